"""A bundle: the directory of one incident, ready to be attached to a bug report. ``bundle.json`` says what is in it.

The manifest is written first, before anything that may take long, and again at the end: what was killed half way says
so, and ``gpuserve explain --check`` says what is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from .. import __version__, foreign
from .files import MARKER, Store

SCHEMA: Final = "gpuserve.bundle/1"
NAME: Final = "bundle.json"

PARTS: Final[Mapping[str, str]] = {
    "incident.json": "the verdict and what it rests on",
    "verdict.md": "the text a person reads first",
    "issue.md": "ready to paste into a bug report",
    "repro.sh": "starts the same server again",
    "stacks.txt": "merged stacks, then every process",
    "evidence.json": "what was judged, so that it can be judged again",
    "timeline.jsonl": "phases, samples and events",
    "log_tail.txt": "the last lines of the server's log",
    "log.txt": "the whole log, or else log_head.txt its beginning",
    "server.json": "command line, environment, what the server says of itself",
    "versions.json": "versions of engine, torch, CUDA, driver, kernel; GPUs and topology",
}
"""What a whole bundle holds beside the stacks of each process; ``log_cause.txt``, ``results.jsonl`` and ``extra/``
are there when there is something to put into them."""

INSTEAD: Final = {"log.txt": "log_head.txt"}
"""What may stand for a part."""

BESIDE: Final = {
    "results.jsonl": "gpuserve.results/1",
    "matrix.json": "gpuserve.matrix/1",
    "isolate.json": "gpuserve.isolate/1",
}
"""Files of the session, in the directory above, and their schemas: a zip takes them along."""

_NAME: Final = re.compile(r"\d{8}T\d{6}-[A-Za-z0-9._-]+")
_DRAFT: Final = re.compile(r"\.\d{8}T\d{6}-[A-Za-z0-9._-]+\.\d+\.new(-\d+)?")
_YOUNG: Final = 600.0
"""Seconds for which a directory is taken to be in use, whatever its number."""


def manifest(store: Store, *, complete: bool, left_out: Mapping[str, str]) -> dict[str, Any]:
    """The object of schema ``gpuserve.bundle/1``. ``left_out``: parts that could not be had, and why."""
    return {
        "schema": SCHEMA,
        "gpuserve": __version__,
        "complete": complete,
        "time": time.time(),
        "files": {
            name: {"size": size, "sha256": digest}
            for name, (size, digest) in sorted(dict(store.files).items())
            if complete and name not in (NAME, MARKER)  # before the end, what is written will be written again
        },
        "left_out": dict(left_out),
        "beside": [f"../{name}" for name in BESIDE],
    }


def named_like_one(name: str) -> bool:
    """The name of an incident's directory, or of one that was killed while it was made."""
    return bool(_NAME.fullmatch(name) or _DRAFT.fullmatch(name))


def prune(artifacts: Path, keep: int, *, spare: Path | None = None) -> list[str]:
    """Remove the oldest incidents but ``keep``, and drafts that were never finished.

    Only directories that are named and marked as ours and no links; nothing is removed through one, nothing that may
    be in use (``spare``, or written to in the last ten minutes and not complete). Never raises.

    Returns:
        names of what is gone.
    """
    incidents: list[Path] = []
    drafts: list[Path] = []
    with suppress(OSError), os.scandir(artifacts) as entries:
        for entry in entries:
            kind = incidents if _NAME.fullmatch(entry.name) else drafts if _DRAFT.fullmatch(entry.name) else None
            with suppress(OSError):
                if (
                    kind is not None
                    and entry.is_dir(follow_symlinks=False)
                    and _ours(artifacts / entry.name, kind is drafts)
                ):
                    kind.append(artifacts / entry.name)
    old = [*sorted(incidents)[: max(0, len(incidents) - keep)], *drafts]
    gone = []
    for path in old:
        if path != spare and not _in_use(path):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                gone.append(path.name)
    return gone


def _ours(path: Path, draft: bool) -> bool:
    """It carries our marker, a plain file; a draft that was killed at once has nothing in it at all."""
    try:
        return stat.S_ISREG((path / MARKER).lstat().st_mode)
    except FileNotFoundError:
        return draft and not any(path.iterdir())


def _in_use(path: Path) -> bool:
    try:
        age = time.time() - path.lstat().st_mtime
        return age < _YOUNG and not _complete(path)
    except OSError:
        return True


def _complete(path: Path) -> bool:
    with suppress(OSError):
        return b'"complete": true' in foreign.beginning(path / NAME, 4096)
    return False
