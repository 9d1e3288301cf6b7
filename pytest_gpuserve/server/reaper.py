"""What dead sessions left: processes, files in /dev/shm, lease files, old logs. Only what is proved to be ours.

A session is dead when the process that its directory is named after is gone: the same pid with the same start time, in
the boot and pid namespace that the directory notes. What one of its servers left is ended when the supervisor is gone
too; while that lives, ending the server is its business. Ports need nothing: the kernel frees them with their holders.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import procfs
from ..errors import GpuserveError
from ..procfs import ProcessId
from ..redaction.redact import shown_command
from ..text import one_line
from . import cgroup
from . import dead_sessions as dead
from .asking import ask_tree
from .control import Control, end_request, group_of, noted_files
from .paths import existing_state
from .record import ServerRecord, load

_SETTLED = 60.0  # seconds: a server.json older than this has no supervisor that is still to come up
COOKIE = re.compile(r"([1-9][0-9]*):([0-9]+):[0-9a-f]{32}")
"""What every process of a server carries: pid and start time of the owner, and the server's number."""

_SHM = Path("/dev/shm")


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
        cookie: what its processes carry. directory: where its files are; None where only processes tell of it.
        processes: those that carry the cookie, and all below them.
        files: inode and name of what its supervisor noted in /dev/shm and is still there.
        waits: why it is not to be ended now; "" when it is.
        settled: nothing can come up any more. group: the cgroup that its supervisor made for it.
    """

    cookie: str
    directory: Path | None
    processes: tuple[Seen, ...] = ()
    files: Mapping[str, str] | None = None
    waits: str = ""
    settled: bool = True
    group: str = ""

    @property
    def name(self) -> str:
        return one_line(self.directory.name, 60) if self.directory else f"a server of pid {self.cookie.split(':')[0]}"


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did.

    Attributes:
        ended: processes that are gone now. left: those that the kernel, or the limit, did not let die.
        unlinked: names in /dev/shm. kept: those that stay, with the reason.
        waiting: servers that their supervisors are still ending.
        removed: directories of old sessions.
        problems: what could not be done, one sentence each.
    """

    ended: tuple[Seen, ...] = ()
    left: tuple[Seen, ...] = ()
    unlinked: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    removed: int = 0
    problems: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One paragraph for a person, escaped; "" when there is nothing to tell (old logs are nothing to tell)."""
        parts = []
        if self.ended:
            parts.append(f"Ended what dead sessions left: {_some(self.ended)}")
        if self.unlinked:
            parts.append(f"Unlinked in /dev/shm: {_some(self.unlinked)}")
        if self.left:
            parts.append(f"Could not end {_some(self.left)}")
        if self.kept:
            parts.append(f"Kept {_some(self.kept)}")
        parts += [one_line(problem) for problem in self.problems]
        return f"{'. '.join(parts)}." if parts else ""


def sweep_dead_sessions(limit: float = 10.0) -> Swept:
    """Free what this user's dead sessions left. To be called before the first server of a session; never raises.

    Costs some milliseconds when there is nothing to free, and at most about ``limit`` seconds: what is not done then
    is the next sweep's.
    """
    deadline = time.monotonic() + limit
    try:
        if (root := existing_state()) is None:
            return _sweep_leases(Swept())
        sessions, todo = dead.look(root)
        if not todo and not any(dead.outdated(session) for session in sessions):
            return _sweep_leases(Swept())
        with dead.alone(root, deadline) as alone:
            if not alone:
                return Swept(problems=("Another session is still sweeping up after dead ones",))
            sessions, todo = dead.look(root)
            leftovers = [found for session in todo for found in _leftovers(session)]
            swept = free(leftovers, limit=max(0.1, deadline - time.monotonic()))
            if not swept.left and not swept.problems:
                for session in todo:
                    if _finished(session):
                        dead.clear(session)
                        dead.mark(session)
            removed = dead.remove(sessions, deadline)
        return _sweep_leases(replace(swept, removed=removed))
    except Exception as error:  # whatever it is: a sweep must not cost anybody a test
        return Swept(problems=(f"Sweeping up after dead sessions failed ({type(error).__name__}: {error})",))


def find_leftovers(root: Path | None, *, strays: bool = False, limit: float = 10.0) -> list[Leftover]:
    """What dead sessions left, looking only: processes are named, nothing is touched.

    Args:
        root: the state directory; None where there is none.
        strays: also processes of this user that carry the cookie of a dead owner whose directory is gone; those of
            another state directory, or that a supervisor looks after, are named and wait.
    """
    deadline = time.monotonic() + limit
    found = [leftover for session in (dead.look(root)[1] if root else ()) for leftover in _leftovers(session)]
    if not found and not strays:
        return []
    carriers = _carriers(deadline)
    found = [_with_processes(leftover, carriers) for leftover in found]
    if strays:
        known = {leftover.cookie for leftover in found}
        found += _strays({cookie: ids for cookie, ids in carriers.items() if cookie not in known}, deadline)
    return [leftover for leftover in found if leftover.processes or leftover.files or leftover.waits]


def free(leftovers: Sequence[Leftover], *, grace: float = 0.0, limit: float = 10.0) -> Swept:
    """End the processes and unlink the files of those leftovers that wait for nobody.

    SIGTERM, SIGKILL after ``grace`` seconds, resource trackers last; daemons that others use are spared.
    """
    deadline = time.monotonic() + limit
    waiting = tuple(f"{found.name}: {found.waits}" for found in leftovers if found.waits)
    todo = [found for found in leftovers if not found.waits]
    if not todo:
        return Swept(waiting=waiting)
    carriers = _carriers(deadline)
    todo = [_with_processes(found, carriers) for found in todo]
    requests = [end_request(found.cookie, grace, found.group) for found in todo if found.processes]
    if files := {inode: name for found in todo for inode, name in (found.files or {}).items()}:
        requests.append({"do": "clean", "files": files})
    words, complete = ask_tree(requests, max(0.1, deadline - time.monotonic()))
    for found in todo:
        cgroup.remove(found.group)
    seen = {process.id: process for found in todo for process in found.processes}
    alive = {id for id in seen if procfs.same(id)}
    shared = {pid for word, *rest in words if word == "shared" for pid in rest}
    present = _present()
    unknown = {rest[1] for word, *rest in words if word == "shm" and rest[0] in present and str(rest[0]) not in files}
    return Swept(
        ended=tuple(process for id, process in seen.items() if id not in alive),
        left=tuple(process for id, process in seen.items() if id in alive and id.pid not in shared),
        unlinked=tuple(str(rest[0]) for word, *rest in words if word == "unlinked"),
        kept=(
            *(f"/dev/shm/{rest[0]} ({rest[1]})" for word, *rest in words if word == "kept"),
            *(f"/dev/shm/{name} (no supervisor noted whose it is)" for name in sorted(unknown)),
        ),
        waiting=waiting,
        problems=() if complete else ("Sweeping up after dead sessions was not done within its limit",),
    )


def _sweep_leases(swept: Swept) -> Swept:
    """Remove lease files that no lock holds; their GPUs are free without that. What is no file there is told."""
    from . import lease_files

    root = Path(os.environ.get(lease_files.VARIABLE) or lease_files.DEFAULT)
    with contextlib.suppress(OSError, GpuserveError):
        if stat.S_ISDIR(root.lstat().st_mode):
            lease_files.sweep(found := lease_files.directory())
            return replace(swept, problems=(*swept.problems, *lease_files.strange(found)))
    return swept


# Servers


def _leftovers(session: dead.Session) -> Iterator[Leftover]:
    """The servers of a dead session that may have left something."""
    with contextlib.suppress(OSError):
        for path in sorted(session.path.iterdir()):
            with contextlib.suppress(OSError, GpuserveError):  # no server, or one that was never launched
                if dead.own(path.lstat(), stat.S_ISDIR):
                    record = load(path)
                    named = record.cookie.split(":")[:2] == [str(session.owner.pid), str(session.owner.start)]
                    if named and not procfs.same(record.owner) and (found := _leftover(record)):
                        yield found


def _leftover(record: ServerRecord) -> Leftover | None:
    """None: its supervisor saw the end of all of it."""
    control = Control(record.directory, record.supervisor)
    if _supervised(control):
        return Leftover(record.cookie, record.directory, waits="its supervisor is still ending it", settled=False)
    events = control.events()
    present = _present()
    files = {inode: name for inode, name in noted_files(events).items() if int(inode) in present}
    kinds = {event.kind for event in events}
    if "stopped" in kinds and "left" not in kinds and not files:
        return None
    settled = "stopped" in kinds or time.time() - (record.directory / "server.json").stat().st_mtime > _SETTLED
    return Leftover(record.cookie, record.directory, files=files, settled=settled, group=group_of(events))


def _supervised(control: Control) -> bool:
    """Whether a supervisor lives: the one of the record, or (its owner died before it noted which) one that listens."""
    if control.alive():
        return True
    folder = os.open(control.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            connection.connect(f"/proc/self/fd/{folder}/supervisor.sock")
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:  # its queue is full
        return True
    finally:
        os.close(folder)
    return True


def _finished(session: dead.Session) -> bool:
    """Nothing is left and nothing can come, or (files that somebody holds) it is not worth another try."""
    found = list(_leftovers(session))
    if any(leftover.waits or not leftover.settled for leftover in found):
        return False
    return not any(leftover.files for leftover in found) or time.time() - dead.changed(session.path) > dead.KEEP


def _present() -> set[int]:
    """Inodes of this user's files in /dev/shm."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(_SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if dead.own(entry.stat(follow_symlinks=False), stat.S_ISREG):
                    found.add(entry.inode())
    return found


