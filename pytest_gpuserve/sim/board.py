"""Each rank's step counter in shared memory, as SGLang's loads are: readable whatever the ranks do."""

from __future__ import annotations

import mmap
import os

WIDTH = 8
"""Bytes a rank."""


def create(size: int, *, named: bool) -> str:
    """Zeros for so many ranks; returns the path by which this process's children open them.

    With a name in /dev/shm the memory outlives a process that is killed by SIGKILL, as the engines' does.
    """
    if named:
        path = f"/dev/shm/gpuserve_sim_loads_{os.getpid()}-{os.urandom(4).hex()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    else:
        descriptor = os.memfd_create("gpuserve_sim_loads")
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    os.truncate(descriptor, WIDTH * size)
    if named:
        os.close(descriptor)
    return path


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
