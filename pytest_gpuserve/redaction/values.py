"""Where a secret stands: after its name, in every writing of names and values that logs, JSON and shells have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from . import sensitive

_OPENING = re.compile(r"[bru]?(\\*[\"'])")
_FIELD = re.compile(
    rf"(?<![\w-])(?=[\w-])(?P<key>-{{0,2}}(?=[\w.-]{{0,64}}(?i:{sensitive.SECRET_NAME_HINT}))[A-Za-z_][\w.-]{{0,64}})"
    r"(?P<separator>\\*[\"']?\s*(?:=>|:=|[:=])\s*|\\*[\"']\s*,\s*|\s+(?:\\\s+)?)"
)
_SCHEME = re.compile(r"(?i)(?:bearer|basic|digest|token|apikey|negotiate)\s+")
_LIST_MARK = re.compile(r"\\*[\"']|[\[\](){}]|\n")
_LIST_GOES_ON = re.compile(
    r"\s*(?!\[\d{4}-\d\d-)(?:[\d\[\]{}\"'.,+-]|tensor|array|true|false|null|none|nan|inf)", re.IGNORECASE
)


def secret_values(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of every value whose name is a secret's, in order; they do not overlap."""
    position = 0
    while found := _FIELD.search(text, position):
        position = found.end()
        if span := _secret_span(text, found):
            yield span
            position = max(span[1], position)


def _secret_span(text: str, found: re.Match[str]) -> tuple[int, int] | None:
    """Where the secret stands whose name may have been ``found``; None when it is no secret."""
    key, separator, begin = found["key"], found["separator"], found.end()
    flag = key.startswith("-")
    before = text[found.start() - 1 : found.start()]
    begins = text[begin : begin + 8].lstrip("\\\"'")
    if not (sensitive.is_secret(key, begins) or (before in ("?", "&") and re.search(r"(?i)sig(nature)?$", key))):
        return None
    opening = _OPENING.match(text, begin)
    if opening:
        begin = opening.end()
        end = _string_end(text, begin, opening[1])
        end -= len(opening[1]) if text.endswith(opening[1], begin, end) else 0
    elif text.startswith(("[", "("), begin) and separator.strip():
        return begin, value_end(text, begin) or len(text)
    else:
        if not separator.strip("\\ \t\r\n") and (not flag or text.startswith("-", begin)):
            return None  # prose; or a switch, and the next option
        if "," in separator:
            return None  # an element of a list that is no option
        scheme = _SCHEME.match(text, begin)
        bare = re.compile(r"[^\s\"'&;]+").match(text, scheme.end() if scheme else begin)
        if not bare or ("=" in separator and separator[-1].isspace() and re.match(r"[\w.-]+=", bare[0])):
            return None  # no value: the next name follows
        begin, end = bare.span()
        end -= len(bare[0]) - len(bare[0].rstrip(",)]}"))
        return begin, end
    if scheme := _SCHEME.match(text, begin, end):
        begin = scheme.end()
    return begin, end


def value_end(text: str, start: int) -> int | None:
    """Where the quoted string or the bracket that begins at ``start`` ends; None when it does not end here.

    A string ends with its line; a list goes on over lines that look like list.
    """
    if opening := _OPENING.match(text, start):
        return _string_end(text, opening.end(), opening[1])
    depth, position = 0, start
    while found := _LIST_MARK.search(text, position):
        position = found.end()
        mark = found[0]
        if mark == "\n":
            if text[position:].strip() and not _LIST_GOES_ON.match(text, position):
                return found.start()
        elif mark in "[({":
            depth += 1
        elif mark in "])}":
            depth -= 1
            if depth <= 0:
                return position
        else:
            position = _string_end(text, position, mark)
    return None


def _string_end(text: str, position: int, mark: str) -> int:
    """After the closing ``mark``, or at the end of the line. Inside JSON inside JSON, ``\\"`` closes what it opened."""
    line_end = text.find("\n", position)
    line_end = len(text) if line_end < 0 else line_end
    for found in re.compile(r"(\\*)" + mark[-1]).finditer(text, position, line_end):
        slashes, level = len(found[1]), len(mark) - 1
        if slashes == level or (not level and slashes % 2 == 0):
            return found.end()
    return line_end
