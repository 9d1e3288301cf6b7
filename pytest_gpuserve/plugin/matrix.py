"""``gpuserve_matrix``: one test per cell, through pytest's own parametrization of the fixture ``gpuserve_cell``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ..errors import GpuserveError, SpecError
from ..isolation.matrix import Cell, combine
from ..isolation.matrix import expand as cells
from .named import named
from .resolve import Wanted, axis_problem, build, layers_of, marks
from .state import State

if TYPE_CHECKING:
    Node = pytest.Item | pytest.Collector

FIXTURE = "gpuserve_cell"


@dataclass(frozen=True, slots=True)
class Variant:
    """One test to be: its cell, the id, and why it cannot be run at all (None: it can)."""

    cell: Cell
    id: str
    refused: str | None


def generate(metafunc: pytest.Metafunc, state: State) -> None:
    """Parametrize a test with the cells of its matrix. What is wrong with the matrix is said by its set-up."""
    if FIXTURE not in metafunc.fixturenames:
        return
    try:
        variants = expand(metafunc.definition, state)
    except GpuserveError:
        return
    params = [
        pytest.param(
            variant.cell,
            id=variant.id,
            marks=[
                pytest.mark.gpuserve(variant.cell),
                *([pytest.mark.skip(reason=variant.refused)] if variant.refused else []),
            ],
        )
        for variant in variants
    ]
    metafunc.parametrize(FIXTURE, params, indirect=True)


def is_cell(item: pytest.Item) -> bool:
    """True for a test that :func:`generate` made."""
    return any(mark.args and isinstance(mark.args[0], Cell) for mark in item.own_markers if mark.name == "gpuserve")


def expand(node: Node, state: State) -> list[Variant]:
    """The cells of the matrix marks of a test, base first; cells that would launch the same server count once.

    Raises:
        SpecError, EngineError: the matrix or the server it varies cannot be.
    """
    source = f"the gpuserve_matrix mark of {node.nodeid}"
    layers = layers_of(node)
    context = _context(layers)
    variants: dict[str, tuple[Cell, Wanted]] = {}
    matrix = combine([_mark(mark, node) for mark in marks(node, "gpuserve_matrix")], source=source)
    for cell in cells(matrix.axes, matrix.exclude, matrix.coverage, matrix.limit, context=context, source=source):
        wanted = build(node.config, state.settings, *layers, cell.layer(), source=source, check=False)
        variants.setdefault(wanted.spec.key, (cell, wanted))
    problems = {key: axis_problem(wanted.spec, state.settings, source) for key, (_, wanted) in variants.items()}
    accepted = {
        pair for key, (_, wanted) in variants.items() if problems[key] is None for pair in _names(wanted.spec.axes)
    }
    for problem in problems.values():
        # another engine of this matrix takes that value: a cell that cannot exist, not a slip of the pen
        if problem is not None and (problem.axis, problem.value) not in accepted:
            raise SpecError(f"{problem.source}: {problem.text}")
    ids = _ids(variants)
    return [
        Variant(cell, ids[key], problems[key].text if problems[key] else None)  # type: ignore[union-attr]
        for key, (cell, _) in variants.items()
    ]


def _mark(mark: pytest.Mark, node: Node) -> Mapping[str, Any]:
    if not mark.args:
        return mark.kwargs
    (first, *rest) = mark.args
    if rest or (isinstance(first, Mapping) and "axes" in mark.kwargs):
        raise SpecError(
            f"the gpuserve_matrix mark of {node.nodeid} takes one name of a matrix, or axes=, not {mark.args!r}."
        )
    if isinstance(first, Mapping):
        return {"axes": first, **mark.kwargs}
    table, _ = named(node.config, "matrix", str(first))
    return {**table, **mark.kwargs}


def _context(layers: list[Mapping[str, object]]) -> dict[str, object]:
    """What exclusions may name besides the matrix's own axes."""
    from ..spec import merge

    values = merge(*layers)
    axes = values.get("axes")
    plain = {key: values[key] for key in ("engine", "model", "tp") if values.get(key) is not None}
    return {**plain, **(axes if isinstance(axes, Mapping) else {})}


def _names(axes: tuple[tuple[str, Any], ...]) -> set[tuple[str, str]]:
    return {(axis, value.name) for axis, value in axes}


def _ids(variants: Mapping[str, tuple[Cell, Wanted]]) -> dict[str, str]:
    """Readable and unique: where two would be equal (models of one name in two directories) the key is added."""
    ids = {key: "-".join((wanted.spec.id, *cell.extra)) for key, (cell, wanted) in variants.items()}
    count = Counter(ids.values())
    return {key: name if count[name] == 1 else f"{name}-{key[:6]}" for key, name in ids.items()}
