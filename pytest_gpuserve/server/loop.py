"""What the supervisor is made of: a poll loop, children, a journal, a socket, tree.py's handle. Standard library only.

Nothing here blocks. supervisor.py, run as a script, imports it as a module of the same directory. No pathlib: it would
cost a third of the start.
"""

# ruff: noqa: PTH101, PTH118, PTH120, PTH100
from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import cgroup
else:  # as a part of a script, or of the package
    try:
        from . import cgroup
    except ImportError:
        import cgroup

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)
LINE_LIMIT, CLIENT_LIMIT = 1 << 20, 16  # bytes of a request, or of events that a full disk keeps waiting; clients
IN_MOVED_TO, IN_CREATE = 0x80, 0x100
TREE_START, TREE_SILENCE, TREE_RETRY = 10.0, 1.5, 0.1  # seconds
FASTEST = 1e9  # bytes a second that a server may print: how soon its log must be looked at again
STARVED = 0.75
"""Part of its limit that a dump gets on top while it waits for a CPU: a busy machine must not cost the stacks."""


def stat(pid: int) -> tuple[int, str]:
    """Start time and state; (-1, "") when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            part = file.read().rpartition(b")")[2].split()
        return int(part[19]), part[0].decode()
    except (OSError, IndexError):
        return -1, ""


def waited(pid: int) -> float:
    """Seconds for which a process (its first thread) was ready to run and got no CPU; 0.0 where the kernel keeps no
    account of it. All of its life."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def watch_folder(path: str) -> int:
    """A descriptor that can be read when a file was made in a directory; -1 where inotify is not to be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if fd >= 0 and libc.inotify_add_watch(fd, path.encode(), IN_CREATE | IN_MOVED_TO) < 0:
        os.close(fd)
        return -1
    return fd


def spawn(
    argv: list[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    stdin: int,
    out: int | str,
    nofile: tuple[int, int],
    group: str = "",
) -> tuple[int, int]:
    """Fork and exec: the pid, and a pipe that tells why exec failed or just closes. It dies with us.

    ``out`` a path: the child is the server, gets a session of its own and appends stdout and stderr to that file.
    ``out`` a descriptor: a helper in our session, with a process group of its own; its stderr is ours.
    """
    parent, (told, tell) = os.getpid(), os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(told)
        os.close(tell)
        raise
    if pid:
        os.close(tell)
        if not isinstance(out, str):
            with suppress(OSError):  # there and here: whoever comes first
                os.setpgid(pid, pid)
        return pid, told
    stage: object = out
    try:
        os.setsid() if isinstance(out, str) else os.setpgid(0, 0)
        for number in RESET:
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_NOFILE, nofile)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        cgroup.enter(group)
        if os.getppid() != parent:
            os._exit(1)
        log = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if isinstance(out, str) else -1
        for fd, source in enumerate((stdin, log, log) if isinstance(out, str) else (stdin, out, 2)):
            os.dup2(source, fd)
        os.chdir(stage := cwd)
        os.execvpe(stage := argv[0], argv, env)
    except BaseException as error:
        text = getattr(error, "strerror", None) or str(error)
        os.write(tell, json.dumps({"what": str(stage), "error": text}).encode())
    finally:
        os._exit(127)


class Loop:
    """Who is called when which descriptor can be read."""

    def __init__(self) -> None:
        self.poller, self.handlers = select.poll(), dict[int, Callable[[], object]]()

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        self.poller.register(fd, select.POLLIN)
        self.handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Forget and close it."""
        if self.handlers.pop(fd, None):
            self.poller.unregister(fd)
            os.close(fd)

    def turn(self, until: float) -> None:
        """Serve what is ready, waiting for it until then (CLOCK_MONOTONIC)."""
        for fd, _ in self.poller.poll(max(0, int((until - time.monotonic()) * 1000) + 1)):
            if handler := self.handlers.get(fd):  # not closed meanwhile
                handler()


def hole(fd: int, begin: int) -> int:
    """Bytes of the first hole of a file after ``begin``: a writer without O_APPEND goes on where it was before a cut.

    To a page or two; 0 where the file system knows no holes.
    """
    with suppress(OSError):  # there is none, or no data behind it
        start = os.lseek(fd, begin, os.SEEK_HOLE)
        return os.lseek(fd, start, os.SEEK_DATA) - start
    return 0


class Log:
    """The server's output: where it reaches its limit, and the knife that keeps it there.

    Its first ``most`` bytes stay. What comes after them is cut away whenever it is a quarter of that, and a line in the
    log says so; the server appends, and so goes on where the cut is. ``most`` 0: there is no limit.
    """

    def __init__(self, path: str, most: int) -> None:
        self.path, self.most, self.fd = path, most, -1
        self.next_look, self.full, self.cut = 0.0 if most else float("inf"), False, 0

    def look(self, now: float) -> bool:
        """Cut what is too much; True when it has reached its limit for the first time."""
        if now < self.next_look:
            return False
        most, size = self.most + self.most // 4, 0
        with suppress(OSError):
            if self.fd < 0:  # kept: the file may lose its name, and be written all the same
                self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            size = os.fstat(self.fd).st_size
            if size > most:
                self.cut += size - self.most - hole(self.fd, self.most)
                os.ftruncate(self.fd, self.most)
                told = f"\n[gpuserve: {self.cut} bytes are left out here: this log reached its limit (log-limit)]\n"
                os.write(self.fd, told.encode())
                size = self.most
        self.next_look = now + min(1.0, max(0.02, (most - size) / FASTEST))
        first, self.full = not self.full and size >= self.most, self.full or size >= self.most
        return first


