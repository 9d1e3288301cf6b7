"""What dead sessions left, looked at: processes, files in /dev/shm. Only what is proved to be ours; nothing is touched.

A session is dead when the process that its directory is named after is gone: the same pid with the same start time, in
the boot and pid namespace that the directory notes. What one of its servers left is to be ended when the supervisor is
gone too; while that lives, ending the server is its business.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import procfs
from ..errors import GpuserveError
from ..procfs import ProcessId
from ..redaction.redact import shown_command
from ..text import one_line
from . import cgroup, tree
from . import dead_sessions as dead
from .asking import ask_tree
from .control import Control, group_of, noted_files
from .paths import SESSIONS
from .record import COOKIE, proof

_SETTLED = 60.0  # seconds: a server.json older than this has no supervisor that is still to come up
_SHM = Path("/dev/shm")
_WATCHER = "pytest_gpuserve.watch.watcher"


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as a person is told of it. ``age`` in seconds; ``command`` is foreign text, redacted."""

    id: ProcessId
    user: str
    age: float
    command: str

    def __str__(self) -> str:
        return f"pid {self.id.pid} ({one_line(self.command, 60)})"


@dataclass(frozen=True, slots=True)
class Leftover:
    """What one server of a dead owner left.

    Attributes:
        cookie: what its processes carry; "" where nothing tells. directory: where its files are; None where only
            processes tell of it.
        processes: those that carry the cookie, and all below them, less ``spared``: daemons that others use.
        files: inode and name of what its supervisor noted in /dev/shm and is still there.
        waits: why it is not to be ended now, which passes by itself; "" when it is.
        problem: the same, where somebody has to do something.
        settled: nothing can come up any more. group: the cgroup that its supervisor made for it.
    """

    cookie: str
    directory: Path | None
    processes: tuple[Seen, ...] = ()
    spared: tuple[Seen, ...] = ()
    files: Mapping[str, str] | None = None
    waits: str = ""
    problem: str = ""
    settled: bool = True
    group: str = ""

    @property
    def name(self) -> str:
        return one_line(self.directory.name, 60) if self.directory else f"a server of pid {self.cookie.split(':')[0]}"

    @property
    def endable(self) -> bool:
        """There is something, and nothing speaks against ending it."""
        return bool(self.processes or self.files) and not self.waits and not self.problem


def find_leftovers(root: Path | None, *, strays: bool = False, limit: float = 10.0) -> list[Leftover]:
    """What dead sessions left, looking only: processes are named, nothing is touched.

    Args:
        root: the state directory; None where there is none.
        strays: also processes of this user that carry the cookie of a dead owner whose directory is gone; those of
            another state directory, or that a supervisor looks after, are named and wait. And stopped watchers.
    """
    deadline = time.monotonic() + limit
    found = [leftover for session in (dead.look(root)[1] if root else ()) for leftover in of_session(session)]
    if not found and not strays:
        return []
    carriers = carried(deadline)
    found = [with_processes(leftover, carriers) for leftover in found]
    if strays:
        known = {leftover.cookie for leftover in found}
        found += _strays({c: ids for c, ids in carriers.items() if c not in known}, root, deadline)
        found += _stopped_watchers(root) if root else []
    return [one for one in found if one.processes or one.spared or one.files or one.waits or one.problem]


# Servers


def of_session(session: dead.Session) -> Iterator[Leftover]:
    """The servers of a dead session that may have left something; one that cannot be looked at hides no other."""
    paths = list[Path]()
    with contextlib.suppress(OSError):
        paths = sorted(session.path.iterdir())
    for path in paths:
        found: Leftover | None = None
        try:
            if dead.own(path.lstat(), stat.S_ISDIR):
                found = _of_server(session, path)
        except FileNotFoundError:  # no server, or one that was never launched
            pass
        except Exception as error:  # whatever is in those files
            why = str(error) if isinstance(error, GpuserveError) else f"{type(error).__name__}: {error}"
            found = Leftover("", path, problem=why)
        if found:
            yield found


def _of_server(session: dead.Session, path: Path) -> Leftover | None:
    """None: its supervisor saw the end of all of it, or it is no server of this session."""
    cookie, supervisor = proof(path)
    if cookie.split(":")[:2] != [str(session.owner.pid), str(session.owner.start)]:
        return None
    control = Control(path, supervisor)
    if (pid := _supervised(control)) is not None:
        if (seen := procfs.stat(pid)) and seen.state == "T":
            why = f"its supervisor, pid {pid}, is stopped and ends it once it goes on: kill -CONT {pid}"
            return Leftover(cookie, path, problem=why, settled=False)
        return Leftover(cookie, path, waits="its supervisor is still ending it", settled=False)
    events = control.events()
    there = present()
    files = {inode: name for inode, name in noted_files(events).items() if int(inode) in there}
    kinds = {event.kind for event in events}
    if "stopped" in kinds and "left" not in kinds and not files:
        return None
    settled = "stopped" in kinds or time.time() - _written(path) > _SETTLED
    return Leftover(cookie, path, files=files, settled=settled, group=group_of(events))


def _written(path: Path) -> float:
    """When the server's record was; a directory without one is as old as itself."""
    with contextlib.suppress(OSError):
        return (path / "server.json").stat().st_mtime
    return path.stat().st_mtime


