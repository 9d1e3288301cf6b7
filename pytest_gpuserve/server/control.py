"""Talking to a server's supervisor: its control socket, and the events it leaves for after any crash."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import foreign, procfs
from ..errors import ServerError
from ..procfs import ProcessId
from . import cgroup
from .asking import ask_tree

LIMIT = 5.0
"""Seconds for one request; the supervisor answers in less than one millisecond unless the machine is dying."""

_MAX_REPLY = 1 << 20


class SupervisorGoneError(ServerError):
    """There is no supervisor to talk to: it ended after its server, or was killed."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of ``events.jsonl``. ``time`` is wall clock, ``monotonic`` CLOCK_MONOTONIC; ``data`` the other keys."""

    kind: str
    time: float
    monotonic: float
    data: dict[str, Any]


class Control:
    """One supervisor, seen from any process of this user. Every call has a limit, and none keeps anything open."""

    def __init__(self, directory: Path, supervisor: ProcessId | None = None) -> None:
        self.directory = directory
        self.supervisor = supervisor
        self._events: list[Event] = []
        self._offset = 0

    def status(self) -> dict[str, Any]:
        """``pid``, ``start``, ``exit`` (None: it runs), ``armed``, ``fired``, ``dumping``, ``stopping``."""
        return self.request(do="status")

    def arm(
        self,
        name: str,
        deadline: float,
        argv: Sequence[str],
        limit: float,
        spare: Collection[int] = (75,),
        *,
        kill: bool = True,
    ) -> None:
        """At ``deadline`` (CLOCK_MONOTONIC) run ``argv`` for at most ``limit`` seconds, then end the server, unless
        argv exits with a code in ``spare`` or ``kill`` is False. Replaces the alarm of this name."""
        words = {"argv": list(argv), "limit": limit, "spare": list(spare), "kill": kill}
        self.request(do="arm", name=name, deadline=deadline, **words)

    def fire(
        self, name: str, argv: Sequence[str], limit: float, spare: Collection[int] = (75,), *, kill: bool = True
    ) -> None:
        """As an alarm whose deadline is now. Does not wait for its end."""
        words = {"argv": list(argv), "limit": limit, "spare": list(spare), "kill": kill}
        self.request(do="fire", name=name, **words)

    def disarm(self, name: str) -> bool:
        """Whether it was armed; one that has fired already is not."""
        return bool(self.request(do="disarm", name=name)["was_armed"])

    def stop(self, grace: float) -> None:
        """SIGTERM now, SIGKILL to all that is left after ``grace`` seconds. Does not wait; ``stopped`` is the end."""
        self.request(do="stop", grace=grace)

    def events(self, since: int = 0) -> list[Event]:
        """All events but the first ``since``. Read from the disk: works when the supervisor is dead."""
        with contextlib.suppress(OSError), foreign.opened(self.directory / "events.jsonl", follow=False) as file:
            file.seek(self._offset)
            data = file.read(foreign.MOST_JSON)  # more: the next time
            whole = data.rfind(b"\n") + 1  # a line that is being written, or was cut by a full disk, is read later
            self._offset += whole
            self._events += filter(None, map(_event, data[:whole].splitlines()))
        return self._events[since:]

    def last(self, *kinds: str) -> Event | None:
        """The newest event of one of these kinds."""
        return next((event for event in reversed(self.events()) if event.kind in kinds), None)

    def wait(self, until: Callable[[list[Event]], bool], limit: float) -> bool:
        """Wait until ``until(events)`` holds. False: it does not after ``limit`` seconds, or never will since the
        supervisor is gone."""
        deadline, pause = time.monotonic() + limit, 0.005
        while True:
            alive = self.alive()
            if until(self.events()):
                return True
            if not alive or time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    def alive(self) -> bool:
        """Whether the supervisor runs."""
        return self.supervisor is not None and procfs.same(self.supervisor)

    def request(self, **words: Any) -> dict[str, Any]:
        """Send one request, return its reply.

        Raises:
            SupervisorGoneError: nobody answers.
            ServerError: the supervisor refused; the message is its own.
        """
        do = words["do"]
        try:
            reply = self._exchange(json.dumps(words).encode() + b"\n")
        except (OSError, ValueError) as error:
            raise SupervisorGoneError(
                f"the supervisor of {self.directory.name} does not answer {do!r} ({error}); what it did last is in "
                f"{self.directory / 'events.jsonl'}."
            ) from error
        if not reply.get("ok"):
            raise ServerError(f"the supervisor of {self.directory.name} refused {do!r}: {reply.get('error')}.")
        return reply

    def _exchange(self, line: bytes) -> dict[str, Any]:
        limit = struct.pack("ll", int(LIMIT), 0)
        folder = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                # not settimeout: a connect that finds the queue full fails at once then
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                # through the descriptor: the path of a socket may have 107 bytes only
                connection.connect(f"/proc/self/fd/{folder}/supervisor.sock")
                connection.sendall(line)
                data = b""
                while not data.endswith(b"\n"):
                    chunk = connection.recv(65536)
                    if not chunk or len(data) > _MAX_REPLY:
                        raise OSError("it closed the connection")
                    data += chunk
        finally:
            os.close(folder)
        found: dict[str, Any] = json.loads(data)
        return found


def _event(line: bytes) -> Event | None:
    """None: it is none (a disk that was full, a file that somebody else wrote)."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match entry:
        case {"event": str(kind), "time": int() | float() as when, "monotonic": int() | float() as monotonic}:
            data = {key: value for key, value in entry.items() if key not in ("event", "time", "monotonic")}
            return Event(kind, when, monotonic, data)
    return None


def sweep_cookie(cookie: str, directory: Path | None = None, *, grace: float = 0.0, limit: float = 30.0) -> list[int]:
    """End what a dead supervisor's server left: carriers of exactly this cookie and their descendants.

    SIGTERM, SIGKILL after ``grace`` seconds, resource trackers last, shared daemons spared. With ``directory``, the
    files in /dev/shm that its supervisor had noted as the server's are unlinked when nobody holds them. Not for a
    cookie whose supervisor lives. Takes at most ``limit`` seconds.

    Returns:
        pids of what the kernel would not let die.
    """
    group = group_of(Control(directory).events()) if directory else ""
    requests = [end_request(cookie, grace, group)]
    if directory and (files := noted_files(Control(directory).events())):
        requests.append({"do": "clean", "files": files})
    words, _ = ask_tree(requests, limit)
    cgroup.remove(group)
    return [int(rest[0]) for word, *rest in words if word == "left"]


def end_request(cookie: str, grace: float, group: str = "") -> dict[str, Any]:
    """For tree.py: end the carriers of a cookie, and who is in a cgroup, that have no supervisor any more."""
    deadline = time.monotonic() + grace
    return {"do": "end", "supervisor": -1, "root": -1, "cookie": cookie, "deadline": deadline, "group": group}


def group_of(events: Sequence[Event]) -> str:
    """The cgroup that a server's supervisor made for it; "": none."""
    paths = (event.data.get("path") for event in events if event.kind == "cgroup")
    return next((path for path in paths if isinstance(path, str) and cgroup.ours(path)), "")


def noted_files(events: Sequence[Event]) -> dict[str, str]:
    """Inode and name of the files in /dev/shm that were seen in a server's hands and not unlinked by its supervisor."""
    gone = {str(event.data.get("name")) for event in events if event.kind == "unlinked"}
    noted = ((event.data.get("inode"), event.data.get("name")) for event in events if event.kind == "shm")
    return {
        str(inode): name for inode, name in noted if type(inode) is int and isinstance(name, str) and name not in gone
    }
