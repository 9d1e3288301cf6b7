"""What an isolation can launch: the user's command line, or the cells of a matrix, with some deltas on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .. import shell
from ..engines.features import Remedy
from ..errors import SpecError
from ..spec import ServerSpec
from .conclude import CellResult
from .deltas import Command, Parts, ordered_remedies
from .search import Trial
from .signature import Signature, outcome


@dataclass(frozen=True, slots=True)
class Wanted:
    """One launch. ``command`` None: the engine's adapter makes the command line of ``spec``."""

    spec: ServerSpec
    command: Command | None


class Variants(Protocol):
    """The deltas of one problem, and what to launch for a choice of them."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def weights(self) -> Sequence[float]: ...

    @property
    def texts(self) -> Sequence[str]:
        """What each delta adds, for people."""

    def wanted(self, on: Iterable[int], remedy: Remedy | None = None, cold: str = "") -> Wanted: ...

    def typed(self, on: Iterable[int], remedy: Remedy | None = None) -> Command | None:
        """The command that a person types for it; None: the engine's adapter knows."""

    def shown(self, on: Iterable[int]) -> str:
        """What it is, in one line: the command line where it is known."""

    def remedies(self, blamed: Collection[str]) -> Sequence[Remedy]: ...

    def refined(self, number: int, others: Collection[int]) -> Variants | None:
        """The parts of one delta as a problem of its own, the others of the failing set being base; None: no parts."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The user's command line."""

    parts: Parts
    engine: str
    cwd: str | None = None

    @property
    def names(self) -> Sequence[str]:
        return [delta.name for delta in self.parts.deltas]

    @property
    def weights(self) -> Sequence[float]:
        return [delta.weight for delta in self.parts.deltas]

    @property
    def texts(self) -> Sequence[str]:
        return [delta.text() for delta in self.parts.deltas]

    def wanted(self, on: Iterable[int], remedy: Remedy | None = None, cold: str = "") -> Wanted:
        command = self.parts.command(on, remedy, cold)
        spec = ServerSpec(
            self.engine,
            model=self.parts.model,
            tp=self.parts.tp,
            command=command.argv,
            env=command.env,
            cwd=self.cwd,
        )
        return Wanted(spec, command)

    def typed(self, on: Iterable[int], remedy: Remedy | None = None) -> Command:
        return self.parts.typed(self.parts.command(on, remedy, shell.EMPTY))

    def shown(self, on: Iterable[int]) -> str:
        command = self.typed(on)
        return shell.line(command.argv, command.env)

    def remedies(self, blamed: Collection[str]) -> Sequence[Remedy]:
        return ordered_remedies(self.parts, blamed)

    def refined(self, number: int, others: Collection[int]) -> Variants | None:
        parts = self.parts.refined(number, others)
        return replace(self, parts=parts) if parts else None


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """A failing cell of a finished matrix: its deltas are the axes that differ from the base cell."""

    base: ServerSpec
    cell: ServerSpec
    axes: tuple[str, ...]

    @property
    def names(self) -> Sequence[str]:
        return self.axes

    @property
    def weights(self) -> Sequence[float]:
        return [1.0] * len(self.axes)

    @property
    def texts(self) -> Sequence[str]:
        return [f"{axis}={_value(self.cell, axis)} instead of {_value(self.base, axis)}" for axis in self.axes]

    def wanted(self, on: Iterable[int], remedy: Remedy | None = None, cold: str = "") -> Wanted:
        spec = self.base
        for number in on:
            spec = _with(spec, self.cell, self.axes[number])
        return Wanted(spec, None)

    def typed(self, on: Iterable[int], remedy: Remedy | None = None) -> None:
        return None

    def shown(self, on: Iterable[int]) -> str:
        spec = self.wanted(on).spec
        words = [f"{axis}={_value(spec, axis)}" for axis in self.axes]
        return f"{spec.id} ({', '.join(words)})"

    def remedies(self, blamed: Collection[str]) -> Sequence[Remedy]:
        return ()  # a matrix has its escape hatches as axes

    def refined(self, number: int, others: Collection[int]) -> Variants | None:
        return None


