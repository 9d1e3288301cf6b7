"""At the end of a session with matrices: the grid of cells, what it proves, ``matrix.json``, properties for junit.

Lives where all reports arrive: in the only process, or in pytest-xdist's controller, to which workers describe the
cells of their tests. A cell fails when any of its tests does; a rerun is another run of its cell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..isolation.matrix import Cell
from .outcome import passed_unexpectedly
from .state import WANTED, State

if TYPE_CHECKING:
    from ..isolation.conclude import CellResult, Conclusion

FILE = "matrix.json"

_RANK = {"passed": 1, "skipped": 0}
"""Of the tests of a cell the worst counts: a failure, else a pass, else a skip."""


def describe(item: pytest.Item) -> dict[str, Any] | None:
    """The cell of a test, as plain values that execnet can carry; None for a test of no matrix."""
    wanted = item.stash.get(WANTED, None)
    cells = [m.args[0] for m in item.own_markers if m.name == "gpuserve" and m.args and isinstance(m.args[0], Cell)]
    if wanted is None or not cells:
        return None
    return {
        "id": cells[0].test_id(wanted.spec),
        "values": cells[0].names(),
        "base": not cells[0].changed,
        "spec": json.dumps(wanted.spec.to_json()),
        "test": item.nodeid.partition("[")[0].rpartition("::")[2],
    }


def learn(state: State, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Follow the tests of these cells, described by node id, in the process where their reports arrive."""
    plugins = state.config.pluginmanager
    conclusions = plugins.get_plugin("gpuserve-conclusions")
    if conclusions is None and cells:
        conclusions = Conclusions(state)
        plugins.register(conclusions, "gpuserve-conclusions")
    if conclusions is not None:
        conclusions.learn(cells)


@dataclass(slots=True)
class Attempt:
    """One run of one test."""

    outcome: str = "passed"
    verdict: str = ""
    phase: str | None = None
    incident: str = ""
    reason: str | None = None


@dataclass(slots=True)
class Run:
    """A test of a cell: its description, and its attempts so far."""

    cell: Mapping[str, Any]
    attempts: list[Attempt] = field(default_factory=list)


