"""Many stacks to few classes: which ranks are in the same place, and which are not.

Classes are formed inside a role and a parallel group (roles differ on purpose, pipeline stages too), from the path of
each process's telling thread, without line numbers; over several rounds the place seen most often counts, so that one
sample in the middle of a step does not make an outlier. After LLNL's STAT.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..engines.base import ProcessRole, Rank
from ..phases.labels import format_ranks, label_order
from ..procfs import ProcessId
from ..vocabulary import RoleName
from .conduct import Conduct, asleep_at, conduct, growth, stuck_owner, working_children
from .model import ClassKind, Frame, ProcessDump, RankClass, ThreadStack
from .signatures import Match, Signature, folded, last_name, match
from .telling import is_idle, telling

__all__ = ["Member", "Merged", "format_ranks", "label_order", "merge", "place", "relabel"]

SILENT_ROLES = frozenset({"compiler", "helper"})
"""Roles whose stacks say nothing: counted, not classed."""

_KERNEL_STATES = {"T": "stopped", "Z": "dead", "X": "dead"}


def place(frame: Frame) -> str:
    """``function (dir/file.py)``: how a frame is written in paths and texts."""
    if frame.native:
        return f"{last_name(frame.name)} ({(frame.module or '').rpartition('/')[2]})"
    return f"{frame.name} ({'/'.join(frame.file.split('/')[-2:])})"


def _key(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Root first, comparable between dumpers: no lines, no class names, no directories."""
    python = [f for f in frames if not f.native] or list(frames)
    return tuple(f"{last_name(f.name)} ({(f.module or f.file).rpartition('/')[2]})" for f in reversed(python))


@dataclass(frozen=True, slots=True)
class Member:
    """One process over all rounds.

    Attributes:
        label: unique; the rank's label where it is a rank.
        key: comparable path, root first; ``frames`` is one of its stacks, leaf first, cut and folded.
        condition: "stopped" (SIGSTOP), "dead" (zombie or gone), "" otherwise.
        moving: its telling thread was seen at different lines.
        cpu: cores used between the first and the last round; None for one round.
        read: bytes per second read between the rounds; None where unknown.
        facts: /proc facts of the last round.
        conduct: how it behaved over the rounds.
    """

    label: str
    role: str
    group: str
    process: ProcessId
    title: str
    key: tuple[str, ...]
    frames: tuple[Frame, ...]
    kind: ClassKind
    signature: Signature | None
    condition: str
    moving: bool
    problem: str | None
    dumper: str
    cpu: float | None
    read: float | None
    facts: Mapping[str, Any]
    rank: bool
    conduct: Conduct = field(default_factory=Conduct)

    @property
    def leaf(self) -> str:
        """Where it is, in few words."""
        return place(self.frames[0]) if self.frames else (self.problem or "no stack")

    @property
    def has_stack(self) -> bool:
        return bool(self.frames)


@dataclass(frozen=True)
class Merged:
    """What the rounds say together. ``members`` in order of label; ``counted`` are processes without a class."""

    members: tuple[Member, ...]
    rounds: int
    counted: Mapping[str, int]
    idle_threads: int

    @cached_property
    def classes(self) -> tuple[RankClass, ...]:
        """Largest first inside a role and group."""
        found: dict[tuple[str, str, str, tuple[str, ...]], list[Member]] = defaultdict(list)
        for member in self.members:
            found[member.role, member.group, member.condition, member.key].append(member)
        classes = [_rank_class(members) for members in found.values()]
        return tuple(sorted(classes, key=lambda c: (c.role, c.group, -len(c.ranks), c.ranks)))

    @cached_property
    def moving(self) -> tuple[str, ...]:
        """Labels of processes whose stack changed between rounds."""
        return tuple(member.label for member in self.members if member.moving)

    @cached_property
    def by_label(self) -> dict[str, Member]:
        return {member.label: member for member in self.members}

    @property
    def ranks(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.rank)

    def of(self, ranks: RankClass) -> tuple[Member, ...]:
        """The members of a class."""
        return tuple(self.by_label[label] for label in ranks.ranks)

    def text(self, max_lines: int = 60) -> str:
        """Classes and prefix trees, at most ``max_lines`` lines whatever the number of ranks."""
        from .render import render

        return render(self, max_lines)


def _rank_class(members: Sequence[Member]) -> RankClass:
    first = members[0]
    signatures = Counter(m.signature.id for m in members if m.signature)
    kinds = Counter(m.kind for m in members)
    path = tuple(place(f) for f in reversed(first.frames)) or (first.problem or "no stack",)
    return RankClass(
        role=first.role,
        group=first.group,
        ranks=tuple(m.label for m in members),
        kind=max(kinds, key=kinds.__getitem__),
        path=path,
        signature=first.condition or max(signatures, key=signatures.__getitem__, default=None),
        moving=any(m.moving for m in members),
    )


def relabel(rounds: Sequence[Sequence[ProcessDump]], ranks: Mapping[int, Rank]) -> list[list[ProcessDump]]:
    """Give ranks to processes whose titles do not tell them yet; ``ranks`` is by pid, from the log."""
    return [[_with_rank(dump, ranks.get(dump.process.pid)) for dump in dumps] for dumps in rounds]


