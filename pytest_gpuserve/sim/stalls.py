"""The calls in which a struck rank blocks. Each is a real one: stacks, /proc and the kernel tell the truth."""

from __future__ import annotations

import os
import signal
import time
from _thread import allocate_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

FOREVER = 10_000_000
"""Seconds."""


def synchronize() -> None:
    """Wait for a device that never finishes: asleep in one call."""
    while True:
        time.sleep(FOREVER)


def wait_event() -> None:
    """Wait for an event that nobody records: asleep in futex."""
    event = allocate_lock()
    event.acquire()
    event.acquire()


def spin_stream() -> None:
    """Poll a stream that never drains: a CPU in C, without the GIL."""
    from hashlib import pbkdf2_hmac

    while True:
        pbkdf2_hmac("sha256", b"stream", b"query", 2**31 - 1)


def poll_stream() -> None:
    """The same in Python: a CPU in bytecode, holding the GIL most of the time."""
    polls = 0
    while True:
        polls += 1


def launch_kernel() -> None:
    """A C call that keeps the GIL while it sleeps: no other thread runs again, and no signal handler."""
    import ctypes

    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(FOREVER)


def acquire_build_lock(path: str) -> None:
    """Wait for a file lock that a rank holds which in turn waits for us in a collective: asleep in flock."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while _free(descriptor):  # the holder takes it at the same time as we get here
        time.sleep(0.005)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def hold_build_lock(path: str) -> None:
    """Take the lock and keep it until this process ends."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _free(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def receive_handle() -> None:
    """Read a memory handle from a pipe to which nobody writes: asleep in read."""
    reader, _writer = os.pipe()
    os.read(reader, 64)


def suspend() -> None:
    """Stopped (state T), as by a debugger or a full terminal."""
    os.kill(os.getpid(), signal.SIGSTOP)


def vanish() -> NoReturn:
    """Killed at once, as by the kernel when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")


def repack_weights(seconds: float) -> None:
    """Slow, not hung: a CPU in bytecode until the time is up."""
    end = time.monotonic() + seconds
    checksum = 0
    while time.monotonic() < end:
        for word in range(10_000):
            checksum = (checksum * 31 + word) & 0xFFFFFFFF


def read_shards(path: str, seconds: float) -> None:
    """Slow, not hung: reads a file from the disk again and again until the time is up."""
    block = os.urandom(1 << 20)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(16):
            os.write(descriptor, block)
        os.fsync(descriptor)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # so that the next read reaches the disk
            os.lseek(descriptor, 0, os.SEEK_SET)
            while time.monotonic() < end and os.read(descriptor, 1 << 20):
                time.sleep(0.01)
    finally:
        os.close(descriptor)
