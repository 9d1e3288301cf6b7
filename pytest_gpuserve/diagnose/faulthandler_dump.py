"""Stacks without ptrace: a real-time signal to a process that took our handler (inject/sitecustomize.py).

The last resort: the signal interrupts system calls of the patient, and would kill a process without the handler.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import foreign
from ..procfs import ProcessId, process_id

SIGNAL = signal.SIGRTMAX - 3

_MOST = 4 << 20


def dump(process: ProcessId, markers: Path, facts: Mapping[str, Any], limit: float) -> tuple[str, str]:
    """(text of the dump, "") or ("", why there is none). Waits at most ``limit`` seconds.

    The signal is sent only when all of this holds: the marker of this very process (pid and start time) is there and
    ours, the process catches the signal, it has the marker open, and it can run (a signal to a stopped process would
    come true later).
    """
    marker = markers / f"fh.{process.pid}.{process.start}.txt"
    try:
        file = foreign.opened(marker, follow=False)
    except OSError:
        return "", "it did not take our fault handler"
    with file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (os.geteuid(), 0):
            return "", "its fault handler's file is not ours"
        if not facts.get("caught", 0) >> (SIGNAL - 1) & 1:
            return "", "it no longer has our fault handler"
        if facts.get("state") in ("T", "t", "D") or facts.get("frozen"):
            return "", "it cannot handle a signal now"
        if not _has_open(process.pid, found):
            return "", "it has closed our fault handler's file"
        return _signal_and_wait(process, file.fileno(), found.st_size, limit)


def _signal_and_wait(process: ProcessId, handle: int, before: int, limit: float) -> tuple[str, str]:
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return "", "it has ended"
    try:
        if process_id(process.pid) != process:
            return "", "it has ended"
        signal.pidfd_send_signal(pidfd, SIGNAL)
    except OSError as error:
        return "", f"it cannot be signalled ({error.strerror})"
    finally:
        os.close(pidfd)
    deadline = time.monotonic() + limit
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = os.fstat(handle).st_size
        if now > before and now == size and os.pread(handle, 1, now - 1) == b"\n":  # written in one go: 1 ms
            return os.pread(handle, min(now - before, _MOST), before).decode(errors="replace"), ""
        size = now
    return "", f"its fault handler wrote nothing within {limit:.1f} s"


def _has_open(pid: int, wanted: os.stat_result) -> bool:
    """True when some descriptor of ``pid`` is this file: a program that closes all descriptors reuses the numbers."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for link in links:
        try:
            if os.path.samestat(link.stat(), wanted):
                return True
        except OSError:
            continue
    return False
