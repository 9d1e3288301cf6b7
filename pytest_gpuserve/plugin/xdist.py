"""The controller of a pytest-xdist run: what it tells its workers, and what it learns from them, dead ones included."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .. import foreign
from ..procfs import ProcessId, process_id
from .state import State

_LOOK = 0.2
"""Seconds between two looks for servers that a worker has started since."""


class Controller:
    """Registered only where tests are handed to workers."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._over = threading.Event()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        from ..server.paths import here

        me = process_id(os.getpid())
        deadline = self._state.settings.session_deadline
        node.workerinput["gpuserve"] = {
            "controller": (me.pid, me.start) if me else (0, 0),
            "place": here(),
            "session_deadline": None if deadline is None else time.time() + deadline - time.monotonic(),
        }

    def pytest_keyboard_interrupt(self) -> None:
        """Have the workers' servers stopped now: they would end with this process, and xdist keeps it for as long as
        the workers need to end, up to ten seconds. Waits for nothing."""
        if (me := process_id(os.getpid())) is not None:
            threading.Thread(target=self._stop_servers, args=(me,), name="gpuserve-interrupted", daemon=True).start()

    def pytest_unconfigure(self) -> None:
        self._over.set()

    def _stop_servers(self, me: ProcessId) -> None:
        from ..server.owned import stop_servers_of

        told: set[Path] = set()
        while not self._over.is_set():
            with contextlib.suppress(Exception):  # whatever it is, the supervisors end the servers when we are gone
                stop_servers_of(me, told)
            self._over.wait(_LOOK)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if counted := getattr(node, "workeroutput", {}).get("gpuserve"):
            self._state.ledger.add(counted)

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """A worker died in a test (pytest-timeout's thread method ends the process): say where the stacks are."""
        from ..report.files import ours
        from ..report.results_log import NAME, SCHEMA
        from ..text import escape
        from .html_report import attach
        from .session_results import open_log

        found = list(self._incidents(crashitem))
        artifacts = self._state.settings.artifacts
        begun = artifacts is not None and ours(artifacts, NAME, SCHEMA)
        if begun and (log := open_log(self._state)) is not None:  # the worker can tell of this test no more
            last = {name: found[-1].get(name) for name in ("verdict", "phase", "incident")} if found else {}
            log.put({"nodeid": crashitem, "outcome": "failed", "reason": str(report.longrepr)[:1000], **last})
            log.close()
        attach(
            self._state.config, report, [str(incident["incident"]) for incident in found if incident.get("incident")]
        )
        for incident in found:
            text, where = str(incident.get("text") or ""), str(incident.get("incident") or "")
            told = text if Path(where).name in text else f"{text}\ndumps: {where}"
            report.sections.append(("gpuserve", escape(told)))
            report.longrepr = escape(f"{report.longrepr}\ngpuserve: {incident.get('verdict')}, dumps: {where}")
        if str(report.outcome) == "rerun":
            self._name_in_junit(crashitem, report)

    def _name_in_junit(self, crashitem: str, report: pytest.TestReport) -> None:
        """pytest-rerunfailures runs it again, and the attempt that died has an entry without a name in junit's file: of
        a worker's set-up junit knows, of its end nothing. Tell junit alone."""
        manager = self._state.config.pluginmanager
        others = [plugin for plugin in manager.get_plugins() if type(plugin).__module__ != "_pytest.junitxml"]
        told = pytest.TestReport(
            crashitem,
            report.location,
            keywords={},
            outcome="skipped",
            longrepr=(report.location[0], 1, f"{report.longrepr}\nIt was run again."),
            when="call",
        )
        told.node = getattr(report, "node", None)  # type: ignore[attr-defined]
        manager.subset_hook_caller("pytest_runtest_logreport", others)(report=told)

    def _incidents(self, test: str) -> Iterator[Mapping[str, Any]]:
        """Of servers that this session's workers started: an earlier one may have had the same test."""
        from ..server.owned import owned_by
        from ..server.paths import state_root

        me = process_id(os.getpid())
        for path in sorted(state_root().glob("sessions/*/*/incidents.jsonl")):
            if me is not None and owned_by(me, path.parent):
                yield from (entry for entry in _lines(path) if entry.get("test") == test)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = foreign.beginning(path, 64 << 20).decode(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut off by a crash
        if isinstance(entry, dict):
            yield entry
