"""A server's processes and shared memory, looked at and ended: ``python -S -E tree.py``. Standard library only.

The supervisor's eyes and hands. A process of its own because reading environ, cmdline or maps of a process stuck in a
driver blocks for ever (the kernel holds its memory lock), and the supervisor must never block: it replaces this one
when it falls silent, and tells the next one to skip the process it was about to look at. It is there from the start,
so that a server which has used up all pids can still be ended.

In: JSON objects, one a line, whose "do" is ``journal``, ``end``, ``clean`` or ``about`` (the functions of those names
say what).
Out: JSON arrays, one a line. ``["?", pid]``: looks at this process next; ``["."]``: the request is done.
"""

# ruff: noqa: PTH108, PTH115, PTH116, PTH119, PTH120
from __future__ import annotations

import json
import os
import select
import signal
import stat as modes
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

COOKIE, MARK = "GPUSERVE_COOKIE", "GPUSERVE_ALARM"
"""Environment of the server's processes, and of those of an alarm's argv."""

SHARED = ("sccache", "nvidia-cuda-mps", "raylet", "gcs_server")
"""comm of daemons that a server may start and others then use: neither they nor what they start is ended, save ray's
workers, which hold GPUs."""

GROUP = "gpuserve-"
"""How the cgroups begin that a supervisor makes (cgroup.py)."""

SHM = os.path.realpath("/dev/shm")
HOST_IPC, HOST_PIDS = 0xEFFFFFFF, 0xEFFFFFFC  # inode numbers of the kernel's first namespaces
TRACKER_TIME, GIVE_UP = 0.6, 15.0  # seconds


class Process(NamedTuple):
    pid: int
    start: int
    ppid: int
    session: int
    state: str
    comm: str


class Member(NamedTuple):
    """A live process of the server. ``tracker``: multiprocessing's resource tracker, which unlinks what the others
    leave once they are gone. ``shared``: not to be ended."""

    pid: int
    start: int
    state: str
    tracker: bool
    shared: bool


def say(*words: object) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def stat(pid: int) -> Process | None:
    """The process; None when it is gone or a zombie. A zombie leader with other threads still runs."""
    head, _, tail = read(f"/proc/{pid}/stat").rpartition(b")")
    part = tail.split()
    if len(part) < 20 or (part[0] in (b"Z", b"X") and int(part[17]) < 2):
        return None
    comm = head.partition(b"(")[2].decode(errors="replace")
    return Process(pid, int(part[19]), int(part[1]), int(part[3]), part[0].decode(), comm)


def table() -> dict[int, Process]:
    return {found.pid: found for name in os.listdir("/proc") if name.isdigit() and (found := stat(int(name)))}


def look(pid: int, what: str, skip: Collection[int]) -> bytes:
    """A file of /proc/PID that may block."""
    say("?", pid)
    return b"" if pid in skip else read(f"/proc/{pid}/{what}")


def below(roots: Iterable[int], processes: Mapping[int, Process], hidden: Collection[int]) -> set[int]:
    """``roots`` and everything under them, not looking behind ``hidden``."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found, queue = set(roots), list(roots)
    while queue:
        new = [pid for pid in children.get(queue.pop(), ()) if pid not in found and pid not in hidden]
        found.update(new)
        queue.extend(new)
    return found


def scan(
    supervisor: int, root: int, cookie: str, skip: Collection[int], dumping: bool, group: str = ""
) -> list[Member]:
    """Who is the server's: the descendants of the supervisor (a subreaper), the carriers of exactly this cookie, who is
    in the server's own cgroup, and their descendants.

    What lives in the supervisor's session or carries the mark is an alarm's: hidden while one runs (``dumping``),
    else a leftover that must go too. Zombies are nobody. ``supervisor`` is -1 where there is none any more.
    """
    processes, (_, born, *_) = table(), (*cookie.split(":"), "", "")
    oldest = int(born) if born.isdigit() else 0  # start time of the owner, who made the cookie
    own = {p.pid for p in processes.values() if p.session == supervisor}
    carriers, marked = {pid for pid in inside(group) & processes.keys() if processes[pid].start >= oldest}, set()
    for pid in processes.keys() - own - carriers:
        if processes[pid].start < oldest:
            continue
        entries = look(pid, "environ", skip).split(b"\0")
        if f"{COOKIE}={cookie}".encode() in entries:
            carriers.add(pid)
        elif f"{MARK}={cookie}".encode() in entries:
            marked.add(pid)
    hidden = {supervisor, os.getpid()} | (own | marked if dumping else set())
    members = below({supervisor} | carriers | (set() if dumping else marked), processes, hidden) - hidden
    shared = spared(members, processes, root, hidden)
    return [
        Member(pid, p.start, p.state, b"resource_tracker" in look(pid, "cmdline", skip), pid in shared)
        for pid in members
        if (p := processes[pid])
    ]


def spared(
    members: Collection[int], processes: Mapping[int, Process], root: int, hidden: Collection[int] = ()
) -> set[int]:
    """Those of ``members`` that are daemons which others use, and what those started."""
    daemons = {pid for pid in members if processes[pid].comm in SHARED and processes[pid].session != root}
    return {pid for pid in below(daemons, processes, hidden) if not processes[pid].comm.startswith("ray::")}


def inside(group: str) -> set[int]:
    """Pids in a cgroup of ours; only the server's processes ever got there."""
    ours = os.path.basename(group).startswith(GROUP)
    return {int(pid) for pid in read(f"{group}/cgroup.procs").split()} - {0} if ours else set()


