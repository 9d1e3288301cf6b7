"""The log as an incident keeps it: a bounded number of lines, each with its rank; what looks bad and is not, folded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from ...diagnose.triage_lines import parse
from ...diagnose.triage_rules import Rules, load
from ...engines import get_engine
from ...engines.base import LogGrammar
from ...phases.labels import label_order
from .reading import Folder

LINES: Final = 2500
HEAD_LINES: Final = 400
"""Lines of all files together, and of the beginning of each."""
CHARACTERS: Final = 420_000
WIDTH: Final = 1200

_HEAD_BYTES = 96 << 10
_TAIL_BYTES = 384 << 10
_NAME = re.compile(r"log[A-Za-z0-9_.-]{0,40}\.(?:txt|log)", re.ASCII)
_BEATS = ("heartbeat", "said again and again while it waits")


@dataclass(frozen=True, slots=True)
class Line:
    """One line. ``level``: E or W, else ""."""

    rank: str
    text: str
    level: str


@dataclass(frozen=True, slots=True)
class Block:
    """Lines that follow each other. ``folded``: rules by which they are folded, with the reason and the number of
    lines; empty for lines that are shown."""

    lines: tuple[Line, ...]
    folded: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Excerpt:
    """One file. ``gap``: what is left out between the blocks and ``tail``; "" when nothing is."""

    name: str
    blocks: tuple[Block, ...]
    gap: str
    tail: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class LogView:
    """``ranks``: who wrote lines, for the filter. ``folded``: how many lines are."""

    excerpts: tuple[Excerpt, ...]
    ranks: tuple[str, ...]
    lines: int
    folded: int


def view(folder: Folder, engine: str) -> LogView:
    """Every ``log*.txt`` of an incident, the beginning of the log before its end. Never raises."""
    grammar = _grammar(engine)
    rules = load()
    names = [name for name in folder.names() if _NAME.fullmatch(name)]
    if "log.txt" in names:  # all of it
        names = [name for name in names if name not in ("log_tail.txt", "log_head.txt")]
    names.sort(key=lambda name: ("head" not in name, "tail" in name, name))
    each, room = LINES // max(1, len(names)), CHARACTERS // max(1, len(names))
    excerpts = []
    for name in names[:8]:
        ends = folder.ends(name, _HEAD_BYTES, _TAIL_BYTES)
        first, last = ends.head.split("\n"), ends.tail.split("\n") if ends.tail else []
        first, last, cut = _fit(first, last, each, room)
        parts = [f"{cut} lines"] if cut else []
        parts += [f"{ends.left_out / (1 << 20):.1f} MiB"] if ends.left_out else []
        blocks, tail = (tuple(_blocks(lines, grammar, rules)) for lines in (first, last))
        excerpts.append(Excerpt(name, blocks, f"{' and '.join(parts)} left out" if parts else "", tail))
    shown = [(b, line) for e in excerpts for b in (*e.blocks, *e.tail) for line in b.lines]
    ranks = sorted({line.rank for _, line in shown if line.rank}, key=label_order)
    return LogView(tuple(excerpts), tuple(ranks), len(shown), sum(bool(block.folded) for block, _ in shown))


def _grammar(engine: str) -> LogGrammar | None:
    with suppress(Exception):  # an engine that is not installed here, or broken
        return get_engine(engine).grammar
    return None


def _fit(first: list[str], last: list[str], lines: int, room: int) -> tuple[list[str], list[str], int]:
    """As many lines as there is room for: the end matters most. Returns the beginning, the end, and the number gone."""
    if not last and len(first) <= lines and sum(map(len, first)) <= room:
        return first, [], 0
    every = len(first) + len(last)
    everything = first + last
    head = _within(first[: min(HEAD_LINES, lines // 4)], room // 4)
    tail = _within(list(reversed(everything[len(head) :])), room - room // 4)[: lines - len(head)]
    return head, tail[::-1], every - len(head) - len(tail)


def _within(lines: Sequence[str], room: int) -> list[str]:
    kept = []
    for line in lines:
        room -= min(len(line), WIDTH) + 40
        if room < 0:
            break
        kept.append(line)
    return kept


def _blocks(lines: Sequence[str], grammar: LogGrammar | None, rules: Rules) -> Iterator[Block]:
    """Runs of lines that are shown, and of lines that are folded, by whatever rules."""
    read = (_read(number, raw, grammar, rules) for number, raw in enumerate(lines) if raw.strip())
    for folded, run in groupby(read, key=lambda pair: pair[1] is not None):
        pairs = list(run)
        reasons = Counter(why for _, why in pairs if why is not None) if folded else {}
        yield Block(
            tuple(line for line, _ in pairs), tuple((name, why, count) for (name, why), count in reasons.items())
        )


def _newest(raw: str) -> str:
    """Of the states of a progress bar, which overwrite each other on a terminal, the last one."""
    states = [state for state in re.split(r"\\x0d|\r", raw) if state.strip()]
    return states[-1] if states else raw


def _read(number: int, raw: str, grammar: LogGrammar | None, rules: Rules) -> tuple[Line, tuple[str, str] | None]:
    raw = _newest(raw)
    data = raw.encode(errors="replace")
    line = parse(number, data, grammar)
    shown = raw if len(raw) <= WIDTH else f"{raw[:WIDTH]}… ({len(raw) - WIDTH} more characters)"
    why = None
    if grammar is not None and any(beat.search(data) for beat in grammar.heartbeats):
        why = _BEATS
    elif rules.gate.any_in(data.lower()) and (rule := rules.noise_in(line.text)):
        why = (rule.name, rule.text or _BEATS[1])
    level = "E" if line.error else "W" if line.level == "W" else ""
    return Line(line.rank or "", shown, level), why
