"""Foreign text in Markdown: in fences that nothing inside can close, or in a paragraph without markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..text import escape, one_line


def code(lines: Sequence[str], language: str = "text") -> list[str]:
    """Foreign lines in a fence longer than any run of backquotes inside."""
    lines = [escape(line) for line in lines]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *lines, fence]


_REFERENCE = re.compile(r"(?<!\w)@(?=\w)|#(?=\d)|(?<!\w)GH-(?=\d)", re.IGNORECASE)
"""What a tracker makes a mention of a person or a link to an issue of, which then tells of this one."""


def inline(text: str) -> str:
    """Inside a paragraph: no markup, no tag, no mention, no link but plain addresses. ``text`` is escaped already."""
    text = re.sub(r"([\\*\[\]`])", r"\\\1", text).replace("<", "&lt;")
    return _REFERENCE.sub(r"\g<0><!-- -->", text)  # an entity is a character again when mentions are looked for


def plain(text: object, width: int | None = None) -> str:
    """Foreign text for one line of a paragraph, a list or a table's cell."""
    return inline(one_line(str(text), width)).replace("|", "\\|")


def block(text: object, width: int = 200) -> list[str]:
    """Foreign text as lines of a fence."""
    return escape(str(text), width).splitlines()
