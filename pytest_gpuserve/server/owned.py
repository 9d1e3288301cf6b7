"""Servers that a process owns without having started them: those of a controller's workers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from ..errors import GpuserveError
from ..procfs import ProcessId
from .control import Control
from .dead_sessions import living
from .paths import existing_state

INTERRUPTED = ".interrupted"
"""File in the session's directory of a worker: its controller was interrupted, so nothing there needs a watcher."""


def stop_servers_of(controller: ProcessId, told: set[Path]) -> None:
    """Have every server stopped that a living process started and that names ``controller`` as a further owner.

    Within its own grace each, and at once: this waits for no end. The servers that ``controller`` started itself are
    left alone. ``told``: directories of those that know; grows. Never raises for a server that is coming up or going.
    """
    for directory, grace in _servers_of(controller):
        with contextlib.suppress(OSError):
            (directory.parent / INTERRUPTED).touch(mode=0o600)
        if directory not in told:
            with contextlib.suppress(GpuserveError, OSError):  # its socket is not there yet, or not any more
                Control(directory).stop(grace)
                told.add(directory)


def owned_by(controller: ProcessId, directory: Path) -> bool:
    """The server of this directory names ``controller`` as a further owner; False where nobody can tell."""
    return _grace_of(controller, directory) is not None


def _grace_of(controller: ProcessId, directory: Path) -> float | None:
    """Of a server that names ``controller``: what its supervisor was told."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        config = json.loads((directory / "supervisor.json").read_bytes())
        if [controller.pid, controller.start] in config["owners"][1:]:
            return float(config["grace"])
    return None


def _servers_of(controller: ProcessId) -> Iterator[tuple[Path, float]]:
    """Directory and grace, from what the servers' supervisors were told."""
    root = existing_state()
    for session in living(root) if root else ():
        for path in session.glob("*/supervisor.json"):
            if (grace := _grace_of(controller, path.parent)) is not None:
                yield path.parent, grace
