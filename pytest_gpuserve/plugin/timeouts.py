"""A test's timeout, exact, with nothing in this process that could miss it.

At a test's timeout T the supervisor of each of its servers takes the stacks and ends the server, so that the blocked
client call fails by itself. pytest-timeout's own clock is moved to T + twice the dump budget: it is left for tests that
are stuck in their own code. Starting or stopping a server stops both clocks.

pytest-timeout 2.4.0 cancels its timer when a test fails and shares one timer among reruns, so both clocks are started
afresh at every set-up and teardown.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from .options import last_resort
from .state import WANTED, State, uses_pool

if TYPE_CHECKING:
    from pytest_timeout import Settings as TimeoutSettings

    Failed = Any  # pytest.fail.Exception: its type has no public name

_GIVEN: pytest.StashKey[Any] = pytest.StashKey()
"""On a test: the settings pytest-timeout found for it."""


@dataclass(frozen=True, slots=True)
class _Running:
    item: pytest.Item
    settings: TimeoutSettings
    deadline: float  # CLOCK_MONOTONIC


class Clock:
    """The timeout of the test in progress."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._running: _Running | None = None
        self._passing = False
        self._debugging = False
        self._moved = 0.0, 0.0  # pytest-timeout's clock, and what of it is ours

    @staticmethod
    def timeout_of(item: pytest.Item) -> float | None:
        """T: what the user asked for, in seconds."""
        settings = item.stash.get(_GIVEN, None)
        return float(settings.timeout) if settings is not None else None

    def set_timer(self, item: pytest.Item, settings: TimeoutSettings) -> bool | None:
        """pytest-timeout is about to start its timer: start ours, and its own with the dump on top."""
        if self._passing:
            return None
        item.stash[_GIVEN] = settings
        if not uses_pool(item):
            self._running = _Running(item, settings, time.monotonic() + settings.timeout)
            return None
        self._start(item, settings, settings.timeout)
        return True

    def cancelled(self) -> None:
        """pytest-timeout's timer is being cancelled: the test is over, failed, or in a debugger."""
        if not self._passing:
            self._stop()

    def restart(self, item: pytest.Item) -> None:
        """The whole timeout again, for a set-up or a teardown; nothing for a test whose timeout is its call's only."""
        settings = item.stash.get(_GIVEN, None)
        if settings is None or settings.func_only or not uses_pool(item):
            return
        self._cancel_theirs(item)
        self._stop()
        self._start(item, settings, settings.timeout)

    def halt(self) -> None:
        """End both clocks of the test in progress, for good or until the next :meth:`restart`."""
        if self._running is not None:
            self._cancel_theirs(self._running.item)
            self._stop()

    def say_what_was_asked(self, item: pytest.Item, error: Failed) -> None:
        """pytest-timeout's message names the moment to which its clock was moved: name T, and what came on top."""
        asked, (moved, ours) = self.timeout_of(item), self._moved
        theirs = f"Timeout (>{moved}s)"
        if asked is not None and error.msg is not None and error.msg.startswith(theirs):
            more = f"; the test was still running {ours:g} s later, time that was left for the dump of its server"
            error.msg = f"Timeout (>{asked:g}s){error.msg.removeprefix(theirs).rstrip('.')}{more}."

    def debugger_entered(self) -> None:
        """A person is looking at the test: pytest-timeout holds its fire for the rest of the session, and so do we."""
        self._debugging = True
        self._disarm()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not the test's: a server starts or stops."""
        running = self._running
        if running is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        left = running.deadline - time.monotonic()
        self.halt()
        try:
            yield
        finally:
            if self._running is None:
                self._start(running.item, running.settings, left)

    def _start(self, item: pytest.Item, settings: TimeoutSettings, left: float) -> None:
        self._running = _Running(item, settings, time.monotonic() + left)
        wanted = item.stash.get(WANTED, None)
        limits = wanted.limits(self._state.settings) if wanted else self._state.settings
        self._passing = True
        try:
            moved = settings._replace(timeout=round(max(left, 0.0) + last_resort(limits.dump_timeout), 1))
            self._moved = moved.timeout, last_resort(limits.dump_timeout)
            item.config.hook.pytest_timeout_set_timer(item=item, settings=moved)
        finally:
            self._passing = False
        if self._state.pool is not None and not self._is_debugging(settings):
            self._state.pool.arm(self._running.deadline, item.nodeid, settings.timeout)

    def _stop(self) -> None:
        self._running = None
        self._disarm()

    def _disarm(self) -> None:
        if self._state.pool is not None:
            self._state.pool.disarm()

    def _cancel_theirs(self, item: pytest.Item) -> None:
        self._passing = True
        try:
            item.config.hook.pytest_timeout_cancel_timer(item=item)
        finally:
            self._passing = False

    def _is_debugging(self, settings: TimeoutSettings) -> bool:
        if settings.disable_debugger_detection:
            return False
        pytest_timeout = sys.modules.get("pytest_timeout")
        return self._debugging or (pytest_timeout is not None and bool(pytest_timeout.is_debugging()))
