"""Our requests in flight, told from the process that sends them to the one that watches: a small shared file.

A client process owns one file ``requests.<pid>.<starttime>`` in the server's directory: counters and a table of start
times, mapped into memory. Writing costs no system call, and what a killed client leaves behind is recognised as stale.
Times are CLOCK_MONOTONIC seconds, the same in every process of a machine.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .. import procfs

SLOTS = 509
"""Requests that can be in flight with their start times; more are only counted."""

_HEAD = struct.Struct("<QQd")  # begun, ended, start of the longest that found no slot
_SLOT = struct.Struct("<d")
_SIZE = _HEAD.size + SLOTS * _SLOT.size


@dataclass(frozen=True, slots=True)
class InFlight:
    """``count`` requests under way, the oldest for ``oldest`` seconds (None: none); ``ended`` since the start."""

    count: int = 0
    oldest: float | None = None
    ended: int = 0
    begun: int = 0


class Requests:
    """This process's requests to one server. Thread-safe; a process that was forked writes a file of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._pid = 0
        self._map: mmap.mmap | None = None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around one request."""
        slot = self._begin()
        try:
            yield
        finally:
            self._end(slot)

    def _begin(self) -> int | None:
        with self._lock:
            view = self._view()
            if view is None:
                return None
            begun, ended, _ = _HEAD.unpack_from(view)
            now = time.monotonic()
            for slot in range(SLOTS):
                at = _HEAD.size + slot * _SLOT.size
                if not _SLOT.unpack_from(view, at)[0]:
                    _SLOT.pack_into(view, at, now)
                    break
            else:
                slot = -1
            _HEAD.pack_into(view, 0, begun + 1, ended, now)
            return slot

    def _end(self, slot: int | None) -> None:
        if slot is None:
            return
        with self._lock:
            if self._map is None or self._pid != os.getpid():
                return
            begun, ended, last = _HEAD.unpack_from(self._map)
            _HEAD.pack_into(self._map, 0, begun, ended + 1, last)
            if slot >= 0:
                _SLOT.pack_into(self._map, _HEAD.size + slot * _SLOT.size, 0.0)

    def _view(self) -> mmap.mmap | None:
        if self._map is not None and self._pid == os.getpid():
            return self._map
        self._pid = os.getpid()
        me = procfs.process_id(self._pid)
        if me is None:
            return None
        try:
            path = self._directory / f"requests.{me.pid}.{me.start}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(descriptor, _SIZE)
                self._map = mmap.mmap(descriptor, _SIZE)
            finally:
                os.close(descriptor)
        except OSError:  # the server's directory is gone: nobody watches any more
            self._map = None
        return self._map


def read(directory: Path) -> InFlight:
    """All live clients' requests to the server of ``directory`` together."""
    now = time.monotonic()
    count = ended_all = begun_all = 0
    oldest: float | None = None
    for path in directory.glob("requests.*.*"):
        with suppress(OSError, ValueError, struct.error):
            _, pid, start = path.name.split(".")
            raw = path.read_bytes()
            begun, ended, _ = _HEAD.unpack_from(raw)
            ended_all += ended
            begun_all += begun
            if begun == ended or not procfs.same(procfs.ProcessId(int(pid), int(start))):
                continue
            count += begun - ended
            ages = [now - t for (t,) in _SLOT.iter_unpack(raw[_HEAD.size :]) if t]
            if ages:
                oldest = max(*ages, oldest or 0.0)
    return InFlight(count, oldest, ended_all, begun_all)