def _with_rank(dump: ProcessDump, rank: Rank | None) -> ProcessDump:
    if rank is None or dump.role.rank is not None or dump.role.role not in ("worker", "scheduler", "other"):
        return dump
    role: RoleName = "worker" if dump.role.role == "other" else dump.role.role
    return replace(dump, role=ProcessRole(role, rank))


def merge(rounds: Sequence[Sequence[ProcessDump]]) -> Merged:
    """Merge one or more rounds of dumps; a process is the same over the rounds by pid and start time."""
    seen: dict[tuple[ProcessId, str], list[ProcessDump]] = defaultdict(list)
    for dumps in rounds:
        for number, dump in enumerate(dumps):
            nameless = "" if dump.process.pid else f"{dump.label} {number}"  # a pasted dump may not say the pid
            seen[dump.process, nameless].append(dump)
    classed = [d for d in seen.values() if d[-1].role.role not in SILENT_ROLES]
    counted: Counter[str] = Counter(d[-1].role.role for d in seen.values() if d[-1].role.role in SILENT_ROLES)
    names = _unique([dumps[-1] for dumps in classed])
    members = _whole_paths([_member(dumps, label) for dumps, label in zip(classed, names, strict=True)])
    working = working_children(rounds)
    members = [
        replace(m, conduct=replace(m.conduct, child=working[m.process])) if m.process in working else m for m in members
    ]
    idle = sum(is_idle(t) for dumps in classed for t in dumps[-1].threads)
    return Merged(tuple(sorted(members, key=lambda m: label_order(m.label))), len(rounds), dict(counted), idle)


def _unique(dumps: Sequence[ProcessDump]) -> list[str]:
    """Labels; of several that are the same each with its pid, or counted where a paste does not tell it."""
    total, seen = Counter(d.label for d in dumps), Counter[str]()
    names = []
    for dump in dumps:
        seen[dump.label] += 1
        number = dump.process.pid or seen[dump.label]
        names.append(dump.label if total[dump.label] == 1 else f"{dump.label} {number}")
    return names


def _member(dumps: Sequence[ProcessDump], label: str) -> Member:
    last = dumps[-1]
    places: list[tuple[tuple[str, ...], tuple[Frame, ...], Match | None]] = []
    exact = set()
    owner = stuck_owner(dumps)
    told: list[ThreadStack] = []
    for dump in dumps:
        thread, found = telling(dump)
        if owner is not None and thread is not None and thread.identity != owner:
            thread = next((t for t in dump.threads if t.identity == owner), thread)
            found = match(thread)
        if thread is None or not thread.frames:
            continue
        told.append(thread)
        frames = found.frames[found.start :] if found else folded(thread.frames)
        name = () if thread.main else (f"[{re.sub(r'[0-9]+', 'N', thread.name or 'thread')}]",)
        places.append((name + _key(found.cut if found else frames), frames, found))
        exact.add(tuple((f.name, f.file, f.line) for f in folded(thread.frames) if not f.native))
    condition = _KERNEL_STATES.get(last.state, "") if all(d.state == last.state for d in dumps) else ""
    key: tuple[str, ...] = ()
    frames, found, same, leaf = (), None, 0, None
    if places:
        counts = Counter(p[0] for p in places)
        latest = {p[0]: n for n, p in enumerate(places)}
        key = max(counts, key=lambda k: (counts[k], latest[k]))
        _, frames, found = places[latest[key]]
        same = counts[key]
        leaf = found.frames[0] if found and found.start else None
    kind: ClassKind = "cause" if condition else (found.signature.kind if found else "other")
    rank = last.role.rank
    group = "" if rank is None or rank.tp is None else _group(rank.dp, rank.pp)
    return Member(
        label=label,
        role=last.role.role,
        group=group,
        process=last.process,
        title=last.title,
        key=key or (last.problem or "no stack", str(last.facts.get("wchan", ""))),
        frames=frames,
        kind=kind,
        signature=found.signature if found else None,
        condition=condition,
        moving=len(exact) > 1,
        problem=last.problem,
        dumper=last.dumper,
        cpu=growth(dumps, "cpu_seconds"),
        read=growth(dumps, "read_bytes"),
        facts=asleep_at(dumps),
        rank=rank is not None,
        conduct=conduct(dumps, same, told, leaf),
    )


def _whole_paths(members: Sequence[Member]) -> list[Member]:
    """A pasted stack may lack its outer frames: one that is the inner part of another's path is in that place."""
    keys = {(m.role, m.group, m.key) for m in members if m.frames}
    found = []
    for member in members:
        longer = [k for r, g, k in keys if (r, g) == (member.role, member.group) and _is_tail(member.key, k)]
        found.append(replace(member, key=max(longer, key=len)) if member.frames and longer else member)
    return found


def _is_tail(short: Sequence[str], long: Sequence[str]) -> bool:
    return 2 <= len(short) < len(long) and tuple(long[-len(short) :]) == tuple(short)


def _group(dp: int | None, pp: int | None) -> str:
    return " ".join(f"{name}{n}" for name, n in (("DP", dp), ("PP", pp)) if n is not None)
