"""How one process behaved over the rounds, whatever it runs: CPU, wake-ups, the GIL, compilers below it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..procfs import ProcessId
from .kernel import RESTARTED, kernel_wait
from .model import Frame, ProcessDump, ThreadStack

STILL: Final = 0.05
"""Cores: a process that uses no more does nothing between two rounds."""

_WAKES_OF_A_DUMP: Final = 2
"""Voluntary switches that stopping a thread for its stack costs it (measured with py-spy)."""


@dataclass(frozen=True, slots=True)
class Conduct:
    """Attributes:
    rounds: how often it was looked at.
    same: rounds in which it was in the place that counts.
    gil: rounds in which its telling thread owned the GIL.
    running: rounds in which its main thread was on a CPU, or waited for one.
    wakes: how often a second its main thread went to sleep between the rounds; None where the kernel does not say.
    leaf: where it really was, when a signature was found further out.
    child: a compiler below it that used CPU between the rounds.
    """

    rounds: int = 1
    same: int = 1
    gil: int = 0
    running: int = 0
    wakes: float | None = None
    leaf: Frame | None = None
    child: str = ""

    @property
    def stays(self) -> bool:
        """It was looked at more than once, and was in one place each time."""
        return self.same == self.rounds > 1


def conduct(dumps: Sequence[ProcessDump], same: int, telling: Sequence[ThreadStack], leaf: Frame | None) -> Conduct:
    """Of the rounds of one process; ``telling`` holds its telling thread in each round that has one."""
    return Conduct(
        rounds=len(dumps),
        same=same,
        gil=sum(bool(thread.owns_gil) for thread in telling),
        running=sum(dump.state == "R" or dump.facts.get("syscall") == "running" for dump in dumps),
        wakes=_wakes(dumps),
        leaf=leaf,
    )


def _wakes(dumps: Sequence[ProcessDump]) -> float | None:
    first, last = dumps[0], dumps[-1]
    seconds = last.taken - first.taken
    before, after = first.facts.get("switches"), last.facts.get("switches")
    if len(dumps) < 2 or seconds <= 0.2 or not isinstance(before, int) or not isinstance(after, int):
        return None
    return max(0.0, (after - before - _WAKES_OF_A_DUMP * (len(dumps) - 1)) / seconds)


def stuck_owner(dumps: Sequence[ProcessDump]) -> int | None:
    """The thread (:attr:`ThreadStack.identity`) that owns the GIL in every round, in a process that uses no CPU; None
    where there is none."""
    owners = {next((t.identity for t in dump.threads if t.owns_gil), None) for dump in dumps}
    if len(dumps) < 2 or len(owners) != 1 or None in owners:
        return None
    used = growth(dumps, "cpu_seconds")
    return owners.pop() if used is not None and used <= STILL else None


def growth(dumps: Sequence[ProcessDump], fact: str) -> float | None:
    """A counter's growth a second between the first and the last round."""
    first, last = dumps[0], dumps[-1]
    seconds = last.taken - first.taken
    a, b = first.facts.get(fact), last.facts.get(fact)
    if len(dumps) < 2 or seconds <= 0.2 or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return None
    return max(0.0, (b - a) / seconds)


def asleep_at(dumps: Sequence[ProcessDump]) -> Mapping[str, Any]:
    """The last round's facts, with the place in the kernel that an earlier one knew: a sleep that a dumper has
    interrupted goes on in ``restart_syscall``, which says nothing; ``wchan`` may say enough, or half of it."""
    facts = dumps[-1].facts
    known = kernel_wait(facts).place
    if dumps[-1].state != "S" or (known and facts.get("syscall") != RESTARTED):
        return facts
    for dump in reversed(dumps[:-1]):
        same = not known or dump.facts.get("wchan") == facts.get("wchan")
        if dump.state == "S" and same and kernel_wait(dump.facts).place not in ("", "cpu", known):
            return {**facts, **{key: dump.facts.get(key) for key in ("wchan", "syscall")}}
    return facts


def working_children(rounds: Sequence[Sequence[ProcessDump]]) -> dict[ProcessId, str]:
    """Process to the name of a compiler below it that used CPU between the rounds, however far below."""
    seen: dict[ProcessId, list[ProcessDump]] = {}
    for dumps in rounds:
        for dump in dumps:
            seen.setdefault(dump.process, []).append(dump)
    by_pid = {dumps[-1].process.pid: dumps[-1] for dumps in seen.values()}
    found: dict[ProcessId, str] = {}
    for dumps in seen.values():
        last = dumps[-1]
        if last.role.role != "compiler" or (growth(dumps, "cpu_seconds") or 0.0) <= STILL:
            continue
        name = (last.title.split() or ["compiler"])[0].rpartition("/")[2]
        above, passed = last, {last.process.pid}
        while (parent := above.facts.get("ppid")) in by_pid and parent not in passed:
            passed.add(parent)
            above = by_pid[parent]
            found.setdefault(above.process, name)
    return found
