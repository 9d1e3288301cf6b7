"""Foreign text made safe to look at: what a terminal, a page or a CI runner would obey or hide is written out."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import json

_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\u2800") | {chr(n) for n in range(0xFE00, 0xFE10)}
"""Characters of visible categories that nothing is seen of (fillers, joiners, variation selectors)."""


_COMMAND = re.compile(r"(?m)^([^\S\n]*):(?=:[A-Za-z])|#(?=#\w*\[)")
"""What the runner of a CI service looks for in a log: ``::error::`` of GitHub at the beginning of a line; ``##[…]``,
``##vso[…]`` of Azure and ``##teamcity[…]`` anywhere in it."""


def escape(text: str, width: int | None = None) -> str:
    """``text`` with control, format (bidi, zero width), unassigned and surrogate characters written as escapes, and
    nothing that a CI service's runner takes for a command.

    Line feeds and tabs stay; carriage returns do not, so that nothing can overwrite what stands before it. With
    ``width`` every line is cut to that many columns (an ellipsis takes the last), wide characters counting two.
    """
    clean = text if text.isascii() and text.isprintable() else "".join(map(_shown, text))
    if "::" in clean or "##" in clean:
        clean = _COMMAND.sub(_tamed, clean)
    if width is None:
        return clean
    return "\n".join(_cut(line, width) for line in clean.split("\n"))


def all_seen(text: str) -> bool:
    """Every character is one that people see, or a space; there is no line feed or tab either."""
    return all(character.isprintable() and character not in _INVISIBLE for character in text)


def one_line(text: str, width: int | None = None) -> str:
    """:func:`escape` for where a line feed would break the layout: line feeds and tabs become spaces."""
    return escape(" ".join(text.split()), width)


def foreign_json(data: str | bytes) -> Any:
    """A JSON value that anybody may have written, read as :func:`foreign_decoder` does.

    Raises:
        ValueError: no JSON.
        RecursionError: nested too deeply.
    """
    return foreign_decoder().decode(data if isinstance(data, str) else data.decode())


def foreign_decoder() -> json.JSONDecoder:
    """A number that no counter can hold (10**400, NaN) is null."""
    import json

    def whole(digits: str) -> int | None:
        return int(digits) if len(digits) <= 30 else None

    def real(digits: str) -> float | None:
        value = float(digits)
        return value if abs(value) < 1e30 else None

    return json.JSONDecoder(parse_int=whole, parse_float=real, parse_constant=lambda _: None)


def _tamed(found: re.Match[str]) -> str:
    return "\\x23" if found[1] is None else f"{found[1]}\\x3a"


def _shown(character: str) -> str:
    if character.isprintable() and character not in _INVISIBLE:
        return character
    if character in "\n\t" or unicodedata.category(character) == "Zs":
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _cut(line: str, width: int) -> str:
    if len(line) <= width and line.isascii() and "\t" not in line:
        return line
    columns = 0
    end = None  # where the line is cut if it turns out too long
    for position, character in enumerate(line):
        step = _columns(character, columns)
        if end is None and columns + step > width - 1:
            end = position
        columns += step
        if columns > width:
            return line[:end] + "…"[: max(width, 0)]
    return line


def _columns(character: str, at: int) -> int:
    if character == "\t":
        return 8 - at % 8
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