def shm_files(pid: int, skip: Collection[int]) -> dict[int, str]:
    """Inode and name of the files directly in our /dev/shm that a process maps or has open."""
    found: dict[int, str] = {}
    device = os.stat(SHM).st_dev
    for line in os.fsdecode(look(pid, "maps", skip)).split("\n"):
        part = line.split(None, 5) if SHM + "/" in line else []
        if len(part) == 6 and part[3] == f"{os.major(device):02x}:{os.minor(device):02x}":
            found[int(part[4])] = part[5]
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith(SHM + "/") and (file := os.stat(f"/proc/{pid}/fd/{fd}")).st_dev == device:
                    found[file.st_ino] = target
    # the kernel's suffix of an unlinked file stays: a semaphore lives on under another name
    return {inode: os.path.basename(path) for inode, path in found.items() if os.path.dirname(path) == SHM}


def send(number: int, members: Iterable[Member]) -> None:
    """Signal exactly these processes: a pidfd pins each, the start time proves it. Quiet about what is gone or another
    user's: the next scan tells."""
    for member in members:
        fd = -1
        with suppress(OSError, AttributeError):  # AttributeError: a Python built against old kernel headers
            fd = os.pidfd_open(member.pid)
        with suppress(OSError):
            found = stat(member.pid)
            if found and found.start == member.start and fd >= 0 and hasattr(signal, "pidfd_send_signal"):
                signal.pidfd_send_signal(fd, number)
            elif found and found.start == member.start:
                os.kill(member.pid, number)
        if fd >= 0:
            os.close(fd)


