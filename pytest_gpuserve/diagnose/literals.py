"""Texts of which one must be where a regular expression matches: searching for them first is many times cheaper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

_Tree: TypeAlias = "dict[str, Any]"

_SHORTEST: Final = 3
_COMMON: Final = dict(zip("zqxj_kvbywgpfmucdlhrsnioate ", range(1, 29), strict=True))
"""Letters of English and of programs: how common each is, roughly. Others are rare."""
_CLASSES: Final = "dDsSwWntrfv0123456789"
_PLACES: Final = "bBAZ"


class Words:
    """A fixed set of texts, searched for all at once: one pass over a line, however many they are.

    The texts are lower case, and so must be what is searched. A text that holds another one is left out.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = frozenset(_shortest(words))
        pattern = _written(_tree(self.words))
        rough = re.compile(_written(_tree(_shortest(_rare_ends(self.words)))).encode())
        self._rough, self._roughly = rough.search, rough.finditer
        self._any = re.compile(pattern.encode()).search
        self._all = re.compile(f"(?=({pattern}))").findall

    def any_in(self, line: bytes) -> bool:
        """Whether one of the texts is in the line."""
        return self._rough(line) is not None and self._any(line) is not None

    def rough_lines(self, lines: bytes) -> set[int]:
        """Numbers, from 0, of the lines in which one of the texts may be; in all others there is none."""
        found: set[int] = set()
        number = begin = 0
        for match in self._roughly(lines):
            number += lines.count(b"\n", begin, match.start())
            begin = match.start()
            found.add(number)
        return found

    def all_in(self, text: str) -> frozenset[str]:
        """Those that are in the text."""
        return frozenset(self._all(text))


def _shortest(words: Iterable[str]) -> set[str]:
    kept = set(words)
    return {word for word in kept if not any(other in word for other in kept - {word})}


def _rare_ends(words: Iterable[str]) -> set[str]:
    """The end of each text from a rare letter on, three letters at least. Few letters begin them all, none of them
    common: at any other place of a line nothing is compared. (The best choice by greed: a set cover.)"""
    begins = {word: set(word[: max(1, len(word) - _SHORTEST + 1)]) for word in words}
    chosen: set[str] = set()
    left = set(begins)
    while left:
        letters = set().union(*(begins[word] for word in left))
        best = min(letters, key=lambda x: (_COMMON.get(x, 1) / sum(x in begins[word] for word in left), x))
        chosen.add(best)
        left = {word for word in left if best not in begins[word]}
    return {word[min(at for at, x in enumerate(word) if x in chosen & begins[word]) :] for word in begins}


def _tree(words: Iterable[str]) -> _Tree:
    tree: _Tree = {}
    for word in words:
        branch = tree
        for letter in word:
            branch = branch.setdefault(letter, {})
        branch[""] = {}
    return tree


def _written(tree: _Tree) -> str:
    """The tree as a regular expression: common beginnings are compared once."""
    if not tree:
        return "(?!)"
    parts = [re.escape(letter) + _written(branch) for letter, branch in sorted(tree.items()) if letter]
    return "" if "" in tree else parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def required(pattern: str, words: Sequence[str] = ()) -> tuple[str, ...]:
    """Lower-case texts, at least one of which is in every match of ``pattern``; empty when there are none to be told.

    Of several such sets the one is chosen whose texts all hold one of ``words``, else the one with the longest texts.

    Understands what rules are written in: literals, classes, groups, alternatives, quantifiers, look-around. What it
    does not understand it takes for "anything", which is safe.
    """
    texts, _ = _alternatives(pattern, 0, words)
    return texts


def _alternatives(pattern: str, at: int, words: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """The best texts of ``a|b|c`` from ``at`` up to the closing parenthesis or the end, and where that is."""
    union: list[str] = []
    whole = True
    while True:
        texts, at = _sequence(pattern, at, words)
        union += texts
        whole = whole and bool(texts)
        if at >= len(pattern) or pattern[at] == ")":
            return (tuple(dict.fromkeys(union)) if whole else ()), at
        at += 1


def _sequence(pattern: str, at: int, words: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """The best texts of one alternative: those of one part of it that must be there."""
    best: tuple[str, ...] = ()
    run = ""

    def worth(texts: tuple[str, ...]) -> tuple[bool, int]:
        covered = all(any(word in text for word in words) for text in texts)
        return bool(texts) and covered, min(map(len, texts), default=0)

    def offer(texts: tuple[str, ...]) -> None:
        nonlocal best
        texts = tuple(text.lower() for text in texts)
        if min(map(len, texts), default=0) >= _SHORTEST and worth(texts) > worth(best):
            best = texts

    while at < len(pattern) and pattern[at] not in "|)":
        character = pattern[at]
        literal, texts, at = _item(pattern, at, words)
        optional, quantified, at = _quantifier(pattern, at)
        if literal is not None and not quantified:
            run += literal
            continue
        if literal is not None and not optional:
            run += literal
        if character in "^$" or literal == "":
            continue
        offer((run,) if run else ())
        run = ""
        if not optional:
            offer(texts)
    offer((run,) if run else ())
    return best, at


def _item(pattern: str, at: int, words: Sequence[str]) -> tuple[str | None, tuple[str, ...], int]:
    """One item: (its text if it is literal, texts of which one is in it, where the next item begins)."""
    character = pattern[at]
    if character == "\\":
        after = pattern[at + 1]
        if after in _PLACES:
            return "", (), at + 2
        return (None if after in _CLASSES else after), (), at + 2
    if character in "^$":
        return "", (), at + 1
    if character == "[":
        return None, (), _class_end(pattern, at)
    if character == "(":
        return _group(pattern, at, words)
    return (None if character == "." else character), (), at + 1


def _group(pattern: str, at: int, words: Sequence[str]) -> tuple[str | None, tuple[str, ...], int]:
    body, look = at + 1, False
    if pattern.startswith("(?", at):
        look = pattern[at + 2] in "=!<" and pattern[at + 2 : at + 4] != "<P" and not pattern.startswith("(?P<", at)
        body = at + 3
        if pattern[at + 2] == "<":
            body = at + 4
        elif pattern[at + 2] == "P":
            body = pattern.index(">", at) + 1
        elif pattern[at + 2] not in ":=!":  # flags for a group: (?i:...)
            body = pattern.index(":", at) + 1
    texts, end = _alternatives(pattern, body, words)
    return ("" if look else None), (() if look else texts), end + 1


def _quantifier(pattern: str, at: int) -> tuple[bool, bool, int]:
    """(may it be absent, is there one at all, where the next item begins)."""
    if at >= len(pattern) or pattern[at] not in "*+?{":
        return False, False, at
    optional = pattern[at] in "*?" or pattern.startswith(("{0", "{,"), at)
    end = pattern.index("}", at) + 1 if pattern[at] == "{" else at + 1
    if end < len(pattern) and pattern[end] in "?+":
        end += 1
    return optional, True, end


def _class_end(pattern: str, at: int) -> int:
    at += 2 if pattern.startswith("[^", at) else 1
    if pattern.startswith("]", at):
        at += 1
    while pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1
