"""Each rank's step counter in shared memory, as SGLang's loads are: readable whatever the ranks do.

The front end makes the file and removes it. A front end that is killed by SIGKILL leaves it in /dev/shm.
"""

from __future__ import annotations

import mmap
import os

WIDTH = 8
"""Bytes a rank."""


def create(path: str, size: int) -> None:
    """A new file of ``size`` zeros; FileExistsError when there is one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, bytes(WIDTH * size))
    finally:
        os.close(descriptor)


def attach(path: str) -> mmap.mmap | None:
    """The counters, writable; None when the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def put(board: mmap.mmap, rank: int, steps: int) -> None:
    board[WIDTH * rank : WIDTH * (rank + 1)] = steps.to_bytes(WIDTH, "little")


def read(path: str, size: int) -> list[int]:
    """All counters; zeros when the file is gone."""
    board = attach(path)
    if board is None:
        return [0] * size
    with board:
        return [int.from_bytes(board[WIDTH * rank : WIDTH * (rank + 1)], "little") for rank in range(size)]
