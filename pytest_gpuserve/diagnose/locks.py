"""Locks that a server waits for, and who holds them: kernel locks by inode, lock files of caches by open files."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from .. import procfs
from ..home import expanded
from . import tools
from .evidence import LockFact
from .kernel import kernel_wait
from .mechanism import mechanism
from .merge import Member, Merged

_LOCK_LINE = re.compile(
    r"^\d+: (-> )?(FLOCK|POSIX|OFDLCK)\s+\S+\s+\S+\s+(-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+)", re.MULTILINE
)
_WALK_LIMIT = 20_000
_TRACE = 1.2
"""Seconds of system calls that are looked at: a dozen turns of a loop that sleeps 0.1 s."""
_OFTEN = 3
_LOOPS = 2

_CACHES: Mapping[str, tuple[tuple[str | None, str, str], ...]] = {
    "torch-extension-lock": (("TORCH_EXTENSIONS_DIR", "", "lock"), (None, ".cache/torch_extensions", "lock")),
    "flashinfer-build-lock": (
        ("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer", ".lock"),
        (None, ".cache/flashinfer", ".lock"),
    ),
    "huggingface-download-lock": (
        ("HF_HUB_CACHE", ".locks", ".lock"),
        ("HF_HOME", "hub/.locks", ".lock"),
        (None, ".cache/huggingface/hub/.locks", ".lock"),
    ),
    "file-lock": (
        ("TRITON_CACHE_DIR", "", ".lock"),
        ("TORCHINDUCTOR_CACHE_DIR", "locks", ".lock"),
        ("VLLM_CACHE_ROOT", "", ".lock"),
        (None, ".cache/flashinfer", ".lock"),
        (None, ".triton/cache", ".lock"),
        (None, ".cache/vllm", ".lock"),
        (None, ".cache/huggingface/hub/.locks", ".lock"),
    ),
}
"""Signature to (variable, sub-directory, end of the name); None stands for the process's HOME."""


def locks(merged: Merged, *, limit: float = 3.0, python: str | None = None) -> tuple[LockFact, ...]:
    """Locks that the server's processes wait for, and who holds them.

    Kernel locks come from /proc/locks, by inode. Lock files of JIT caches and downloads, which a waiter polls, are
    looked for where the signature says; the holder is who has the file open, and one that nobody has open is stale.
    What any other process polls for is seen in its system calls, when ``python`` (an interpreter) is given for that.
    """
    deadline = time.monotonic() + limit
    labels = {m.process.pid: m.label for m in merged.members}
    table = _kernel_locks()
    found: list[LockFact] = []
    waiting = [m for m in merged.members if kernel_wait(m.facts).place == "lock"]
    by_inode: dict[tuple[str, int], list[Member]] = {}
    for member in waiting:
        for _, device, inode, pid, blocked in table:
            if blocked and pid == member.process.pid:
                by_inode.setdefault((device, inode), []).append(member)
                break
        else:
            found.append(LockFact("", (member.label,)))
    for (device, inode), members in by_inode.items():
        holders = [pid for _, d, i, pid, blocked in table if (d, i) == (device, inode) and not blocked]
        kind = next(k for k, d, i, _, _ in table if (d, i) == (device, inode))
        path = _path_of(inode, [members[0].process.pid, *holders])
        found.append(_fact(path, [m.label for m in members], holders, labels, kind.lower()))
    polling: dict[str, list[Member]] = {}
    for member in merged.members:
        if member.signature and member.signature.lock and member not in waiting:
            polling.setdefault(member.signature.id, []).append(member)
    for signature, members in polling.items():
        found.extend(_cache_locks(signature, members, labels, table, deadline))
    if python:
        found.extend(_polled(merged, found, labels, python, deadline))
    return tuple(found)


def _polled(
    merged: Merged, found: Sequence[LockFact], labels: Mapping[int, str], python: str, deadline: float
) -> list[LockFact]:
    """Files for which loops poll; of those in one place one is traced."""
    known = {label for lock in found for label in lock.waiters if lock.path}
    loops: dict[tuple[str, ...], list[Member]] = {}
    for member in merged.members:
        how = mechanism(member)
        if how is not None and how.kind == "poll" and member.label not in known:
            loops.setdefault(member.key, []).append(member)
    result = []
    for members in list(loops.values())[:_LOOPS]:
        path = asked_for(members[0].process.pid, python, deadline - time.monotonic())
        if path:
            holders = _open_by(Path(path), _inode(Path(path)), {m.process.pid for m in members}, deadline)
            waiters = [m.label for m in members]
            result.append(_fact(path, waiters, holders, labels, "file", None if holders else False))
    return result


