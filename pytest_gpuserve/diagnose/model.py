"""The values that diagnosis passes around: stacks in, a judgement out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..engines.base import ProcessRole
from ..procfs import ProcessId
from ..vocabulary import Phase, Verdict

Dumper = Literal["py-spy", "py-spy --nonblocking", "pystack", "faulthandler", "proc", "file"]
"""Who took a stack. ``proc``: no stack, only what /proc tells. ``file``: read from somebody else's dump."""

ClassKind = Literal["cause", "waits", "idle", "other"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. ``file`` as dumped; ``line`` None where unknown; ``module`` is a .so for native frames."""

    name: str
    file: str
    line: int | None = None
    module: str | None = None

    @property
    def native(self) -> bool:
        return self.module is not None


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread. ``frames[0]`` is the leaf (innermost) frame. ``active`` and ``owns_gil`` are None where the dumper
    does not know; ``ident``: its pthread id, in dumps that may lack ``tid``."""

    tid: int | None
    name: str | None
    main: bool
    frames: tuple[Frame, ...]
    active: bool | None = None
    owns_gil: bool | None = None
    ident: int | None = None

    @property
    def identity(self) -> int | None:
        """What tells it from the others of its process in every round."""
        return self.ident if self.tid is None else self.tid


@dataclass(frozen=True, slots=True)
class ProcessDump:
    """What was seen of one process in one round.

    Attributes:
        process: pid and start time.
        role: what the process is for (role ``other`` when nothing is known).
        title: command line as shown, one string, unescaped foreign text.
        state: kernel's letter at the time.
        dumper: who took the stacks.
        threads: Python threads; empty when there is no stack.
        problem: one line why there is no (or only a partial) stack; None when all is well.
        facts: /proc facts: wchan, syscall, cpu_seconds, read_bytes, rss_bytes, tracer, exit ... as available.
        taken: CLOCK_MONOTONIC seconds.
        seconds: how long the dump took.
        raw: the dumper's own output, to be stored (redacted) beside the merged text.
    """

    process: ProcessId
    role: ProcessRole
    title: str
    state: str
    dumper: Dumper
    threads: tuple[ThreadStack, ...] = ()
    problem: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    taken: float = 0.0
    seconds: float = 0.0
    raw: str = ""

    @property
    def label(self) -> str:
        """The rank's or the role's name; ``pid 4711`` where no more is known, ``process`` where not even that is."""
        if self.role.rank or self.role.role != "other":
            return self.role.label
        return f"pid {self.process.pid}" if self.process.pid else "process"

    @property
    def main(self) -> ThreadStack | None:
        return next((t for t in self.threads if t.main), self.threads[-1] if self.threads else None)


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks of one role and one parallel group with the same call path. ``path`` is root first, ``name (file)``."""

    role: str
    group: str
    ranks: tuple[str, ...]
    kind: ClassKind
    path: tuple[str, ...]
    signature: str | None = None
    moving: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "group": self.group,
            "ranks": list(self.ranks),
            "kind": self.kind,
            "path": list(self.path),
            "signature": self.signature,
            "moving": self.moving,
        }


@dataclass(frozen=True, slots=True)
class Gone:
    """Ranks or roles that ended alike. ``how``: ``killed by SIGKILL``; ``phase``: the last one; ``first``: before all
    others of the server."""

    ranks: tuple[str, ...]
    how: str
    phase: Phase | None = None
    first: bool = False

    @property
    def words(self) -> str:
        """``killed by SIGKILL, first of all, last phase cuda_graph``."""
        return (
            self.how + (", first of all" if self.first else "") + (f", last phase {self.phase}" if self.phase else "")
        )

    def to_json(self) -> dict[str, Any]:
        return {"ranks": list(self.ranks), "how": self.how, "phase": self.phase, "first": self.first}


@dataclass(frozen=True, slots=True)
class Judgement:
    """What we say, and on what it rests. ``text`` is one paragraph a maintainer can paste.

    ``facts`` are (claim, witness) pairs; ``ruled_out`` likewise (what it is not, and by what). ``confidence`` 0..1.
    ``cause`` and ``advice`` are the parts of ``text`` that say what happened and what to do; ``known``: addresses of
    public reports of the same. ``gone``: ranks and roles that ended. ``phase_over``: ``phase`` has ended, and neither
    log nor stack says which came after it.
    """

    verdict: Verdict
    phase: Phase | None
    culprits: tuple[str, ...]
    classes: tuple[RankClass, ...]
    missing: tuple[str, ...]
    ruled_out: tuple[tuple[str, str], ...]
    confidence: float
    text: str
    facts: tuple[tuple[str, str], ...] = ()
    cause: str = ""
    advice: str = ""
    known: tuple[str, ...] = ()
    gone: tuple[Gone, ...] = ()
    phase_over: bool = False

    def to_json(self) -> dict[str, Any]:
        """The object of schema ``gpuserve.verdict/1``."""
        return {
            "schema": "gpuserve.verdict/1",
            "verdict": self.verdict,
            "phase": self.phase,
            "phase_over": self.phase_over,
            "culprits": list(self.culprits),
            "classes": [c.to_json() for c in self.classes],
            "missing": list(self.missing),
            "ruled_out": [{"what": what, "by": by} for what, by in self.ruled_out],
            "facts": [{"claim": claim, "witness": witness} for claim, witness in self.facts],
            "confidence": self.confidence,
            "cause": self.cause,
            "advice": self.advice,
            "known": list(self.known),
            "gone": [gone.to_json() for gone in self.gone],
            "text": self.text,
        }
