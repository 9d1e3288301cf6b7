"""Where ``gpuserve run`` speaks: lines, and on a terminal one live line below them."""

from __future__ import annotations

import shutil
import sys

from ..text import one_line
from ..watch.starting import Status


class Screen:
    """One line a phase in a log; on a terminal a line that is painted over. Foreign text is escaped."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._painted = False
        self._phase = ""

    def say(self, text: str) -> None:
        """A line, or several, that stay; ``text`` has been escaped."""
        self.clear()
        print(f"gpuserve: {text}", flush=True)

    def show(self, status: Status) -> None:
        """How far it is now."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{one_line(status.text, width)}\x1b[K", end="", flush=True)
            self._painted = True
        elif status.phase and status.phase != self._phase and status.phase not in ("ready", "serving"):
            self._phase = status.phase
            print(f"gpuserve: {status.text}", flush=True)

    def clear(self) -> None:
        """Take the live line away."""
        if self._painted:
            print("\r\x1b[K", end="", flush=True)
            self._painted = False
