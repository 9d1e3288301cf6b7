"""What happened to a server while a test ran, read from what its supervisor wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import GpuserveError
from ..server.readiness import EXITED, settle

if TYPE_CHECKING:
    from ..server.handle import Server

TEST_ALARM = "test_timeout"
SESSION_ALARM = "session_deadline"

_END = ("killing", "exited")

MANUAL = "manual"
"""A dump that the test itself asked for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One server's part in one phase of a test.

    Attributes:
        fired: alarms that went off, by name.
        killed: the server was ended because of one.
        exit_code: of a server that ended by itself; None while it runs and for one that was ended.
        incidents: entries of incidents.jsonl written meanwhile, oldest first.
        cut: seconds after which the last dump was cut off; None: it came to its end.
    """

    server: Server
    fired: tuple[str, ...]
    killed: bool
    exit_code: int | None
    incidents: tuple[Mapping[str, Any], ...]
    cut: float | None = None

    @property
    def spared(self) -> bool:
        """An alarm went off, and the server lives."""
        return bool(self.fired) and not self.killed and self.exit_code is None


class Evidence:
    """Reads one server's events and incidents, each once."""

    def __init__(self, server: Server, limit: float) -> None:
        self._server = server
        self._limit = limit
        self._events = 0
        self._incidents = 0
        self.skip()

    def skip(self) -> None:
        """What happened until now belongs to nobody's test."""
        self._events = len(self._server.control.events())
        self._incidents = len(self._server.incidents())

    def went_off(self) -> bool:
        """An alarm went off: its dump is being taken, or was."""
        return any(event.kind == "fired" for event in self._server.control.events(self._events))

    def take(self, patience: float = 0.0) -> Finding | None:
        """What is new since the last call; waits for a dump that is under way, within its limit. None: nothing.

        ``patience``: seconds to wait for the end of a server that may be dying (its answers tell before its exit does).
        """
        control, begin = self._server.control, self._events
        if patience:
            control.wait(lambda events: any(event.kind in ("fired", *_END) for event in events[begin:]), patience)
        settle(control, begin, self._limit)
        events = control.events(begin)
        incidents = self._server.incidents()[self._incidents :]
        self._events += len(events)
        self._incidents += len(incidents)
        names = (str(event.data["name"]) for event in events if event.kind == "fired" and event.data.get("kill", True))
        fired = tuple(name for name in names if name != EXITED)  # an end is no alarm of the test's
        killed = any(event.kind == "killing" and event.data.get("why") == "alarm" for event in events)
        end = next((event for event in events if event.kind in _END), None)
        code = int(end.data["code"]) if end is not None and end.kind == "exited" else None
        if code is not None and not incidents:
            self.quietly(self._server.dump, EXITED)
            self._events = len(control.events())  # that incident was no alarm of the test's
            incidents = self._server.incidents()[self._incidents :]
            self._incidents += len(incidents)
        if not fired and not killed and not incidents and code is None:
            return None
        dumps = [event.data for event in events if event.kind == "dumped"]
        cut = float(dumps[-1]["seconds"]) if dumps and dumps[-1]["code"] is None else None
        return Finding(self._server, fired, killed, code, tuple(incidents), cut)

    def quietly(self, call: Callable[..., object], *args: object) -> None:
        """A request to the supervisor that may find it dead; the server's own death will tell then."""
        with contextlib.suppress(GpuserveError, OSError):
            call(*args)