def from_matrix(
    raw: Mapping[str, Any], results: Sequence[CellResult], cell: str
) -> tuple[MatrixCell, list[Trial], Signature]:
    """The problem of one failing cell, the other cells as evidence, and the failure that is sought.

    Args:
        raw: the object of matrix.json; ``specs`` maps a cell's id to its spec.

    Raises:
        SpecError: there is no such cell, it did not fail, it is the base, or the file does not say what was launched.
    """
    runs = [run for run in results if run.id == cell]
    if not runs:
        known = ", ".join(dict.fromkeys(run.id for run in results))
        raise SpecError(f"the matrix has no cell {cell!r}. Its cells: {known or 'none'}.")
    failed = [run for run in runs if run.failed]
    if not failed:
        raise SpecError(f"cell {cell} did not fail ({runs[0].verdict}), so there is nothing to isolate.")
    target = Signature(failed[0].verdict, failed[0].phase)
    base_values = {axis: str(value) for axis, value in (raw.get("base") or results[0].values).items()}
    values = failed[0].values
    axes = tuple(axis for axis, value in values.items() if base_values.get(axis) != value)
    if not axes:
        raise SpecError(f"cell {cell} is the base of its matrix: no axis can be taken away. Isolate its command line.")
    if (
        odd := next((axis for axis in axes if "." in axis and axis.split(".")[0] not in ("args", "env")), None)
    ) is not None:
        raise SpecError(f"the axis {odd!r} of this matrix is neither one of an engine nor of args or env.")
    specs = {id: spec for id, spec in (raw.get("specs") or {}).items() if spec is not None}
    bases = [run.id for run in results if dict(run.values) == dict(base_values)]
    if cell not in specs or not bases or bases[0] not in specs:
        raise SpecError(
            "this matrix.json does not say what its cells launched (no specs of the base cell and of this one), so "
            "nothing can be started from it. Give the failing command line instead: gpuserve isolate -- CMD…"
        )
    source = "the specs of matrix.json"
    problem = MatrixCell(
        ServerSpec.from_mapping(specs[bases[0]], source=source),
        ServerSpec.from_mapping(specs[cell], source=source),
        axes,
    )
    evidence = []
    for run in results:
        changed = [axis for axis, value in run.values.items() if base_values.get(axis) != value]
        if all(axis in axes and run.values[axis] == values[axis] for axis in changed) and (run.passed or run.failed):
            seen = Signature("ready" if run.passed else run.verdict, run.phase)
            evidence.append(Trial(frozenset(axes.index(axis) for axis in changed), outcome(seen, target)))
    return problem, evidence, target


def _value(spec: ServerSpec, axis: str) -> str:
    head, _, name = axis.partition(".")
    if name:
        return str(dict(getattr(spec, head)).get(name))
    if axis in ("engine", "model", "tp"):
        return str(getattr(spec, axis))
    value = spec.axis(axis)
    return value.name if value else "default"


def _with(spec: ServerSpec, cell: ServerSpec, axis: str) -> ServerSpec:
    """``spec`` with one axis as in ``cell``."""
    head, _, name = axis.partition(".")
    if name:
        merged = dict(getattr(spec, head))
        if name in dict(getattr(cell, head)):
            merged[name] = dict(getattr(cell, head))[name]
        else:
            merged.pop(name, None)
        changed = tuple(sorted(merged.items()))
        return replace(spec, args=changed) if head == "args" else replace(spec, env=changed)
    if axis in ("engine", "model", "tp"):
        return replace(spec, **{axis: getattr(cell, axis)})
    value = cell.axis(axis)
    return spec.with_axes({axis: value}) if value is not None else spec
