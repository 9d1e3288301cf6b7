"""Labels of ranks in texts: sorted by number, folded to ranges."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

_NUMBER = re.compile(r"([A-Za-z_]+)(\d+)")


def label_order(label: str) -> tuple[Any, ...]:
    """Sort key that puts TP10 after TP9."""
    return tuple((name, int(number)) for name, number in _NUMBER.findall(label)) or ((label, -1),)


def _ranges(numbers: Iterable[int]) -> str:
    parts: list[str] = []
    run: list[int] = []
    for n in [*sorted(set(numbers)), None]:
        if run and (n is None or n != run[-1] + 1):
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        if n is not None:
            run.append(n)
    return ",".join(parts)


def format_ranks(labels: Iterable[str]) -> str:
    """``TP0-2,4-7``; ``DP0-63 TP0-7`` where every group has the same ranks; else one part a group."""
    plain: list[str] = []
    groups: dict[str, list[int]] = defaultdict(list)
    for label in sorted(set(labels), key=label_order):
        found = re.fullmatch(r"(.*?)([A-Z]+)(\d+)", label)
        if found:
            groups[found[1] + found[2]].append(int(found[3]))
        else:
            plain.append(label)
    by_ranks: dict[str, list[str]] = defaultdict(list)
    for prefix, numbers in groups.items():
        by_ranks[_ranges(numbers)].append(prefix)
    for ranges, prefixes in by_ranks.items():
        outer = [re.fullmatch(r"([A-Z]+)(\d+) ([A-Z]+)", prefix) for prefix in prefixes]
        if len(prefixes) > 1 and all(outer) and len({(m[1], m[3]) for m in outer if m}) == 1:
            first = outer[0]
            assert first is not None
            plain.append(f"{first[1]}{_ranges(int(m[2]) for m in outer if m)} {first[3]}{ranges}")
        else:
            plain.extend(prefix + ranges for prefix in prefixes)
    if len(plain) > 12:
        plain = [*plain[:12], f"{len(plain) - 12} more"]
    return ", ".join(plain)
