"""Known failures: cells that are expected to fail, in a file, so that a nightly run is green until one is fixed.

``--gpuserve-known-failures known.toml``::

    [[failure]]
    cell = { spec_decode = "eagle3", attention_backend = "flashinfer" }
    verdict = "hang"
    reason = "EAGLE-3 with flashinfer hangs in capture"
    issue = "https://github.com/sgl-project/sglang/issues/1"

``cell`` names what must match: axes, engine, model, tp. Matching tests become ``xfail(strict=True)``: one that passes
is reported. With ``verdict`` another failure than that is a failure all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .state import WANTED

if TYPE_CHECKING:
    from ..spec import ServerSpec

_EXPECTED: pytest.StashKey[KnownFailure] = pytest.StashKey()

_KEYS = {"cell", "verdict", "reason", "issue"}


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """One ``[[failure]]``."""

    cell: Mapping[str, str]
    reason: str
    verdict: str | None = None
    issue: str | None = None

    def matches(self, spec: ServerSpec) -> bool:
        """True when everything that ``cell`` names is so."""
        there = {"engine": spec.engine, "model": str(spec.model), "tp": str(spec.tp)}
        there.update({axis: value.name for axis, value in spec.axes})
        return all(there.get(key) == value for key, value in self.cell.items())

    @property
    def text(self) -> str:
        return f"{self.reason} ({self.issue})" if self.issue else self.reason


def read(path: Path, source: str) -> list[KnownFailure]:
    """The entries of a file.

    Raises:
        pytest.UsageError: it cannot be read, or an entry is not as it should be.
    """
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        document = toml.loads(path.read_text(encoding="utf-8"))
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
    words = {"True": "on", "False": "off"}
    cell = {str(key): words.get(str(value), str(value)) for key, value in entry["cell"].items()}
    return KnownFailure(
        cell, str(entry["reason"]), *(str(entry[key]) if entry.get(key) else None for key in ("verdict", "issue"))
    )


class KnownFailures:
    """Marks tests, and looks whether they failed as they were expected to."""

    def __init__(self, known: list[KnownFailure]) -> None:
        self._known = known

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The first entry that matches counts."""
        for item in items:
            wanted = item.stash.get(WANTED, None)
            entry = next((e for e in self._known if e.matches(wanted.spec)), None) if wanted is not None else None
            if entry is not None:
                item.stash[_EXPECTED] = entry
                item.add_marker(pytest.mark.xfail(strict=True, reason=f"known failure: {entry.text}"))

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
    known = read(config.invocation_params.dir / Path(path).expanduser(), source)
    config.pluginmanager.register(KnownFailures(known), "gpuserve-known-failures")
