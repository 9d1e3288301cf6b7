"""Crowds: of a pool of idle compile workers a few are read, not all, round by round."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from .. import procfs
from ..engines.titles import program
from ..procfs import ProcessId, Stat
from .model import ProcessDump
from .parse import RoleOf

ENOUGH = 3
"""Idle processes of one kind that are read; 66 workers of an inductor pool were seen under one rank."""
_LOOK = 0.1  # seconds: a busy process uses CPU within them
_LEFT_OUT = "idle, like others of its kind that were read"


def left_out(processes: Sequence[Stat], role_of: RoleOf, limit: float = 1.0) -> dict[ProcessId, str]:
    """The processes of a round that need not be read, and what to say of each.

    Compilers and their pools alone: each one that runs, waits for a disk, uses CPU or has a child is read, and the
    first few idle ones of a kind, so that every round reads the same. Takes 0.1 s where there is a crowd; a process
    whose /proc cannot be read (it blocks) costs at most ``limit`` seconds, and then all are read.
    """
    if len(processes) <= ENOUGH:
        return {}
    found: list[dict[ProcessId, str]] = []
    thread = threading.Thread(target=lambda: found.append(_left_out(processes, role_of)), daemon=True)
    thread.start()
    thread.join(limit)
    return found[0] if found else {}


def _left_out(processes: Sequence[Stat], role_of: RoleOf) -> dict[ProcessId, str]:
    kinds: dict[str, list[Stat]] = defaultdict(list)
    for stat in processes:
        cmdline = procfs.cmdline(stat.pid)
        if _role(role_of, cmdline, stat.comm) == "compiler":
            kinds[program(cmdline, stat.comm)].append(stat)
    crowds = [found for found in kinds.values() if len(found) > ENOUGH]
    if not crowds:
        return {}
    time.sleep(_LOOK)
    parents = {stat.ppid for stat in processes}
    idle = [[stat for stat in found if stat.pid not in parents and _idle(stat)] for found in crowds]
    return {stat.id: _LEFT_OUT for found in idle for stat in found[ENOUGH:]}


def _role(role_of: RoleOf, cmdline: Sequence[str], comm: str) -> str:
    try:
        role = role_of(cmdline, comm)
    except Exception:  # an engine's trouble with a title: it is read
        return ""
    return role.role if role else ""


def _idle(then: Stat) -> bool:
    now = procfs.stat(then.pid)
    return now is not None and now.id == then.id and now.state == "S" and _ticks(now) == _ticks(then)


def _ticks(stat: Stat) -> int:
    return stat.utime + stat.stime


def unread(dumps: Sequence[ProcessDump]) -> str | None:
    """One sentence about those that were left out; None when all were read."""
    count = sum(dump.problem == _LEFT_OUT for dump in dumps)
    return f"{count} idle compile workers were not read, as {ENOUGH} of their kind were." if count else None


def crowded(dump: ProcessDump) -> bool:
    """Whether this process was left out: it has no stack, and needs no line of its own."""
    return dump.problem == _LEFT_OUT
