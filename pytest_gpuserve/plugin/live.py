"""A server's start-up on the terminal: one live line; in a CI log one line a phase; workers and ``-q``: nothing."""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest

from ..text import one_line
from ..watch.starting import Starting, Status
from .state import State

if TYPE_CHECKING:
    from ..server.record import ServerRecord

EVERY = 0.25
"""Seconds between looks."""

PATIENCE = 1.0
"""Seconds of start-up that nobody needs to be told of in a log."""


class Live:
    """Shows one start-up: ``tick`` while it lasts (from the thread that waits), ``end`` in any case."""

    def __init__(self, state: State, item: pytest.Item | None) -> None:
        plugins = state.config.pluginmanager
        self._reporter: Any = plugins.getplugin("terminalreporter")
        self._capture: Any = plugins.getplugin("capturemanager")
        self._item = item
        self._quiet = self._reporter is None or state.is_worker or state.config.get_verbosity() < 0
        self._starting: Starting | None = None
        self._due = 0.0
        self._note = ""
        self._said = ""
        self._painted = False

    def note(self, text: str) -> None:
        """What the wait for readiness saw."""
        self._note = text

    def tick(self, record: ServerRecord) -> None:
        """Show what is new; cheap when called too often."""
        now = time.monotonic()
        if self._quiet or now < self._due:
            return
        self._due = now + EVERY
        with suppress(OSError, ValueError):  # a terminal that is gone, or closed, ends no server
            self._starting = self._starting or Starting(record)
            status = self._starting.look(self._note)
            if self._reporter.isatty:
                self._paint(status)
            elif status.seconds > PATIENCE and status.phase not in (self._said, "ready", "serving"):
                self._said = status.phase
                self._line(status.text)

    def end(self, *, ready: bool) -> None:
        """The wait is over: take the live line away, and let pytest go on where it was."""
        status = self._starting.look(self._note) if self._starting is not None and ready and self._said else None
        if self._starting is not None:
            self._starting.close()
        if self._painted:
            with self._uncaptured():
                self._reporter.write("\r\x1b[K", flush=True)
        elif status is not None:
            self._line(f"{one_line(status.id)}: ready after {status.seconds:.0f} s")
        if (self._painted or self._said) and self._item is not None:
            with self._uncaptured():
                self._reporter.pytest_runtest_logstart(nodeid=self._item.nodeid, location=self._item.location)

    def _paint(self, status: Status) -> None:
        width = shutil.get_terminal_size().columns - 1
        with self._uncaptured():
            if not self._painted:
                self._reporter.ensure_newline()
            self._painted = True
            self._reporter.write(f"\r{one_line(status.text, width)}\x1b[K", flush=True)

    def _line(self, text: str) -> None:
        with self._uncaptured():
            self._reporter.ensure_newline()
            self._reporter.write_line(f"gpuserve: {text}")

    def _uncaptured(self) -> AbstractContextManager[None]:
        return nullcontext() if self._capture is None else self._capture.global_and_fixture_disabled()
