"""The processes of one server, read cheaply: two small files a process and look, kept open between looks.

Belongs to the server: what descends from its first process, also after being left to the supervisor (a subreaper), and
what carries its cookie. Compilers of another run do neither.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from .. import procfs
from ..engines.base import ProcessRole
from ..procfs import ProcessId
from .compilers import is_compiler
from .sample import ProcessSample

RoleOf = Callable[[Sequence[str], str], ProcessRole | None]

TICK = 1.0 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")

FULL_SCAN = 30.0
"""Seconds after which every pid is looked at again: between two looks only new ones are, and pids are reused."""

TITLES = 5.0
"""Seconds between looks at the titles of processes that have no rank yet: engines set them late."""

YOUNG = 30.0
"""Seconds of a process's life in which its title is looked at every time: it may die before the next look."""


@dataclass
class _Process:
    """A process of the tree, with its two files. ``io`` is -1 where it is not ours to read."""

    id: ProcessId
    comm: str
    stat: int
    io: int
    role: ProcessRole | None = None
    compiler: bool = False
    named: float = 0.0
    begun: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        for descriptor in (self.stat, self.io):
            if descriptor >= 0:
                os.close(descriptor)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


class ProcessTable:
    """New processes of the machine since the last look, read once for all servers."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._scanned = float("-inf")
        self.fresh: dict[int, procfs.Stat] = {}

    def refresh(self) -> None:
        """Look again; ``fresh`` holds processes that were not there last time."""
        now = time.monotonic()
        if now - self._scanned >= FULL_SCAN:
            self._scanned = now
            self._seen.clear()
        pids = set(procfs.pids())
        self.fresh = {pid: entry for pid in pids - self._seen if (entry := procfs.stat(pid))}
        self._seen = pids


@dataclass
class ProcTree:
    """One server's tree.

    Attributes:
        root: its first process.
        supervisor: pid of the subreaper; its other children (dumps) are not the server's.
        cookie: inherited by everything the server starts; None: descent alone counts.
        role_of: the engine's names for its processes.
    """

    root: ProcessId
    supervisor: int | None
    cookie: str | None
    role_of: RoleOf
    _known: dict[int, _Process] = field(default_factory=dict)
    _begun: bool = False

    def sample(self, table: ProcessTable | None = None, *, closely: bool = False) -> dict[ProcessId, ProcessSample]:
        """Read the tree; ``table`` has been refreshed by the caller, who may share it between trees.

        ``closely`` reads the main threads of ranks too.
        """
        now = time.monotonic()
        self._update(procfs.snapshot() if table is None or not self._begun else table.fresh)
        self._begun = True
        found: dict[ProcessId, ProcessSample] = {}
        for pid, entry in list(self._known.items()):
            read = self._read(entry, now, closely)
            if read is None:
                entry.close()
                del self._known[pid]
            else:
                found[entry.id] = read
        return found

    def notice(self, table: ProcessTable) -> None:
        """Take in the new processes of a table that is refreshed for another tree's sake."""
        if self._begun:
            self._update(table.fresh)

    def close(self) -> None:
        """Close every file."""
        for entry in self._known.values():
            entry.close()
        self._known.clear()

    # --- who belongs

    def _update(self, fresh: dict[int, procfs.Stat]) -> None:
        for pid, entry in fresh.items():
            if pid not in self._known and self._belongs(entry, fresh):
                self._add(entry)

    def _belongs(self, entry: procfs.Stat, stats: dict[int, procfs.Stat]) -> bool:
        if entry.id == self.root:
            return True
        seen: set[int] = set()
        current = entry
        while current.ppid not in seen:
            if current.ppid in self._known or current.ppid == self.root.pid:
                return True
            if current.ppid == self.supervisor:
                break
            seen.add(current.pid)
            parent = stats.get(current.ppid)
            if parent is None:
                return False
            current = parent
        # left to the supervisor between two looks, or one of its dumps: those run without the cookie
        return self.cookie is not None and procfs.cookie(current.pid) == self.cookie

    def _add(self, entry: procfs.Stat) -> None:
        stat = _open(f"/proc/{entry.pid}/stat")
        if stat < 0:
            return
        known = _Process(entry.id, entry.comm, stat, _open(f"/proc/{entry.pid}/io"))
        self._name(known)
        self._known[entry.pid] = known

    def _name(self, known: _Process) -> None:
        pid = known.id.pid
        argv = procfs.cmdline(pid)
        known.named = time.monotonic()
        if now := procfs.stat(pid):
            known.comm = now.comm
        role = None
        with suppress(Exception):  # an engine of somebody else's must not stop the watch
            role = self.role_of(argv, known.comm)
        known.compiler = is_compiler(known.comm, argv) or (role is not None and role.role == "compiler")
        known.role = role

    # --- counters

    def _read(self, entry: _Process, now: float, closely: bool) -> ProcessSample | None:
        try:
            raw = os.pread(entry.stat, 1024, 0)
        except OSError:
            return None
        head, _, tail = raw.rpartition(b")")
        fields = tail.split()
        if len(fields) < 22 or int(fields[19]) != entry.id.start:
            return None
        comm = head.partition(b"(")[2]
        role = entry.role
        renamed = comm != entry.comm.encode()  # exec: a shell becomes a compiler
        nameless = role is None or (role.rank is None and role.role != "helper")
        if renamed or (nameless and now - entry.named > (TITLES if now - entry.begun > YOUNG else 0.0)):
            self._name(entry)
            role = entry.role
        state = fields[0].decode()
        read = chars = calls = 0
        if entry.io >= 0:
            try:
                values = dict(line.split(b": ") for line in os.pread(entry.io, 512, 0).splitlines())
                read, chars, calls = int(values[b"read_bytes"]), int(values[b"rchar"]), int(values[b"syscr"])
            except (OSError, ValueError, KeyError):
                os.close(entry.io)  # a process that changed its user, or is exiting
                entry.io = -1
        main, wchan = None, ""
        if closely and not entry.compiler:
            main, wchan = _main_thread(entry.id.pid)
        label = role.label if role and (role.rank or role.role not in ("other", "compiler")) else entry.comm
        return ProcessSample(
            process=entry.id,
            label=label,
            role="compiler" if entry.compiler else (role.role if role else "other"),
            state=state,
            cpu=sum(map(int, fields[11 : 15 if entry.compiler else 13])) * TICK,  # a build tool's children too
            majflt=int(fields[9]),
            minflt=int(fields[7]),
            read=read,
            chars=chars,
            calls=calls,
            rss=int(fields[21]) * PAGE,
            compiler=entry.compiler,
            rank=bool(role and role.rank and role.role in ("scheduler", "worker")),
            main=main,
            wchan=wchan,
        )


def _main_thread(pid: int) -> tuple[float | None, str]:
    fields = procfs.read(f"/proc/{pid}/task/{pid}/stat").rpartition(b")")[2].split()
    if len(fields) < 13:
        return None, ""
    wchan = procfs.read(f"/proc/{pid}/task/{pid}/wchan").strip(b"\0\n0").decode(errors="replace")
    return (int(fields[11]) + int(fields[12])) * TICK, wchan
