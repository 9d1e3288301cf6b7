"""Titles, signals and ends of the server's processes."""

from __future__ import annotations

import os
import signal

PR_SET_PDEATHSIG = 1


def set_title(title: str) -> None:
    """The name that ps shows. Without setproctitle the process stays untitled, as the engines' do."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle(title)


def leave_interrupts_to_the_front_end() -> None:
    """Ctrl-C reaches every process of a terminal. (What ``--ignore-term`` ignores, children inherit.)"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when the thread that started it ends, however that happens (Linux)."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