class Journal:
    """events.jsonl: appended a line at a time. A full disk delays a line; it never tears or loses one (up to 1 MiB)."""

    def __init__(self, path: str) -> None:
        self.path, self.fd, self.waiting = path, -1, bytearray()

    def emit(self, event: str, **data: object) -> None:
        line = json.dumps({"event": event, "time": time.time(), "monotonic": time.monotonic(), **data}) + "\n"
        if len(self.waiting) < LINE_LIMIT:
            self.waiting += line.encode()
        self.flush()

    def flush(self) -> None:
        with suppress(OSError):
            if self.fd < 0:
                self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            while self.waiting:
                del self.waiting[: os.write(self.fd, self.waiting)]


class Listener:
    """The control socket: JSON lines in, one JSON line out for each. A client that sends more than 1 MiB without a
    newline, or does not read its answers, is dropped; the oldest is when there are too many."""

    def __init__(self, loop: Loop, path: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.loop, self.answer, self.clients = loop, answer, dict[int, tuple[socket.socket, bytearray]]()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.socket.bind(path)
        os.chmod(path, 0o600)
        self.socket.listen(64)
        loop.watch(self.socket.fileno(), self.accept)

    def accept(self) -> None:
        if len(self.clients) >= CLIENT_LIMIT:
            self.drop(next(iter(self.clients)))
        try:
            client, _ = self.socket.accept()
        except OSError:  # no descriptor to be had, or it has gone again
            for fd in list(self.clients)[:1]:
                self.drop(fd)
            time.sleep(0.01)
            return
        client.setblocking(False)
        fd = client.fileno()
        self.clients[fd] = (client, bytearray())
        self.loop.watch(fd, partial(self.serve, fd))

    def drop(self, fd: int) -> None:
        client, _ = self.clients.pop(fd)
        client.detach()
        self.loop.unwatch(fd)

    def serve(self, fd: int) -> None:
        client, buffer = self.clients[fd]
        try:
            data = client.recv(65536)
            buffer += data
            while (end := buffer.find(b"\n")) >= 0:
                line = bytes(buffer[:end])
                del buffer[: end + 1]
                reply = json.dumps(self.reply(line)).encode() + b"\n"
                if client.send(reply) < len(reply):
                    data = b""
            if not data or len(buffer) > LINE_LIMIT:
                self.drop(fd)
        except OSError:
            self.drop(fd)

    def reply(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise TypeError("a request is a JSON object")
            return {"ok": True, **self.answer(request)}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}


class Tree:
    """tree.py and what it is asked. One that is silent too long is replaced, and what it was looking at is skipped."""

    def __init__(self, loop: Loop, hear: Callable[..., None], nofile: tuple[int, int]) -> None:
        self.loop, self.hear, self.nofile = loop, hear, nofile
        self.asked, self.limit = "", 0.0  # what it is asked ("start": to be there); when its silence is too long
        self.looks_at, self.stuck, self.skip = 0, 0, list[int]()
        self.start()

    def start(self) -> None:
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tree.py")
        reads, self.input = os.pipe()
        self.output, writes = os.pipe()
        os.set_blocking(self.input, False)
        self.loop.watch(self.output, self.read)
        self.pid, self.half_line, self.looks_at = -1, b"", 0
        self.limit = time.monotonic() + TREE_START
        try:
            argv = [sys.executable, "-S", "-E", script]
            self.pid, told = spawn(argv, os.environ, "/", stdin=reads, out=writes, nofile=self.nofile)
            os.close(told)
        except OSError:  # no process to be had now: tried again, but not as fast as we can
            self.loop.unwatch(self.output)
            self.output = -1
            self.asked, self.limit = "start", time.monotonic() + TREE_RETRY
        os.close(reads)
        os.close(writes)

    def replace(self) -> None:
        if self.looks_at and (self.looks_at == self.stuck or stat(self.looks_at)[1] == "D"):
            self.skip.append(self.looks_at)
        self.stuck, self.asked = self.looks_at, ""
        if self.pid > 0:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so still ours
        self.loop.unwatch(self.output)
        os.close(self.input)
        self.start()

    def ask(self, what: str, **more: object) -> None:
        self.asked, self.limit = what, max(self.limit, time.monotonic() + TREE_SILENCE)
        self.tell({"do": what, "skip": self.skip, **more})

    def tell(self, words: dict[str, object]) -> None:
        with suppress(OSError):  # full or closed: its silence will show
            os.write(self.input, json.dumps(words).encode() + b"\n")

    def read(self) -> None:
        data = os.read(self.output, 65536)
        if not data:
            self.replace()
            return
        self.limit = time.monotonic() + TREE_SILENCE
        *lines, self.half_line = (self.half_line + data).split(b"\n")
        for word, *rest in map(json.loads, lines):
            if word == "?":
                self.looks_at = rest[0]
            else:
                self.hear(word, *rest)
