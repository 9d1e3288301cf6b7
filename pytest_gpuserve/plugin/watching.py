"""The session's watcher: started with the first server, ended with the session. See pytest_gpuserve/watch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report.incident import command
from ..server.paths import session_directory, state_root
from ..watch.watcher import start
from .options import Settings, alarm_limit, incident_limit

END_LIMIT = 5.0
"""Seconds for the watcher to end by itself."""


class Watching:
    """The watcher of this process's servers, unless ``--gpuserve-stall-timeout=off``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start it, or start it again when it died."""
        if self._settings.stall_timeout is not None and (self._process is None or self._process.poll() is not None):
            self._process = start(session_directory(), configuration(self._settings))

    def end(self) -> None:
        """SIGTERM, and SIGKILL when that is not obeyed: it holds nothing that could be lost."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def configuration(settings: Settings) -> Mapping[str, Any]:
    """What :func:`pytest_gpuserve.watch.watcher.start` takes."""
    limit = incident_limit(settings.dump_timeout)
    argv = command(
        Path("{server}"), settings.artifacts, "{reason}", soft=settings.soft, limit=limit, keep=settings.keep
    )
    window = settings.stall_timeout
    return {
        "incident": [*argv, "--after", "{after}"],
        "limit": alarm_limit(settings.dump_timeout),
        "budgets": {"window": window} if isinstance(window, float) else {},
        "cache": str(state_root() / "stillness"),
    }
