"""How long tests with servers took, kept between runs in pytest's cache (``-p no:cacheprovider``: nowhere)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from .state import WANTED, State

KEY = "gpuserve/durations"

KEPT = 20_000
"""Tests that are remembered; those not run for longest are forgotten first."""


def remember(state: State) -> None:
    """Keep the durations of a session that runs its tests in this process."""

    def served() -> Collection[str]:
        return {item.nodeid for item in state.planned if WANTED in item.stash}

    state.config.pluginmanager.register(Durations(state.config, served), "gpuserve-durations")


class Durations:
    """Registered in the process that sees every report: the controller, or the only one.

    Args:
        served: node ids of the tests that want a server; no other is remembered.
    """

    def __init__(self, config: pytest.Config, served: Callable[[], Collection[str]]) -> None:
        self._cache: Any = getattr(config, "cache", None)
        self._served = served
        self._running: dict[str, float] = {}
        self._passed: dict[str, float] = {}

    def past(self) -> dict[str, float]:
        """Seconds of whole tests (set-up with a server's start, call, teardown) when they last passed, by node id."""
        found = self._cache.get(KEY, {}) if self._cache is not None else {}
        if not isinstance(found, Mapping):
            return {}
        return {str(k): float(v) for k, v in found.items() if isinstance(v, (int, float)) and v >= 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the phases of a test; a new set-up is a new attempt."""
        if report.when == "setup":
            self._running[report.nodeid] = 0.0
        if report.nodeid not in self._running:
            return
        self._running[report.nodeid] += report.duration
        if not report.passed:
            del self._running[report.nodeid]
        elif report.when == "teardown":
            self._passed[report.nodeid] = round(self._running.pop(report.nodeid), 2)

    def pytest_sessionfinish(self) -> None:
        """Write down what passed."""
        served = self._served() if self._passed else ()
        fresh = {nodeid: seconds for nodeid, seconds in self._passed.items() if nodeid in served}
        if fresh and self._cache is not None:
            past = {nodeid: seconds for nodeid, seconds in self.past().items() if nodeid not in fresh}
            self._cache.set(KEY, dict(list({**past, **fresh}.items())[-KEPT:]))
