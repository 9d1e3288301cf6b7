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


def inline(text: str) -> str:
    """Inside a paragraph: no markup, no tag, no link but plain addresses. ``text`` is escaped already."""
    return re.sub(r"([\\*\[\]`])", r"\\\1", text).replace("<", "&lt;")


def plain(text: object, width: int | None = None) -> str:
    """Foreign text for one line of a paragraph, a list or a table's cell."""
    return inline(one_line(str(text), width)).replace("|", "\\|")


def block(text: object, width: int = 200) -> list[str]:
    """Foreign text as lines of a fence."""
    return escape(str(text), width).splitlines()
