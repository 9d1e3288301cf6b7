"""The classes of ranks as a tree of frames, root first: what all share stands once, and the tree forks where they part.

Who belongs to which class, and what each is taken for, is the judgement's (``incident.json``); lines come from the
stacks of each process where they are there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...diagnose import parse, roles
from ...diagnose.merge import merge, place
from ...diagnose.signatures import by_id
from ...phases.labels import format_ranks, label_order
from ..bundle_reader import MOST_PARSED
from .reading import Folder, items, mapping, text, texts

CLASSES: Final = 300
DEPTH: Final = 24
"""Forks inside forks; below that, each class is shown by itself."""
FRAMES: Final = 20_000
RUNS: Final = 64
"""Chips of one class."""

_STACK_FILES: Final = 1200
_STACK_BYTES: Final = 4 << 20
_KINDS: Final = {"cause": "cause", "waits": "waits", "idle": "idle"}

_Step = tuple[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Frame:
    """``function``, ``file:line`` or, where ranks are at different lines, ``file:12|14``."""

    name: str
    place: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """A class: its ranks are here. ``kind``: cause, waits, idle or other."""

    kind: str
    what: str
    moving: str


@dataclass(slots=True)
class Node:
    """Frames that these ranks share, down to where they part. ``chips``: runs of ranks; ``labels``: each of them."""

    labels: tuple[str, ...]
    frames: list[Frame]
    children: list[Node] = field(default_factory=list)
    leaf: Leaf | None = None

    @property
    def ranks(self) -> str:
        return format_ranks(self.labels)

    @property
    def chips(self) -> tuple[str, ...]:
        return runs(self.labels)


@dataclass(frozen=True, slots=True)
class Role:
    """Processes that do the same work: only their stacks can be compared."""

    name: str
    count: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class _Class:
    labels: tuple[str, ...]
    leaf: Leaf
    steps: tuple[_Step, ...]


def roles_of(folder: Folder, incident: Mapping[str, Any]) -> list[Role]:
    """The trees, the role that holds a cause first. Never raises."""
    lines = _lines(folder)
    culprits = set(texts(incident.get("culprits")))
    by_role: dict[str, list[_Class]] = defaultdict(list)
    for entry in items(incident.get("classes"), CLASSES):
        raw = mapping(entry)
        labels = tuple(sorted(texts(raw.get("ranks")), key=label_order))
        if labels:
            by_role[text(raw.get("role"), 40) or "other"].append(_class(raw, labels, lines, culprits))
    left = [FRAMES]
    found = [
        Role(name, sum(len(c.labels) for c in classes), tuple(_grow(classes, 0, 0, left)))
        for name, classes in by_role.items()
    ]
    ranked = {"cause": 0, "waits": 1, "other": 2, "idle": 3}
    return sorted(found, key=lambda role: (min(ranked[c.leaf.kind] for c in by_role[role.name]), -role.count))


def runs(labels: Sequence[str]) -> tuple[str, ...]:
    """``TP0-2``, ``TP4-63``: each can be typed into the filter."""
    found: list[str] = []
    first = last = -1
    before = ""
    for label in sorted(set(labels), key=label_order):
        match = re.fullmatch(r"(.*?[A-Z])(\d{1,6})", label)
        prefix, number = (match[1], int(match[2])) if match else (label, -1)
        if match and found and prefix == before and number == last + 1:
            last = number
            found[-1] = f"{prefix}{first}-{last}"
        else:
            found.append(label)
            before, first, last = prefix if match else "", number, number
    return (*found[:RUNS], f"{len(found) - RUNS} more") if len(found) > RUNS else tuple(found)


def _class(
    raw: Mapping[str, Any], labels: tuple[str, ...], lines: Mapping[str, Sequence[tuple[str, int]]], guilty: set[str]
) -> _Class:
    path = texts(raw.get("path"), 300)
    kind = _KINDS.get(text(raw.get("kind"), 10), "other")
    if kind == "other" and guilty.intersection(labels):
        kind = "cause"
    steps = []
    for depth, name in enumerate(path):
        seen = {lines[label][depth][1] for label in labels if _agrees(lines.get(label, ()), path, depth)}
        steps.append((name, frozenset(n for n in seen if n)))
    leaf = Leaf(kind, _what(text(raw.get("signature"), 80)), "moving" if raw.get("moving") is True else "")
    return _Class(labels, leaf, tuple(steps))


def _agrees(lines: Sequence[tuple[str, int]], path: Sequence[str], depth: int) -> bool:
    """The process's own stack is the class's path: then its lines are those of the path's frames."""
    return len(lines) == len(path) and lines[depth][0] == path[depth]


def _what(signature: str) -> str:
    if signature in ("stopped", "dead"):
        return {"stopped": "is stopped (state T)", "dead": "is dead"}[signature]
    known = by_id().get(signature)
    return known.title if known is not None else signature


def _lines(folder: Folder) -> dict[str, list[tuple[str, int]]]:
    """By label, root first: what a frame is called in paths, and its line."""
    dumps = []
    left = MOST_PARSED
    for name in folder.names("stacks")[:_STACK_FILES]:
        if name.endswith(".json") and not name.endswith(".native.json") and not name.startswith((".", "pytest.")):
            data = folder.read(f"stacks/{name}", _STACK_BYTES)
            left -= len(data or b"")
            if data and left >= 0:
                dumps += parse.read_dumps(data.decode(errors="replace"), role_of=roles.any_role)
    members = merge(parse.as_rounds(dumps)).members
    return {m.label: [(place(f), f.line or 0) for f in reversed(m.frames)] for m in members}


def _grow(classes: Sequence[_Class], at: int, depth: int, left: list[int]) -> Iterator[Node]:
    """Nodes of the classes that agree on all steps before ``at``; ``left``: how many frames may still be shown."""
    forks: dict[str, list[_Class]] = defaultdict(list)
    for number, one in enumerate(classes):
        apart = depth >= DEPTH or at >= len(one.steps)
        forks[f"\0{number}" if apart else one.steps[at][0]].append(one)
    for fork in sorted(forks.values(), key=lambda fork: -sum(len(c.labels) for c in fork)):
        end = at
        while all(end < len(c.steps) for c in fork) and len({c.steps[end][0] for c in fork}) == 1:
            end += 1
        if len(fork) == 1:
            end = len(fork[0].steps)
        frames = [_frame([c.steps[n] for c in fork]) for n in range(at, min(end, at + max(0, left[0])))]
        left[0] -= len(frames)
        labels = tuple(sorted((label for c in fork for label in c.labels), key=label_order))
        if len(fork) == 1:
            yield Node(labels, frames, leaf=fork[0].leaf)
        else:
            yield Node(labels, frames, list(_grow(fork, end, depth + 1, left)))


def _frame(steps: Sequence[_Step]) -> Frame:
    name, _, where = steps[0][0].partition(" (")
    numbers = sorted(set().union(*(numbers for _, numbers in steps)))
    at = f":{'|'.join(map(str, numbers[:3]))}{'…' if len(numbers) > 3 else ''}" if numbers else ""
    return Frame(name, f"{where.removesuffix(')')}{at}")
