"""The stacks of one incident, round by round; each process's are on disk the moment they are there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from .. import procfs
from ..diagnose import parse, stacks
from ..diagnose.merge import Merged, label_order
from ..diagnose.model import Judgement, ProcessDump
from ..diagnose.roles import any_role
from ..engines.base import Engine, ProcessRole
from ..server.record import ServerRecord, processes
from . import gather
from .files import Stores, safe_name

BETWEEN: Final = 2.0
"""Seconds from one round of stacks to the next: frozen is told from moving by more than one look."""

SCHEMA: Final = "gpuserve.stacks/1"


class StackRounds:
    """``owner``: the stacks of the process that the server belongs to, pytest."""

    def __init__(self, record: ServerRecord, engine: Engine | None, stores: Stores, began: float) -> None:
        self._record = record
        self._engine = engine
        self._stores = stores
        self._began = began
        self._kept: dict[procfs.ProcessId, list[dict[str, Any]]] = {}
        self._labels: dict[procfs.ProcessId, str] = {}
        self._total = 0
        self.owner: ProcessDump | None = None

    def take(self, number: int, limit: float, *, owner: bool = True) -> list[ProcessDump]:
        """One round of the server's processes and, with ``owner``, the test's own beside them."""
        record = self._record
        everyone = gather.tree(record, processes(record))
        test = procfs.stat(record.owner.pid) if owner else None
        if test is not None and test.id == record.owner and test.pid not in {s.pid for s in everyone}:
            everyone.append(test)
        self._total = max(self._total, len(everyone))
        dumps = stacks.take(
            everyone,
            self._role_of,
            python=record.python,
            markers=record.directory / "markers",
            limit=limit,
            on_dump=lambda dump: self._keep(dump, number),
        )
        self.owner = next((d for d in dumps if d.process == record.owner), self.owner)
        return [d for d in dumps if d.process != record.owner]

    def native(self, merged: Merged, judgement: Judgement, limit: float) -> None:
        """C frames of at most three suspects: half a second and more each."""
        wanted = [label for label in judgement.culprits if label in merged.by_label]
        wanted += [c.ranks[0] for c in merged.classes if merged.by_label[c.ranks[0]].rank]
        members = [merged.by_label[label] for label in dict.fromkeys(wanted)]
        found = [procfs.stat(m.process.pid) for m in members if m.has_stack and not m.condition]
        for dump in stacks.take(
            [s for s in found if s][:3], self._role_of, python=self._record.python, limit=limit, native=True
        ):
            if any(frame.native for thread in dump.threads for frame in thread.frames):
                self._write(dump, [parse.to_json(dump)], ".native")

    def so_far(self) -> tuple[str, list[str]]:
        """While a round is under way: a sentence on the stacks that are on disk and on those that are not; the ranks
        without. Reads nothing."""
        kept = dict(self._labels)
        there = sorted(kept.values(), key=label_order)
        missing = [label for label in gather.expected(self._record, kept.values()) if label not in there]
        named = f": {', '.join(there)}" if there else ""
        text = f"stacks of {len(there)} of {self._total or '?'} processes are on disk{named}"
        if missing:
            text += f"; the time was over before those of {', '.join(missing)} were taken"
        return f"{text}.", missing

    def _role_of(self, cmdline: Sequence[str], comm: str) -> ProcessRole | None:
        role = None
        with suppress(Exception):
            role = self._engine.process_role(cmdline, comm) if self._engine else None
        return role or any_role(cmdline, comm)

    def _keep(self, dump: ProcessDump, number: int) -> None:
        """Later rounds join the earlier ones."""
        rounds = self._kept.setdefault(dump.process, [])
        rounds.append({"round": number, "after": round(dump.taken - self._began, 3), **parse.to_json(dump)})
        self._write(dump, rounds, "")
        self._labels[dump.process] = "pytest" if dump.process == self._record.owner else dump.label

    def _write(self, dump: ProcessDump, rounds: Sequence[Any], suffix: str) -> None:
        label = "pytest" if dump.process == self._record.owner else dump.label
        name = f"stacks/{safe_name(label)}.{dump.process.pid}{suffix}.json"
        self._stores.write_json(name, {"schema": SCHEMA, "label": label, "rounds": rounds})


def pause_before(number: int, began: float, first: Sequence[ProcessDump], left: float) -> float | None:
    """Seconds to wait before round ``number``; None when there is nothing to see again, or no time."""
    slowest = max((d.seconds for d in first), default=0.0)
    pause = max(0.0, began + number * BETWEEN - time.monotonic())
    return pause if any(d.threads for d in first) and left >= pause + 3 * slowest + 4.0 else None
