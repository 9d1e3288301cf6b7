"""Merged stacks as text: a class a line, then a prefix tree with rank sets; never more than the lines allowed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .kernel import kernel_wait
from .mechanism import contradicted, mechanism, spins
from .merge import Member, format_ranks, label_order, place
from .model import RankClass

if TYPE_CHECKING:
    from .merge import Merged

_KINDS = {"cause": "CAUSE", "waits": "waits", "idle": "idle", "other": "?"}


@dataclass
class _Node:
    """A frame of the prefix tree, with the ranks in it and the lines they are at."""

    name: str
    ranks: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)
    children: dict[str, _Node] = field(default_factory=dict)


def render(merged: Merged, max_lines: int) -> str:
    """The most detailed of several forms that fits."""
    head = _head(merged)
    for chain in (40, 12, 6, 3, 1):
        lines = head + _classes(merged, 1000) + _trees(merged, chain)
        if len(lines) <= max_lines:
            return "\n".join(lines)
    for limit in (max_lines, max_lines // 2):
        lines = head + _classes(merged, max(2, limit - len(head)))
        if len(lines) <= max_lines:
            return "\n".join(lines)
    return "\n".join([*lines[: max_lines - 1], "..."])


def _head(merged: Merged) -> list[str]:
    if not merged.members and not merged.counted:
        return ["no process was left to look at"]
    members, classes = _counted(len(merged.members), "process", "es"), _counted(len(_joined(merged)), "class", "es")
    words = [f"{members} in {classes} over {_counted(merged.rounds, 'round')}"]
    if merged.idle_threads:
        words.append(f"{_counted(merged.idle_threads, 'idle thread')} left out")
    words.extend(_counted(count, f"{role} process", "es") for role, count in sorted(merged.counted.items()))
    return [", ".join(words)]


def _counted(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"


def _joined(merged: Merged) -> list[tuple[RankClass, list[Member]]]:
    """Classes of different groups with the same path and kind, together."""
    found: dict[tuple[object, ...], tuple[RankClass, list[Member]]] = {}
    for rank_class in merged.classes:
        key = (rank_class.role, rank_class.kind, rank_class.signature, rank_class.path)
        found.setdefault(key, (rank_class, []))[1].extend(merged.of(rank_class))
    return sorted(found.values(), key=lambda pair: (pair[0].role, -len(pair[1]), label_order(pair[1][0].label)))


def describe(rank_class: RankClass, members: Sequence[Member]) -> str:
    """What the ranks of a class do, in one line."""
    first = members[0]
    if first.condition == "stopped":
        text = "is stopped (state T)"
    elif first.condition == "dead":
        text = "is dead (zombie)"
    elif first.signature and contradicted(first.signature, first):
        how = mechanism(first)
        does = how.verb if how else kernel_wait(first.facts).words
        return f"{does}: {place(first.conduct.leaf or first.frames[0])}, inside {first.leaf}"
    elif first.signature:
        text = f"{first.signature.title} [{first.signature.id}]"
    else:
        text = "at"
    if first.frames:
        text += f" {first.leaf}"
    elif not first.condition:
        text = f"no stack: {first.problem or 'not a Python process'}"
    wchan = first.facts.get("wchan")
    if wchan and str(wchan) != "0":
        text += f", kernel: {wchan}"
    return text


def _classes(merged: Merged, limit: int) -> list[str]:
    lines: list[str] = []
    role = None
    joined = _joined(merged)
    for number, (rank_class, members) in enumerate(joined):
        if len(lines) + 2 > limit and number < len(joined) - 1:
            left = sum(len(m) for _, m in joined[number:])
            lines.append(f"  ... {len(joined) - number} more classes with {left} processes")
            break
        if rank_class.role != role:
            role = rank_class.role
            lines.append(f"{role}:")
        ranks = format_ranks(m.label for m in members)
        count = f"{len(members)}x " if len(members) > 1 else ""
        what = f"{_KINDS[rank_class.kind]}  {describe(rank_class, members)}"
        lines.append(f"  {count}{ranks}  {what}  {_pace(merged, members)}".rstrip())
    return lines


def _pace(merged: Merged, members: Sequence[Member]) -> str:
    """moving (its stack, or what it works at), spins (burns a CPU in one place), frozen; "" for one round."""
    if any(m.moving for m in members) and not all(spins(m) for m in members):
        return "moving"
    found = [how for m in members if (how := mechanism(m)) is not None and how.kind in ("build", "reads")]
    if found:
        return f"moving ({found[0].seen})"
    if any(spins(m) for m in members):
        return "spins"
    return "frozen" if merged.rounds > 1 else ""


def _trees(merged: Merged, chain: int) -> list[str]:
    by_role: dict[str, list[Member]] = defaultdict(list)
    for member in merged.members:
        if member.frames:
            by_role[member.role].append(member)
    lines: list[str] = []
    for role, members in sorted(by_role.items()):
        root = _Node("")
        for member in members:
            node = root
            for frame in reversed(member.frames):
                place = f"{frame.name} ({'/'.join((frame.module or frame.file).split('/')[-2:])}"
                node = node.children.setdefault(place, _Node(place))
                node.ranks.add(member.label)
                if frame.line:
                    node.lines.add(frame.line)
        lines.append(f"stacks of {role} (root first; ranks are named where they part):")
        for child in root.children.values():
            _show(child, frozenset(m.label for m in members), 1, chain, lines)
    return lines


def _show(node: _Node, above: frozenset[str], depth: int, chain: int, lines: list[str]) -> None:
    """One chain of frames without a fork, folded in its middle when longer than ``chain``, then its branches."""
    run = [node]
    while len(run[-1].children) == 1:
        (child,) = run[-1].children.values()
        if child.ranks != run[-1].ranks:
            break
        run.append(child)
    ranks = frozenset(node.ranks)
    name = "" if ranks == above else f"[{format_ranks(ranks)}] "
    indent = "  " * min(depth, 12)
    shown = run
    if len(run) > chain:
        tail = max(1, chain - 1)
        shown = run[-tail:] if chain == 1 else [run[0], *run[-tail:]]
    for number, entry in enumerate(shown):
        left = len(run) - len(shown)
        at = ":" + "|".join(map(str, sorted(entry.lines)[:3])) if entry.lines else ""
        gap = f"... {left} frames ... " if left and number == (0 if chain == 1 else 1) else ""
        lines.append(f"{indent}{name if number == 0 else ''}{gap}{entry.name}{at})")
    for child in sorted(run[-1].children.values(), key=lambda c: (-len(c.ranks), c.name)):
        _show(child, ranks, depth + 1, chain, lines)
