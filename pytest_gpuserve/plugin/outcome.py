"""What a test's report says of its server: failed when an alarm went off, one short section, properties for junit."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

from ..errors import GpuserveError, ServerError, ServerExitedError, ServerHungError
from ..text import escape
from ..vocabulary import LOG_LIMIT
from .bundles import fill
from .evidence import MANUAL, SESSION_ALARM, TEST_ALARM
from .state import ERROR, State

if TYPE_CHECKING:
    from .evidence import Finding
    from .slots import Slot

DYING = 0.5
"""Seconds after a failed test in which a server that is about to exit may do so, to be told as the cause."""

_CHOSEN = (pytest.skip.Exception, pytest.xfail.Exception, KeyboardInterrupt)
_PACKAGE = Path(__file__).parents[1]
_PROPERTIES = ("gpuserve_verdict", "gpuserve_phase", "gpuserve_incident")


class Outcome:
    """Looks at the servers of a test when one of its phases has ended; made before pytest's own report is."""

    def __init__(self, item: pytest.Item, call: pytest.CallInfo[None], state: State) -> None:
        self._item, self._call, self._state = item, call, state
        self._pool = state.pool
        if call.when != "setup" or call.excinfo is not None:
            state.clock.halt()  # the phase is over: a teardown, or the next attempt, starts the clock afresh
        slots = state.pool.touched if state.pool is not None else ()
        self._findings = [(slot, found) for slot in slots if (found := self._take(slot)) is not None]
        if call.excinfo is not None and isinstance(call.excinfo.value, pytest.fail.Exception):
            state.clock.say_what_was_asked(item, call.excinfo.value)
        if call.excinfo is not None and isinstance(call.excinfo.value, GpuserveError):
            _end_in_their_code(call.excinfo.value, call.excinfo.tb)
        if call.when == "setup" and call.excinfo is None:
            item.user_properties[:] = [entry for entry in item.user_properties if entry[0] not in _PROPERTIES]
            if ERROR in item.stash:
                del item.stash[ERROR]  # of an earlier attempt
        self._set_properties()
        self._fail_with_the_server()

    def _fail_with_the_server(self) -> None:
        """A phase that went on to its end, or to a skip, has failed when its time was over, or its server was ended:
        said before the report is made, and with the server's own error, so that xfail judges it as any other failure.
        """
        fatal = [found for _, found in self._findings if found.killed or TEST_ALARM in found.fired]
        raised = self._call.excinfo
        if fatal and (raised is None or (self._call.when == "call" and raised.errisinstance(pytest.skip.Exception))):
            found, went = fatal[0], "went on to its end" if raised is None else "skipped itself"
            error = _swallowed(found, f"{self._item.nodeid} {went}, but {_headline(found, self._timeout())}")
            try:
                raise error
            except pytest.fail.Exception:
                self._call.excinfo = pytest.ExceptionInfo.from_current()

    def _take(self, slot: Slot) -> Finding | None:
        if slot.evidence.went_off():
            self._state.clock.halt()
        return slot.evidence.take(DYING if self._failed() else 0.0)

    def _failed(self) -> bool:
        excinfo = self._call.excinfo
        return self._call.when != "teardown" and excinfo is not None and not excinfo.errisinstance(_CHOSEN)

    def apply(self, report: pytest.TestReport) -> pytest.TestReport:
        """Change the report of the phase, and remember what it means for the servers."""
        text = "\n\n".join(part for _, found in self._findings if (part := self._text(found)))
        if text:
            report.sections.append(("gpuserve", text))
        if report.skipped and isinstance(report.longrepr, tuple) and _PACKAGE in Path(report.longrepr[0]).parents:
            where = self._item.reportinfo()  # skipped by us: the test is what -rs should name, not our file
            report.longrepr = (str(where[0]), (where[1] or 0) + 1, report.longrepr[2])
            report.gpuserve_skipped = True  # type: ignore[attr-defined]  # for plugin/results.py, also through xdist
        for slot, found in self._findings:
            self._account(slot, found, report)
        written = [str(i["incident"]) for _, found in self._findings for i in found.incidents if i.get("incident")]
        if report.failed:
            written += [str(value) for name, value in self._item.user_properties if name == "gpuserve_incident"]
        if written:
            from .html_report import attach

            attach(self._item.config, report, written)
        degraded = dict(self._item.user_properties).get("gpuserve_verdict") == "degraded"  # another would be no better
        suspect = report.failed and not passed_unexpectedly(report)
        if self._pool is not None and suspect and report.when != "teardown" and not degraded:
            self._pool.failed(spared=any(found.spared for _, found in self._findings))
        return report

    def _text(self, found: Finding) -> str:
        lines = [_headline(found, self._timeout())]
        said = str(self._call.excinfo.value) if self._call.excinfo is not None else ""
        for incident in found.incidents:
            text = str(incident.get("text") or "").strip()
            if text and text not in said:
                lines.append(text)
            where = str(incident.get("incident") or "")
            if Path(where).name not in said + text:
                lines.append(f"dumps: {where}")
        return "\n".join(escape(line) for line in "\n".join(filter(None, lines)).splitlines())

    def _account(self, slot: Slot, found: Finding, report: pytest.TestReport) -> None:
        assert self._pool is not None
        spec, ledger = found.server.spec, self._state.ledger
        for incident in found.incidents:
            where = incident.get("incident")
            ledger.incident(
                spec,
                test=self._item.nodeid,
                reason=str(incident.get("reason")),
                verdict=str(incident.get("verdict")),
                incident=str(where) if where else None,
                spared=found.server.record.cookie if not found.killed and _to_blame(incident) else None,
            )
            self._item.config.hook.pytest_gpuserve_incident(server=found.server, incident=incident)
            fill(self._state, str(where) if where else None)
        if found.killed:
            ledger.hung(spec)
            self._pool.strike(slot, f"it hung in {self._item.nodeid}{_where(found)}")
        elif found.exit_code is not None and report.failed:
            ledger.exited(spec)
            self._pool.strike(slot, f"it ended with exit code {found.exit_code} in {self._item.nodeid}")

    def _set_properties(self) -> None:
        values: dict[str, str] = {}
        raised = self._call.excinfo.value if self._call.excinfo is not None else None
        ours = ServerError if self._call.when != "setup" else GpuserveError
        error = raised if raised is None or isinstance(raised, ours) else self._item.stash.get(ERROR, None)
        if isinstance(error, ServerError):
            values = {"gpuserve_verdict": error.verdict, "gpuserve_incident": error.incident or ""}
        elif isinstance(error, GpuserveError):  # there can be no such server: nothing was launched
            values = {"gpuserve_verdict": "config", "gpuserve_incident": ""}
        for _, found in self._findings:
            if found.exit_code is not None and not values:
                values = {"gpuserve_verdict": "crash", "gpuserve_incident": ""}
            for incident in found.incidents:
                values = {
                    "gpuserve_verdict": str(incident.get("verdict") or ""),
                    "gpuserve_incident": str(incident.get("incident") or ""),
                }
        if not values:
            return
        values["gpuserve_phase"] = str(_read(values["gpuserve_incident"]).get("phase") or "")
        kept = [entry for entry in self._item.user_properties if entry[0] not in _PROPERTIES]
        self._item.user_properties[:] = kept + [(name, values[name]) for name in _PROPERTIES if values[name]]

    def _timeout(self) -> float | None:
        return self._state.clock.timeout_of(self._item)


