"""The ladder of dumpers: every process of a server ends with a stack, or with one line that says why not.

/proc first; py-spy that stops the process while it reads; py-spy that does not, where stopping fails, is refused or
would wait for ever; pystack; the fault handler by signal; at last /proc alone. Nothing is left stopped that was not so.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import procfs
from ..procfs import ProcessId, Stat
from . import crowd, faulthandler_dump, proc_facts, tools
from .model import Dumper, ProcessDump, ThreadStack
from .parse import RoleOf, text_threads
from .roles import UNKNOWN

PTRACE_ADVICE = (
    "To have stacks: run as the server's user, add --cap-add SYS_PTRACE to the container, or set "
    "kernel.yama.ptrace_scope=0"
)
"""What a person can change when the kernel refuses; said once in a report."""

_AT_ONCE = 16  # tools at a time: simultaneity, not speed; 10-40 ms of CPU each
_LONGEST = 5.0  # seconds for one run of py-spy: 10-90 ms is usual
_LONGEST_NATIVE = 10.0
_SETTLE = 0.3  # seconds between the two readings of /proc at least


def take(
    processes: Sequence[Stat],
    role_of: RoleOf,
    *,
    python: str | None = None,
    markers: Path | None = None,
    limit: float = 20.0,
    native: bool = False,
    on_dump: Callable[[ProcessDump], None] | None = None,
) -> list[ProcessDump]:
    """One round: a dump of every process, in the order given, taken in parallel, within ``limit`` seconds.

    ``python``: the server's interpreter (its py-spy comes first). ``markers``: directory of the fault handlers' files.
    ``native``: C frames too, 0.5-1 s a process: for a few suspects. ``on_dump`` gets each dump as soon as it is there,
    in the caller's thread, but those of a crowd of idle compile workers (crowd.py), which have no stack; the returned
    ones also have the deltas of a second reading of /proc (proc_facts.changes).
    """
    began = time.monotonic()
    round_ = _Round(role_of, tools.find("py-spy", python), tools.find("pystack", python), markers, native)
    round_.left_out = crowd.left_out(processes, role_of)
    round_.deadline = began + limit
    round_.attempt = min(
        _LONGEST_NATIVE if native else _LONGEST, max(0.5, limit / (3 * -(-len(processes) // _AT_ONCE or 1)))
    )
    dumps: list[ProcessDump | None] = [None] * len(processes)
    jobs = [lambda stat=stat: round_.dump(stat) for stat in processes]
    for number, dump in _parallel(jobs, round_.deadline):
        dumps[number] = dump
        if on_dump and not crowd.crowded(dump):
            on_dump(dump)
    for number, stat in enumerate(processes):
        if dumps[number] is None:
            dumps[number] = late = round_.late(stat, limit)
            if on_dump:
                on_dump(late)
    return _with_changes([d for d in dumps if d], round_.deadline)


def refused(dumps: Sequence[ProcessDump]) -> str | None:
    """One sentence about processes that ptrace was refused for; None when it was allowed."""
    hit = [d for d in dumps if d.facts.get("ptrace") == "refused"]
    if not hit:
        return None
    without = sum(not d.threads for d in hit)
    how = f"{without} of them have no stack" if without else "they were read without stopping them"
    return f"ptrace was refused for {len(hit)} of {len(dumps)} processes; {how}. {PTRACE_ADVICE}."


@dataclass
class _Round:
    """What all dumps of a round share."""

    role_of: RoleOf
    pyspies: tuple[str, ...]
    pystacks: tuple[str, ...]
    markers: Path | None
    native: bool
    deadline: float = 0.0
    attempt: float = _LONGEST
    left_out: Mapping[ProcessId, str] = field(default_factory=dict)

    def dump(self, stat: Stat) -> ProcessDump:
        """Never raises: one process's oddity must not cost the others their stacks."""
        began = time.monotonic()
        try:
            return self._dump(stat, began)
        except Exception as error:
            return self._bare(stat, began, stat.state, f"not read: {type(error).__name__}: {error}")

    def _dump(self, stat: Stat, began: float) -> ProcessDump:
        found = proc_facts.facts(stat.pid)
        cmdline = procfs.cmdline(stat.pid)
        if not found or procfs.process_id(stat.pid) != stat.id:
            return self._bare(stat, began, "X", "gone: it ended before it could be looked at")
        try:
            role = self.role_of(cmdline, stat.comm) or UNKNOWN
        except Exception:  # an engine's trouble with a title must not cost the stack
            role = UNKNOWN
        seen = replace(
            self._bare(stat, began, found["state"], None), role=role, title=" ".join(cmdline) or stat.comm, facts=found
        )
        if stat.id in self.left_out:
            return replace(seen, problem=self.left_out[stat.id])
        if found["state"] == "Z":
            how = proc_facts.exit_words(found.get("exit"))
            problem = f"a zombie: it ended ({how}) and its parent (pid {found['ppid']}) has not collected it"
            return replace(seen, problem=problem, seconds=time.monotonic() - began)
        if "caught" in found and "vm_bytes" not in found:
            return replace(seen, problem=_without_memory(stat, found), seconds=time.monotonic() - began)
        taken = _Ladder(self, stat.id, found).climb()
        return replace(
            seen,
            dumper=taken.dumper,
            threads=taken.threads,
            raw=taken.raw,
            problem=taken.problem,
            facts={**found, **taken.facts},
            seconds=time.monotonic() - began,
        )

    def late(self, stat: Stat, limit: float) -> ProcessDump:
        problem = f"no time left: not read within the {limit:.0f} s of this round"
        return self._bare(stat, time.monotonic(), stat.state, problem)

    def _bare(self, stat: Stat, began: float, state: str, problem: str | None) -> ProcessDump:
        return ProcessDump(stat.id, UNKNOWN, stat.comm, state, "proc", problem=problem, taken=began)


