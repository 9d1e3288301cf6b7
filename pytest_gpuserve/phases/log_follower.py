"""A growing file, read as it grows, through rotation and truncation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from .reader import PhaseReader

BLOCK: Final = 1 << 20
"""Bytes read at once."""

HEAD: Final = 4096
"""Bytes by which a file is known again."""

BEHIND: Final = 8
"""Polls' worth of bytes that may wait: with more the log is written faster than it is read, and the end counts."""


class LogFollower:
    """Feeds a file to a reader. Another file of that name, or one that begins in another way, is read from its top."""

    def __init__(self, path: Path, reader: PhaseReader) -> None:
        self.path = path
        self.reader = reader
        self._file: int | None = None
        self._offset = 0
        self._head = b""

    def poll(self, now: float, limit: int = 64 << 20) -> int:
        """Read what is new, about ``limit`` bytes at most. Returns how many there were; 0 too when there is no file.

        A log that is further ahead than :data:`BEHIND` polls can read is an endless one: the next poll reads its end.
        """
        count = 0
        while count < limit and (self._file is not None or self._open()):
            assert self._file is not None
            chunk = b"" if self._shorter() else os.pread(self._file, BLOCK, self._offset)
            if chunk:
                if self._offset == len(self._head) < HEAD:
                    self._head = (self._head + chunk)[:HEAD]
                self._offset += len(chunk)
                count += len(chunk)
                self.reader.feed(chunk, now)
            elif not self._moved():
                break
        return count + self._catch_up(limit)

    def _catch_up(self, limit: int) -> int:
        behind = os.fstat(self._file).st_size - self._offset if self._file is not None else 0
        if behind <= BEHIND * limit:
            return 0
        self.reader.skip(behind - limit)
        self._offset += behind - limit
        return behind - limit

    def close(self) -> None:
        """Close the file; another poll reads it from the top."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._offset, self._head = None, 0, b""

    def _open(self) -> bool:
        try:
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        return True

    def _shorter(self) -> bool:
        assert self._file is not None
        return os.fstat(self._file).st_size < self._offset

    def _moved(self) -> bool:
        """At the end of the file: was it cut, or is there another one of its name?"""
        assert self._file is not None
        ours = os.fstat(self._file)
        if ours.st_size < self._offset:
            if len(self._head) < ours.st_size and os.pread(self._file, len(self._head), 0) == self._head:
                self.reader.cut()  # its end was cut off (server/loop.py, Log): go on there
                self._offset = ours.st_size
                return True
        else:
            try:
                there = self.path.stat()
            except OSError:
                return False
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                return False
        self.reader.cut()
        self.close()
        return True
