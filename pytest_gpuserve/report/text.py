"""Where reports take :func:`escape` from; it lives below all rooms, because every room shows foreign text."""

from __future__ import annotations

from ..text import escape, one_line

__all__ = ["escape", "one_line"]