def asked_for(pid: int, python: str, limit: float) -> str | None:
    """The file that a loop asks for again and again while it is there; None where it asks for none, or for several,
    or cannot be traced. Takes a second and a bit."""
    if limit < _TRACE + 0.5:
        return None
    argv = [python, "-S", "-E", str(Path(__file__).with_name("asked_files.py")), str(pid), str(_TRACE)]
    try:
        asked = {str(path): int(often) for path, often in json.loads(tools.run(argv, _TRACE + 3.0).raw).items()}
    except (ValueError, AttributeError):
        return None
    often = [path for path, count in asked.items() if count >= _OFTEN and path.startswith("/")]
    there = [path for path in often if Path(path).is_file() and not Path(path).is_symlink()]
    return there[0] if len(there) == len(often) == 1 else None


def _fact(
    path: str,
    waiters: Sequence[str],
    holders: Sequence[int],
    labels: Mapping[int, str],
    kind: str,
    alive: bool | None = None,
) -> LockFact:
    holder = next((pid for pid in holders if pid in labels), holders[0] if holders else None)
    state = procfs.stat(holder) if holder is not None else None
    return LockFact(
        path=path,
        waiters=tuple(waiters),
        holder=holder,
        holder_label=labels.get(holder) if holder is not None else None,
        holder_alive=alive if holder is None else bool(state and state.alive),
        holder_title=" ".join(procfs.cmdline(holder))[:120] if holder is not None else "",
        kind="flock" if kind == "flock" else "file" if kind == "file" else "posix",
        age=_age(path),
    )


def _kernel_locks() -> list[tuple[str, str, int, int, bool]]:
    """(kind, device, inode, pid, waits) of every kernel lock that can be seen."""
    text = procfs.read("/proc/locks").decode(errors="replace")
    return [(m[2], f"{m[4]}:{m[5]}", int(m[6]), int(m[3]), m[1] is not None) for m in _LOCK_LINE.finditer(text)]


def _path_of(inode: int, pids: Sequence[int]) -> str:
    for pid in pids:
        for entry in _descriptors(pid):
            if _inode(entry) == inode:
                return _target(entry)
    return ""


def _descriptors(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""


def _age(path: str) -> float | None:
    try:
        return max(0.0, time.time() - Path(path).stat().st_mtime)
    except (OSError, ValueError):
        return None


def _cache_locks(
    signature: str,
    members: Sequence[Member],
    labels: Mapping[int, str],
    table: Sequence[tuple[str, str, int, int, bool]],
    deadline: float,
) -> list[LockFact]:
    environment = procfs.environ(members[0].process.pid)
    waiters = [m.label for m in members]
    exists = signature == "torch-extension-lock"  # its existence is the lock; the others are flocks on a file
    files = _lock_files(signature, environment, deadline)
    held: list[LockFact] = []
    stale: list[LockFact] = []
    for path in files:
        inode = _inode(Path(path))
        holders = [pid for _, _, i, pid, blocked in table if i == inode and not blocked and pid > 0]
        if exists:
            holders = _open_by(Path(path), inode, {m.process.pid for m in members}, deadline)
        if holders:
            held.append(_fact(path, waiters, holders, labels, "file" if exists else "flock"))
        elif exists:
            stale.append(_fact(path, waiters, [], labels, "file", alive=False))
    return held[:1] or stale[:1]


def _lock_files(signature: str, environment: Mapping[str, str], deadline: float) -> list[str]:
    """Lock files in the caches that the signature names, newest first."""
    home = environment.get("HOME") or str(expanded("~"))
    found: dict[str, float] = {}
    seen = 0
    for variable, below, suffix in _CACHES.get(signature, ()):
        base = home if variable is None else environment.get(variable)
        if not base:
            continue
        for directory, _, names in os.walk(Path(base) / below):
            seen += len(names) + 1
            if seen > _WALK_LIMIT or time.monotonic() > deadline:
                break
            for name in names:
                if name == suffix or (suffix.startswith(".") and name.endswith(suffix)):
                    path = str(Path(directory) / name)
                    found[path] = -(_age(path) or 0.0)
    return sorted(found, key=lambda p: -found[p])


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _open_by(path: Path, inode: int | None, without: Collection[int], deadline: float) -> list[int]:
    """Pids that have the file open."""
    found: list[int] = []
    for pid in procfs.pids():
        if pid in without or time.monotonic() > deadline:
            continue
        if any(_target(entry) == str(path) and _inode(entry) == inode for entry in _descriptors(pid)):
            found.append(pid)
    return found
