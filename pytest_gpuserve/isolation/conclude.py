"""What a finished matrix proves: which axis, which combination, what is flaky, what would decide. Pure and typed.

Failures are told apart by their signature, so two faults are two conclusions; for each, the cells that got past the
phase in which it shows count as passed, those that failed earlier or for the machine's sake say nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..shape import NUMBER, OBJECT, SCALAR, Maybe, checked
from ..vocabulary import PHASES
from .conclude_text import blame, conjoin, count, counts, exonerate, name, plural, pretty, with_cells
from .hypotheses import Condition, Evidence, Posterior, Values, Weighed, infer

PASSING = ("ready", "pass", "passed")
"""Verdicts of a run in which all is well."""

NOT_THE_CELL = ("infra", "port", "leak", "undecided", "skip", "skipped", "unsupported_arch", "not_run")
"""Verdicts that say nothing of a configuration: the machine, an earlier server, or a cell that cannot exist here."""

SURE = 0.95
"""Confidence from which a cause is stated without "probably"."""

ENOUGH = 3
"""A fault seen in one cell only needs so many failing runs there to be sure of its condition: one may be chance."""

LIKELY = 0.5
"""Confidence from which a cause is named at all."""

_WORLDS = 20_000
"""Cells looked at for those that would decide."""

_CELL = {
    "id": str,
    "values": {str: SCALAR},
    "verdict": str,
    "phase": str | None,
    "signature": str | None,
    "figures": Maybe({str: NUMBER}),
    "reason": str | None,
}

SCHEMA = "gpuserve.matrix/1"
SHAPE = {"schema": (SCHEMA,), "base": Maybe({str: SCALAR}), "cells": [_CELL], "specs": Maybe({str: Maybe(OBJECT)})}
"""Of ``matrix.json``, as far as it is read."""

Kind = Literal["cause", "interaction", "everywhere", "flaky", "undecided", "passes", "slower", "none"]


@dataclass(frozen=True, slots=True)
class CellResult:
    """One run of one cell.

    Attributes:
        id: of the cell; equal for several runs of it.
        values: axis to value name.
        verdict: of :data:`pytest_gpuserve.vocabulary.Verdict`, or ``pass``, ``skip``, ``not_run``.
        phase: where it failed; None with the verdict ``config``: nothing ran as this cell asks for.
        signature: what makes two failures the same fault; None: verdict and phase.
        figures: accept_rate (0..1), throughput (tokens/s), where measured.
        reason: why it was skipped.
    """

    id: str
    values: Mapping[str, str]
    verdict: str
    phase: str | None = None
    signature: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None

    @property
    def passed(self) -> bool:
        return self.verdict in PASSING

    @property
    def failed(self) -> bool:
        return not self.passed and self.verdict not in NOT_THE_CELL and not self.refused

    @property
    def refused(self) -> bool:
        """It was not launched, or not as it was asked for: its error says why, and no other cell proves anything."""
        return self.verdict == "config" and self.phase is None

    @property
    def fault(self) -> str:
        """The signature, for people: ``hang in cuda_graph``."""
        return self.signature or f"{self.verdict}{f' in {self.phase}' if self.phase else ''}"

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "values": dict(self.values),
            "verdict": self.verdict,
            "phase": self.phase,
            "signature": self.signature,
            "figures": dict(self.figures),
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CellResult:
        """Raises ValueError for what :meth:`to_json` did not write."""
        checked(raw, _CELL)
        return cls(
            raw["id"],
            {axis: str(value) for axis, value in raw["values"].items()},
            raw["verdict"],
            raw.get("phase"),
            raw.get("signature"),
            {name: float(value) for name, value in (raw.get("figures") or {}).items()},
            raw.get("reason"),
        )


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing that the matrix proves, or does not.

    Attributes:
        kind: cause (one axis), interaction (two or three), everywhere (no axis: the base too), flaky (at random, no
            axis), undecided, passes (all do), slower (figures against base), none (nothing ran).
        text: one sentence with its counts.
        fault: the signature it is about.
        condition: (axis, value) of the cells that fail, where one condition explains them; alternatives one by one.
        axes: the axes to blame; empty when none is.
        confidence: 0..1; below :data:`SURE` the text says "probably".
        rate: how often a cell that meets the condition fails.
        cells: ids of the cells that failed so.
        decide: cells (axis to value) whose run would tell most, best first.
    """

    kind: Kind
    text: str
    fault: str | None = None
    condition: Condition | None = None
    axes: tuple[str, ...] = ()
    confidence: float = 1.0
    rate: float = 1.0
    cells: tuple[str, ...] = ()
    decide: tuple[Mapping[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        parts = self.condition.parts if self.condition is not None else ()
        return {
            "kind": self.kind,
            "text": self.text,
            "fault": self.fault,
            "condition": [[[x.axis, "!=" if x.negated else "=", x.value] for x in part] for part in parts],
            "axes": list(self.axes),
            "confidence": round(self.confidence, 3),
            "rate": self.rate,
            "cells": list(self.cells),
            "decide": [dict(cell) for cell in self.decide],
        }


@dataclass(frozen=True, slots=True)
class Conclusion:
    """All statements, most certain first within what matters most, and the cells that did not always do the same."""

    statements: tuple[Statement, ...]
    flaky: tuple[tuple[str, int, int], ...]
    axes: Mapping[str, tuple[str, ...]]
    base: Mapping[str, str]
    results: tuple[CellResult, ...]

    def to_json(self) -> dict[str, Any]:
        """The object of ``matrix.json``, schema ``gpuserve.matrix/1``: read back by :func:`from_json`."""
        return {
            "schema": SCHEMA,
            "axes": {axis: list(values) for axis, values in self.axes.items()},
            "base": dict(self.base),
            "cells": [result.to_json() for result in self.results],
            "conclusion": [statement.to_json() for statement in self.statements],
            "flaky": [{"id": id, "failed": failed, "runs": runs} for id, failed, runs in self.flaky],
        }


def from_json(raw: Mapping[str, Any]) -> list[CellResult]:
    """The runs that a ``matrix.json`` holds.

    Raises:
        ValueError: it is none.
    """
    checked(raw, SHAPE)
    return [CellResult.from_json(cell) for cell in raw["cells"]]


def conclude(results: Iterable[CellResult], base: Values | None = None) -> Conclusion:
    """Say what the runs of a matrix prove.

    Args:
        results: one entry a run; several for a cell that ran several times.
        base: the values that changes are counted from; None: those of the first result, as matrices put it first.
    """
    runs = tuple(results)
    axes = _axes(runs)
    base = dict(base if base is not None else runs[0].values if runs else {})
    flaky = _flaky(runs)
    counted = [run for run in runs if run.passed or run.failed]
    statements: list[Statement] = []
    if not counted:
        statements.append(Statement("none", f"No cell ran, so nothing is known ({_lost(runs)})."))
    faults = list(dict.fromkeys(run.fault for run in runs if run.failed))
    for fault in faults:
        statements.append(_explain(fault, counted, axes, base, [run.values for run in runs if run.refused]))
    if counted and not faults:
        lost = f"; {_lost(runs)}" if len(counted) < len(runs) else ""
        statements.append(Statement("passes", f"All {plural(_cells(counted), 'cell')} pass{lost}."))
    statements.extend(_figures(counted, axes, base))
    return Conclusion(tuple(statements), flaky, axes, base, runs)


def _axes(runs: Sequence[CellResult]) -> dict[str, tuple[str, ...]]:
    axes: dict[str, dict[str, None]] = {}
    for run in runs:
        for axis, value in run.values.items():
            axes.setdefault(axis, {})[value] = None
    return {axis: tuple(values) for axis, values in axes.items()}


def _flaky(runs: Sequence[CellResult]) -> tuple[tuple[str, int, int], ...]:
    counts: dict[str, list[int]] = {}
    for run in runs:
        if run.passed or run.failed:
            counts.setdefault(run.id, [0, 0])[run.passed] += 1
    return tuple((id, bad, bad + good) for id, (bad, good) in counts.items() if bad and good)


def _evidence(fault: str, runs: Sequence[CellResult]) -> dict[str, Evidence]:
    """What each cell says of one fault. Other failures count as passes when they came in a later phase."""
    phases = {run.phase for run in runs if run.fault == fault and run.failed}
    order = [PHASES.index(phase) for phase in phases if phase in PHASES]
    cells: dict[str, Evidence] = {}
    for run in runs:
        same = run.failed and run.fault == fault
        later = run.failed and run.phase in PHASES and bool(order) and PHASES.index(run.phase) > max(order)
        if same or run.passed or later:
            cell = cells.setdefault(run.id, Evidence(run.values))
            cell.failed += same
            cell.passed += not same
    return cells


def _explain(
    fault: str,
    runs: Sequence[CellResult],
    axes: Mapping[str, Sequence[str]],
    base: Values,
    refused: Sequence[Values],
) -> Statement:
    cells = _evidence(fault, runs)
    posterior = infer(list(cells.values()), axes)
    best = posterior.best
    failed = [cell for cell in cells.values() if cell.failed]
    if len(failed) == 1 and failed[0].failed < ENOUGH:
        best = replace(best, probability=min(best.probability, SURE - 0.01))
    mute = [*refused, *(run.values for run in runs if run.id not in cells)]
    failing = tuple(id for id, cell in cells.items() if cell.failed)
    common: dict[str, Any] = {"fault": fault, "cells": failing, "confidence": best.probability, "rate": best.rate}
    if best.probability < LIKELY:
        return _undecided(posterior, cells, common, base, mute)
    decide = _deciding(posterior, base, mute) if best.probability < SURE else ()
    sure = "" if best.probability >= SURE else "probably "
    condition = best.condition
    if condition.noise:
        bad, total = count(cells.values(), lambda _: True)
        text = f"{fault}: in {bad} of {total} runs, {sure}at random: no axis explains which."
        return Statement("flaky", with_cells(text, decide, cells), decide=decide, **common)
    if not condition.axes:
        return _everywhere(best, cells, axes, base, common, decide)
    text = f"{fault}: {counts(best, cells)}: {sure}{blame(condition)}.{exonerate(condition, cells, axes, base)}"
    kind: Kind = "cause" if all(len(part) == 1 for part in condition.parts) else "interaction"
    return Statement(
        kind,
        with_cells(text, decide, cells),
        condition=condition,
        axes=tuple(sorted(condition.axes)),
        decide=decide,
        **common,
    )


def _everywhere(
    best: Weighed,
    cells: Mapping[str, Evidence],
    axes: Mapping[str, Sequence[str]],
    base: Values,
    common: dict[str, Any],
    decide: tuple[Mapping[str, str], ...],
) -> Statement:
    failed = sum(1 for cell in cells.values() if cell.failed)
    varied = [axis for axis, values in axes.items() if len(values) > 1]
    at_base = any(cell.failed and dict(cell.values) == dict(base) for cell in cells.values())
    where = "the base cell" if at_base else "every cell"
    but = f" (in {best.rate:.0%} of the runs)" if best.rate < 0.9 else ""
    sure = "" if best.probability >= SURE else "probably "
    names = [pretty(axis, value) for axis in varied for value in axes[axis] if value != base.get(axis)]
    innocent = (
        f"{conjoin(names)} {'is' if len(names) == 1 else 'are'} {sure}not the cause" if names else "one cell only"
    )
    text = f"{common['fault']}: {where} fails, and {failed} of {plural(len(cells), 'cell')} do{but}: {innocent}."
    return Statement("everywhere", with_cells(text, decide, cells), condition=best.condition, decide=decide, **common)


def _undecided(
    posterior: Posterior,
    cells: Mapping[str, Evidence],
    common: dict[str, Any],
    base: Values,
    mute: Sequence[Values],
) -> Statement:
    rivals = [w for w in posterior.weighed[:3] if w.probability > 0.05]
    shown = "; ".join(f"{name(w.condition)} ({w.probability:.0%})" for w in rivals)
    decide = _deciding(posterior, base, mute)
    bad, total = count(cells.values(), lambda _: True)
    text = f"{common['fault']}: {bad} of {total} runs, undecided between {shown or 'many causes'}."
    return Statement("undecided", with_cells(text, decide, cells), decide=decide, **common)


def _deciding(posterior: Posterior, base: Values, mute: Sequence[Values]) -> tuple[Mapping[str, str], ...]:
    """At most two cells whose next run (again, for tested ones) is expected to tell most; closest to the base at equal
    worth. ``mute``: cells that fail before this fault can show."""
    worlds = itertools.islice(itertools.product(*posterior.axes.values()), _WORLDS)
    rated: dict[tuple[bool, ...], tuple[float, int, dict[str, str]]] = {}
    for world in worlds:
        values = dict(zip(posterior.axes, world, strict=True))
        if values in mute:
            continue
        key = tuple(w.condition.holds(values) for w in posterior.weighed[:12])
        entry = (posterior.information(values), -sum(base.get(axis) != value for axis, value in values.items()), values)
        if key not in rated or entry[:2] > rated[key][:2]:
            rated[key] = entry
    best = sorted(rated.values(), key=lambda entry: entry[:2], reverse=True)
    return tuple(values for information, _, values in best[:2] if information > 0.02)


def _figures(runs: Sequence[CellResult], axes: Mapping[str, Sequence[str]], base: Values) -> list[Statement]:
    """Speculative decoding against the cell that differs in nothing else."""
    plain = base.get("spec_decode")
    statements = []
    by_values = {tuple(sorted(run.values.items())): run for run in runs if run.passed and "throughput" in run.figures}
    for run in by_values.values():
        kind = run.values.get("spec_decode")
        if kind is None or kind == plain:
            continue
        against = by_values.get(tuple(sorted({**run.values, "spec_decode": plain or ""}.items())))
        accepted = run.figures.get("accept_rate")
        rate = f" ({accepted:.0%} accepted)" if accepted is not None else ""
        if against is None or against.figures["throughput"] <= 0:
            text = f"{run.id}: {run.figures['throughput']:.0f} tokens/s{rate}, undecided: no base cell to compare with."
            statements.append(Statement("undecided", text, cells=(run.id,)))
            continue
        factor = run.figures["throughput"] / against.figures["throughput"]
        word = "slower than" if factor < 1 else "as against"
        text = f"{run.id}: {factor:.2f}x {word} its base {against.id}{rate}."
        statements.append(
            Statement("slower" if factor < 1 else "passes", text, cells=(run.id, against.id), rate=factor)
        )
    return statements


def _lost(runs: Sequence[CellResult]) -> str:
    counts: dict[str, int] = {}
    for run in runs:
        if not (run.passed or run.failed):
            counts[run.verdict] = counts.get(run.verdict, 0) + 1
    return ", ".join(f"{n} {verdict}" for verdict, n in counts.items()) or "no result"


def _cells(runs: Sequence[CellResult]) -> int:
    return len({run.id for run in runs})
