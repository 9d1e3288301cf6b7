"""``timeline.jsonl``: what happened when, over a server's life. One JSON object a line, in the order of time.

Times are seconds since the epoch. Three kinds of line:

``{"t", "kind": "phase", "rank": "TP0" | "server", "phase", "end": t | null, "done": n | null, "total": n | null}``
    one rank in one phase; ``end`` null: it had not ended when the incident was taken. ``server`` is the front end.
``{"t", "kind": "sample", "state", "still", "phase", "log", "cpu": {label: s}, "rss", "gpus", "tokens", "requests"}``
    one look of the watcher: seconds without progress, bytes of log that are no heartbeats, seconds of CPU of each
    process since its own start, bytes resident in all, and of each GPU ``[bytes used, percent, watts]``.
``{"t", "kind": "event", "text"}``
    what the supervisor, pytest and the watcher did.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from .. import foreign
from ..phases.rank_phase import RankPhase
from ..server.control import Event
from ..server.record import ServerRecord
from ..watch.samples import NAME as SAMPLES
from .logs import Log

NAME: Final = "timeline.jsonl"

_MOST_BYTES: Final = 32 << 20
_MOST_EVENTS: Final = 500
_WHY: Final = {
    "owner": "pytest is gone",
    "stop": "it was asked to end it",
    "alarm": "the alarm {name}",
    "failed": "it failed",
}


def timeline(record: ServerRecord, log: Log, events: Sequence[Event], reason: str, now: float) -> list[dict[str, Any]]:
    """Every line, oldest first. ``now``: when the incident of this ``reason`` began."""
    found: list[dict[str, Any]] = [_event(record.started, "launched")]
    for label, phase in log.phases.items():
        found += _phases(label, phase)
    if log.server is not None:
        found += _phases("server", log.server)
    found += samples(record.directory / SAMPLES)
    told = [_event(event.time, text) for event in events if (text := _told(event))]
    found += told if len(told) <= _MOST_EVENTS else [*told[:20], *told[20 - _MOST_EVENTS :]]
    with suppress(OSError):
        found.append(_event((record.directory / "ready").stat().st_mtime, "handed to a test"))
    found.append(_event(now, f"incident: {reason}"))
    return sorted(found, key=lambda line: float(line["t"]))


def samples(path: Path) -> Iterator[dict[str, Any]]:
    """What the watcher kept (watch/samples.py); nothing where nobody watches. A torn line is passed over."""
    try:
        data = foreign.beginning(path, _MOST_BYTES)
    except OSError:
        return
    for line in data.splitlines():
        try:
            entry = json.loads(line)
            float(entry["t"])
        except (ValueError, KeyError, TypeError):
            continue
        yield entry


def _phases(label: str, phase: RankPhase) -> Iterator[dict[str, Any]]:
    def line(name: str, begin: float, end: float | None, last: bool) -> dict[str, Any]:
        return {
            "t": round(begin, 3),
            "kind": "phase",
            "rank": label,
            "phase": name,
            "end": None if end is None else round(end, 3),
            "done": phase.done if last else None,
            "total": phase.total if last else None,
        }

    for number, (name, begin, end) in enumerate(phase.history, 1):
        yield line(name, begin, end, phase.left is not None and number == len(phase.history))
    if phase.left is None:
        yield line(phase.phase, phase.since, None, True)


def _told(event: Event) -> str | None:
    """One event of the supervisor's in words; None for what tells nobody anything."""
    data = event.data
    name = data.get("name")
    match event.kind:
        case "started":
            return f"started (pid {data.get('pid')})"
        case "failed":
            return f"could not be started: {data.get('error')}"
        case "exited":
            return f"its first process exited with code {data.get('code')}"
        case "fired":
            return f"the alarm {name} went off"
        case "dumped":
            code = data.get("code")
            end = "was cut off at its limit" if code is None else f"ended with code {code}"
            return f"the dump of {name} {end} after {data.get('seconds')} s"
        case "spared":
            return f"spared by the dump of {name}"
        case "killing":
            return f"being ended: {_WHY.get(str(data.get('why')), str(data.get('why'))).format(name=name)}"
        case "left":
            return f"process {data.get('pid')} (state {data.get('state')}) would not die"
        case "stopped":
            return "nothing of it is left"
    return None


def _event(when: float, text: str) -> dict[str, Any]:
    return {"t": round(when, 3), "kind": "event", "text": text}