class _Hung(ServerHungError, pytest.fail.Exception):  # type: ignore[misc,name-defined]
    """Shown as one paragraph: no line of the test raised it."""

    __module__, __qualname__ = ServerHungError.__module__, ServerHungError.__qualname__


class _Exited(ServerExitedError, pytest.fail.Exception):  # type: ignore[misc,name-defined]
    """Shown as one paragraph: no line of the test raised it."""

    __module__, __qualname__ = ServerExitedError.__module__, ServerExitedError.__qualname__


def _swallowed(found: Finding, text: str) -> BaseException:
    """The server's error that a test did not pass on; of a healthy server's slow test, the test's own failure."""
    if not found.killed and found.exit_code is None:
        return pytest.fail.Exception(text, pytrace=False)
    last = found.incidents[-1] if found.incidents else {}
    verdict, incident = str(last.get("verdict") or ("hang" if found.killed else "crash")), last.get("incident")
    error = (_Hung if found.killed else _Exited)(text, verdict=verdict, incident=str(incident) if incident else None)
    error.msg, error.pytrace = text, False
    return error


def passed_unexpectedly(report: pytest.TestReport) -> bool:
    """True for a failure that only says that the test passed (``xfail``, strict): nothing is wrong with its server."""
    return isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]")


def _headline(found: Finding, timeout: float | None) -> str:
    """What happened to the server, in one sentence or two."""
    spec = found.server.spec.id
    dumped = "was dumped" if found.incidents else f"was not dumped ({_no_stack(found.server.directory)})"
    if TEST_ALARM in found.fired:
        reached = f"the test's timeout of {timeout:g} s was reached" if timeout else "the test's timeout was reached"
    elif SESSION_ALARM in found.fired:
        reached = "the session's deadline (--gpuserve-session-deadline) was reached"
    elif LOG_LIMIT in found.fired:
        reached = f"the log of {spec} reached its limit (--gpuserve-log-limit)"
        if not found.killed and found.exit_code is None:
            return f"{reached}: its beginning and its newest lines stay. The server {dumped}, not ended."
    elif others := [name for name in found.fired if name != MANUAL]:
        reached = f"the alarm {others[0]!r} went off"
    elif found.killed:
        reached = "the server hung"
    elif found.exit_code is not None:
        from ..server.readiness import exit_text

        return f"{spec} {exit_text(found.exit_code)}."
    else:
        return ""
    if found.killed and found.cut is not None:
        stacks = "" if found.incidents else " No stack is on disk."
        return (
            f"{reached}: the dump of {spec} was not done after {found.cut:.0f} s, so it was cut off, and the server "
            f"ended.{stacks} Give it more with --gpuserve-dump-timeout. The next test that wants it gets a fresh one."
        )
    if found.killed:
        return f"{reached}: {spec} {dumped}, then ended. The next test that wants it gets a fresh one."
    if found.exit_code is not None:
        return f"{reached}, and {spec} had ended with exit code {found.exit_code}."
    if any(_to_blame(incident) for incident in found.incidents):
        return f"{reached}: {spec} {dumped} and left alone (--gpuserve-mode=soft); it would have been ended."
    return (
        f"{reached} while {spec} was healthy: the test was slow, or stuck in its own code. The server {dumped}, not "
        f"ended, and serves the next test."
    )


def _no_stack(directory: Path) -> str:
    """Why an incident left nothing in the server's directory: asked by writing there again."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        return f"no stack is on disk: {directory}: {error.strerror}"
    return f"no stack is on disk: {directory / 'supervisor.log'} says why"


def _to_blame(incident: Mapping[str, Any]) -> bool:
    """The server was ended for it, or would have been without --gpuserve-mode=soft."""
    return bool(incident.get("kill")) or _read(incident.get("incident") or "").get("why", "").startswith("mode=soft")


def _where(found: Finding) -> str:
    last = found.incidents[-1] if found.incidents else {}
    return f" ({last.get('verdict')}, {last.get('incident')})" if last else ""


def _read(incident: str) -> dict[str, Any]:
    """incident.json; empty when there is none, or not yet."""
    from ..report.failure import read_incident

    return read_incident(incident) or {}


def _end_in_their_code(error: GpuserveError, traceback: TracebackType) -> None:
    """End a traceback where the user called us: what is behind that, and the client's own errors, the message tells."""
    error.__cause__, error.__suppress_context__ = None, True
    last: TracebackType | None = None
    entry: TracebackType | None = traceback
    while entry is not None:
        if _PACKAGE not in Path(entry.tb_frame.f_code.co_filename).parents:
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
