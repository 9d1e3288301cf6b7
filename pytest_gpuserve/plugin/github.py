"""GitHub Actions: an ``::error`` annotation for each incident, and a table in the job's summary.

Both are only written where ``GITHUB_ACTIONS`` is ``true``, by the process that reports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.failure import read_incident
from ..report.markdown import plain
from ..text import escape

if TYPE_CHECKING:
    import pytest

MOST = 10
"""Annotations: GitHub shows no more of one step."""

_SUMMARY_ROWS = 200


def report(reporter: pytest.TerminalReporter, incidents: Sequence[Mapping[str, Any]]) -> None:
    """Annotations to the log, a table to ``$GITHUB_STEP_SUMMARY``."""
    told = [entry for entry in incidents if entry.get("verdict") not in ("ready", None)]
    for entry in told[:MOST]:
        reporter.ensure_newline()
        reporter.write_line(annotation(entry))
    if (path := os.environ.get("GITHUB_STEP_SUMMARY")) and told:
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(summary(told))
        except OSError as error:
            reporter.write_line(escape(f"gpuserve: the job's summary {path} cannot be written: {error.strerror}"))


def annotation(entry: Mapping[str, Any]) -> str:
    """``::error file=…,title=…::…`` with everything in it escaped as the runner undoes it."""
    test = str(entry.get("test") or "")
    title = f"{entry.get('verdict')}: {entry.get('id')}"
    properties = [*([f"file={_property(test.partition('::')[0])}"] if test else []), f"title={_property(title)}"]
    text = _text(entry)
    where = f"\nbundle: {entry['incident']}" if entry.get("incident") else ""
    return f"::error {','.join(properties)}::{_data(f'{test}: {text}{where}' if test else text + where)}"


def summary(entries: Sequence[Mapping[str, Any]]) -> str:
    """One table; foreign text in it is no markup."""
    lines = [
        "### gpuserve: servers that failed",
        "",
        "| verdict | server | test | what | bundle |",
        "|---|---|---|---|---|",
    ]
    for entry in entries[:_SUMMARY_ROWS]:
        bundle = Path(str(entry.get("incident") or "")).name
        cells = (entry.get("verdict"), entry.get("id"), entry.get("test") or "", _text(entry), bundle)
        lines.append(f"| {' | '.join(plain(cell, 400) for cell in cells)} |")
    if len(entries) > _SUMMARY_ROWS:
        lines += ["", f"and {len(entries) - _SUMMARY_ROWS} more"]
    return "\n".join(lines) + "\n\n"


def _text(entry: Mapping[str, Any]) -> str:
    """The verdict's paragraph; the reason where there is none."""
    found = read_incident(entry.get("incident")) or {}
    return str(found.get("text") or entry.get("reason"))


def _data(text: str) -> str:
    return escape(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
