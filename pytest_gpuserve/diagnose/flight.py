"""PyTorch's Flight Recorder: which rank misses which collective. Asked through its named pipe, which harms nobody.

The launch sets TORCH_NCCL_TRACE_BUFFER_SIZE, TORCH_NCCL_DEBUG_INFO_PIPE_FILE and TORCH_NCCL_DEBUG_INFO_TEMP_FILE (newer
torch: TORCH_FR_*). Files are pickles of plain values, written by the server: they are read by an unpickler that refuses
every class and function. The recorder only sees torch's own NCCL groups, not those of an engine.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import foreign
from .evidence import Witness
from .merge import format_ranks

MAX_BYTES = 64 << 20

_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE = ("TORCH_FR_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")


class _Plain(pickle.Unpickler):
    """Reads dicts, lists, tuples, texts, numbers and None; nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a flight record")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a flight record has no persistent ids")


@dataclass(frozen=True, slots=True)
class Collective:
    """One entry: ``state`` is scheduled, started or completed; ``sizes`` and ``dtypes`` as text."""

    group: str
    sequence: int
    name: str
    state: str
    sizes: str


@dataclass(frozen=True, slots=True)
class Flight:
    """One rank's record: the newest entry of each process group, and the newest that is not completed."""

    last: Mapping[str, Collective]
    pending: Mapping[str, Collective]
    entries: Mapping[tuple[str, int], Collective]
    members: Mapping[str, tuple[int, ...]]


def read(raw: bytes) -> Flight:
    """Read a record.

    Raises:
        ValueError: it is none: not a pickle of plain values, or of another shape.
    """
    try:
        record = _Plain(io.BytesIO(raw[:MAX_BYTES])).load()
        entries = [_entry(e) for e in record["entries"]]
        members = {
            str(name): tuple(int(n) for n in str(config["ranks"]).strip("[]() ").split(",") if n.strip())
            for name, config in dict(record.get("pg_config") or {}).items()
        }
    except Exception as error:  # a foreign file may raise anything, down to a RecursionError
        raise ValueError(f"not a flight record: {error}") from error
    last: dict[str, Collective] = {}
    pending: dict[str, Collective] = {}
    for entry in entries:
        if entry.group not in last or entry.sequence >= last[entry.group].sequence:
            last[entry.group] = entry
        if entry.state != "completed" and (
            entry.group not in pending or entry.sequence < pending[entry.group].sequence
        ):
            pending[entry.group] = entry
    return Flight(last, pending, {(e.group, e.sequence): e for e in entries}, members)


def _entry(raw: Mapping[str, Any]) -> Collective:
    group = raw.get("process_group") or ("?",)
    sequence = raw.get("collective_seq_id", raw.get("seq_id"))
    return Collective(
        group=str(group[0]) if isinstance(group, (list, tuple)) else str(group),
        sequence=int(sequence if sequence is not None else raw["record_id"]),
        name=str(raw.get("profiling_name", "?")).removeprefix("nccl:")[:80],
        state=str(raw.get("state", "?"))[:20],
        sizes=f"{raw.get('input_sizes')} {raw.get('input_dtypes')}"[:200],
    )


def dump(environment: Mapping[str, str], rank: int, limit: float = 10.0) -> bytes | None:
    """Ask rank ``rank`` (its number in the world) for its record; None when it has no recorder or does not answer.

    ``environment`` is the rank's own. The pipe and the file must belong to this user.
    """
    pipe = next((environment[k] for k in _PIPE if environment.get(k)), None)
    name = next((environment[k] for k in _FILE if environment.get(k)), None)
    if not pipe or not name or not any(environment.get(k, "0") != "0" for k in _BUFFER):
        return None
    target = Path(f"{name}{rank}")
    before = _mtime(target)
    deadline = time.monotonic() + limit
    try:
        descriptor = os.open(f"{pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # nobody reads it: the recorder's thread is gone
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
            return None
        with suppress(OSError):
            os.write(descriptor, b"1")
    finally:
        os.close(descriptor)
    size = -1
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if _mtime(target) == before:
            continue
        now = target.stat().st_size if target.exists() else -1
        if now > 0 and now == size:
            return _load(target)
        size = now
    return None


def _mtime(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _load(path: Path) -> bytes | None:
    try:
        with foreign.opened(path, follow=False) as file:
            return file.read(MAX_BYTES) if os.fstat(file.fileno()).st_uid == os.geteuid() else None
    except OSError:
        return None


def witnesses(records: Mapping[str, Flight]) -> tuple[Witness, ...]:
    """Compare the ranks' records; ``records`` maps labels to them. Ranks without a record accuse nobody."""
    found: list[Witness] = []
    groups: dict[str, list[str]] = defaultdict(list)
    for label, record in records.items():
        for group in record.last:
            groups[group].append(label)
    for group, labels in sorted(groups.items()):
        if len(labels) < 2:
            continue
        newest = {label: records[label].last[group] for label in labels}
        ahead = max(entry.sequence for entry in newest.values())
        behind = sorted(label for label, entry in newest.items() if entry.sequence < ahead)
        waiting = [label for label in labels if group in records[label].pending]
        if behind and waiting and len(behind) < len(labels):
            wanted = next(e for e in newest.values() if e.sequence == ahead)
            claim = f"{format_ranks(behind)} has not called collective {ahead} ({wanted.name}) that the others wait in"
            found.append(Witness("Flight Recorder", claim, tuple(behind), "nccl"))
            continue
        names = {(e.name, e.sizes) for e in newest.values()}
        if waiting and len(names) > 1 and not behind:
            words = ", ".join(sorted({e.name for e in newest.values()}))
            claim = f"collective {ahead} differs between the ranks ({words}): their calls do not match"
            found.append(Witness("Flight Recorder", claim, (), "desync"))
    idle = sorted(label for label, record in records.items() if record.last and not record.pending)
    if idle and not found:
        claim = f"every NCCL collective of {format_ranks(idle)} is completed: it does not wait for the GPU"
        found.append(Witness("Flight Recorder", claim, (), "host"))
    return tuple(found)