class Conclusions:
    """Collects what became of the cells. ``learn`` comes before the reports of the tests it is about."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._runs: dict[str, Run] = {}
        self._said: list[tuple[Conclusion, str]] = []
        self._written: list[Path] = []

    def learn(self, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Descriptions of cells by node id."""
        for nodeid, cell in cells.items():
            self._runs.setdefault(nodeid, Run(cell))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended; set-up begins an attempt."""
        run = self._runs.get(report.nodeid)
        if run is None:
            return
        if report.when == "setup" or not run.attempts:
            run.attempts.append(Attempt())
        attempt, properties = run.attempts[-1], dict(report.user_properties)
        expected = hasattr(report, "wasxfail")
        if report.outcome in ("failed", "rerun") or (report.skipped and expected):
            if passed_unexpectedly(report):
                return  # the cell is well
            attempt.outcome = "failed"
            crashed = report.when not in ("setup", "call", "teardown")
            attempt.verdict = str(properties.get("gpuserve_verdict") or ("infra" if crashed else "test"))
            attempt.phase = str(properties.get("gpuserve_phase") or "") or None
            attempt.incident = str(properties.get("gpuserve_incident") or "")
        elif report.skipped and attempt.outcome == "passed":
            attempt.outcome, attempt.reason = "skipped", _reason(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Conclude, while junit's file can still be told."""
        ran = any(run.attempts and run.attempts[-1].outcome != "skipped" for run in self._runs.values())
        if not ran or self._state.settings.action != "run":
            return
        self._said = [self._conclude(runs) for runs in self._matrices()]
        for n, (said, _) in enumerate(self._said):
            for plugin in self._state.config.pluginmanager.get_plugins():
                if hasattr(plugin, "add_global_property"):  # pytest's own junit plugin
                    for statement in said.statements:
                        plugin.add_global_property(f"gpuserve_matrix_{n + 1}", statement.text)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One section, one table a matrix."""
        if not self._said:
            return
        from ..isolation.grid import text
        from ..text import escape

        terminalreporter.section("gpuserve matrix", "=")
        for said, path in self._said:
            for line in text(said, matrix=path or FILE):
                terminalreporter.line(escape(line))

    def _matrices(self) -> list[list[Run]]:
        """Tests whose cells have the same axes are one matrix."""
        found: dict[tuple[str, ...], list[Run]] = {}
        for run in self._runs.values():
            if run.attempts:
                found.setdefault(tuple(run.cell["values"]), []).append(run)
        return list(found.values())

    def _conclude(self, runs: Sequence[Run]) -> tuple[Conclusion, str]:
        from ..isolation.conclude import conclude

        base = next((dict(run.cell["values"]) for run in runs if run.cell["base"]), None)
        specs = {run.cell["id"]: json.loads(run.cell["spec"]) for run in runs}
        results = _results(runs)
        if self._state.counted and self._state.ledger.figures:
            from ..spec import ServerSpec
            from .figures import of_cell

            keys = {id: ServerSpec.from_mapping(spec, source=id).key for id, spec in specs.items()}
            results = [replace(result, figures=of_cell(self._state, keys[result.id])) for result in results]
        said = conclude(results, base)
        incidents = {run.cell["id"]: Path(a.incident).name for run in runs for a in run.attempts if a.incident}
        return said, self._write(said, specs, incidents)

    def _write(self, said: Conclusion, specs: Mapping[str, Any], incidents: Mapping[str, str]) -> str:
        """``matrix.json``, ``matrix-2.json`` …: what can be gone on from. Returns how the terminal names it."""
        from ..isolation.conclude import SCHEMA
        from ..redaction.redact import Redactor
        from ..report.files import place_of

        directory = self._state.settings.artifacts
        if directory is None:
            return ""
        path = directory / FILE
        redactor = Redactor.of(*(spec["env"] for spec in specs.values()))
        shown = {
            **said.to_json(),
            "specs": {id: redactor.value(spec) for id, spec in specs.items()},
            "incidents": incidents,
        }
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = place_of(directory, FILE, SCHEMA, self._written)
            if not self._written and path.name != FILE:
                self._state.ledger.gave_way(directory / FILE, path)
            self._written.append(path)
            draft = path.with_name(f".{path.name}")
            draft.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            self._state.ledger.trouble(f"{path} cannot be written: {error.strerror}")
            return ""
        here = self._state.config.invocation_params.dir
        return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _results(runs: Sequence[Run]) -> list[CellResult]:
    """Runs of cells, base first: attempt n of a cell is as bad as the worst of its tests' attempts n."""
    from ..isolation.conclude import CellResult

    cells: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: not run.cell["base"]):
        cells.setdefault(run.cell["id"], []).append(run)
    faults: list[Any] = []
    results = []
    for id, tests in cells.items():
        for n in range(max(len(test.attempts) for test in tests)):
            there = [(test.attempts[n], test) for test in tests if n < len(test.attempts)]
            worst, test = max(there, key=lambda pair: (_RANK.get(pair[0].outcome, 2), pair[0].verdict != "test"))
            values = dict(test.cell["values"])
            if worst.outcome == "passed":
                results.append(CellResult(id, values, "ready"))
            elif worst.outcome == "skipped":
                results.append(CellResult(id, values, "skip", reason=worst.reason))
            else:
                signature = _signature(worst, str(test.cell["test"]), faults)
                results.append(CellResult(id, values, worst.verdict, worst.phase or _later(worst), signature))
    return results


def _later(attempt: Attempt) -> str | None:
    """A test that failed by itself had a server that came up."""
    return "serving" if attempt.verdict == "test" else None


def _signature(attempt: Attempt, test: str, faults: list[Any]) -> str:
    """The same text for the same failure: roots that differ a little do not make another fault."""
    from ..isolation.signature import Signature
    from ..report.failure import read_incident

    if attempt.verdict == "test":
        return f"{test} fails"
    seen = Signature(attempt.verdict, attempt.phase)
    if raw := read_incident(attempt.incident):
        with suppress(ValueError, TypeError):  # not whole: verdict and phase will do
            seen = Signature(seen.verdict, seen.phase, Signature.from_json(raw).roots)
    for fault in faults:
        if fault.same(seen):
            return str(fault)
    faults.append(seen)
    return str(seen)


def _reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
