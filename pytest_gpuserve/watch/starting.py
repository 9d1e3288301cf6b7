"""How far a server's start-up is, for people: phase, ranks in it, shards, seconds, GPU memory, in one line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from .. import gpu
from ..engines import get_engine
from ..errors import EngineError
from ..phases.labels import format_ranks
from ..phases.log_follower import LogFollower
from ..phases.rank_phase import RankPhase
from ..phases.reader import PhaseReader
from ..server.record import ServerRecord
from ..text import one_line
from ..vocabulary import PHASES, Phase
from .watched import GpuReader

_COUNTED: Final[Mapping[str, str]] = {"weight_load": "shards", "draft_load": "shards", "cuda_graph": "graphs"}
"""What an engine counts in a phase."""


@dataclass(frozen=True, slots=True)
class Status:
    """One look at a server that starts.

    Attributes:
        phases: (phase, labels of the ranks in it), the slowest ranks first; empty before a rank has spoken.
        done, total: progress of the rank that has least, inside the first of these phases.
        seconds: since the launch.
        memory: bytes in use on the server's GPUs together. gpus: their number; 0: none is read.
        note: what the wait for readiness saw last, such as ``GET /health answered 503``.
    """

    id: str
    phases: tuple[tuple[Phase, tuple[str, ...]], ...] = ()
    done: int | None = None
    total: int | None = None
    seconds: float = 0.0
    memory: int = 0
    gpus: int = 0
    note: str = ""

    @property
    def phase(self) -> str:
        """Where the slowest rank is; before any has spoken, what else is known."""
        return self.phases[0][0] if self.phases else self.note

    @property
    def text(self) -> str:
        """``sglang-tp8: weight_load 12/64 shards (TP0-7), 34 s, 76.1 GB on 8 GPUs``."""
        where = []
        for number, (phase, labels) in enumerate(self.phases):
            count = f" {self.done}/{self.total}" if number == 0 and self.total else ""
            unit = f" {_COUNTED[phase]}" if count and phase in _COUNTED else ""
            where.append(f"{phase}{count}{unit} ({format_ranks(labels)})")
        shown = ", ".join(where) or self.note or "no line of a rank yet"
        memory = f", {self.memory / 1e9:.1f} GB on {self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else ""
        return one_line(f"{self.id}: {shown}, {self.seconds:.0f} s{memory}")


class Starting:
    """Reads a server's log as it grows. Not thread-safe; :meth:`look` is quick."""

    def __init__(self, record: ServerRecord, gpus: str | None = None) -> None:
        """``gpus``: what CUDA_VISIBLE_DEVICES leaves to a server that got none from us; None: none is read."""
        self._record = record
        self._visible = ",".join(record.gpus) or gpus
        self._begun = time.monotonic()
        self._log: LogFollower | None = None
        with suppress(EngineError):
            self._reader = PhaseReader(get_engine(record.engine).grammar)
            self._log = LogFollower(record.log, self._reader)
        self._gpus = GpuReader(every=2.0) if self._visible is not None else None

    def look(self, note: str = "") -> Status:
        """What is known now."""
        if self._gpus is not None:
            self._gpus.ask()
        ranks: dict[str, RankPhase] = {}
        if self._log is not None:
            self._log.poll(time.monotonic(), limit=2 << 20)
            ranks = self._reader.ranks()
        mine = gpu.visible(self._gpus.last, self._visible or None) if self._gpus is not None else ()
        mine = mine[: self._record.spec.tp]
        seconds = time.monotonic() - self._begun
        used = [unit.memory_used for unit in mine if unit.memory_used is not None]
        return summarise(self._record.spec.id, ranks, seconds, memory=sum(used), gpus=len(used), note=note)

    def close(self) -> None:
        """Close the log, end the GPU helper."""
        if self._log is not None:
            self._log.close()
        if self._gpus is not None:
            self._gpus.close()


def summarise(
    id: str, ranks: Mapping[str, RankPhase], seconds: float, *, memory: int = 0, gpus: int = 0, note: str = ""
) -> Status:
    """Ranks by phase, the slowest first."""
    groups: dict[Phase, list[str]] = {}
    for label, rank in ranks.items():
        groups.setdefault(rank.phase, []).append(label)
    phases = tuple((phase, tuple(groups[phase])) for phase in PHASES if phase in groups)
    done = total = None
    if phases:
        counted = [(r.done, r.total) for label in phases[0][1] if (r := ranks[label]).done is not None and r.total]
        done, total = min(counted, default=(None, None), key=lambda pair: pair[0] or 0)
    return Status(id, phases, done, total, seconds, memory, gpus, note)
