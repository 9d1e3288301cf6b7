"""results.jsonl: what every test of a session came to, written as it ends by the process that ran it.

Nothing is written before the first server is asked for; then the tests that ended until then are.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from .results import Results
from .state import State

if TYPE_CHECKING:
    from ..report.results_log import ResultsLog

NAME = "gpuserve-session-results"


class SessionResults(Results):
    """Follows the tests of one process."""

    def __init__(self, state: State) -> None:
        super().__init__(self._put, self._end)
        self._state = state
        self._waiting: list[dict[str, Any]] = []
        self._begun = False
        self._log: ResultsLog | None = None

    def begin(self) -> None:
        """A server is about to be started."""
        if not self._begun:
            self._begun = True
            self._log = open_log(self._state)
            waiting, self._waiting = self._waiting, []
            for entry in waiting:
                self._put(entry)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._log is not None:  # of a pytest that is killed, the last such line says in which test
            self._log.put({"nodeid": nodeid, "outcome": "running"}, sync=False)

    def _put(self, entry: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.put(entry)
        elif not self._begun:  # else it cannot be written, which was said
            self._waiting.append(entry)

    def _end(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def open_log(state: State) -> ResultsLog | None:
    """None where nothing is to be written, or nothing can be."""
    from ..procfs import process_id
    from ..redaction.redact import Redactor
    from ..report.results_log import NAME as FILE
    from ..report.results_log import ResultsLog

    if state.settings.artifacts is None:
        return None
    me = process_id(os.getpid())
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID") or (f"{me.pid}-{me.start}" if me else "")
    if hasattr(state.config, "workerinput"):
        session = str(state.config.workerinput.get("testrunuid") or session)
    try:
        log = ResultsLog(state.settings.artifacts, session, Redactor.of(os.environ))
    except OSError as error:
        where = f"{state.settings.artifacts} (--gpuserve-artifacts)"
        state.ledger.trouble(f"results.jsonl cannot be written in {where}: {error.strerror}")
        return None
    if log.path.name != FILE:
        state.ledger.gave_way(log.path.with_name(FILE), log.path)
    return log


def follow(config: pytest.Config, state: State) -> None:
    """Listen to the tests of this process, some of which want servers."""
    if state.settings.artifacts is not None and not config.pluginmanager.has_plugin(NAME):
        config.pluginmanager.register(SessionResults(state), NAME)


def begin(config: pytest.Config) -> None:
    """The first server of this process."""
    plugin = config.pluginmanager.get_plugin(NAME)
    if isinstance(plugin, SessionResults):
        plugin.begin()
