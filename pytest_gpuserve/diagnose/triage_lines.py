"""One line of a server's log: which process and rank wrote it, when, at which level, and what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..engines.base import LogGrammar, Rank

LONGEST: Final = 1 << 16
"""Bytes of one line that are searched for words and marks; the rest of a longer one is passed over."""
READ: Final = 1 << 12
"""Bytes of one record that are read: what a longer one goes on with are settings, token ids or a command line."""

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_GLUED: Final = re.compile(rb"[\]s](?:\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\([A-Za-z_]\w* (?:rank=\d+ )?pid=\d+)")
_GLUED_TORCH: Final = re.compile(rb".\[rank\d+\]:\[[EWIF]\d")
"""Where a record follows a progress bar that had no newline."""

_RELAYED = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+ (?:"
    r"(?:- [\w.:]+ )*- (?P<logging>[A-Z]{4,8}) - |\| (?P<loguru>[A-Z]{4,8}) +\| [\w.:<>-]+ - )"
)
"""Python's logging and loguru, of a program that prints another's lines."""
_BRACKET = re.compile(r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?(?P<tags>(?: [A-Z_]+\d+)*)\] ?")
_PROCESS = re.compile(r"\((?P<name>[A-Za-z_][\w.:-]*)(?P<rank> rank=\d+)? pid=(?P<pid>\d+)(?:, ip=[\d.a-f:]+)?\) ?")
_TORCH = re.compile(
    r"(?:\[(?:rank(?P<rank>\d+)|default\d+)\]: ?)?"
    r"(?:\[?(?P<level>[EWIF])\d{3,4} \d\d:\d\d:\d\d[.\d]* (?:\d+ )?[^\]\s]+:\d+\] ?)?"
)
_LEVEL = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)(?:: +| +(?P<time>\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? "
    r"\[?(?P<file>[\w./<>-]+):\d+\] ?)"
)
_CLOCK = re.compile(r"\b(?:(?:(\d{4})-)?(\d\d)-(\d\d)[ T])?(\d\d):(\d\d):(\d\d)\b")
_TAG = re.compile(r"(DP|PP|TP|EP)(\d+)")
_MEMBER = re.compile(r"_(DP|PP|TP|EP)(\d+)")


@dataclass(frozen=True, slots=True)
class Line:
    """A record, or one piece of a line that carriage returns divide.

    Attributes:
        number: of the line in the file, from 1, as an editor counts (newlines only).
        text: the message without its prefixes, indentation kept.
        raw: all of it, decoded; terminal colours removed, nothing else.
        stream: who wrote it, as far as the prefix tells; "" without a prefix.
        rank: label of the rank, or None.
        level: first letter of the level (D I W E C F), or "".
        file: the source file that a record of vLLM names, or "".
    """

    number: int
    text: str
    raw: str
    stream: str = ""
    rank: str | None = None
    level: str = ""
    file: str = ""

    @property
    def error(self) -> bool:
        return self.level in ("E", "C", "F")


def plain(line: bytes) -> bytes:
    """Without terminal colours and other escape sequences."""
    return _ANSI.sub(b"", line) if b"\x1b" in line else line


def glued(line: bytes) -> list[int]:
    """Where another record begins in a line, behind a progress bar without a newline."""
    cuts = [match.start() + 1 for match in _GLUED.finditer(line)] if b"pid=" in line or b"[2" in line else []
    if b"[rank" in line:
        cuts = sorted({*cuts, *(match.start() + 1 for match in _GLUED_TORCH.finditer(line))})
    return cuts


def pieces(line: bytes) -> Iterator[bytes]:
    """The records in one line: progress bars end in a carriage return or in nothing at all."""
    for part in line.split(b"\r"):
        if cuts := glued(part) if len(part) > 40 else []:
            yield from (part[a:b] for a, b in zip((0, *cuts), (*cuts, len(part)), strict=True))
        elif part or b"\r" not in line:
            yield part


def parse(number: int, raw: bytes, grammar: LogGrammar | None = None) -> Line:
    """Take one record apart. ``grammar`` decides which rank wrote it; without one the usual tags do."""
    text = whole = raw[:READ].decode("utf-8", "replace")
    stream, rank, level, file = "", None, "", ""
    if match := _RELAYED.match(text):
        text, level = text[match.end() :], (match["logging"] or match["loguru"])[:1]
    while True:
        if match := _PROCESS.match(text):
            stream = f"{match['name']} {match['pid']}"
            rank = _label(_MEMBER.findall(match["name"])) or (f"TP{match['rank'][6:]}" if match["rank"] else rank)
        elif match := _BRACKET.match(text):
            stream = stream or match["tags"].strip() or "main"
            rank = _label(_TAG.findall(match["tags"])) or rank
        else:
            break
        text = text[match.end() :]
    if (match := _TORCH.match(text)) and match.end():
        text, level = text[match.end() :], match["level"] or level
        if match["rank"]:
            stream, rank = f"rank{match['rank']}", f"TP{match['rank']}"
    if match := _LEVEL.match(text):
        text, level, file = text[match.end() :], match["level"][:1], match["file"] or ""
    if grammar is not None and (found := rank_of(raw[:READ], grammar)):
        rank = found
    return Line(number, text, whole, stream, rank, level, file)


def rank_of(raw: bytes, grammar: LogGrammar) -> str | None:
    """The label of the rank that wrote a line, or None when it carries no tag."""
    match = grammar.rank.search(raw)
    if match is None:
        return None
    groups = match.groupdict()
    numbers = {name: int(groups[name]) for name in ("tp", "pp", "dp", "ep") if groups.get(name)}
    label = Rank(**numbers).label if numbers else "?"
    return None if label == "?" else label


def clock(text: str) -> str | None:
    """The time a record carries, as it is written there."""
    match = _CLOCK.search(text[:120])
    return match.group() if match else None


def seconds(time: str | None) -> float | None:
    """A comparable clock: seconds since the year began, or of the day when the record names no day."""
    match = _CLOCK.fullmatch(time) if time else None
    if match is None:
        return None
    _, month, day, hour, minute, second = (int(value or 0) for value in match.groups())
    return ((month * 31 + day) * 24 + hour) * 3600 + minute * 60 + second


def _label(tags: list[tuple[str, str]]) -> str | None:
    numbers = {name.lower(): int(value) for name, value in tags}
    return Rank(**numbers).label if numbers else None
