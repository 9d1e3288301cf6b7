"""The parts of a server's log that an incident keeps: all of a small one; of others the head, what is around the cause,
and the last lines. Redacted and escaped where people read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from .. import foreign
from ..redaction.redact import Redactor
from ..redaction.stream import RedactingWriter
from ..text import escape
from .files import Store, Stores

WHOLE: Final = 256 << 10
"""Bytes of a log that is kept whole."""
HEAD: Final = 64 << 10
"""Bytes of the beginning, where engines print their settings."""
AROUND: Final = 60
"""Lines before and after the cause."""
TAIL: Final = 400
"""Lines of the end."""

_LONGEST: Final = 16 << 10
_MOST: Final = 4 << 30


def write_tail(stores: Stores, redactor: Redactor, tail: str) -> None:
    """``log_tail.txt``. ``tail``: the end of the log as text."""
    _write(stores, redactor, "log_tail.txt", "\n".join(tail.split("\n")[-TAIL:]))


def write_rest(stores: Stores, redactor: Redactor, log: Path, cause: int | None) -> None:
    """``log.txt``, or ``log_head.txt`` and, when the ``cause`` (number of a line) is known, ``log_cause.txt``."""
    with suppress(OSError), foreign.opened(log) as file:
        begin = file.read(WHOLE + 1)
        if len(begin) <= WHOLE:
            _write(stores, redactor, "log.txt", begin.decode(errors="replace"))
            return
        head = begin[:HEAD]
        _write(stores, redactor, "log_head.txt", head[: head.rfind(b"\n") + 1 or HEAD].decode(errors="replace"))
        if cause is not None:
            file.seek(0)
            around = b"".join(_around(file, cause))
            _write(stores, redactor, "log_cause.txt", around.decode(errors="replace"))


def _around(file: BinaryIO, cause: int) -> Iterator[bytes]:
    """Lines near one, each with its number; only the beginning of a very long line."""
    number, read, fresh = _skip(file, max(0, cause - AROUND - 1)) + 1, 0, True
    while number <= cause + AROUND and read < _MOST and (line := file.readline(_LONGEST)):
        read += len(line)
        whole = line.endswith(b"\n")
        if fresh and number >= cause - AROUND:
            yield b"%s%d: %s%s" % (b"> " if number == cause else b"  ", number, line, b"" if whole else b"\n")
        fresh = whole
        number += whole


def _skip(file: BinaryIO, lines: int) -> int:
    """Go on by so many lines, a block at a time; how many there were."""
    left = lines
    while left and (block := file.read(1 << 20)):
        ends = block.count(b"\n")
        if ends < left:
            left -= ends
            continue
        at = -1
        for _ in range(left):
            at = block.find(b"\n", at + 1)
        file.seek(at + 1 - len(block), os.SEEK_CUR)
        left = 0
    return lines - left


def _write(stores: Stores, redactor: Redactor, name: str, text: str) -> None:
    def write(store: Store) -> None:
        if store.redacts:
            store.write(name, shown(redactor, text), clean=True)
        else:
            store.write(name, text)

    stores.each(write)


def shown(redactor: Redactor, text: str) -> str:
    """As people may see it: secrets that were split over lines are found too."""
    pieces: list[str] = []
    with RedactingWriter(redactor, pieces.append) as writer:
        writer.feed(text)
    return escape("".join(pieces))
