"""Paths below a home directory."""

from __future__ import annotations

import os.path
from pathlib import Path


def expanded(path: str) -> Path:
    """``~`` and ``~user`` replaced; as it is where nobody knows that home (a uid without a name in a container)."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - that of pathlib raises


def xdg(variable: str, default: str) -> Path:
    """The base directory that ``variable`` names, else ``default``; a relative one counts as none, as its rules say."""
    chosen = Path(os.environ.get(variable) or "")
    return chosen if chosen.is_absolute() else expanded(default)
