"""One look at one server: what is counted, and nothing yet about what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..procfs import ProcessId
from ..vocabulary import Phase, RoleName


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """Counters of one process. Seconds of CPU, bytes, and counts since the process began.

    ``main`` is the main thread's own CPU, read only while a server is suspected.
    """

    process: ProcessId
    label: str
    role: RoleName
    state: str
    cpu: float
    majflt: int = 0
    minflt: int = 0
    read: int = 0
    chars: int = 0
    calls: int = 0
    rss: int = 0
    compiler: bool = False
    rank: bool = False
    main: float | None = None
    wchan: str = ""

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


@dataclass(frozen=True, slots=True)
class GpuSample:
    """Bytes, percent and watts of one GPU; None where the driver does not say."""

    memory: int | None = None
    utilisation: int | None = None
    power: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One look.

    Attributes:
        at: CLOCK_MONOTONIC seconds.
        processes: the live tree, by process.
        phase: the phase of the rank that is least far; None before anything is known.
        phases: label to phase.
        log: bytes of log records that are no heartbeats.
        gpus: the server's GPUs; empty when they were not read this time.
        tokens: sum of the engine's token and step counters; None when not read.
        requests: our requests in flight; None when nobody counts them.
        running: requests in flight by the engine's own gauges; a wedged engine may say 0.
        oldest: age in seconds of our oldest request.
        ended: requests of ours that have ended.
        root: the server's first process lives.
    """

    at: float
    processes: Mapping[ProcessId, ProcessSample] = field(default_factory=dict)
    phase: Phase | None = None
    phases: Mapping[str, str] = field(default_factory=dict)
    log: int = 0
    gpus: tuple[GpuSample, ...] = ()
    tokens: float | None = None
    requests: int | None = None
    running: float | None = None
    oldest: float | None = None
    ended: int = 0
    root: bool = True

    def to_json(self) -> dict[str, Any]:
        """A short form, for the history in reports."""
        return {
            "at": round(self.at, 2),
            "phase": self.phase,
            "log": self.log,
            "cpu": round(sum(p.cpu for p in self.processes.values()), 2),
            "processes": len(self.processes),
            "compilers": sum(p.compiler for p in self.processes.values()),
            "read": sum(p.read for p in self.processes.values()),
            "rss": sum(p.rss for p in self.processes.values()),
            "gpus": [[g.memory, g.utilisation, g.power] for g in self.gpus],
            "tokens": self.tokens,
            "requests": self.requests,
            "oldest": None if self.oldest is None else round(self.oldest, 1),
        }
