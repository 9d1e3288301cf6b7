"""Axes in, cells out: what ``gpuserve_matrix(axes=…, exclude=…, coverage=…)`` means. Pure; touches no GPU.

The first value of every axis is the base. Cells come base first, then by the number of axes that differ from it, which
is the order in which a person would try them, and the same in every process (xdist workers compare their collections).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from ..errors import SpecError
from ..spec import AxisValue, ServerSpec
from .axes import SPEC_AXES, Axes, Exclusion, distinguishing, parse_axes, parse_exclude, parse_value, pieces, safe

Coverage = Literal["full", "pairwise", "one_off"]
"""full: every combination. pairwise: every pair of values in some cell. one_off: base, and each single change of it."""

LIMIT = 256
"""Cells of one matrix, unless ``limit=`` raises it: each is a server start of minutes."""

_COUNTABLE = 200_000
"""Combinations that are enumerated just to count what exclusions leave."""

_Row = dict[str, AxisValue]
_Allowed = Callable[[Mapping[str, AxisValue]], bool]


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of values.

    Attributes:
        values: (axis, value), sorted as in :data:`pytest_gpuserve.spec.AXES`.
        changed: the axes whose value is not the base's, in the same order; empty for the base cell.
        skip_on: architectures (120 for sm_120) on which ``exclude`` rules the cell out: it is collected all the same
            and skipped there with that reason, because collecting asks no GPU.
        extra: pieces of the id for what :attr:`ServerSpec.id` does not tell: the model, args, env, and details in
            which values of one name differ.
    """

    values: tuple[tuple[str, AxisValue], ...]
    changed: tuple[str, ...] = ()
    skip_on: tuple[int, ...] = ()
    extra: tuple[str, ...] = field(default=(), compare=False)

    def __getitem__(self, axis: str) -> AxisValue:
        return dict(self.values)[axis]

    @property
    def id(self) -> str:
        """What tells it from the other cells of its matrix: ``eagle3-cuda_graph_off-triton``."""
        own = [safe(v.name if a == "engine" else f"tp{v.name}") for a, v in self.values if a in ("engine", "tp")]
        plain = tuple(v for v in self.values if v[0] not in SPEC_AXES and "." not in v[0])
        named = ServerSpec("x", axes=plain).id.removeprefix("x-tp1").removeprefix("-")
        return "-".join(part for part in (*own, named, *self.extra) if part)

    def test_id(self, spec: ServerSpec) -> str:
        """The parameter id of a test that runs on ``spec``, made from this cell."""
        return "-".join((spec.id, *self.extra))

    def layer(self) -> dict[str, Any]:
        """What the cell sets, as a layer for :func:`pytest_gpuserve.spec.merge` above the gpuserve mark's."""
        layer: dict[str, Any] = {}
        for axis, value in self.values:
            head, _, name = axis.partition(".")
            if name:
                layer.setdefault(head, {})[name] = value.detail["value"]
            elif axis == "tp":
                layer[axis] = int(value.name)
            elif axis in SPEC_AXES:
                layer[axis] = value.name
            else:
                layer.setdefault("axes", {})[axis] = value
        return layer

    def names(self) -> dict[str, str]:
        """Axis to value name: the keywords of the ``cell(...)`` mark."""
        return {axis: value.name for axis, value in self.values}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Several marks joined: what :func:`expand` takes."""

    axes: Mapping[str, tuple[AxisValue, ...]]
    exclude: tuple[Exclusion, ...] = ()
    coverage: Coverage = "full"
    limit: int = LIMIT

    def cells(self, context: Mapping[str, object] | None = None) -> list[Cell]:
        """As :func:`expand`."""
        return expand(self.axes, self.exclude, self.coverage, self.limit, context=context)


def combine(marks: Iterable[Mapping[str, object]], *, source: str = "gpuserve_matrix") -> Matrix:
    """Join the matrices of a test, outermost first (named matrix, module, class, function).

    Different axes multiply; the same axis in a closer mark replaces the outer one; exclusions add up; coverage and
    limit are the closest that is given. Each mark is a mapping with axes, exclude, coverage, limit.

    Raises:
        SpecError: an unknown key, an axis or value that cannot be, an exclusion that names no value of its own mark.
    """
    axes: Axes = {}
    exclude: list[Exclusion] = []
    coverage: object = "full"
    limit: object = LIMIT
    for mark in marks:
        if unknown := sorted(set(mark) - {"axes", "exclude", "coverage", "limit"}):
            raise SpecError(
                f"{source}: unknown option {', '.join(map(repr, unknown))}. "
                "A matrix takes axes, exclude, coverage and limit."
            )
        own = parse_axes(mark.get("axes") or {}, source)
        axes.update(own)
        exclude.extend(parse_exclude(mark.get("exclude") or (), own, source))
        coverage, limit = mark.get("coverage", coverage), mark.get("limit", limit)
    return Matrix(axes, tuple(exclude), _coverage(coverage, source), _limit(limit, source))


def expand(
    axes: Mapping[str, Sequence[object]],
    exclude: Sequence[Mapping[str, object] | Exclusion] = (),
    coverage: Coverage = "full",
    limit: int = LIMIT,
    *,
    context: Mapping[str, object] | None = None,
    source: str = "gpuserve_matrix",
) -> list[Cell]:
    """The cells of a matrix, base first, then by number of changes. Duplicates are removed.

    Args:
        exclude: mappings of axis to a value, or a list of values, of cells to leave out; the key ``arch`` ("sm120")
            makes it hold on that architecture only (:attr:`Cell.skip_on`). A plain name covers every detail of it.
        limit: more cells than this are refused.
        context: values of the test's spec outside the matrix (engine, model, tp, axes) that exclusions may name.
        source: named in errors.

    Raises:
        SpecError: no axis, an axis without values, a value that is none, an unknown axis or value in ``exclude``,
            everything excluded, or too many cells (the message has the count).
    """
    parsed = parse_axes(axes, source)
    if not parsed:
        raise SpecError(f'{source} names no axis: write axes={{"cuda_graph": ["on", "off"]}}, or remove the mark.')
    coverage, limit = _coverage(coverage, source), _limit(limit, source)
    rules: list[Exclusion] = []
    for entry in exclude:
        rules.extend([entry] if isinstance(entry, Exclusion) else parse_exclude([entry], parsed, source))
    around = {key: parse_value(key, value, source) for key, value in (context or {}).items() if value is not None}
    base = {axis: values[0] for axis, values in parsed.items()}

    def allowed(row: Mapping[str, AxisValue]) -> bool:
        return not any(rule.matches({**around, **row}) for rule in rules if not rule.arch)

    if coverage == "full":
        rows = _full(parsed, limit, source)
    elif coverage == "one_off":
        rows = _one_off(parsed, base)
    else:
        rows = _pairwise(parsed, base, allowed, limit, source)
    kept = [row for row in rows if allowed(row)]
    if not kept:
        raise SpecError(f"{source}: exclude leaves no cell of the {_count(parsed)} of this matrix. Change exclude=.")
    if len(kept) > limit:
        raise _too_many(len(kept), parsed, limit, source)
    distinct = distinguishing(parsed)
    cells = [
        Cell(
            values=tuple(row.items()),
            changed=tuple(axis for axis in parsed if row[axis] != base[axis]),
            skip_on=tuple(sorted({a for rule in rules if rule.matches({**around, **row}) for a in rule.arch})),
            extra=tuple(piece for axis in parsed for piece in pieces(axis, row[axis], distinct)),
        )
        for row in kept
    ]
    return sorted(cells, key=lambda cell: len(cell.changed))


def _coverage(value: object, source: str) -> Coverage:
    if value not in get_args(Coverage):
        raise SpecError(f"{source}: coverage must be full, pairwise or one_off, not {value!r}.")
    return cast(Coverage, value)


def _limit(value: object, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{source}: limit must be a number of cells, 1 or more, not {value!r}.")
    return value


def _count(axes: Axes) -> int:
    return math.prod(map(len, axes.values()))


def _too_many(count: int, axes: Axes, limit: int, source: str) -> SpecError:
    sizes = " x ".join(f"{axis} {len(values)}" for axis, values in axes.items())
    return SpecError(
        f"{source} has {count:,} cells ({sizes}), more than {limit:,}: each is a server to start. Use "
        f'coverage="pairwise" or "one_off", exclude some, or raise limit=.'
    )


def _full(axes: Axes, limit: int, source: str) -> Iterable[_Row]:
    if _count(axes) > max(limit, _COUNTABLE):
        raise _too_many(_count(axes), axes, limit, source)
    return (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def _one_off(axes: Axes, base: _Row) -> list[_Row]:
    return [base, *({**base, axis: value} for axis, values in axes.items() for value in values[1:])]


def _pairwise(axes: Axes, base: _Row, allowed: _Allowed, limit: int, source: str) -> list[_Row]:
    """Cover every pair of values that some allowed cell holds; the base, where allowed, is always among the rows.

    allpairspy stops at the first row that adds no pair, which exclusions can make happen too early, so pairs that it
    left are completed here.
    """
    if len(axes) < 2:
        return _one_off(axes, base)
    from allpairspy import AllPairs

    smaller, larger = sorted(map(len, axes.values()))[-2:]
    if smaller * larger > limit and smaller * larger > _COUNTABLE:
        raise _too_many(smaller * larger, axes, limit, source)
    names, start = list(axes), list(base.values())

    def partial(row: Sequence[AxisValue]) -> bool:
        return allowed(dict(zip(names, row, strict=False)))

    rows = [base] if partial(start) else []
    found = AllPairs([list(v) for v in axes.values()], filter_func=partial, previously_tested=[start] if rows else None)
    rows.extend(dict(zip(names, row, strict=True)) for row in found)
    covered = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    for first, second in itertools.combinations(names, 2):
        for pair in itertools.product(((first, v) for v in axes[first]), ((second, v) for v in axes[second])):
            if pair not in covered and (row := next(_completions(axes, dict(pair), allowed), None)):
                rows.append(row)
                covered.update(itertools.combinations(row.items(), 2))
    return rows


def _completions(axes: Axes, row: _Row, allowed: _Allowed) -> Iterator[_Row]:
    """Allowed cells that hold ``row``, the base's values tried first; a dead branch is left at once."""
    if not allowed(row):
        return
    axis = next((axis for axis in axes if axis not in row), None)
    if axis is None:
        yield {axis: row[axis] for axis in axes}
        return
    for value in axes[axis]:
        yield from _completions(axes, {**row, axis: value}, allowed)
