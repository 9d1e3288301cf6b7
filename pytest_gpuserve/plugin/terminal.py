"""What the terminal says: a header line when somebody asked for something, a section when something was done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .state import WANTED, State

if TYPE_CHECKING:
    from ..spec import ServerSpec
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


def summary(reporter: pytest.TerminalReporter, state: State) -> None:
    """The section at the end: the plan, or what became of the servers; nothing when none was asked for."""
    if state.settings.action == "plan":
        _plan(reporter, state.planned)
    else:
        _servers(reporter, state.ledger, state)


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
    for entry in ledger.incidents:
        where = _short(state.config, Path(entry["incident"])) if entry["incident"] else "no evidence could be written"
        test = f" in {entry['test']}" if entry["test"] else ""
        reporter.line(escape(f"{entry['verdict']}: {entry['id']}{test} ({entry['reason']}): {where}"))
    if state.settings.soft:
        spared = len({entry["spared"] for entry in ledger.incidents} - {None})
        reporter.line(f"soft mode: {_count(spared, 'server')} would have been killed")
    for text in ledger.troubles:
        reporter.line(escape(text))


def _plan(reporter: pytest.TerminalReporter, items: list[pytest.Item]) -> None:
    """What a run would start: each server once, with the tests that want it, in order. Starts and probes nothing."""
    from ..text import escape

    servers: dict[str, tuple[ServerSpec, list[pytest.Item]]] = {}
    for item in items:
        if wanted := item.stash.get(WANTED, None):
            servers.setdefault(wanted.spec.key, (wanted.spec, []))[1].append(item)
    tests = sum(len(users) for _, users in servers.values())
    reporter.section("gpuserve plan", "=")
    for spec, users in servers.values():
        reporter.line(escape(f"{spec.id}  tp={spec.tp}  {spec.model or ''}".rstrip()))
        for item in users:
            reporter.line(escape(f"    {item.nodeid}"))
    others = len(items) - tests
    reporter.line(
        f"{_count(len(servers), 'server')} to start for {_count(tests, 'test')}"
        + (f"; {_count(others, 'test')} without one" if others else "")
        + (f"; {tests - len(servers)} starts fewer than one a test" if tests > len(servers) else "")
        + ". Nothing was started."
    )


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _short(config: pytest.Config, path: Path) -> str:
    """Relative to where pytest was started, when that is shorter."""
    try:
        return min(os.path.relpath(path, config.invocation_params.dir), str(path), key=len)
    except ValueError:
        return str(path)
