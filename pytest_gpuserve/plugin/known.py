"""Known failures: cells that are expected to fail, in a file, so that a nightly run is green until one is fixed.

``--gpuserve-known-failures known.toml``::

    [[failure]]
    cell = { spec_decode = "eagle3", attention_backend = "flashinfer" }
    verdict = "hang"
    reason = "EAGLE-3 with flashinfer hangs in capture"
    issue = "https://github.com/sgl-project/sglang/issues/1"

``cell`` names what must match: axes, engine, model, tp, ``args.FLAG``, ``env.NAME``; a value without details covers
every detail. Matching tests become ``xfail(strict=True)``: one that passes is reported. With ``verdict`` a failure
other than that is a failure all the same. An axis that no engine has is refused; an entry that matches no test is told.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .. import foreign
from ..errors import EngineError, SpecError
from ..home import expanded
from ..isolation.axes import SPEC_AXES, covers, parse_value, suggest
from ..spec import AXES, AxisValue
from ..text import escape
from ..vocabulary import VERDICTS
from .state import WANTED

if TYPE_CHECKING:
    from ..spec import ServerSpec

_EXPECTED: pytest.StashKey[KnownFailure] = pytest.StashKey()

_KEYS = {"cell", "verdict", "reason", "issue"}
_VERDICTS = (*VERDICTS, "test")
_SENT = "gpuserve_known_failures"
_MOST = 10
"""Entries without a test that are told one by one: the run may be of a part of the tests."""


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """One ``[[failure]]``, the ``number``-th of its file."""

    number: int
    cell: Mapping[str, AxisValue]
    reason: str
    verdict: str | None = None
    issue: str | None = None

    def matches(self, spec: ServerSpec) -> bool:
        """True when everything that ``cell`` names is so."""
        there = _values(spec)
        return all(key in there and covers(value, there[key]) for key, value in self.cell.items())

    def strangers(self, specs: Sequence[ServerSpec]) -> Iterator[tuple[str, bool]]:
        """What of ``cell`` neither these servers nor their engines have; and whether that may be a slip of the pen."""
        for key, value in self.cell.items():
            known = {there[key].name for spec in specs if key in (there := _values(spec))}
            for engine in {spec.engine for spec in specs}:
                known |= set(_axes_of(engine).get(key, ()))
            if value.name not in known:
                close = suggest(value.name, sorted(known))
                values = f"there: {', '.join(sorted(known))}" if known else f"no test has {key}"
                yield f"{key} {value.name!r} is nowhere{close}; {values}", bool(close)

    @property
    def text(self) -> str:
        return f"{self.reason} ({self.issue})" if self.issue else self.reason


def _values(spec: ServerSpec) -> dict[str, AxisValue]:
    """What a cell may name, of one server."""
    there = {"engine": AxisValue(spec.engine), "model": AxisValue(str(spec.model)), "tp": AxisValue(str(spec.tp))}
    there.update(spec.axes)
    there.update({f"args.{name}": _value(f"args.{name}", value) for name, value in spec.args})
    there.update({f"env.{name}": AxisValue(value) for name, value in spec.env})
    return there


def _value(key: str, value: object) -> AxisValue:
    """One value of a cell.

    Raises:
        SpecError: ``key`` can have no such value.
    """
    parsed = parse_value(key, value, "cell")
    return AxisValue(parsed.name) if "." in key else parsed


def _axes_of(engine: str) -> Mapping[str, Any]:
    from ..engines import get_engine

    try:
        return get_engine(engine).axes
    except EngineError:
        return {}  # told where it is used


def read(path: Path, source: str) -> list[KnownFailure]:
    """The entries of a file.

    Raises:
        pytest.UsageError: it cannot be read, or an entry is not as it should be.
    """
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        document = toml.loads(foreign.whole(path).decode())
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"{source}: {path} cannot be read: {error}") from None
    entries = document.get("failure", [])
    if set(document) - {"failure"} or not isinstance(entries, list):
        raise pytest.UsageError(f"{source}: {path} should hold [[failure]] tables and nothing else.")
    return [_entry(entry, n, f"{source}: {path}") for n, entry in enumerate(entries, 1)]


def _entry(entry: Any, number: int, source: str) -> KnownFailure:
    if not isinstance(entry, Mapping) or set(entry) - _KEYS or not entry.get("cell") or not entry.get("reason"):
        raise pytest.UsageError(
            f"{source}, failure {number}: needs cell (axes and values) and reason, may have verdict and issue, "
            f"and has {', '.join(entry) if isinstance(entry, Mapping) else entry!r}."
        )
    if not isinstance(entry["cell"], Mapping):
        raise pytest.UsageError(f'{source}, failure {number}: cell must be a table such as {{ cuda_graph = "on" }}.')
    cell = {}
    for key, value in entry["cell"].items():
        if problem := _no_axis(str(key)):
            raise pytest.UsageError(f"{source}, failure {number}: {problem}")
        try:
            cell[str(key)] = _value(str(key), value)
        except SpecError as error:
            raise pytest.UsageError(f"{source}, failure {number}: {error}") from None
    verdict, issue = (str(entry[key]) if entry.get(key) else None for key in ("verdict", "issue"))
    if verdict is not None and verdict not in _VERDICTS:
        raise pytest.UsageError(
            f"{source}, failure {number}: there is no verdict {verdict!r}{suggest(verdict, _VERDICTS)}. "
            f"Verdicts: {', '.join(_VERDICTS)}."
        )
    return KnownFailure(number, cell, str(entry["reason"]), verdict, issue)


def _no_axis(key: str) -> str | None:
    """Why a cell cannot name ``key``: no engine has it. Engines are looked at only for an axis that is not common."""
    room, _, name = key.partition(".")
    if key in (*SPEC_AXES, *AXES) or (room in ("args", "env") and name):
        return None
    from ..engines import engine_names

    own = dict.fromkeys(axis for engine in engine_names() for axis in _axes_of(engine))
    if key in own:
        return None
    known = tuple(dict.fromkeys((*SPEC_AXES, *AXES, *own)))
    return f"there is no axis {key!r}{suggest(key, known)}. Axes: {', '.join(known)}, args.FLAG, env.NAME."


class KnownFailures:
    """Marks tests, and looks whether they failed as they were expected to.

    ``file``: as the user named it. What was found of entries without a test travels from pytest-xdist's workers to the
    controller, which collects nothing.
    """

    def __init__(self, known: list[KnownFailure], file: str) -> None:
        self._known, self._file = known, file
        self._unused: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The first entry that matches counts; before ``-k`` and its like take tests away."""
        self._unused = self._without_a_test([item.stash[WANTED].spec for item in items if WANTED in item.stash])
        for item in items:
            wanted = item.stash.get(WANTED, None)
            entry = next((e for e in self._known if e.matches(wanted.spec)), None) if wanted is not None else None
            if entry is not None:
                item.stash[_EXPECTED] = entry
                item.add_marker(pytest.mark.xfail(strict=True, reason=f"known failure: {entry.text}"))

    def _without_a_test(self, specs: Sequence[ServerSpec]) -> list[str]:
        """A line an entry, likely slips of the pen first; none where no test wants a server."""
        distinct = list({spec.key: spec for spec in specs}.values())
        lines = []
        for entry in self._known if distinct else ():
            if not any(map(entry.matches, distinct)):
                strange = list(entry.strangers(distinct))
                why = "; ".join(text for text, _ in strange) or "no test has all of its cell"
                text = f"{self._file}, failure {entry.number} ({entry.reason}) matches no test of this run: {why}."
                lines.append((not any(slip for _, slip in strange), text))
        return [text for _, text in sorted(lines, key=lambda line: line[0])]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_SENT] = self._unused

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._unused = self._unused or list(getattr(node, "workeroutput", {}).get(_SENT, ()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unused:
            terminalreporter.section("gpuserve known failures", "=")
            for line in self._unused[:_MOST]:
                terminalreporter.line(escape(line))
            if len(self._unused) > _MOST:
                terminalreporter.line(f"and {len(self._unused) - _MOST} more")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Another verdict than the known one is news."""
        report = yield
        entry = item.stash.get(_EXPECTED, None)
        verdict = str(dict(item.user_properties).get("gpuserve_verdict") or "test")
        expected = report.skipped and hasattr(report, "wasxfail")
        if expected and entry is not None and entry.verdict not in (None, verdict):
            del report.wasxfail
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} is a known failure with verdict {entry.verdict} ({entry.text}), but failed with "
                f"verdict {verdict}. Correct the entry of its cell in the file of known failures, or look into it."
            )
        return report


def register(config: pytest.Config, path: str, source: str) -> None:
    """Read the file, relative to where pytest was started, and follow it."""
    known = read(config.invocation_params.dir / expanded(path), source)
    config.pluginmanager.register(KnownFailures(known, path), "gpuserve-known-failures")