@dataclass(frozen=True)
class _Taken:
    dumper: Dumper
    threads: tuple[ThreadStack, ...]
    raw: str
    problem: str | None
    facts: dict[str, Any]


class _Ladder:
    """The rungs for one live process."""

    def __init__(self, round_: _Round, process: ProcessId, found: dict[str, Any]) -> None:
        self.round = round_
        self.process = process
        self.found = found
        self.facts: dict[str, Any] = {}
        self.trouble: tools.Trouble = "missing"
        self.message = "py-spy is not installed"

    def climb(self) -> _Taken:
        for rung in (self._pyspy, self._pystack, self._faulthandler):
            if self.trouble == "gone":
                break
            if taken := rung():
                return taken
        return self._taken("proc", problem=self._problem())

    def _pyspy(self) -> _Taken | None:
        for executable in self.round.pyspies:
            for stop in self._ways():
                limit = self._share(0.6 if stop else 1.0)
                if limit <= 0:
                    self.trouble, self.message = "timeout", "no time was left"
                    return None
                native = self.round.native and stop
                attempt = tools.pyspy(executable, self.process.pid, limit=limit, stop=stop, native=native)
                if not attempt.trouble:
                    return self._taken("py-spy" if stop else "py-spy --nonblocking", attempt)
                self._note(attempt)
                if stop:
                    self._resume(attempt.trouble == "timeout")
                if self.trouble in ("gone", "not-python", "missing", "too-old"):
                    break
            if self.trouble not in ("too-old", "missing", "other", "not-python"):
                break  # another py-spy would meet the same
        return None

    def _ways(self) -> Iterator[bool]:
        """Whether to stop the target, attempt by attempt: a consistent picture first, unless it cannot be had."""
        stopping = not proc_facts.undisturbable(self.found)
        if stopping:
            yield True
        for _ in range(3):
            yield False
            if self.trouble != "race":
                return
        if not stopping and not proc_facts.undisturbable(proc_facts.facts(self.process.pid)):
            yield True  # it was in D for a moment, and moves too fast to be read

    def _pystack(self) -> _Taken | None:
        pid = self.process.pid
        if self.trouble == "not-python":
            return None
        if self.trouble == "refused" and pid in procfs.descendants(os.getpid()):
            attempt = tools.pystack_inside(pid)
            if not attempt.trouble:
                return self._taken("pystack", attempt)
        for executable in self.round.pystacks[:1]:
            if (limit := self._share(1.0)) > 0:
                attempt = tools.pystack(executable, pid, limit=limit)
                if not attempt.trouble:
                    return self._taken("pystack", attempt)
        return None

    def _faulthandler(self) -> _Taken | None:
        limit = min(2.0, self._share(1.0))
        if self.round.markers is None or limit <= 0:
            return None
        text, why = faulthandler_dump.dump(self.process, self.round.markers, self.found, limit)
        if not text:
            self.facts["faulthandler"] = why
            return None
        threads = text_threads(text, self.process.pid)
        return self._taken("faulthandler", tools.Attempt(threads, text)) if threads else None

    def _share(self, part: float) -> float:
        return min(self.round.attempt, (self.round.deadline - time.monotonic()) * part)

    def _note(self, attempt: tools.Attempt) -> None:
        assert attempt.trouble
        self.trouble, self.message = attempt.trouble, attempt.message
        if self.trouble == "refused" and not self.found.get("tracer"):
            if tracer := proc_facts.facts(self.process.pid).get("tracer"):
                self.found["tracer"] = tracer  # somebody else's py-spy: engines run one from every rank at once
            else:
                self.facts["ptrace"] = "refused"

    def _resume(self, killed: bool) -> None:
        """Continue a process that a tracer of ours left stopped, or about to stop; it was running when we came."""
        now = procfs.stat(self.process.pid)
        if now is None or now.id != self.process or not (killed or now.state == "T"):
            return
        try:
            pidfd = os.pidfd_open(self.process.pid)
        except OSError:
            return
        try:
            if procfs.process_id(self.process.pid) == self.process:
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        except OSError:
            pass
        finally:
            os.close(pidfd)

    def _taken(self, dumper: Dumper, attempt: tools.Attempt | None = None, problem: str | None = None) -> _Taken:
        return _Taken(dumper, attempt.threads if attempt else (), attempt.raw if attempt else "", problem, self.facts)

    def _problem(self) -> str:
        pid = self.process.pid
        if self.trouble == "gone" and not procfs.same(self.process):
            return "gone: it ended while it was looked at"
        where = proc_facts.whereabouts(self.found)
        if self.trouble == "not-python":
            return f"no Python process ({_program(pid)}); {where}"
        if tracer := self.found.get("tracer"):
            name = next(iter(procfs.cmdline(tracer)), "?").rpartition("/")[2]
            return f"traced by pid {tracer} ({name}), which must let go first; {where}"
        if self.trouble == "refused":
            return f"no permission to read its memory; {where}. {PTRACE_ADVICE}"
        if self.trouble == "missing":
            return f"no dumper: {self.message} (pip install py-spy); {where}"
        words = {
            "timeout": "py-spy gave up",
            "race": "it moved too fast to be read",
            "stopped": "it could not be stopped",
        }
        return f"no stack: {words.get(self.trouble, 'py-spy failed')} ({self.message}); {where}"


