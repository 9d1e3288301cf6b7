"""What the processes print: the shapes of the engines' own log lines, so that one grammar reads both.

Everything goes to stderr, one write a line, unbuffered; progress bars are glued together by carriage returns.
"""

from __future__ import annotations

import os
import time

from .config import Options

MEMORY = 138.28
"""GB free on the pretended GPU before anything is loaded."""

BLOCKS = " ▏▎▍▌▋▊▉"


def emit(text: str, descriptor: int = 2) -> None:
    """Write all of it, whatever the locale; a log that nobody reads any more is no reason to die."""
    data = text.encode("utf-8", "replace")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


class Bar:
    """tqdm's text: ``desc:  12%|█▏   | 1/8 [00:03<00:22,  3.18s/it]``, or the engines' ``12% Completed | 1/8``."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def text(self, description: str, done: int, total: int, *, completed: bool = False) -> str:
        elapsed = time.monotonic() - self.began
        if done and elapsed:
            pace = done / elapsed
            rate = f"{pace:5.2f}it/s" if pace >= 1 else f"{1 / pace:5.2f}s/it"
            tail = f"[{clock(elapsed)}<{clock((total - done) / pace)}, {rate}]"
        else:
            tail = f"[{clock(elapsed)}<?, ?it/s]"
        percent = f"{100 * done // total:3d}%"
        if completed:
            return f"{description}: {percent} Completed | {done}/{total} {tail}"
        full, part = divmod(80 * done // total, 8)
        bar = ("█" * full + (BLOCKS[part].strip() if full < 10 else "")).ljust(10)
        return f"{description}{percent}|{bar}| {done}/{total} {tail}"


class Script:
    """The lines of one rank. Rank 0 draws the bars; the others are as silent as the engines' are."""

    def __init__(self, rank: int, options: Options) -> None:
        self.rank = rank
        self.options = options
        self.drafting = False
        self.began = time.monotonic()
        self.bar = Bar()
        self.memory = MEMORY

    def start(self) -> None:
        """A phase whose length a later line tells begins now."""
        self.began = time.monotonic()
        self.bar = Bar()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def line(self, text: str, source: str = "") -> None:
        raise NotImplementedError

    def raw(self, text: str) -> None:
        """Text that no logger prefixed."""
        emit(text)

    def draw(self, text: str) -> None:
        """Progress, drawn by rank 0 only."""
        if not self.rank:
            emit(text)

    def distributed_begin(self) -> None: ...
    def distributed_joined(self) -> None: ...
    def distributed_end(self) -> None: ...
    def load_begin(self, *, draft: bool) -> None: ...
    def shards(self, done: int, total: int) -> None: ...
    def load_end(self, *, draft: bool) -> None: ...
    def kv_begin(self) -> None: ...
    def kv_end(self) -> None: ...
    def compile_begin(self) -> None: ...
    def compile_end(self) -> None: ...
    def autotune_begin(self) -> None: ...
    def autotune_end(self) -> None: ...
    def capture_begin(self, *, draft: bool) -> None: ...
    def captures(self, done: int, total: int) -> None: ...
    def capture_error(self, error: Exception) -> Exception:
        """What the engine makes of an error in a graph capture."""
        return error

    def capture_end(self, *, draft: bool) -> None: ...
    def warmup_begin(self) -> None: ...
    def ready(self) -> None: ...
