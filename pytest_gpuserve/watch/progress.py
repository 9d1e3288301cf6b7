"""Is it moving? From samples to a state, by signs of progress and not by silence.

A sign is anything that a hang does not do: new log records that are no heartbeats, bytes from storage, page faults,
memory that grows, a compiler among its own children that uses CPU, GPU memory, tokens, answered requests. CPU of a rank
is only a weak sign, since a hung rank may spin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from ..vocabulary import Phase
from .budgets import Budgets
from .sample import ProcessSample, Sample

State = Literal["moving", "idle", "paused", "suspect", "hung", "dead"]

MIB: Final = 1 << 20
READ: Final = 8 << 10
"""Bytes per second from storage: an idle or hung process reads none at all."""
CHARS: Final = MIB
"""Bytes per second through read(), in calls of CALL bytes at least: a poll loop on an eventfd reads 8 at a time."""
CALL: Final = 256
MAJOR: Final = 5.0
"""Major page faults per second (mapped files, swap)."""
MINOR: Final = 40.0
"""Minor page faults per second: real work takes thousands, spinning and idle loops none (measured: at most 2)."""
RSS: Final = 4 * MIB
"""Bytes per second, up or down."""
GPU_MEMORY: Final = 8 * MIB
COMPILER: Final = 0.02
"""Cores."""
BUSY: Final = 0.1
"""Cores of one rank that count as a weak sign: side threads of a hung rank use 0.02 (measured)."""

GONE: Final = 15.0
"""Seconds without progress that make a hang once a rank is gone while the others live."""

_RANK_ROLES = frozenset({"scheduler", "worker", "engine_core", "other"})


@dataclass(frozen=True, slots=True)
class Movement:
    """Signs between two samples: words such as ``log``, ``reads of TP1``, ``compiler ptxas``, ``tokens``."""

    strong: tuple[str, ...] = ()
    weak: tuple[str, ...] = ()


def movement(before: Sample, after: Sample, *, serving: bool = False) -> Movement:
    """What moved from one sample to the next.

    While serving, memory of the front end does not count: it answers health checks and metrics of a wedged engine.
    """
    seconds = max(after.at - before.at, 1e-3)
    strong: list[str] = []
    weak: list[str] = []
    if after.log > before.log:
        strong.append("log")
    if after.phases != before.phases or after.phase != before.phase:
        strong.append("phase")
    if after.tokens is not None and before.tokens is not None and after.tokens != before.tokens:
        strong.append("tokens")
    if after.ended > before.ended:
        strong.append("requests")
    for now in after.processes.values():
        old = before.processes.get(now.process)
        if old is not None:
            strong.extend(_strong(old, now, seconds, serving))
            weak.extend(_weak(old, now, seconds))
        elif now.compiler:
            strong.append(f"new compiler {now.label}")
        elif now.role not in ("helper", "other"):
            strong.append(f"new process {now.label}")
    for number, (old_gpu, new_gpu) in enumerate(zip(before.gpus, after.gpus, strict=False)):
        known = old_gpu.memory is not None and new_gpu.memory is not None
        if known and abs((new_gpu.memory or 0) - (old_gpu.memory or 0)) >= GPU_MEMORY:
            strong.append(f"memory of GPU {number}")
        if old_gpu.utilisation is not None and new_gpu.utilisation is not None and 0 < new_gpu.utilisation < 90:
            weak.append(f"GPU {number}")
    return Movement(tuple(dict.fromkeys(strong)), tuple(dict.fromkeys(weak)))


def _strong(old: ProcessSample, now: ProcessSample, seconds: float, serving: bool) -> Iterator[str]:
    if now.compiler:
        if (now.cpu - old.cpu) / seconds >= COMPILER:
            yield f"compiler {now.label}"
        return
    if (now.read - old.read) / seconds >= READ:
        yield f"reads of {now.label}"
    calls = now.calls - old.calls
    if (now.chars - old.chars) / seconds >= CHARS and now.chars - old.chars >= CALL * max(calls, 1):
        yield f"reads of {now.label}"
    if (now.majflt - old.majflt) / seconds >= MAJOR:
        yield f"page faults of {now.label}"
    if serving and now.role not in _RANK_ROLES:
        return
    if (now.minflt - old.minflt) / seconds >= MINOR or abs(now.rss - old.rss) / seconds >= RSS:
        yield f"memory of {now.label}"


def _weak(old: ProcessSample, now: ProcessSample, seconds: float) -> Iterator[str]:
    if now.compiler or now.role not in _RANK_ROLES:
        return
    cpu = (now.cpu - old.cpu) / seconds
    if now.main is not None and old.main is not None:
        cpu = (now.main - old.main) / seconds
    if cpu >= BUSY or (now.state == "R" and old.state == "R"):  # runnable, and starved on a crowded machine
        yield f"CPU of {now.label}"
    if now.state == "D":
        yield f"storage of {now.label}"


@dataclass(frozen=True, slots=True)
class Reading:
    """The monitor's answer to one sample.

    Attributes:
        state: see the module; ``paused`` means that every process is stopped.
        still: seconds since the last sign.
        window: seconds of stillness that make a hang here and now.
        last: the last sign.
        moving: signs of this very sample, weak ones in brackets.
        phase: where it is.
        why: one clause, for hung and suspect.
    """

    state: State
    still: float
    window: float
    last: str
    moving: tuple[str, ...] = ()
    phase: Phase | None = None
    why: str = ""


@dataclass
class Monitor:
    """Follows one server. ``interval`` is the expected time between samples, in seconds."""

    budgets: Budgets
    interval: float = 1.0
    still: float = 0.0
    paused: float = 0.0
    last: str = "its start"
    stretch: float = 1.0
    served: bool = False
    stillness: dict[str, float] = field(default_factory=dict)
    ranks: set[str] = field(default_factory=set)
    _before: Sample | None = None
    _busy: deque[bool] = field(default_factory=lambda: deque(maxlen=240))

    def feed(self, sample: Sample) -> Reading:
        """The state after this sample. Samples must come in the order of time."""
        before, self._before = self._before, sample
        if not sample.root:
            return self._reading("dead", sample, why="its first process is gone")
        if before is None:
            return self._reading("moving", sample)
        seconds = sample.at - before.at
        if seconds > max(5 * self.interval, 5.0):  # we did not run (suspended, stopped, starved): we saw nothing
            return self._restart(sample, "the watcher's own pause")
        if _stopped(sample):
            return self._paused(sample, seconds)
        if self.paused:
            self.paused = 0.0
            return self._restart(sample, "its own pause")
        self.ranks.update(p.label for p in sample.processes.values() if p.rank and p.alive)
        serving = sample.phase in ("ready", "serving")
        moved = movement(before, sample, serving=serving)
        if serving and self._idle(sample):
            self.served = self.served or sample.ended > 0
            self._restart(sample, "idle")
            return self._reading("idle", sample, moved)
        if moved.strong:
            self._remember(sample.phase)
            self.still, self.last, self.stretch = 0.0, moved.strong[0], 1.0
            self._busy.clear()
            self.served = self.served or (serving and sample.ended > before.ended)
            return self._reading("moving", sample, moved)
        self.still += min(seconds, 2 * self.interval)
        self._busy.append(bool(moved.weak) and not (serving and sample.tokens is not None))
        still = self.still if sample.oldest is None or not serving else min(self.still, sample.oldest)
        return self._judge(sample, moved, still, serving)

    def spared(self) -> None:
        """The stacks showed a healthy server: look again after twice the time."""
        self.stretch *= 2
        self.still = 0.0

    def _judge(self, sample: Sample, moved: Movement, still: float, serving: bool) -> Reading:
        window = self._window(sample, serving)
        state: State = "moving"
        gone = self.ranks - {p.label for p in sample.processes.values() if p.alive}
        if gone and self.still >= min(GONE, window / 2) * self.stretch:
            why = f"{', '.join(sorted(gone))} is gone and nothing moved for {self.still:.0f} s"
            return self._reading("hung", sample, moved, still=self.still, window=window, why=why)
        if still >= window:
            state = "hung"
        elif still >= window / 2:
            state = "suspect"
        why = f"nothing moved for {still:.0f} s in {sample.phase or 'spawn'} (window {window:.0f} s, last: {self.last})"
        return self._reading(state, sample, moved, still=still, window=window, why=why if state != "moving" else "")

    def _window(self, sample: Sample, serving: bool) -> float:
        busy = bool(self._busy) and sum(self._busy) * 2 > len(self._busy)
        first = serving and not self.served
        return min(self.budgets.window(sample.phase, first_request=first, busy=busy) * self.stretch, self.budgets.cap)

    def _idle(self, sample: Sample) -> bool:
        """Ready, and nobody asks anything that we know of."""
        if sample.requests:
            return False
        return not sample.running

    def _paused(self, sample: Sample, seconds: float) -> Reading:
        self.paused += seconds
        window = self._window(sample, sample.phase in ("ready", "serving"))
        state: State = "hung" if self.paused >= window else "paused"
        why = f"every process has been stopped for {self.paused:.0f} s"
        return self._reading(state, sample, still=self.paused, window=window, why=why)

    def _restart(self, sample: Sample, last: str) -> Reading:
        self.still, self.last = 0.0, last
        self._busy.clear()
        return self._reading("moving", sample)

    def _remember(self, phase: Phase | None) -> None:
        if phase is not None and self.still > self.stillness.get(phase, 0.0):
            self.stillness[phase] = self.still

    def _reading(
        self,
        state: State,
        sample: Sample,
        moved: Movement | None = None,
        *,
        still: float | None = None,
        window: float | None = None,
        why: str = "",
    ) -> Reading:
        moved = moved or Movement()
        serving = sample.phase in ("ready", "serving")
        return Reading(
            state=state,
            still=self.still if still is None else still,
            window=self._window(sample, serving) if window is None else window,
            last=self.last,
            moving=(*moved.strong, *(f"({sign})" for sign in moved.weak)),
            phase=sample.phase,
            why=why,
        )


def _stopped(sample: Sample) -> bool:
    """Every live process is stopped: somebody paused the server, no rank hangs."""
    states = [p.state for p in sample.processes.values() if p.alive]
    return bool(states) and all(state == "T" for state in states)