def _without_memory(stat: Stat, found: dict[str, Any]) -> str:
    if stat.pid == 2 or stat.ppid == 2:
        return "a thread of the kernel"
    where = proc_facts.whereabouts(found)
    return f"exiting: its memory is gone, the kernel or a driver still closes what it had open; {where}"


def _program(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return next(iter(procfs.cmdline(pid)), "no program")


def _parallel(jobs: Sequence[Callable[[], ProcessDump]], deadline: float) -> Iterator[tuple[int, ProcessDump]]:
    """Results by number, as they come, until ``deadline``. Daemon threads: one stuck in /proc must not hold us."""
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[int, ProcessDump]] = queue.SimpleQueue()
    for number in range(len(jobs)):
        numbers.put(number)

    def work() -> None:
        while True:
            try:
                number = numbers.get_nowait()
            except queue.Empty:
                return
            results.put((number, jobs[number]()))

    for _ in range(min(_AT_ONCE, len(jobs))):
        threading.Thread(target=work, name="gpuserve-dump", daemon=True).start()
    for _ in jobs:
        try:
            yield results.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return


def _with_changes(dumps: list[ProcessDump], deadline: float) -> list[ProcessDump]:
    """The dumps with what moved since their first reading of /proc."""
    live = {d.process: d.taken for d in dumps if d.facts and d.state not in "ZX"}
    if live:
        rest = max(live.values()) + _SETTLE - time.monotonic()
        time.sleep(max(0.0, min(rest, deadline - time.monotonic())))

    def changed(dump: ProcessDump) -> ProcessDump:
        if dump.process not in live or time.monotonic() >= deadline or not procfs.same(dump.process):
            return dump
        now = proc_facts.facts(dump.process.pid)
        moved = proc_facts.changes(dump.facts, now, time.monotonic() - dump.taken)
        return replace(dump, facts={**dump.facts, **moved})

    return [changed(dump) for dump in dumps]
