"""What /proc says, in one place: identity, family and cookie of processes.

A process is (pid, start time): pids are reused. Everything here returns None or nothing for a process that is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COOKIE_VARIABLE = "GPUSERVE_COOKIE"
"""Environment variable inherited by everything a server starts: ``ownerpid:ownerstart:uuid``."""


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """A process for certain: ``start`` is field 22 of /proc/PID/stat, in clock ticks since boot."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class Stat:
    """One reading of /proc/PID/stat. Times in clock ticks; ``state`` is the kernel's letter (R S D T t Z X)."""

    pid: int
    comm: str
    state: str
    ppid: int
    session: int
    majflt: int
    utime: int
    stime: int
    start: int
    threads: int

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start)

    @property
    def alive(self) -> bool:
        """A zombie leader with other threads still runs."""
        return self.state not in "ZX" or self.threads > 1


def read(path: str) -> bytes:
    """The file's bytes, or b"" when it is gone or not ours to read."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError):
        return b""


def stat(pid: int) -> Stat | None:
    """The process's stat line, or None when it is gone."""
    raw = read(f"/proc/{pid}/stat")
    head, _, tail = raw.rpartition(b")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    return Stat(
        pid=pid,
        comm=head.partition(b"(")[2].decode(errors="replace"),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        session=int(fields[3]),
        majflt=int(fields[9]),
        utime=int(fields[11]),
        stime=int(fields[12]),
        start=int(fields[19]),
        threads=int(fields[17]),
    )


def process_id(pid: int) -> ProcessId | None:
    """Identity of a live (or zombie) process, or None."""
    found = stat(pid)
    return found.id if found else None


def same(process: ProcessId) -> bool:
    """True while exactly this process exists and is no zombie."""
    found = stat(process.pid)
    return found is not None and found.start == process.start and found.alive


def exit_code(process: ProcessId) -> int | None:
    """Of exactly this process while it is a zombie, as subprocess says it (-9: SIGKILL); None when it is reaped, or
    not ours to read."""
    raw = read(f"/proc/{process.pid}/stat")
    fields = raw.rpartition(b")")[2].split()
    if len(fields) < 50 or fields[0] not in (b"Z", b"X") or int(fields[19]) != process.start:
        return None
    return os.waitstatus_to_exitcode(int(fields[49]))


def pids() -> Iterator[int]:
    """Every pid this process can see."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def snapshot() -> dict[int, Stat]:
    """All processes by pid, zombies included."""
    return {pid: found for pid in pids() if (found := stat(pid))}


def descendants(root: int, table: dict[int, Stat] | None = None) -> list[int]:
    """Pids below ``root`` (which is left out), parents before children."""
    table = snapshot() if table is None else table
    children: dict[int, list[int]] = {}
    for entry in table.values():
        children.setdefault(entry.ppid, []).append(entry.pid)
    found: list[int] = []
    queue = sorted(children.get(root, []))
    while queue:
        pid = queue.pop(0)
        found.append(pid)
        queue.extend(sorted(children.get(pid, [])))
    return found


def ignores(pid: int, number: int) -> bool:
    """The process ignores this signal (a shell without job control has its background jobs ignore SIGINT)."""
    for line in read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"SigIgn:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def cmdline(pid: int) -> list[str]:
    """argv as the process shows it now: titles set by setproctitle come as one padded string, stripped here."""
    raw = read(f"/proc/{pid}/cmdline").rstrip(b"\0 ")
    return [part.decode(errors="replace") for part in raw.split(b"\0")] if raw else []


def environ(pid: int) -> dict[str, str]:
    """Environment the process was started with; empty when not ours to read (or cleared)."""
    entries = (part.partition(b"=") for part in read(f"/proc/{pid}/environ").split(b"\0") if part)
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, _, v in entries}


def cookie(pid: int) -> str | None:
    """The cookie the process inherited, or None."""
    return environ(pid).get(COOKIE_VARIABLE)


def carriers(value: str) -> list[int]:
    """Live pids whose environment carries exactly this cookie."""
    return [pid for pid, entry in snapshot().items() if entry.alive and cookie(pid) == value]
