"""``gpuserve explain BUNDLE``: the directory or zip of an incident, or of many, from this machine or another."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..errors import GpuserveError
from ..redaction.redact import Redactor
from ..report.again import render, written_again
from ..report.bundle_check import Check, check
from ..report.bundle_reader import SIGNS, Bundle, open_bundles
from ..report.bundle_zip import write_zip
from ..report.files import Store
from ..report.html import write_bundle_page
from ..report.issue import issue
from ..report.pages import sections
from ..text import escape, one_line

EXIT_CODES: Final = {"ready": 0, "hang": 3, "stalled": 3, "slow": 4, "degraded": 4, "undecided": 5}
"""Exit code by verdict; every other verdict is a failure, 1."""


def run(paths: Sequence[Path], arguments: argparse.Namespace) -> int:
    """Show, check, zip or write again. With ``--check`` 0: all are whole, 1: something is missing or torn; with
    ``--zip`` 1: something was left out."""
    found = [(path, bundle) for path in paths for bundle in open_bundles(path)]
    writes = arguments.zip or arguments.render or arguments.html
    if (writes or arguments.issue) and len(found) > 1:
        holder = f"{one_line(str(paths[0]))} holds" if len(paths) == 1 else f"the {len(paths)} paths named hold"
        raise GpuserveError(
            f"{holder} {len(found)} incidents. Name one of them: "
            f"{', '.join(one_line(bundle.name, 80) for _, bundle in found[:5])}."
        )
    if arguments.issue or arguments.render or arguments.html:
        _needs_its_verdict(found[0][1])
    checks = [check(bundle) for _, bundle in found]
    if arguments.json:
        print(json.dumps([_json(bundle, seen) for (_, bundle), seen in zip(found, checks, strict=True)], indent=1))
    elif arguments.check:
        for (_, bundle), seen in zip(found, checks, strict=True):
            _show_check(bundle, seen)
    elif arguments.issue:
        print(escape(issue(found[0][1])))
    elif len(found) > 1:
        for (_, bundle), seen in zip(found, checks, strict=True):
            print(_headline(bundle, seen))
    elif not writes:
        _show(found[0][1], checks[0])
    left = _zip(found[0][0], found[0][1], arguments.zip) if arguments.zip else []
    if arguments.render:
        _render(found[0][1], arguments.render)
    if arguments.html:
        print(one_line(f"written: {write_bundle_page(written_again(found[0][1]), arguments.html)}"))
    if arguments.check:
        return 0 if all(seen.whole for seen in checks) else 1
    if writes or arguments.issue:
        return 1 if left else 0
    return max(EXIT_CODES.get(str(bundle.json("incident.json").get("verdict", "undecided")), 1) for _, bundle in found)


def _needs_its_verdict(bundle: Bundle) -> None:
    if not bundle.json("incident.json"):
        raise GpuserveError(
            f"{one_line(bundle.name)} has no incident.json that can be read, so there is nothing to write. "
            f"--check says what is wrong with it."
        )


def _show(bundle: Bundle, seen: Check) -> None:
    """The verdict by this version's rules, with what it was called then where that was something else."""
    before, incident = bundle.json("incident.json"), written_again(bundle).json("incident.json")
    print(escape(str(incident.get("text", "nothing was found before the incident ended"))))
    then, now = (f"{i.get('verdict')} {i.get('culprits')}" for i in (before, incident))
    if then != now:
        print(one_line(f"(judged again by this version; the bundle says: {before.get('text')})"))
    for title, lines in sections(incident):
        print("\n".join(["", one_line(title), *(f"  {line}" for line in lines)]))
    if not seen.whole or seen.left_out:
        print()
        _show_check(bundle, seen)


def _show_check(bundle: Bundle, seen: Check) -> None:
    for line in seen.lines():
        print(one_line(f"{bundle.name}: {line}", 500))


def _headline(bundle: Bundle, seen: Check) -> str:
    incident = bundle.json("incident.json")
    test = f" in {incident['test']}" if incident.get("test") else ""
    state = "" if seen.whole else " (not whole: --check)"
    return one_line(f"{bundle.name}: {incident.get('verdict', 'undecided')}: {incident.get('id')}{test}{state}", 300)


def _json(bundle: Bundle, seen: Check) -> dict[str, object]:
    told = {name: [list(pair) for pair in getattr(seen, name)] for name in ("missing", "torn", "left_out", "odd")}
    whole = {"complete": seen.complete, "whole": seen.whole, **told}
    return {"bundle": bundle.name, "check": whole, "incident": bundle.json("incident.json")}


def _zip(path: Path, bundle: Bundle, out: Path) -> list[str]:
    left = write_zip(bundle, out, path.parent if path.is_dir() else None)
    print(one_line(f"written: {out}"))
    for name in left:
        print(one_line(f"left out, too big or not readable: {name}"))
    return left


def _render(bundle: Bundle, directory: Path) -> None:
    if any(os.path.lexists(directory / sign) for sign in SIGNS):
        raise GpuserveError(
            f"{one_line(str(directory))} is an incident's own directory: what was written then is evidence, and is not "
            f"replaced. Choose another directory with --render."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        render(written_again(bundle), Store(directory, Redactor.of(os.environ), 0o644))
    except OSError as error:
        raise GpuserveError(
            f"{one_line(str(directory))} cannot be written: {error.strerror}. Choose another directory with --render."
        ) from error
    print(one_line(f"written: verdict.md, issue.md and repro.sh in {directory}"))
