"""Asking tree.py from beside a supervisor: a process that a driver holds must not make us wait for ever."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import procfs
from .loop import TREE_SILENCE, TREE_START

_TREE = Path(__file__).with_name("tree.py")
_stuck: list[subprocess.Popen[bytes]] = []  # helpers that the kernel did not let die: nobody waits for them


def ask_tree(requests: Sequence[Mapping[str, Any]], limit: float) -> tuple[list[list[Any]], bool]:
    """What tree.py says to ``requests`` (its ``skip`` is added here), and whether it answered all of them.

    A helper that falls silent is replaced; the process it was looking at is skipped when that is why. Takes at most
    about ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    waiting, said, skip, suspect = list(requests), list[list[Any]](), list[int](), 0
    while waiting and time.monotonic() < deadline:
        words, looks_at = _talk(waiting, skip, deadline)
        said += words
        if waiting and looks_at:
            found = procfs.stat(looks_at)
            if looks_at == suspect or (found is not None and found.state == "D"):
                skip.append(looks_at)
            suspect = looks_at
        if waiting and not words:
            time.sleep(0.05)
    return said, not waiting


def _talk(waiting: list[Mapping[str, Any]], skip: list[int], deadline: float) -> tuple[list[list[Any]], int]:
    """Ask one helper until it falls silent or ends; what it answered is taken from ``waiting``."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(_TREE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    except OSError:  # no process to be had now
        return [], 0
    assert process.stdin is not None
    assert process.stdout is not None
    said: list[list[Any]] = []
    looks_at, half, asked = 0, b"", False
    patience = TREE_START
    try:
        while waiting:
            if not asked:
                process.stdin.write(json.dumps({**waiting[0], "skip": skip}).encode() + b"\n")
                process.stdin.flush()
                asked = True
            left = min(patience, deadline - time.monotonic())
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                break
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                break
            patience = TREE_SILENCE
            *lines, half = (half + data).split(b"\n")
            for word, *rest in map(json.loads, lines):
                if word == "?":
                    looks_at = int(rest[0])
                elif word == ".":
                    waiting.pop(0)
                    asked = False
                else:
                    said.append([word, *rest])
    except (OSError, ValueError):
        pass  # it died: asked again as long as there is time
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        _end(process)
    return said, looks_at


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it has nothing to lose: what it was to do is done, or it is stuck
    try:
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        _stuck.append(process)
