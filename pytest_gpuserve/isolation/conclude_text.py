"""Sentences of a conclusion: counts, names of conditions, cells. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from .hypotheses import Condition, Evidence, Values, Weighed


def count(cells: Iterable[Evidence], inside: Callable[[Values], bool]) -> tuple[int, int]:
    chosen = [cell for cell in cells if inside(cell.values)]
    return sum(cell.failed for cell in chosen), sum(cell.failed + cell.passed for cell in chosen)


def counts(best: Weighed, cells: Mapping[str, Evidence]) -> str:
    """``fails in 4 of 4 cells with cuda_graph=on, passes in 4 of 4 with off``."""
    condition = best.condition
    inside = [c for c in cells.values() if condition.holds(c.values)]
    outside = [c for c in cells.values() if not condition.holds(c.values)]
    unit = "runs" if any(c.failed + c.passed > 1 for c in cells.values()) else "cells"
    bad, runs = count(inside, lambda _: True)
    other_bad, other = count(outside, lambda _: True)
    text = f"fails in {bad} of {runs} {unit} with {name(condition)}"
    if not other:
        return f"{text}, and no other {unit[:-1]} got that far"
    only = condition.parts[0][0] if len(condition.parts) == 1 and len(condition.parts[0]) == 1 else None
    values = {cell.values.get(only.axis) for cell in outside} if only is not None else set()
    rest = f"with {values.pop()}" if only is not None and len(values) == 1 else "of the others"
    return f"{text}, passes in {other - other_bad} of {other} {rest}"


def exonerate(
    condition: Condition, cells: Mapping[str, Evidence], axes: Mapping[str, Sequence[str]], base: Values
) -> str:
    """What the base cell's failure clears: every change from it."""
    if not any(cell.failed and dict(cell.values) == dict(base) for cell in cells.values()):
        return ""
    others = [pretty(a, v) for a, values in axes.items() if a not in condition.axes for v in values if v != base.get(a)]
    verb = "is" if len(others) == 1 else "are"
    return (
        f" The base cell fails too: {conjoin(others)} {verb} not the cause." if others else " The base cell fails too."
    )


def blame(condition: Condition) -> str:
    if len(condition.parts) > 1:
        return f"two causes, {name(condition)}"
    (part,) = condition.parts
    if len(part) == 1:
        return part[0].axis
    return f"only {' + '.join(pretty(x.axis, x.value) for x in part)}: interaction"


def name(condition: Condition) -> str:
    if condition.noise:
        return "chance"
    if not condition.axes:
        return "none of the axes"
    return " or ".join(" and ".join(map(str, part)) for part in condition.parts)


def pretty(axis: str, value: str) -> str:
    """``eagle3``, but ``cuda_graph=off``: values that say nothing alone keep their axis."""
    return value if axis in ("spec_decode", "attention_backend", "engine") else f"{axis}={value}"


def with_cells(text: str, decide: Sequence[Mapping[str, str]], cells: Mapping[str, Evidence]) -> str:
    if not decide:
        return text
    tested = [dict(cell.values) for cell in cells.values()]
    shown = "; ".join(
        "-".join(pretty(axis, value) for axis, value in cell.items()) + (" again" if dict(cell) in tested else "")
        for cell in decide
    )
    return f"{text} {'These cells' if len(decide) > 1 else 'This cell'} would decide: {shown}."


def plural(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def conjoin(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
