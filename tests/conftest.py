"""For tests of several rooms."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def odd_file(tmp_path: Path) -> Callable[[str], Path]:
    """Makes what is no regular file, and would block whoever reads it, or never end: a pipe, a socket, a device."""

    def make(kind: str) -> Path:
        if kind == "device":
            return Path("/dev/zero")
        path = tmp_path / kind
        if kind == "pipe":
            os.mkfifo(path)
        else:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(os.path.relpath(path))  # a socket's whole path has at most 107 characters
        return path

    return make
