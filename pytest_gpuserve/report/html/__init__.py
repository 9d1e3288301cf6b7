"""One HTML page per incident and one per session: self-contained files that open from a CI artifact or a disk.

They are made from the redacted files of an artifacts directory, after the fact, never while an incident is taken.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import GpuserveError
from ..bundle_reader import Bundle
from ..files import Store
from .reading import Folder, Packed

PAGE: Final = "index.html"

_ELSEWHERE: Final = "Choose another place with --output, or with pytest's --gpuserve-artifacts."


class PageError(GpuserveError):
    """A page cannot be written; the message says why."""


@dataclass(frozen=True, slots=True)
class Written:
    """What :func:`refresh` did. ``page``: of the session; None: there was nothing to tell. ``left``: incidents whose
    page there was no time for. ``problems``: one sentence each."""

    page: Path | None
    pages: int
    left: int
    problems: tuple[str, ...]


def write_page(directory: Path, out: Path | None = None, *, since: float | None = None) -> Path:
    """The page of ``directory``: of an incident, else of a session. Returns where it is.

    Raises:
        PageError: there is nothing to show in it, or the page cannot be written.
    """
    if (directory / "incident.json").exists():
        return write_incident_page(directory, out)
    return write_session_page(directory, out, since=since)


def write_incident_page(directory: Path, out: Path | None = None, *, above: bool = False) -> Path:
    """``index.html`` of one incident, in its directory unless ``out`` is given. ``above``: the session's page is about
    to be written; else it is linked to where it is there.

    Raises:
        PageError: the directory is not there, or the page cannot be written.
    """
    _must_exist(directory)
    above = out is None and (above or (directory.parent / PAGE).is_file())
    return _put(directory, out, _incident(Folder(directory), above))


def write_bundle_page(bundle: Bundle, out: Path) -> Path:
    """The page of an incident that may be in a zip.

    Raises:
        PageError: the page cannot be written.
    """
    return _put(out.parent, out, _incident(Packed(bundle), above=False))


def _incident(folder: Folder, above: bool) -> str:
    from . import incident_view
    from .page import render

    return render("incident.html", page=incident_view.view(folder), above=above)


def write_session_page(directory: Path, out: Path | None = None, *, since: float | None = None) -> Path:
    """``index.html`` of an artifacts directory (or of one that ``gpuserve isolate`` wrote). ``since``: seconds since
    the epoch; incidents from before are of an earlier session.

    Raises:
        PageError: the directory holds nothing of ours, or the page cannot be written.
    """
    from . import session_view
    from .page import render

    _must_exist(directory)
    page = session_view.view(Folder(directory), since)
    if not (page.incidents or page.matrices or page.searches or page.tests):
        raise PageError(
            f"there is nothing to show in {directory}: no incident.json, matrix.json, isolate.json or results.jsonl. "
            f"Name an incident's directory, or the artifacts directory of a session."
        )
    return _put(directory, out, render("session.html", page=page))


def refresh(artifacts: Path, *, since: float, limit: float) -> Written:
    """Write what pages are missing under ``artifacts``, the newest incident first, then the session's.

    Incidents of a session that was killed get theirs from the next one. ``limit``: seconds after which no further
    incident's page is begun. Never raises.
    """
    until = time.monotonic() + limit
    problems: list[str] = []
    pages = left = 0
    directories = _directories(artifacts)
    if not any((path / "incident.json").exists() for path in directories) and not any(artifacts.glob("matrix*.json")):
        return Written(None, 0, 0, ())  # tests that pass are no news
    stale = sorted(filter(_stale, directories), key=lambda path: path.name, reverse=True)
    for directory in stale:
        if time.monotonic() > until:
            left += 1
            continue
        try:
            write_incident_page(directory, above=True)
            pages += 1
        except Exception as error:  # a picture must not cost a session its result
            problems.append(f"no page for {directory.name}: {_why(error)}")
    page = None
    try:
        page = write_session_page(artifacts, since=since)
    except Exception as error:
        problems.append(f"no page for {artifacts}: {_why(error)}")
    return Written(page, pages, left, tuple(problems))


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, GpuserveError) else f"{type(error).__name__}: {error}"


def _directories(artifacts: Path) -> list[Path]:
    with suppress(OSError):
        return [Path(entry.path) for entry in os.scandir(artifacts) if entry.is_dir(follow_symlinks=False)]
    return []


def _stale(directory: Path) -> bool:
    """An incident without a page, or with one that is older."""
    try:
        told = (directory / "incident.json").stat().st_mtime
    except OSError:
        return False
    with suppress(OSError):
        return (directory / PAGE).stat().st_mtime < told
    return True


def _must_exist(directory: Path) -> None:
    if not directory.is_dir():
        raise PageError(f"{directory} is not a directory. Name that of an incident, or an artifacts directory.")


def _put(directory: Path, out: Path | None, html: str) -> Path:
    """In one step; beside what it is about only where no file of somebody else's is in the way."""
    try:
        if out is None:
            _ours(directory / PAGE)
            Store(directory, None, 0o644).write(PAGE, html)
            return directory / PAGE
        draft = out.with_name(f".{out.name}.{os.getpid()}")
        draft.write_text(html, encoding="ascii")
        draft.replace(out)
    except OSError as error:
        where = out or directory / PAGE
        raise PageError(f"{where} cannot be written: {error.strerror}. {_ELSEWHERE}") from error
    return out


def _ours(path: Path) -> None:
    from .page import GENERATOR

    head = Folder(path.parent).read(path.name, 2000)
    if os.path.lexists(path) and (head is None or GENERATOR.encode() not in head):
        raise PageError(f"{path} is not a page of ours, so it is not replaced. {_ELSEWHERE}")
