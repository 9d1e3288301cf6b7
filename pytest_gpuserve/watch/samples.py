"""The samples of a server's whole life in a file of bounded size: ``samples.jsonl``, for the timeline of a report.

The first samples are kept every second; when there are too many, every other one goes and the next ones come half as
often. What is told in words (a test begins, the state changes) is kept apart from that, the newest :data:`NOTES`.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from .progress import Reading
from .sample import Sample

NAME: Final = "samples.jsonl"
MOST: Final = 1500
"""Samples in the file; with :data:`NOTES` at most 2000 lines."""
NOTES: Final = 250
LABELS: Final = 600
"""Processes whose CPU one sample names; a tree of more (compilers) is summed up as ``other``."""


class SampleFile:
    """Appends to ``path``; rewrites it, in one step, when it has grown too long. Not thread-safe.

    A full disk costs lines, never the watch.
    """

    def __init__(self, path: Path, *, every: float = 1.0, most: int = MOST, notes: int = NOTES) -> None:
        self._path = path
        self._every = every
        self._most = most
        self._due = float("-inf")
        self._state = ""
        self._samples: list[str] = []
        self._notes: deque[str] = deque(maxlen=notes)
        self._lines = 0
        self._file = -1

    def add(self, sample: Sample, reading: Reading, now: float) -> None:
        """Keep a sample, if it is time for one or the state has changed. ``now``: its time, seconds since the epoch."""
        if sample.at < self._due and reading.state == self._state:
            return
        self._due, self._state = sample.at + self._every - 0.1, reading.state
        self._samples.append(_line(_sample(sample, reading, now)))
        if len(self._samples) > self._most:
            del self._samples[-2::-2]  # the newest stays
            self._every *= 2
            self._rewrite()
        else:
            self._append(self._samples[-1])

    def note(self, text: str, now: float) -> None:
        """Keep one event."""
        self._notes.append(_line({"t": round(now, 3), "kind": "event", "text": text[:400]}))
        if self._lines >= self._most + 2 * (self._notes.maxlen or 0):
            self._rewrite()
        else:
            self._append(self._notes[-1])

    def close(self) -> None:
        """No more will come."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, line: str) -> None:
        """One write, so that a kill tears no line but the last."""
        with suppress(OSError):
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(self._file, line.encode())
            self._lines += 1

    def _rewrite(self) -> None:
        draft = self._path.with_name(f".{self._path.name}")
        lines = [*self._notes, *self._samples]
        with suppress(OSError):
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
                file.writelines(lines)
            draft.replace(self._path)
            self.close()
            self._lines = len(lines)


def _sample(sample: Sample, reading: Reading, now: float) -> dict[str, Any]:
    return {
        "t": round(now, 2),
        "kind": "sample",
        "state": reading.state,
        "still": round(reading.still, 1),
        "phase": sample.phase,
        "log": sample.log,
        "cpu": _cpu(sample),
        "rss": sum(p.rss for p in sample.processes.values()),
        "gpus": [[g.memory, g.utilisation, None if g.power is None else round(g.power)] for g in sample.gpus],
        "tokens": sample.tokens,
        "requests": sample.requests,
    }


def _cpu(sample: Sample) -> Mapping[str, float]:
    """Seconds by label; processes of one label are added up."""
    seconds: Counter[str] = Counter()
    for process in sample.processes.values():
        label = process.label if process.label in seconds or len(seconds) < LABELS else "other"
        seconds[label] += process.cpu  # type: ignore[assignment]
    return {label: round(value, 2) for label, value in seconds.items()}


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"