class Requests:
    """Lines of standard input, waited for with a limit."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.rest, self.closed = b"", False

    def next(self) -> dict[str, Any]:
        """The next request; ends the process when nobody is there to ask."""
        while True:
            while not self.lines:
                if self.closed:
                    raise SystemExit(0)
                self.wait(None)
            request = self.lines.pop(0)
            if "do" in request:  # not a word to an end that is over
                return request

    def word(self, pause: float) -> dict[str, Any]:
        """What is said to the request in progress within ``pause`` seconds; {} when nothing is."""
        if not self.lines:
            self.wait(pause)
        return self.lines.pop(0) if self.lines and "do" not in self.lines[0] else {}

    def wait(self, pause: float | None) -> None:
        if self.closed:
            time.sleep(pause or 0.0)
        elif select.select([0], [], [], pause)[0]:
            data = os.read(0, 65536)
            self.closed = not data
            *whole, self.rest = (self.rest + data).split(b"\n")
            self.lines.extend(json.loads(line) for line in whole)


def journal(_: Requests, *, supervisor: int, root: int, cookie: str, skip: list[int], group: str = "") -> None:
    """``["shm", inode, name]`` for each file in /dev/shm that the server maps or has open."""
    for member in scan(supervisor, root, cookie, skip, True, group):
        for inode, name in () if member.shared else shm_files(member.pid, skip).items():
            say("shm", inode, name)


def end(
    requests: Requests,
    *,
    supervisor: int,
    root: int,
    cookie: str,
    skip: list[int],
    deadline: float,
    group: str = "",
) -> None:
    """End the server's processes: SIGTERM to the root, to the others once it is gone or half of the time is over;
    SIGKILL at ``deadline``; look and kill again until nothing is left, resource trackers last.

    While it runs, a line ``{}`` means that something died, ``{"deadline": t}`` that it must be done earlier. Says
    ``["shm", ...]`` as journal does, ``["shared", pid...]`` who is spared, ``["all", pid...]`` when the kernel may
    kill the whole cgroup in one step, ``["hunt", pid...]`` when killing does not keep up with forking (the pids are
    trackers that have time yet), and
    ``["left", pid, state]`` for what the kernel would not let die in 15 s.
    """
    with suppress(OSError):  # as the supervisor: what forks without end must not starve us
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    half, asked, struck = (time.monotonic() + deadline) / 2, set[int](), set[int]()
    first = trackers_until = 0.0
    rounds = 0
    while members := scan(supervisor, root, cookie, skip, False, group):
        say("shared", *(member.pid for member in members if member.shared))
        rest = [member for member in members if not member.shared]
        if not rest:
            break
        for member in () if struck else rest:
            for inode, name in shm_files(member.pid, skip).items():
                say("shm", inode, name)
        now = time.monotonic()
        others = [member for member in rest if not member.tracker]
        if now < deadline:
            calm = now < half and any(member.pid == root for member in rest)
            new = [m for m in others if m.pid not in asked and (m.pid == root or not calm)]
            asked.update(member.pid for member in new)
            send(signal.SIGTERM, new)
            pause = min(0.25, deadline - now, half - now if now < half else deadline)
        else:
            first, rounds, pause = first or now, rounds + 1, 0.02
            if others:
                trackers_until = now + TRACKER_TIME
            prey = others if now < trackers_until else rest
            send(signal.SIGKILL, prey)
            spared = [member.pid for member in rest if member not in prey]
            if rounds > 3 and any(member.pid not in struck for member in prey):
                say("hunt", *spared)
            elif group:
                say("all", *spared)
            struck.update(member.pid for member in prey)
            if now > first + GIVE_UP:
                for member in rest:
                    say("left", member.pid, member.state)
                break
        say("?", 0)
        deadline = min(deadline, requests.word(pause).get("deadline", deadline))


def clean(_: Requests, *, files: dict[str, str], skip: list[int]) -> None:
    """Unlink those of ``files`` (inode: name in /dev/shm, all seen in the server's hands) that are still the same file,
    ours, and held by nobody: ``["unlinked", name]``; else ``["kept", name, why]``.

    The same file: the inode with that name, or of two names of semaphores (glibc renames a new one). A container that
    shares the host's IPC namespace but not its processes cannot see who holds a file: all is kept.
    """
    why: dict[int, str] = {}
    for pid in table():
        for inode in shm_files(pid, skip):
            why[inode] = f"process {pid} holds it"
    blind = f"process {skip[0]} could not be looked at" if skip else ""
    with suppress(OSError):
        if os.stat("/proc/self/ns/ipc").st_ino == HOST_IPC and os.stat("/proc/self/ns/pid").st_ino != HOST_PIDS:
            blind = "the IPC namespace is shared with processes that cannot be seen from here"
    for name in os.listdir(SHM):
        with suppress(OSError):
            found = os.lstat(f"{SHM}/{name}")
            seen = files.get(str(found.st_ino), "")
            same = seen == name or (seen.startswith("sem.") and name.startswith("sem."))
            if same and found.st_uid == os.geteuid() and modes.S_ISREG(found.st_mode):
                if reason := why.get(found.st_ino, blind):
                    say("kept", name, reason)
                else:
                    os.unlink(f"{SHM}/{name}")
                    say("unlinked", name)


def about(_: Requests, *, pids: list[int] | None, skip: list[int]) -> None:
    """``["about", pid, start, cookie, command line]`` of these processes, or (None) of all that have a cookie; the
    processes of an alarm have one too."""
    for pid, process in table().items():
        if pids is None or pid in pids:
            entries = (entry.partition(b"=") for entry in look(pid, "environ", skip).split(b"\0"))
            cookies = [value for name, _, value in entries if name in (COOKIE.encode(), MARK.encode())]
            if cookies or pids is not None:
                command = look(pid, "cmdline", skip).replace(b"\0", b" ").strip() or process.comm.encode()
                say(
                    "about",
                    pid,
                    process.start,
                    b"".join(cookies[:1]).decode("ascii", "replace"),
                    command.decode(errors="replace"),
                )


def main() -> None:
    """Answer requests until nobody is there to ask."""
    requests = Requests()
    say("?", 0)
    while True:
        request = requests.next()
        do = request.pop("do")
        if do == "journal":
            journal(requests, **request)
        elif do == "end":
            end(requests, **request)
        elif do == "about":
            about(requests, **request)
        else:
            clean(requests, **request)
        say(".")


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
