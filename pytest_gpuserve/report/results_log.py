"""results.jsonl among the artifacts: one line a test, on disk as it ends. It stands in for junit, which pytest writes
only when it ends itself.

Any number of processes (pytest-xdist's workers, sessions side by side) append to one file: each line is one write.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..redaction.redact import Redactor
from .files import free_for, make_artifacts, place_of

NAME: Final = "results.jsonl"
SCHEMA: Final = "gpuserve.results/1"
MOST: Final = 8 << 20
"""Bytes after which a new session begins a new file; the last one stays beside it as ``results.1.jsonl``."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Never waits: in the place of the file there may be a pipe that nobody reads."""


class ResultsLog:
    """``session``: what the lines of one pytest run, in all its processes, have in common.

    Attributes:
        path: where they are; ``results-2.jsonl`` … where ``results.jsonl`` is somebody else's.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, artifacts: Path, session: str, redactor: Redactor) -> None:
        make_artifacts(artifacts)
        self.path = place_of(artifacts, NAME, SCHEMA)
        last = self.path.with_suffix(".1.jsonl")
        with suppress(OSError):
            if self.path.lstat().st_size > MOST and free_for(last, SCHEMA):
                self.path.replace(last)
        self._file = os.open(self.path, _FLAGS, 0o644)
        self._session = session
        self._redactor = redactor

    def put(self, entry: Mapping[str, Any], *, sync: bool = True) -> None:
        """Append one line; a full disk costs lines, never a test. ``sync``: it must survive the machine, too."""
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        head = {"schema": SCHEMA, "time": round(time.time(), 3), "session": self._session, "worker": worker}
        line = json.dumps(self._redactor.value({**head, **entry}), default=str) + "\n"
        with suppress(OSError):
            os.write(self._file, line.encode(errors="backslashreplace"))
            if sync:
                os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)
