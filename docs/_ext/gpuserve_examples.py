"""The examples of the documentation as steps that can be run, and the comparison of what they print.

    ```python title="test_x.py"     a file of that name is written
    ```console run                  each ``$ command`` is run where the files are; what follows is what it should print

Compared is what is stable: numbers, times, paths, kernel functions, classes of methods (py-spy reads them from Python
3.11 on) and the widths of rules are not; a line ``...`` stands for any lines, ``…`` in a line for any text. Every other
line must come, in this order.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).parents[1]

_FENCE = re.compile(r"^(?P<ticks>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=ticks)\s*$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"(?P<rank>[A-Za-z_]\w*\d[\d,-]*)|(?<!\w)\d[\d.:|]*")  # ranks and ids keep theirs: TP0-1,3, tp4
_TITLE = re.compile(r'\btitle="([^"]+)"')


@dataclass(frozen=True)
class File:
    """A file that an example shows."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command of an example and the lines that it should print."""

    words: tuple[str, ...]
    lines: tuple[str, ...] = field(default=())


def pages() -> list[Path]:
    """Every page of the documentation, and the README."""
    own = (path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
    return [DOCS.parent / "README.md", *sorted(own)]


def fences(text: str) -> Iterator[tuple[str, str]]:
    """(info string, body) of every fenced block."""
    for match in _FENCE.finditer(text):
        yield match["info"].strip(), match["body"]


def steps(text: str) -> list[File | Command]:
    """What a page's marked blocks ask for, in their order."""
    found: list[File | Command] = []
    for info, body in fences(text):
        if title := _TITLE.search(info):
            found.append(File(title[1], body))
        elif info.split()[:2] == ["console", "run"]:
            found += _commands(body)
    return found


def _commands(body: str) -> Iterator[Command]:
    head, *parts = re.split(r"^\$ ", body, flags=re.MULTILINE)
    assert not head.strip(), f"a console block begins with a command, not with {head!r}"
    for part in parts:
        command, _, output = part.partition("\n")
        yield Command(tuple(shlex.split(command)), tuple(output.splitlines()))


def plain(line: str) -> str:
    """A line less all that differs from run to run."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r", kernel: \S+", "", line)
    line = re.sub(r"\b[A-Z]\w*\.(?=\w+ \()", "", line)
    line = re.sub(r"\d{8}T\d{6}", "TIME", line)
    line = re.sub(r"([=_-])\1{2,}", r"\1\1\1", line)
    line = _NUMBER.sub(lambda match: match["rank"] or "N", line)
    return " ".join(line.split())


def missing(expected: tuple[str, ...], printed: str) -> str | None:
    """The first expected line that does not come where it should; None: all do."""
    rest = iter([plain(line) for line in printed.splitlines()])
    for line in expected:
        wanted = plain(line)
        if wanted in ("", "..."):
            continue
        pattern = re.compile(".*".join(map(re.escape, wanted.split("…"))))
        if not any(pattern.fullmatch(line) for line in rest):
            return line
    return None