def _supervised(control: Control) -> int | None:
    """pid of the supervisor that lives: the one of the record, or (its owner died before it noted which) one that
    listens; 0 for one of whom nothing more can be told. None: there is none."""
    if control.supervisor is not None and control.alive():
        return control.supervisor.pid
    folder = os.open(control.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            connection.connect(f"/proc/self/fd/{folder}/supervisor.sock")
            pid: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return pid
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except OSError:  # its queue is full
        return 0
    finally:
        os.close(folder)


def present() -> set[int]:
    """Inodes of this user's files in /dev/shm."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(_SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if dead.own(entry.stat(follow_symlinks=False), stat.S_ISREG):
                    found.add(entry.inode())
    return found


# Processes


def carried(deadline: float) -> dict[str, list[tuple[ProcessId, str]]]:
    """Every process that carries a cookie, with its command line, by cookie."""
    words, _ = ask_tree([{"do": "about", "pids": None}], max(0.1, deadline - time.monotonic()))
    found: dict[str, list[tuple[ProcessId, str]]] = {}
    for word, *rest in words:
        if word == "about":
            pid, start, cookie, command = rest
            found.setdefault(cookie, []).append((ProcessId(pid, start), command))
    return found


def with_processes(found: Leftover, carriers: Mapping[str, Sequence[tuple[ProcessId, str]]]) -> Leftover:
    if not found.cookie:
        return found
    commands = dict(carriers.get(found.cookie, ()))
    for pid in cgroup.members(found.group):  # it has lost its cookie
        if id := procfs.process_id(pid):
            commands.setdefault(id, (procfs.cmdline(pid) or ["?"])[0])
    if not commands:
        return replace(found, processes=())
    table = procfs.snapshot()
    for id in list(commands):
        for pid in procfs.descendants(id.pid, table):
            if table[pid].alive:
                commands.setdefault(table[pid].id, table[pid].comm)
    seen = [look(id, command) for id, command in commands.items() if procfs.same(id)]
    now = tree.table()
    spared = tree.spared({one.id.pid for one in seen} & now.keys(), now, -1)
    return replace(
        found,
        processes=tuple(one for one in seen if one.id.pid not in spared),
        spared=tuple(one for one in seen if one.id.pid in spared),
    )


def _strays(
    carriers: Mapping[str, Sequence[tuple[ProcessId, str]]], root: Path | None, deadline: float
) -> list[Leftover]:
    """Those whose owner is gone, of this user and this pid namespace. ``waits`` where a supervisor is above them."""
    table, found = procfs.snapshot(), []
    for cookie, members in carriers.items():
        owner = COOKIE.fullmatch(cookie)
        if owner is None or procfs.same(ProcessId(int(owner[1]), int(owner[2]))):
            continue
        if not all(_ours(id.pid) for id, _ in members):
            continue
        above = {pid for id, _ in members for pid in _ancestors(id.pid, table)}
        words, complete = ask_tree([{"do": "about", "pids": sorted(above)}], max(0.1, deadline - time.monotonic()))
        commands = [str(rest[3]) for word, *rest in words if word == "about"]
        # a name that only spares
        supervised = not complete or any("pytest_gpuserve/server/supervisor.py" in text for text in commands)
        waits = "its supervisor lives" if supervised else _elsewhere(members, root)
        found.append(with_processes(Leftover(cookie, None, waits=waits), carriers))
    return found


def _elsewhere(members: Sequence[tuple[ProcessId, str]], root: Path | None) -> str:
    """The state directory that these processes belong to, if it is still there and another than ``root``: what looks
    after that one frees them, and knows their files."""
    for id, _ in members:
        markers = procfs.environ(id.pid).get("GPUSERVE_MARKERS")
        if markers and os.path.isdir(markers):  # noqa: PTH112
            theirs = Path(markers).parents[3]  # .../sessions/SESSION/SERVER/markers
            with contextlib.suppress(OSError):
                if root is not None and theirs.samefile(root):
                    continue
            shown = one_line(str(theirs), 200)
            return f"it belongs to the state directory {shown}: GPUSERVE_STATE={shlex.quote(shown)} gpuserve reap"
    return ""


def _stopped_watchers(root: Path) -> list[Leftover]:
    """Watchers end with their session by themselves, save those that somebody stopped."""
    found = []
    for pid, entry in procfs.snapshot().items():
        words = procfs.cmdline(pid) if entry.state == "T" and _ours(pid) else []
        if _WATCHER in words and "--session" in words[:-1]:
            path = Path(words[words.index("--session") + 1])
            if path.parent == root / SESSIONS and path not in dead.living(root):
                why = f"its watcher, pid {pid}, is stopped and ends once it goes on: kill -CONT {pid}"
                found.append(Leftover("", path, problem=why))
    return found


def in_our_namespace(pid: int) -> bool:
    """Whether pids mean the same to that process as to us."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/pid").st_ino == os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    return False


def _ours(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid() and in_our_namespace(pid)  # noqa: PTH116
    return False


def _ancestors(pid: int, table: Mapping[int, procfs.Stat]) -> Iterator[int]:
    while (entry := table.get(pid)) is not None and entry.ppid > 0:
        pid = entry.ppid
        yield pid


def look(id: ProcessId, command: str) -> Seen:
    """User and age of a process."""
    from .lease_files import owner

    age = time.clock_gettime(time.CLOCK_BOOTTIME) - id.start / os.sysconf("SC_CLK_TCK")
    return Seen(id, owner(id.pid) or "?", max(0.0, age), shown_command(command))
