"""What others wrote, read with care: through no link, no more than a limit, and of any shape.

A page is built from files that may be torn, huge, of another version, or made to mislead. Nothing here raises because
of what stands in a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ... import foreign
from ...text import foreign_json
from ..bundle_reader import MOST_BYTES, Bundle

LINES_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Ends:
    """The beginning and the end of a text; ``left_out``: bytes between them."""

    head: str
    left_out: int
    tail: str


class Folder:
    """A directory. Names may have directories in front; every part of them is opened without following links."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self, inside: str = "") -> list[str]:
        """Names in it, sorted; none where it cannot be listed."""
        with suppress(OSError):
            return sorted(os.listdir(self.path / inside))
        return []

    def read(self, name: str, most: int) -> bytes | None:
        """At most ``most`` bytes from the start of a regular file; None where there is none."""
        with suppress(OSError), foreign.opened_below(self.path, name) as file:
            return file.read(most)
        return None

    def json(self, name: str) -> Mapping[str, Any]:
        """The JSON object in a file; empty where there is none that can be read."""
        data = self.read(name, foreign.MOST_JSON)
        return mapping(parsed(data)) if data else {}

    def lines(self, name: str) -> Iterator[Mapping[str, Any]]:
        """The JSON objects of a file of lines; what is none is passed over."""
        for line in (self.read(name, LINES_BYTES) or b"").splitlines():
            entry = parsed(line)
            if isinstance(entry, dict):
                yield entry

    def ends(self, name: str, head: int, tail: int) -> Ends:
        """The first ``head`` and the last ``tail`` bytes of a text of any size, each cut at a line's end."""
        with suppress(OSError), foreign.opened_below(self.path, name) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= head + tail:
                return Ends(file.read(head + tail).decode(errors="replace"), 0, "")
            first = file.read(head)
            first = first[: first.rfind(b"\n") + 1] or first
            file.seek(size - tail)
            last = file.read(tail)
            last = last[last.find(b"\n") + 1 :]
            return Ends(first.decode(errors="replace"), size - len(first) - len(last), last.decode(errors="replace"))
        return Ends("", 0, "")


class Packed(Folder):
    """The files of a bundle that came from elsewhere, which is never unpacked to a disk."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(Path(bundle.name))
        self._bundle = bundle

    def names(self, inside: str = "") -> list[str]:
        prefix = f"{inside}/" if inside else ""
        below = (name.removeprefix(prefix) for name in self._bundle.files.names if name.startswith(prefix))
        return sorted({name.partition("/")[0] for name in below})

    def read(self, name: str, most: int) -> bytes | None:
        with suppress(OSError):
            return self._bundle.files.read(name, most)
        return None

    def json(self, name: str) -> Mapping[str, Any]:
        return self._bundle.json(name)

    def ends(self, name: str, head: int, tail: int) -> Ends:
        data = self.read(name, MOST_BYTES) or b""
        if len(data) <= head + tail:
            return Ends(data.decode(errors="replace"), 0, "")
        first = data[:head]
        first = first[: first.rfind(b"\n") + 1] or first
        last = data[-tail:]
        last = last[last.find(b"\n") + 1 :]
        left = len(data) - len(first) - len(last)
        return Ends(first.decode(errors="replace"), left, last.decode(errors="replace"))


def parsed(data: bytes) -> Any:
    """A JSON value; None for what is none."""
    try:
        return foreign_json(data)
    except (ValueError, RecursionError):
        return None


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: object, most: int = 10_000) -> Sequence[Any]:
    return value[:most] if isinstance(value, list) else ()


def text(value: object, most: int = 4000) -> str:
    """A value as text, cut; "" for nothing, and for what has no short form."""
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[:most]}… ({len(value) - most} more characters)"
    if isinstance(value, bool) or value is None or isinstance(value, (dict, list)):
        return ""
    return str(value)[:100]


def texts(value: object, most: int = 2000) -> tuple[str, ...]:
    """The texts of a list."""
    return tuple(text(entry, 300) for entry in items(value, most) if isinstance(entry, (str, int, float)))


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with suppress(OverflowError):
        found = float(value)
        return found if abs(found) < 1e18 else None  # false for NaN, too
    return None