# Processes


def _carriers(deadline: float) -> dict[str, list[tuple[ProcessId, str]]]:
    """Every process that carries a cookie, with its command line, by cookie."""
    words, _ = ask_tree([{"do": "about", "pids": None}], max(0.1, deadline - time.monotonic()))
    found: dict[str, list[tuple[ProcessId, str]]] = {}
    for word, *rest in words:
        if word == "about":
            pid, start, cookie, command = rest
            found.setdefault(cookie, []).append((ProcessId(pid, start), command))
    return found


def _with_processes(found: Leftover, carriers: Mapping[str, Sequence[tuple[ProcessId, str]]]) -> Leftover:
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
    return replace(found, processes=tuple(look(id, command) for id, command in commands.items() if procfs.same(id)))


def _strays(carriers: Mapping[str, Sequence[tuple[ProcessId, str]]], deadline: float) -> list[Leftover]:
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
        waits = "its supervisor lives" if supervised else _elsewhere(members)
        found.append(_with_processes(Leftover(cookie, None, waits=waits), carriers))
    return found


def _elsewhere(members: Sequence[tuple[ProcessId, str]]) -> str:
    """The state directory that these processes belong to, if it is still there: what looks after that one frees them,
    and knows their files."""
    for id, _ in members:
        markers = procfs.environ(id.pid).get("GPUSERVE_MARKERS")
        if markers and os.path.isdir(markers):  # noqa: PTH112
            root = one_line("/".join(markers.split("/")[:-4]), 200)  # …/sessions/SESSION/SERVER/markers
            return f"it belongs to the state directory {root}: GPUSERVE_STATE={root} gpuserve reap"
    return ""


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


def _some(things: Sequence[object]) -> str:
    shown = ", ".join(one_line(str(thing), 160) for thing in things[:5])
    return f"{shown} and {len(things) - 5} more" if len(things) > 5 else shown
