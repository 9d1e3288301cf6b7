"""Paths below a home directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def expanded(path: str) -> Path:
    """``~`` and ``~user`` replaced; as it is where nobody knows that home (a uid without a name in a container)."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - that of pathlib raises


def xdg(variable: str, default: str) -> Path:
    """The base directory that ``variable`` names, else ``default``; a relative one counts as none, as its rules say."""
    chosen = Path(os.environ.get(variable) or "")
    return chosen if chosen.is_absolute() else expanded(default)


def unfit(path: Path) -> str | None:
    """None where nobody else can exchange what is in this directory of ours; else why it is not to be used.

    Raises:
        OSError: it cannot be looked at.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is a link or no directory"
    if found.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if found.st_mode & 0o022:
        from .shell import word

        return f"others may write {path} (mode {stat.S_IMODE(found.st_mode):04o}): chmod go-w {word(str(path))}"
    return None if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written"
