"""A conclusion as text: the grid of cells with verdict and phase, the statements, and how to go on. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from .conclude import CellResult, Conclusion


def text(conclusion: Conclusion, *, matrix: str = "matrix.json", width: int = 120) -> list[str]:
    """Lines for a terminal: grid, statements, flaky cells, the command that goes on. Foreign text is not escaped."""
    lines = [*grid(conclusion, width=width), ""]
    lines += [f"* {statement.text}" for statement in conclusion.statements]
    lines += [f"* flaky: {id} failed in {failed} of {runs} runs" for id, failed, runs in conclusion.flaky]
    if cell := next_cell(conclusion):
        lines.append(f"To go on: gpuserve isolate --from {matrix} {cell}")
    return lines


def next_cell(conclusion: Conclusion) -> str | None:
    """The failing cell to isolate: of the least certain statement, the one with the fewest changes."""
    open_ = [s for s in conclusion.statements if s.fault is not None and s.cells and s.kind != "everywhere"]
    if not open_:
        return None
    statement = min(open_, key=lambda s: s.confidence)
    values = {result.id: result.values for result in conclusion.results}

    def changes(id: str) -> int:
        return sum(conclusion.base.get(axis) != value for axis, value in values[id].items())

    return min(statement.cells, key=changes)


def grid(conclusion: Conclusion, *, width: int = 120) -> list[str]:
    """One row for each combination of the other axes, one column for each value of the last axis that varies."""
    varied = [axis for axis, values in conclusion.axes.items() if len(values) > 1]
    if not varied:
        return [f"{id}: {shown}" for id, shown in _by_id(conclusion.results).items()]
    *rows, column = varied
    cells: dict[tuple[str, ...], list[CellResult]] = {}
    for result in conclusion.results:
        cells.setdefault(tuple(result.values.get(axis, "") for axis in varied), []).append(result)
    head = [*rows, *(f"{column}={value}" for value in conclusion.axes[column])]
    body = [
        [*names, *(cell_text(cells.get((*names, value), [])) for value in conclusion.axes[column])]
        for names in itertools.product(*(conclusion.axes[axis] for axis in rows))
        if any((*names, value) in cells for value in conclusion.axes[column])
    ]
    sizes = [max(len(line[n]) for line in (head, *body)) for n in range(len(head))]
    if sum(sizes) + 2 * len(sizes) > width:
        return [f"{id}: {shown}" for id, shown in _by_id(conclusion.results).items()]
    return [
        "  ".join(part.ljust(size) for part, size in zip(line, sizes, strict=True)).rstrip() for line in (head, *body)
    ]


def _by_id(results: Sequence[CellResult]) -> Mapping[str, str]:
    runs: dict[str, list[CellResult]] = {}
    for result in results:
        runs.setdefault(result.id, []).append(result)
    return {id: cell_text(of_cell) for id, of_cell in runs.items()}


def cell_text(runs: Sequence[CellResult]) -> str:
    """``pass``, ``hang cuda_graph``, ``2/3 hang cuda_graph``; ``-`` for a cell that is not in the matrix."""
    if not runs:
        return "-"
    words = []
    for run in runs:
        words.append("pass" if run.passed else f"{run.verdict} {run.phase}" if run.phase else run.verdict)
    counts = {word: words.count(word) for word in dict.fromkeys(sorted(words, key=lambda word: word == "pass"))}
    if len(counts) == 1:
        return words[0]
    return ", ".join(f"{n}/{len(words)} {word}" for word, n in counts.items())
