"""pytest-html, where it is there: the verdict and the bundle's place beside the test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import foreign
from ..text import escape

if TYPE_CHECKING:
    import pytest

MOST = 200_000
"""Characters of a verdict that go into the page."""


def attach(config: pytest.Config, report: pytest.TestReport, incidents: list[str]) -> None:
    """Add to ``report.extras``, which pytest-html reads (4.0 and later), also through pytest-xdist."""
    if not incidents or not config.pluginmanager.hasplugin("html"):
        return
    from pytest_html import extras

    found: list[Any] = list(getattr(report, "extras", []))
    for incident in dict.fromkeys(incidents):
        path = Path(incident)
        found.append(extras.url(path.resolve().as_uri(), name=f"gpuserve {path.name}"))
        try:
            text = foreign.beginning(path / "verdict.md", 4 * MOST).decode(errors="replace")[:MOST]
        except OSError:
            continue
        found.append(extras.text(escape(text), name="gpuserve verdict"))
    report.extras = found  # type: ignore[attr-defined]
