"""All that is known about one server when it is judged. Collected with machine.py, locks.py, ras.py and
flight.py.

Everything is optional: a verdict says what it rests on, and what it could not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..gpu import Gpu
from ..vocabulary import Verdict
from .model import ProcessDump

if TYPE_CHECKING:
    from ..phases.reader import RankPhase

Front = Literal["healthy", "responds", "silent", "closed"]
"""Of a front end behind which no token comes: its health page says 200; it answers something; its port is open and
nothing is answered; its port is closed."""

NO_PROGRESS = frozenset({"no_progress", "startup_budget", "request_timeout", "test_timeout"})
"""Reasons for an incident that come with a suspicion; ``manual`` and others come with none."""


@dataclass(frozen=True, slots=True)
class LogFact:
    """Something the log says. ``verdict`` where the line decides one (a fatal error), ``rank`` whose fault that is,
    where the log tells; ``hint``: it says what to do, not what happened. ``lost``: of a victim, that lost a peer;
    ``silent``: the ranks that printed no error then."""

    claim: str
    witness: str
    verdict: Verdict | None = None
    rank: str | None = None
    hint: bool = False
    lost: bool = False
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """Is it memory? Bytes. ``oom_kills`` counts since the launch; None where the kernel does not say.

    Attributes:
        resident: sum of anonymous and shared resident memory of the server's processes.
        virtual: sum of VmSize: address space, which proves nothing (CUDA maps hundreds of GB).
        limit: the lowest cgroup limit above the server, or the machine's memory.
        current: what the cgroup (or machine) uses now.
        killed: pids the kernel log names as killed for memory.
        swapped: bytes of the processes in swap.
        pressure: share of the last 10 s in which all tasks stalled on memory (PSI "full avg10"), percent.
    """

    resident: int = 0
    virtual: int = 0
    limit: int | None = None
    current: int | None = None
    oom_kills: int | None = None
    killed: tuple[int, ...] = ()
    swapped: int = 0
    pressure: float | None = None

    @property
    def short(self) -> bool:
        """The server's memory is within 3 % of its limit."""
        used = max(self.resident, self.current or 0) if self.current is not None else self.resident
        return bool(self.limit) and used >= 0.97 * (self.limit or 1)


@dataclass(frozen=True, slots=True)
class LockFact:
    """A lock that a process of the server waits for.

    Attributes:
        path: the lock file, or "" where only the inode is known.
        waiters: labels of the processes that wait.
        holder: pid that holds it, or wrote it last; None when nobody does.
        holder_label: the holder's label when it belongs to this server.
        holder_alive: False: the lock is stale.
        kind: flock (kernel), posix (kernel), file (exists or not), unknown.
        age: seconds since the file was made.
    """

    path: str
    waiters: tuple[str, ...]
    holder: int | None = None
    holder_label: str | None = None
    holder_alive: bool | None = None
    holder_title: str = ""
    kind: Literal["flock", "posix", "file", "unknown"] = "unknown"
    age: float | None = None


@dataclass(frozen=True, slots=True)
class Witness:
    """What another service says: NCCL RAS, the Flight Recorder, a CUDA core dump.

    ``ranks`` are the labels it accuses (empty: it accuses nobody); ``layer`` what it blames instead.
    """

    source: str
    claim: str
    ranks: tuple[str, ...] = ()
    layer: str = ""


@dataclass(frozen=True, slots=True)
class Departure:
    """A process of the engine that ended by itself, before anything of ours ended the server.

    ``at``: CLOCK_MONOTONIC seconds; two that ended together have the same. ``code``: as subprocess says it, None where
    nobody could tell.
    """

    label: str
    pid: int
    at: float
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What the watcher saw before the incident.

    Attributes:
        state: moving, idle, paused, suspect, hung, dead; None when nobody watched.
        still: seconds since anything moved.
        window: seconds without progress after which it calls a hang.
        last: what moved last ("log", "compiler ptxas", "reads of TP1", "tokens").
        moving: what moved within the last few samples.
        history: the last samples as JSON objects, oldest first.
    """

    state: str | None = None
    still: float | None = None
    window: float | None = None
    last: str = ""
    moving: tuple[str, ...] = ()
    history: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Input of :func:`pytest_gpuserve.diagnose.verdict.judge`.

    Attributes:
        reason: why the incident was taken (``test_timeout``, ``no_progress``, ``manual`` ...).
        after: seconds since the event that led here began (a request's age, a start-up's), where known.
        rounds: stacks, one sequence a round.
        phases: label of a rank to its phase, from the log.
        expected: labels of the ranks there should be.
        exits: label, or pid as text, of processes that ended to their exit code (negative: by that signal).
        departures: who ended in which order, as far as somebody watched.
        server_exit: exit code of the server's first process, None while it lives.
        engine: adapter's name; ``axes``: axis to value name; ``tp``: tensor-parallel size.
        log: what the log says; fatal facts carry a verdict.
        memory, gpus, gpu_busy: memory; one reading a GPU that the server uses; labels of GPUs busy with no process.
        shm_free: bytes free in /dev/shm; ``nccl``: NCCL variables of the server's environment.
        locks, witnesses, progress: see the classes.
        answers: a completion we just sent answered (True), did not (False), or was not sent (None).
        ready: our own readiness was reached: the server was handed to a test; None: unknown.
        front: what the front end itself answered when no completion came; None: not asked.
        requests: our requests in flight; None when unknown.
        test: node id of the test that was running.
        flood: the line that the log repeats without end, many times a second; "": it does not.
        foreign: True when processes were read from somebody else's dump, so that nothing can be measured.
    """

    reason: str = "manual"
    after: float | None = None
    rounds: Sequence[Sequence[ProcessDump]] = ()
    phases: Mapping[str, RankPhase] = field(default_factory=dict)
    expected: tuple[str, ...] = ()
    exits: Mapping[str, int] = field(default_factory=dict)
    departures: tuple[Departure, ...] = ()
    server_exit: int | None = None
    engine: str | None = None
    axes: Mapping[str, str] = field(default_factory=dict)
    tp: int | None = None
    log: tuple[LogFact, ...] = ()
    memory: Memory | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_busy: tuple[str, ...] = ()
    shm_free: int | None = None
    nccl: Mapping[str, str] = field(default_factory=dict)
    locks: tuple[LockFact, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    progress: Progress | None = None
    answers: bool | None = None
    ready: bool | None = None
    front: Front | None = None
    requests: int | None = None
    test: str | None = None
    flood: str = ""
    foreign: bool = False
