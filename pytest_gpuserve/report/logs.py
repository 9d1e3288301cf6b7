"""A server's log as an incident needs it: phases from all of it, last lines from its end, what it says of a failure."""

from __future__ import annotations

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .. import foreign
from ..diagnose import triage
from ..diagnose.evidence import LogFact
from ..engines.base import PAGE_ASKED, Engine, LogGrammar, Rank
from ..phases.reader import MOST, RankPhase, read_log
from ..server.readiness import end_of_log
from ..server.record import ServerRecord

_TAIL_BYTES = 256 << 10
FLOOD: Final = 1e6
"""Bytes a second that no log grows by whose lines somebody is to read."""
_FLOOD_TAIL, _REPEATS, _LOOK = 64 << 10, 50, 0.5  # bytes; lines; seconds
_DIGITS = re.compile(r"\d+")
_MISSING = re.compile(r"No such file or directory: '([^']+)'")
_FATAL = frozenset({"crash", "oom", "config", "unsupported_arch", "port", "leak", "infra"})


@dataclass(frozen=True, slots=True)
class Log:
    """A server's log. ``lines``: the last lines of every rank by label; ``server`` for lines without a rank. ``pids``:
    ranks of processes whose titles may not tell them yet. ``server``: the phase by the front end's own lines."""

    phases: Mapping[str, RankPhase] = field(default_factory=dict)
    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tail: str = ""
    pids: Mapping[int, Rank] = field(default_factory=dict)
    server: RankPhase | None = None


def read(record: ServerRecord, grammar: LogGrammar | None) -> Log:
    """Phases from the whole log (from both ends of a very long one), last lines from its end."""
    phases: Mapping[str, RankPhase] = {}
    pids: Mapping[int, Rank] = {}
    server: RankPhase | None = None
    if grammar is not None:
        with suppress(OSError):
            reader = read_log(record.log, grammar, MOST)
            phases, pids, server = reader.ranks(), reader.pids, reader.server
    tail = _tail(record.log)
    return Log(phases, _by_rank(tail, grammar), tail, pids, server)


@dataclass(frozen=True, slots=True)
class Said:
    """What the log says of a failure. ``line``: number of the line that did it, from 1."""

    facts: tuple[LogFact, ...] = ()
    line: int | None = None


def said(record: ServerRecord) -> Said:
    """What the log says of a failure."""
    found = triage.explain([str(record.log)], record.engine, MOST)
    facts = [LogFact(text, "log") for text in found.degraded]
    facts += [LogFact(text, "log", hint=True) for text in found.hints if "gpuserve " not in text]  # no how-to of ours
    if found.cause is None or found.verdict not in _FATAL:
        return Said(tuple(facts))
    witness = f"{record.log.name}, line {found.cause.number}"
    rank = found.cause.rank
    lost = found.cause.kind == "peer_lost"
    if lost:  # who says so is a victim; the only rank that is behind is not
        rank = found.lagging[0] if len(found.lagging) == 1 else None
    verdict = "config" if found.verdict == "crash" and _named(record, found.cause.line) else found.verdict
    fatal = LogFact(found.cause.line, witness, verdict, rank, lost=lost, silent=found.silent if lost else ())
    return Said((fatal, *facts), found.cause.number)


def _named(record: ServerRecord, line: str) -> bool:
    """A file is missing that the command line names, or one below it: the model's path is wrong."""
    missing = _MISSING.search(line)
    if missing is None:
        return False
    words = [record.spec.model or "", *(part for word in record.argv[1:] for part in word.split("="))]
    asked = {word.rstrip("/") for word in words if "/" in word.rstrip("/")} | {record.spec.model}
    return any(missing[1] == word or missing[1].startswith(f"{word}/") for word in asked if word)


def said_more(path: Path, since: int, engine: Engine | None) -> bool:
    """The log has lines after byte ``since`` that are no heartbeats (access lines of pages that we ask for are), or
    was cut at its limit meanwhile."""
    try:
        with foreign.opened(path) as log:
            if log.seek(0, os.SEEK_END) < since:
                return True
            log.seek(since)
            lines = log.read(1 << 20).splitlines()
    except OSError:
        return True
    beats = engine.grammar.heartbeats if engine else (PAGE_ASKED,)
    return any(line.strip() and not any(beat.search(line) for beat in beats) for line in lines)


def flood(path: Path, since: int | None) -> str:
    """The line that a log repeats without end (digits may differ); "" where it does not, or slower than 1 MB/s.

    ``since``: its size a while ago; one that has not changed is not looked at. Takes half a second at most.
    """
    if since is None or size_of(path) in (None, since):
        return ""
    lines, _ = end_of_log(path, _FLOOD_TAIL)
    whole = [line.strip() for line in lines[1:-1] if line.strip()]
    shapes = Counter(_DIGITS.sub("#", line) for line in whole)
    shape, count = next(iter(shapes.most_common(1)), ("", 0))
    if len(whole) < _REPEATS or count < 0.95 * len(whole) or not _rushes(path):
        return ""
    return next(line for line in reversed(whole) if _DIGITS.sub("#", line) == shape)[:200]


def _rushes(path: Path) -> bool:
    """It grows by :data:`FLOOD`. Looked at often: it is cut at its limit meanwhile, again and again."""
    grown, size, until = 0, size_of(path) or 0, time.monotonic() + _LOOK
    while grown < FLOOD * _LOOK and time.monotonic() < until:
        time.sleep(0.01)
        before, size = size, size_of(path) or 0
        grown += max(0, size - before)
    return grown >= FLOOD * _LOOK


def size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _tail(path: Path) -> str:
    """The end of a log, whole lines."""
    lines, cut = end_of_log(path, _TAIL_BYTES)
    return "\n".join(lines[1:] if cut and len(lines) > 1 else lines)


def _by_rank(tail: str, grammar: LogGrammar | None, keep: int = 3) -> dict[str, list[str]]:
    """The last lines of each rank. Heartbeats are folded: a wait loop must not hide what was said before it."""
    found: dict[str, list[str]] = defaultdict(list)
    beats: Counter[str] = Counter()
    for line in reversed(tail.split("\n")):
        if not line.strip():
            continue
        raw = line.encode(errors="replace")
        label, begin = _label(line, grammar)
        if grammar is not None and any(beat.search(raw) for beat in grammar.heartbeats):
            beats[label] += 1
            if beats[label] > 1:
                continue
        if len(found[label]) < keep:
            found[label].insert(0, line[begin:])
    return dict(sorted(found.items()))


def _label(line: str, grammar: LogGrammar | None) -> tuple[str, int]:
    """Whose line it is, and where it begins: a progress bar may be glued in front."""
    found = grammar.rank.search(line.encode(errors="replace")) if grammar is not None else None
    if found is None:
        return "server", 0
    groups = {name: int(value) for name, value in found.groupdict().items() if value and value.isdigit()}
    numbers = {name: groups[name] for name in ("tp", "pp", "dp", "ep") if name in groups}
    if not numbers and "world" in groups:
        numbers = {"tp": groups["world"]}
    begin = len(found.string[: found.start()].decode(errors="replace"))
    return (Rank(**numbers).label, begin) if numbers else ("server", 0)
