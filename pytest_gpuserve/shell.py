"""Command lines as a person may paste them into a POSIX shell: what is shown runs as it stands."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence

from .text import all_seen

HOME = re.compile(r"(?<![\w.~-])~(?=/|$)")
"""Where redaction left ``~`` for this user's home directory, which no shell would put back inside a word."""

EMPTY = "\0"
"""Stands for a new empty directory; no argument can have it."""

_OURS = re.compile(f"({HOME.pattern}|{EMPTY})")


def word(text: str) -> str:
    """One word, quoted where it must be. Nothing of it breaks the line or is obeyed by a terminal."""
    return "".join(map(_piece, filter(None, _OURS.split(text)))) or "''"


def line(argv: Sequence[str], env: Iterable[tuple[str, str]] = ()) -> str:
    """A command with the variables that stand before it."""
    pairs = list(env)
    if all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name, _ in pairs):
        variables = [f"{name}={word(value) if value else ''}" for name, value in pairs]
    else:  # a name that is none to a shell
        variables = ["env", *(word(f"{name}={value}") for name, value in pairs)]
    return " ".join([*variables, *map(word, argv)])


def _piece(text: str) -> str:
    if text == "~":
        return '"$HOME"'
    if text == EMPTY:
        return '"$(mktemp -d)"'
    if all_seen(text):
        return shlex.quote(text)
    return f"\"$(printf '{''.join(map(_printed, text))}')\""  # line feeds at its end are lost: they never matter


def _printed(character: str) -> str:
    """For the format of printf(1)."""
    if character == "%":
        return "%%"
    if all_seen(character) and character not in "\\'\"-":
        return character
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
