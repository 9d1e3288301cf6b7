"""What ``gpuserve isolate`` prints: the plan, a line a run, the report."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .. import shell
from ..engines import get_engine
from ..engines.features import Remedy
from ..errors import GpuserveError
from ..isolation.deltas import Command
from ..isolation.plan import minutes
from ..isolation.search import Trial
from ..isolation.variants import Variants
from ..redaction.redact import Redactor
from ..text import one_line
from .isolate_state import Run, State

if TYPE_CHECKING:
    from .isolate_run import Result

HOST, PORT = "127.0.0.1", 30000
"""Where a command line says that it listens, of those that nobody typed."""


def command(variants: Variants, on: Iterable[int], redactor: Redactor, remedy: Remedy | None = None) -> str:
    """The command line with these deltas on, as it may be pasted into a shell; secrets are placeholders."""
    on = list(on)
    typed = variants.typed(on, remedy)
    if typed is None:
        spec = variants.wanted(on, remedy).spec
        try:
            launch = get_engine(spec.engine).launch(spec, host=HOST, port=PORT, python=spec.python or sys.executable)
        except GpuserveError:  # not installed here
            return variants.shown(on)
        env = {**launch.env, **dict(spec.env)}
        typed = Command(launch.argv, tuple((name, env[name] or "") for name in sorted(env)))
    return shell.line(redactor.value(list(typed.argv)), redactor.value(dict(typed.env)).items())


def plan(variants: Variants, given: argparse.Namespace, evidence: Sequence[Trial], base: str) -> list[str]:
    """What will be tried, and what it costs at most. ``base``: its command line."""
    names, n = variants.names, len(variants.names)
    lines = [f"base: {base}", f"{n} delta{'' if n == 1 else 's'} that can be taken away:"]
    lines += [
        f"  {name}: {one_line(text, 300)}" if text != name else f"  {name}"
        for name, text in zip(names, variants.texts, strict=True)
    ]
    remedies = variants.remedies(())
    lines += [f"remedies: {', '.join(remedy.name for remedy in remedies) or 'none known'}"]
    if not n:
        return lines
    ends = 2 * given.calibrate - sum(1 for t in evidence if len(t.deltas) in (0, n))
    few, many = math.ceil(math.log2(max(n, 2))) + 1, 2 * math.ceil(math.log2(max(n, 2))) + 5
    lines.append(
        f"cost: {max(0, ends)} launches of both ends ({given.calibrate} each, base first), then about {few} where one "
        f"delta is to blame and {many} where two are; at most {given.budget} for the search"
        + (f" and {given.minutes:g} minutes in all" if given.minutes else "")
        + f", more where it fails only now and then; up to {given.remedies} for remedies. Known from before: "
        f"{len(evidence)}."
    )
    return lines


def what(names: Sequence[str], known: Sequence[str]) -> str:
    """Which deltas are on, in few words."""
    off = [name for name in known if name not in names]
    if not names:
        return "base alone"
    if not off:
        return "everything"
    return f"all but {', '.join(off)}" if len(off) < len(names) else ", ".join(names)


def running(
    number: int, stage: str, names: Sequence[str], known: Sequence[str], purpose: str, remedy: Remedy | None
) -> str:
    """A line when a launch begins."""
    shown = f"everything, {remedy.name}" if remedy is not None else what(names, known)
    if stage.startswith("refine "):
        shown = refining(stage, names)
    return f"[{number}] {one_line(shown, 300)} ({purpose}) …"


def refining(stage: str, parts: Sequence[str]) -> str:
    """What is on while the parts of one delta are tried: its core always, and whatever else the failing set needs."""
    return f"{stage.removeprefix('refine ')}: {', '.join(['its core', *parts]) if parts else 'its core alone'}"


def told(run: Run, state: State) -> str:
    """The end of one run, and how long the rest of a deterministic search may take."""
    meaning = {"fail": "FAILS", "pass": "passes", "unresolved": "says nothing (another failure)"}[run.outcome]
    mean = state.seconds / len(state.runs)
    where = f"; {run.incident}" if run.incident else ""
    first = one_line(run.text.splitlines()[0], 300) if run.text else ""
    return (
        f"[{run.number}] {meaning}: {one_line(str(run.signature))} after {minutes(run.seconds)} "
        f"(a launch takes {minutes(mean)}){where}" + (f"\n      {first}" if first else "")
    )


def report(variants: Variants, state: State, result: Result, seconds: float) -> list[str]:
    """The end: what was found, the command lines as they may be pasted, every run."""
    lines = ["", *_finding(variants, state, result), ""]
    lines += table(state.runs, variants.names)
    searching = sum(1 for run in state.runs if run.stage == "search" and run.purpose == "search")
    lines.append(
        f"{len(state.runs)} launches ({searching} of the search), {minutes(state.seconds)} of launches, "
        f"{minutes(seconds)} now; everything is in {state.directory}."
    )
    return lines


def _finding(variants: Variants, state: State, result: Result) -> list[str]:
    everything = range(len(variants.names))
    sought = f" ({state.target})" if state.target else ""
    if result.status == "base_fails":
        return [
            f"The base fails too{sought}, so none of the deltas is to blame. Look at the model, the GPUs and what is "
            "in the base; its command line:",
            f"  {command(variants, (), state.redactor)}",
            *_why(state, ()),
        ]
    if result.status == "not_reproduced":
        return [
            "The whole command did not fail once, so there is nothing to isolate: it fails rarely (raise --calibrate), "
            "needs a load that the check does not make (--probe), or this machine does not show it."
        ]
    if result.status == "undecided":
        why = "the time (--minutes)" if result.out_of_time else "the budget (--budget)"
        guess = ""
        if result.sets:
            guess = f" Best guess ({result.confidence:.0%}): {' + '.join(result.sets[0])}; {result.counts}."
        lines = [f"Undecided: {why} is spent before one set of deltas was proved{sought}.{guess}"]
        if result.contradiction:
            lines = [f"Undecided: {result.contradiction}{sought}.{guess}"]
    else:
        names = " + ".join(result.sets[0])
        rate = "" if result.repro_rate > 0.9 else f", in about {result.repro_rate:.0%} of the launches"
        lines = [
            f"Found{sought}: it fails with {names} on the base{rate}, and not with any of them taken away "
            f"(confidence {result.confidence:.1%})."
        ]
        for name, parts in result.refined.items():
            matter = f"its parts that matter: {', '.join(parts)}" if parts else "its core alone is enough"
            lines.append(f"Of {name}, {matter}.")
        lines += [f"Another set that fails by itself: {' + '.join(other)}." for other in result.sets[1:]]
    if result.indices and not result.contradiction:
        heading = "Smallest command that fails" if result.status == "found" else "The command line of that guess"
        lines += [f"{heading}:", f"  {result.smallest}"]
    if result.remedy is not None:
        lines += [
            f"Smallest remedy that passes ({result.remedy.name}, {result.remedy_runs} of {result.remedy_runs} runs):",
            f"  {command(variants, everything, state.redactor, result.remedy)}",
        ]
    elif result.status == "found":
        rest = set(everything) - {max(result.indices[0], key=lambda n: variants.weights[n])}
        passing = [run for run in state.runs if run.outcome == "pass" and run.stage == "search"]
        most = max(passing, key=lambda run: len(run.deltas), default=None)
        if most is not None:
            rest = {variants.names.index(name) for name in most.deltas}
            lines += [
                "No known remedy passed; the largest command that passed:",
                f"  {command(variants, rest, state.redactor)}",
            ]
    return lines


def _why(state: State, names: tuple[str, ...]) -> list[str]:
    run = next((run for run in state.runs if run.deltas == names and run.outcome == "fail"), None)
    if run is None:
        return []
    return [f"  {line}" for line in run.text.splitlines()[:12]]


def table(runs: Sequence[Run], known: Sequence[str]) -> list[str]:
    """Every run: number, what was on, what came of it, seconds, evidence."""
    rows = [("run", "what was on", "verdict", "means", "seconds", "evidence")]
    for run in sorted(runs, key=lambda run: run.number):
        shown = what(run.deltas, known)
        if run.stage.startswith("remedy "):
            shown = f"everything, {run.stage.removeprefix('remedy ')}"
        elif run.stage != "search":
            shown = refining(run.stage, run.deltas) if run.stage.startswith("refine ") else f"{run.stage}: {shown}"
        verdict = f"{run.verdict}{f' {run.phase}' if run.phase else ''}"
        evidence = run.incident or (run.log or "" if run.outcome != "pass" else "")
        rows.append((str(run.number), shown, verdict, run.outcome, f"{run.seconds:.0f}", evidence))
    clean = [tuple(one_line(cell, 200) for cell in row) for row in rows]
    widths = [min(60, max(len(row[n]) for row in clean)) for n in range(6)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in clean]
