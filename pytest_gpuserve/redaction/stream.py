"""Redaction of a stream in constant memory: a log of any size, cut into chunks anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable

from .redact import Redactor


class RedactingWriter:
    """Redacts what is fed to it and hands it on by lines, which end in ``\\n`` or, as progress bars do, in ``\\r``.

    A line longer than ``limit`` characters is cut, with a note: nothing that was seen only in part is let through.
    Secrets that go on in the next line are waited for. Close it, or the last line is lost.
    """

    def __init__(self, redactor: Redactor, write: Callable[[str], object], limit: int = 1 << 16) -> None:
        self._redactor = redactor
        self._write = write
        self._limit = limit
        self._pending: list[str] = []  # pieces of the line being received
        self._size = 0
        self._held = ""  # whole lines that wait for what follows
        self._dropped = 0  # characters seen of a line that was cut
        self._in_list = False  # inside a list of tokens that was too long to hold

    def feed(self, chunk: str) -> None:
        """Take the next piece of the stream."""
        for piece in re.split(r"(?<=[\n\r])", chunk):
            self._pending.append(piece)
            self._size += len(piece)
            if piece.endswith(("\n", "\r")):
                self._line(self._take())
            elif self._size > self._limit:
                self._cut(self._take())

    def close(self) -> None:
        """Write what is left."""
        self._line(self._take())
        self._flush()

    def __enter__(self) -> RedactingWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> str:
        line = "".join(self._pending)
        self._pending.clear()
        self._size = 0
        return line

    def _line(self, line: str) -> None:
        body = line.rstrip("\r\n")
        if self._dropped:
            length = self._dropped + len(body)
            self._write(f" <the rest of a line of {length} characters left out>{line[len(body) :] or chr(10)}")
            self._dropped = 0
        elif len(line) > self._limit:
            self._cut(body)
            self._line(line[len(body) :])
        elif line:
            self._whole(line)

    def _whole(self, line: str) -> None:
        if self._in_list and re.fullmatch(r"[\s\d,.\[\]()+'\"eE-]*", line):
            return
        self._in_list = False
        self._held += line
        if not self._redactor.unfinished(self._held):
            self._flush()
        elif len(self._held) > self._limit:
            self._flush()
            self._in_list = True

    def _flush(self) -> None:
        if self._held:
            text, self._held = self._held, ""
            self._write(self._redactor.redact(text))

    def _cut(self, text: str) -> None:
        """Let the beginning of an endless line through; nothing near where it was cut, which may be half a secret."""
        if not self._dropped:
            self._flush()
            shown = self._redactor.redact(text)[: self._limit // 2]
            self._write(shown[: max(shown.rfind(" "), 0)])
        self._dropped += len(text)
