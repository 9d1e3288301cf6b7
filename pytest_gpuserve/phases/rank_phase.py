"""The phase of one rank: what a reader tells, and what it keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from ..engines.base import PhaseRule, Rank
from ..vocabulary import Phase


@dataclass(frozen=True, slots=True)
class RankPhase:
    """Where one rank is. Times are seconds on the clock of ``PhaseReader.feed``'s ``now``.

    Attributes:
        phase: the phase entered last.
        since: when it was entered, by the log's own clock where it has one, else by arrival.
        done, total: progress inside the phase (shards, batch sizes), where the log counts it.
        last_line: the rank's last record, at most 400 characters, foreign text.
        history: (phase, begin, end) of every phase that is over; a phase may occur more than once.
        left: when the phase ended, while no other has begun; None inside a phase.
        last: when the rank printed its last record.
        assumed: the phase is that of the group's first rank, because the engine prints it on that rank alone.
    """

    phase: Phase
    since: float
    done: int | None = None
    total: int | None = None
    last_line: str = ""
    history: tuple[tuple[Phase, float, float], ...] = ()
    left: float | None = None
    last: float = 0.0
    assumed: bool = False

    def seconds(self, phase: Phase, now: float | None = None) -> float | None:
        """Seconds in ``phase``, all its occurrences together, the present one up to ``now``; None: never entered."""
        spent = [end - begin for name, begin, end in self.history if name == phase]
        if self.phase == phase and self.left is None:
            spent.append(max(0.0, (self.last if now is None else now) - self.since))
        return sum(spent) if spent else None


@dataclass(slots=True)
class State:
    """A rank while the log is read; times on the log's clock.

    Attributes:
        certain: the log named the rank by its coordinates; else it is a guess that these may overrule.
        worker: a rank; else the stand-in of a log without tags.
        entered: rule number to how often it entered a phase.
        led: phase, time and offset in the log of the last entry that only the first rank of a group prints.
        moved: offset of the last record that changed the phase.
        line, at: the last record and its offset.
    """

    rank: Rank | None = None
    certain: bool = False
    worker: bool = True
    phase: Phase = "spawn"
    since: float = 0.0
    left: float | None = None
    done: int | None = None
    total: int | None = None
    history: list[tuple[Phase, float, float]] = field(default_factory=list)
    entered: Counter[int] = field(default_factory=Counter)
    led: tuple[Phase, float, int] | None = None
    moved: int = -1
    last: float = 0.0
    line: bytes = b""
    at: int = -1

    def spawn(self, rank: Rank, *, worker: bool) -> State:
        """A rank that the log names only now: all that it told of the whole server so far is true of it too."""
        return replace(
            self, rank=rank, worker=worker, history=list(self.history), entered=Counter(self.entered), line=b"", at=-1
        )

    def apply(self, number: int, rule: PhaseRule, done: int | None, total: int | None, now: float, at: int) -> None:
        """One record, matched by rule ``number``, at this offset of the log."""
        now = max(now, self.since, self.left or now)
        before = (self.phase, self.since, self.left)
        if rule.edge == "enter":
            if rule.phase == "spawn":  # another server in the same log
                self.entered.clear()
                self.led = None
            self.entered[number] += 1
            self._enter(rule.again if rule.again and self.entered[number] > 1 else rule.phase, now)
            if rule.leader:
                self.led = (self.phase, self.since, at)
        elif rule.edge == "leave":
            if self.inside(rule):
                self.left = now
                self.history.append((self.phase, self.since, now))
        elif not self.inside(rule):
            self._join(rule, done, total, now)
        if done is not None and self.inside(rule):
            self.done, self.total = done, total
        if before != (self.phase, self.since, self.left):
            self.moved = at

    def inside(self, rule: PhaseRule) -> bool:
        """In the rule's phase, and not yet past its end."""
        return self.left is None and self.phase in (rule.phase, rule.again)

    def _join(self, rule: PhaseRule, done: int | None, total: int | None, now: float) -> None:
        """Progress in a phase that is over or was never announced: a bar that begins anew, not one repainted late."""
        known = self.phase in (rule.phase, rule.again) or any(name == rule.phase for name, _, _ in self.history)
        if known and (done is None or done == total):
            return
        self._enter(rule.again if known and rule.again else rule.phase, now)

    def _enter(self, phase: Phase, now: float) -> None:
        if self.left is None:
            if phase == self.phase:
                return
            self.history.append((self.phase, self.since, now))
        self.phase, self.since, self.left, self.done, self.total = phase, now, None, None, None
