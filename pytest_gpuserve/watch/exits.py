"""Who went first: the processes of a server's engine, in the order in which they ended (``exits.jsonl``).

When one rank dies the engine ends the others, and minutes later nobody can tell which came first. A pidfd on each is
readable at the moment it ends; those that become so in one look are a tie.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from .. import procfs
from ..procfs import ProcessId
from ..vocabulary import RoleName
from .sample import ProcessSample

NAME: Final = "exits.jsonl"
_ROLES: Final[frozenset[RoleName]] = frozenset({"api", "engine_core", "worker", "scheduler", "detokenizer"})
_OTHERS: Final = 500
"""Processes without a role that are followed: a rank has its title late, and the log may tell whose pid it was."""

_GET_INFO: Final = 0xC040FF0B  # PIDFD_GET_INFO, 64 bytes: Linux 6.13; the exit status of a reaped process: 6.15
_INFO: Final = struct.Struct("=QQ11Ii")
_INFO_EXIT: Final = 1 << 3


class Exits:
    """Follows one server's processes and writes down how each ended. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._known: dict[ProcessId, int] = {}  # -1: nobody can follow it
        self._others = 0
        self._labels: dict[int, tuple[ProcessId, str, RoleName]] = {}

    @property
    def fds(self) -> Iterator[int]:
        """Descriptors that are readable when a process has ended."""
        yield from self._labels

    def follow(self, processes: Iterable[ProcessSample]) -> None:
        """Take in the processes of a sample."""
        for process in processes:
            fd = self._known.get(process.process)
            if fd is None and process.alive and self._wanted(process.role):
                fd = self._open(process.process)
            if fd is not None and fd in self._labels:  # a title that came late
                self._labels[fd] = (process.process, process.label, process.role)

    def ended(self, fds: Iterable[int]) -> None:
        """These are readable: write down who it was, and close them."""
        now, wall = time.monotonic(), time.time()
        lines = []
        for fd in fds:
            if (found := self._labels.pop(fd, None)) is None:
                continue
            process, label, role = found
            del self._known[process]
            entry = {"time": round(wall, 3), "monotonic": round(now, 3), "pid": process.pid, "start": process.start}
            lines.append({**entry, "label": label, "role": role, "code": exit_code(process, fd)})
            os.close(fd)
        if lines:
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            with suppress(OSError):
                file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                try:
                    os.write(file, text.encode())
                finally:
                    os.close(file)

    def close(self) -> None:
        """Follow nobody any more; those who have ended meanwhile are written down."""
        poll = select.poll()
        for fd in self._labels:
            poll.register(fd, select.POLLIN)
        self.ended([fd for fd, _ in poll.poll(0)])
        for fd in self._labels:
            os.close(fd)
        self._labels.clear()

    def _wanted(self, role: RoleName) -> bool:
        if role != "other":
            return role in _ROLES
        self._others += 1
        return self._others <= _OTHERS

    def _open(self, process: ProcessId) -> int:
        """A pidfd of this process and no later one of its number; -1 where there is none."""
        fd = -1
        with suppress(OSError, AttributeError):
            fd = os.pidfd_open(process.pid)
            if not procfs.same(process):
                os.close(fd)
                fd = -1
        self._known[process] = fd
        if fd >= 0:
            self._labels[fd] = (process, "", "other")
        return fd


def exit_code(process: ProcessId, fd: int) -> int | None:
    """How a process ended, as subprocess says it: a zombie's is in /proc, a reaped one's the kernel keeps for its pidfd
    (Linux 6.15); None where neither tells."""
    if (code := procfs.exit_code(process)) is not None:
        return code
    buffer = bytearray(_INFO.size)
    buffer[:8] = struct.pack("=Q", _INFO_EXIT)
    with suppress(OSError, ValueError):
        fcntl.ioctl(fd, _GET_INFO, buffer)
        mask, *_, status = _INFO.unpack(buffer)
        if mask & _INFO_EXIT:
            return os.waitstatus_to_exitcode(status)
    return None
