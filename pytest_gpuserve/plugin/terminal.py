"""What the terminal says: a header line when somebody asked for something, a section when something was done."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .options import PLANNED_WORKERS
from .state import PROBLEM, State

if TYPE_CHECKING:
    from .ledger import Ledger


def header(state: State) -> list[str]:
    """Lines for the session's header."""
    settings, config = state.settings, state.config
    artifacts = _short(config, settings.artifacts) if settings.artifacts else "off"
    mode = "soft (nothing is killed)" if settings.soft else "enforce"
    lines = [
        f"gpuserve: {settings.action}, {mode}, start-up {settings.startup_timeout:g} s, grace {settings.grace:g} s, "
        f"dump {settings.dump_timeout:g} s, artifacts {artifacts}"
    ]
    if not config.pluginmanager.hasplugin("timeout"):
        lines.append(
            "gpuserve: pytest-timeout is off, so a hung server is ended only by its start-up budget, a request's own "
            "timeout or --gpuserve-session-deadline; a test that hangs in its own code is not ended at all"
        )
    return lines


def say(config: pytest.Config, text: str) -> None:
    """A line of its own while tests run, past the capturing of output."""
    from ..text import escape

    reporter = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    if reporter is None:
        return
    with suppress(OSError, ValueError), nullcontext() if capture is None else capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.line(f"gpuserve: {escape(text)}")


def summary(reporter: pytest.TerminalReporter, state: State) -> None:
    """The section at the end: the plan, or what became of the servers; nothing when none was asked for."""
    if state.settings.action == "plan":
        _plan(reporter, state)
    else:
        _servers(reporter, state.ledger, state)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            from .github import report

            report(reporter, state.ledger.incidents)


def _servers(reporter: pytest.TerminalReporter, ledger: Ledger, state: State) -> None:
    from ..text import escape

    total = {name: sum(getattr(row, name) for row in ledger.rows.values()) for name in ("started", "reused")}
    reporter.section("gpuserve", "=")
    reporter.line(
        f"{_count(total['started'], 'server start')} for {_count(len(ledger.rows), 'configuration')}, "
        f"reused {_count(total['reused'], 'time')}"
    )
    for row in ledger.rows.values():
        troubles = [("did not start", row.failed_starts), ("hung", row.hung), ("exited by itself", row.exited)]
        if told := ", ".join(f"{what} {_count(n, 'time')}" for what, n in troubles if n):
            reporter.line(escape(f"{row.id}: {told}"))
        for reason, count in row.retired.items():
            reporter.line(escape(f"{row.id}: not used again{f' ({count} times)' if count > 1 else ''}: {reason}"))
    for entry in ledger.incidents:
        where = f": {_short(state.config, Path(entry['incident']))}" if entry["incident"] else ""
        test = f" in {entry['test']}" if entry["test"] else ""
        reporter.line(escape(f"{entry['verdict']}: {entry['id']}{test} ({entry['reason']}){where}"))
    if ledger.figures:
        from .figures import conclude

        for line in conclude(state)[0]:
            reporter.line(escape(line))
    if state.page is not None:
        reporter.line(escape(f"page: {_short(state.config, state.page)}"))
    if state.settings.soft:
        spared = len({entry["spared"] for entry in ledger.incidents} - {None})
        reporter.line(f"soft mode: {_count(spared, 'server')} would have been killed")
    for text in ledger.troubles:
        reporter.line(escape(text))


def _plan(reporter: pytest.TerminalReporter, state: State) -> None:
    """What a run would start: each server once, with the tests that want it, in order. Starts and probes nothing."""
    from ..isolation.plan import PlannedTest, plan_text
    from ..text import escape
    from .distribution import server_of
    from .durations import Durations

    problems = [(item.nodeid, item.stash[PROBLEM]) for item in state.planned if PROBLEM in item.stash]
    tests = [PlannedTest(t.nodeid, *(server_of(t) or ())) for t in state.planned if PROBLEM not in t.stash]
    reporter.section("gpuserve plan", "=")
    past, workers = Durations(state.config, set).past(), state.config.stash.get(PLANNED_WORKERS, 1)
    for line in plan_text(tests, past, workers=workers, max_uses=state.settings.max_uses):
        reporter.line(escape(line))
    if problems:
        reporter.line(f"{_count(len(problems), 'test')} would fail, since the marks cannot be obeyed:")
    for nodeid, problem in problems:
        reporter.line(f"    {escape(nodeid)}: {escape(problem)}")


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _short(config: pytest.Config, path: Path) -> str:
    """Relative to where pytest was started, when that is shorter."""
    try:
        return min(os.path.relpath(path, config.invocation_params.dir), str(path), key=len)
    except ValueError:
        return str(path)
