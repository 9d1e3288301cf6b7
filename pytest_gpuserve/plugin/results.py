"""One line a test for ``gpuserve judge`` and ``gpuserve isolate``: a private channel beside pytest's exit code.

Written where ``GPUSERVE_RESULTS`` says, by the process that reports (under pytest-xdist the controller), each line
flushed: what is there after a crash is true.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..vocabulary import COLLECTION, FINISHED, LOST_PROCESS, RESULTS, STARTED

_PACKAGE = Path(__file__).parents[1]


class Results:
    """Joins the three reports of a test into one line. An attempt that was rerun is a line of its own, failed, and what
    the test's later attempts may say instead (passed, skipped) is not said."""

    def __init__(self, put: Callable[[dict[str, Any]], None], end: Callable[[], None]) -> None:
        self._put_line, self._end_of_lines = put, end
        self._tests: dict[str, dict[str, Any]] = {}
        self._rerun: set[str] = set()  # their attempt is over, though its teardown may be reported still
        self._failed: set[str] = set()
        self.cut = False
        """Ctrl-C, pytest.exit, a plugin that stops the session or an internal error, whose exit code may be 0."""

    def pytest_keyboard_interrupt(self) -> None:
        self.cut = True

    def pytest_internalerror(self) -> None:
        self.cut = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._rerun.discard(report.nodeid)
        if report.nodeid in self._rerun:
            return
        entry = self._tests.setdefault(report.nodeid, {"nodeid": report.nodeid, "outcome": None, "seconds": 0.0})
        entry["seconds"] = round(entry["seconds"] + report.duration, 3)
        rerun = report.outcome not in ("passed", "failed", "skipped")  # "rerun": it failed, another attempt follows
        if (report.failed or rerun) and entry["outcome"] != "failed":
            entry |= {"outcome": "failed", "reason": _reason(report), "error": _error(report)}
        elif report.skipped and entry["outcome"] != "failed":
            expected = hasattr(report, "wasxfail")  # failed as it is marked to: the test was run, and tells nothing
            entry |= {"outcome": "skipped", "reason": _reason(report), "ours": not expected and _ours(report)}
        elif report.when == "call" and entry["outcome"] is None:
            entry["outcome"] = "passed"
        entry |= {
            name.removeprefix("gpuserve_"): value
            for name, value in report.user_properties
            if name in ("gpuserve_verdict", "gpuserve_phase", "gpuserve_incident")
        }
        if str(report.when) == "???" and "verdict" not in entry:  # as xdist and pytest-forked tell of a death
            entry |= {"outcome": "error", "error": LOST_PROCESS}
        if rerun:
            self._rerun.add(report.nodeid)
        if rerun or report.when == "teardown":
            if entry["outcome"] is None:  # --setup-only, --setup-plan
                entry |= {"outcome": "skipped", "reason": "it was set up, and not called"}
            self._write(self._tests.pop(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            reason = _last_words(str(report.longrepr))
            self._write({"nodeid": report.nodeid, "outcome": "error", "reason": reason, "error": COLLECTION})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.cut |= bool(session.shouldfail or session.shouldstop)
        for entry in self._tests.values():  # whose teardown was never reported: a worker crashed, pytest.exit
            if entry["outcome"] in (None, "passed"):
                entry |= {"outcome": "error", "reason": "the session ended before this test did"}
            self._write(entry)
        self._tests.clear()
        self._end_of_lines()

    def _write(self, entry: dict[str, Any]) -> None:
        if entry["outcome"] == "failed" and isinstance(entry.get("incident"), str):
            entry |= _failure(entry)
        if entry["outcome"] == "failed":
            self._failed.add(entry["nodeid"])
        elif entry["nodeid"] in self._failed:
            return
        self._put_line(entry)


def register(config: pytest.Config) -> None:
    """Begin to report, where somebody asked and this process is the one that reports."""
    path = os.environ.get(RESULTS)
    if path and not hasattr(config, "workerinput") and os.environ.get(f"{RESULTS}_OWNER", path) == path:
        os.environ[f"{RESULTS}_OWNER"] = str(os.getpid())  # a pytest that a test starts must not report as well
        file = Path(path).open("a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 (until the session ends)

        def put(entry: dict[str, Any]) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        def end() -> None:
            if not results.cut:
                put(FINISHED)
            file.close()
            os.environ.pop(f"{RESULTS}_OWNER", None)  # another session of this process reports as well

        results = Results(put, end)
        put(STARTED)
        config.pluginmanager.register(results, "gpuserve-results")


def _ours(report: pytest.TestReport) -> bool:
    """True when our package skipped it: outcome.py says so, which moves the place of a skip, or the place does."""
    if getattr(report, "gpuserve_skipped", False):
        return True
    where = report.longrepr
    return isinstance(where, tuple) and _PACKAGE in Path(where[0]).parents


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")[:1000]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr)[:1000]


def _last_words(text: str) -> str:
    """Of a traceback as pytest shows it, the line of the exception."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    marked = [line[1:] for line in lines if line.startswith("E ")]
    return (marked or lines)[-1].strip()[:300]


def _error(report: pytest.TestReport) -> str | None:
    crash = getattr(report.longrepr, "reprcrash", None)
    head = str(crash.message).splitlines()[0] if crash is not None and crash.message else ""
    if head.startswith("assert "):
        return "AssertionError"
    name = head.partition(":")[0].strip()
    return name.rpartition(".")[2] if name and " " not in name else None


def _failure(entry: dict[str, Any]) -> dict[str, Any]:
    """Phase and roots of a server's failure: what tells it from another, where its incident, or its log, says so."""
    from ..report.failure import read_incident, signature

    incident = read_incident(entry["incident"])
    if incident is None:
        return {}
    seen = signature(str(entry.get("verdict") or "undecided"), incident)
    return {"phase": entry.get("phase") or seen.phase, "roots": sorted(seen.roots)}
