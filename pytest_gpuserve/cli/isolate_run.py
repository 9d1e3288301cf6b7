"""The work of ``gpuserve isolate``: ask the search, launch what it asks for, keep what came of it."""

from __future__ import annotations

import argparse
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from ..engines import get_engine
from ..engines.features import Remedy
from ..isolation.replay import ahead, conclude_now, replay
from ..isolation.search import Finding, Outcome, Question, Search, Trial, search
from ..isolation.signature import ENVIRONMENT, outcome
from ..isolation.support import Support, support
from ..isolation.variants import Variants
from ..text import one_line
from .isolate_state import Run, State
from .isolate_text import command, running, told, what
from .launches import Given, Launcher, Seen, StoppedError
from .parity import with_base
from .pytest_probe import is_pytest, run_pytest

_LIKELY = 0.5
"""Probability by its own launches below which a set is not what was found."""

AGAIN = 2
"""Further launches of what failed for the machine's sake, before it counts as unresolved."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it.

    Attributes:
        status: of the search.
        sets: minimal failing sets, as names of deltas.
        refined: of deltas in the first set, the parts that matter beside the core (none: the core alone fails).
        smallest: the command line of the first set, of one refined delta the parts that matter alone.
        remedy: the smallest change of the whole command that passes; None: none was found.
        remedy_runs: how often it passed.
        contradiction: why it is undecided, where time and budget are not the reason.
        counts: what the launches say of the sets by themselves; None: there is no set.
    """

    status: str
    sets: tuple[tuple[str, ...], ...]
    indices: tuple[frozenset[int], ...]
    confidence: float
    repro_rate: float
    refined: dict[str, tuple[str, ...]]
    smallest: str
    remedy: Remedy | None
    remedy_runs: int
    out_of_time: bool
    contradiction: str = ""
    counts: Support | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "sets": [list(names) for names in self.sets],
            "confidence": round(self.confidence, 4),
            "repro_rate": round(self.repro_rate, 3),
            "refined": {name: list(parts) for name, parts in self.refined.items()},
            "smallest": self.smallest,
            "remedy": self.remedy.name if self.remedy else None,
            "remedy_runs": self.remedy_runs,
            "out_of_time": self.out_of_time,
        }


class Isolation:
    """One isolation; :meth:`run` once."""

    def __init__(
        self,
        variants: Variants,
        state: State,
        launcher: Launcher,
        arguments: argparse.Namespace,
        say: Callable[[str], None],
        width: int,
        cold: Path,
        probe: Sequence[str],
    ) -> None:
        self._variants = variants
        self._state = state
        self._launcher = launcher
        self._given = arguments
        self._say = say
        self._width = width
        self._cold = cold
        self._probe = tuple(probe)
        self._numbers = itertools.count(len(state.runs) + 1)
        self._colds = itertools.count(1)
        self._lock = threading.Lock()

    def run(self, evidence: Sequence[Trial]) -> Result:
        """Search, refine, look for a remedy. Launches that are known are not repeated."""
        given, variants = self._given, self._variants
        make = partial(
            search,
            tuple(variants.weights),
            evidence=tuple(evidence),
            calibrate=given.calibrate,
            budget=given.budget,
            others=not given.one,
        )
        finding = self._search("search", variants, make, evidence)
        contradiction = self._silent(variants, evidence) if finding.status != "base_fails" else ""
        if contradiction:
            finding = replace(finding, status="undecided", sets=(), confidence=0.0)
        elif finding.status == "found" and evidence:
            contradiction = self._verify(variants, finding)
        finding, counts, doubt = self._weighed(finding, evidence, doubted=bool(contradiction))
        contradiction = contradiction or doubt
        sets = tuple(tuple(variants.names[n] for n in sorted(found)) for found in finding.sets)
        refined: dict[str, tuple[str, ...]] = {}
        remedy, runs = None, 0
        smallest = command(variants, finding.sets[0], self._state.redactor) if finding.sets else ""
        if finding.status == "found":
            for number in sorted(finding.sets[0]):
                smaller = variants.refined(number, finding.sets[0] - {number})
                if smaller is not None and (parts := self._refine(variants.names[number], smaller)) is not None:
                    refined[variants.names[number]] = parts
                    smallest = command(smaller, map(smaller.names.index, parts), self._state.redactor)
        if finding.sets:
            remedy, runs = self._remedy(sets[0], finding.repro_rate)
        return Result(
            finding.status,
            sets,
            finding.sets,
            finding.confidence,
            finding.repro_rate,
            refined,
            smallest,
            remedy,
            runs,
            self._over(),
            contradiction,
            counts,
        )

    def _silent(self, variants: Variants, evidence: Sequence[Trial]) -> str:
        """Why nothing is known of the whole command after its calibration; empty: something is."""
        n = len(variants.names)
        whole = [run for run in self._state.runs if run.stage == "search" and len(run.deltas) == n]
        seen = [run.outcome for run in whole] + [trial.outcome for trial in evidence if len(trial.deltas) == n]
        if len(whole) < self._given.calibrate or set(seen) != {"unresolved"}:
            return ""
        last = whole[-1]
        said = one_line(last.text.splitlines()[0], 400).rstrip(".") if last.text else str(last.signature)
        return (
            f"{len(whole)} launches of the whole command, and none told whether it fails: {said}. Mend that"
            f"{' or --probe' if self._probe else ''}, then begin anew with --fresh"
        )

    def _weighed(
        self, finding: Finding, evidence: Sequence[Trial], *, doubted: bool
    ) -> tuple[Finding, Support | None, str]:
        """The finding with a confidence that its own launches bear out, and why it is doubted if they do not."""
        if not finding.sets:
            return finding, None, ""
        own = self._state.launches("search", self._variants.names)
        told: dict[frozenset[int], list[Outcome]] = {}
        for trial in evidence:
            told.setdefault(trial.deltas, []).append(trial.outcome)
        counts = support(finding.sets, [own, told])
        if finding.status == "found" and not doubted:
            if counts.probability >= _LIKELY:
                return finding, counts, ""
            shown = what([self._variants.names[n] for n in sorted(finding.sets[0])], self._variants.names)
            return replace(finding, status="undecided", sets=(), confidence=0.0), counts, f"{shown}: {counts}"
        here = support(finding.sets, [own])
        if here.launched and not here.failed:
            return replace(finding, status="undecided", sets=(), confidence=0.0), counts, ""
        sure = finding.confidence * counts.probability
        return replace(finding, status="undecided", confidence=sure), counts, ""

    def _verify(self, variants: Variants, finding: Finding) -> str:
        """What a matrix told is no launch of ours: the set, and the set less each of its deltas, are launched here
        unless the search did so. What they do not confirm; empty: they do."""
        blamed = finding.sets[0]
        times = _often_enough(finding.repro_rate)
        for deltas, sought, most in [(blamed, "fail", times), *((blamed - {n}, "pass", 1) for n in sorted(blamed))]:
            names = tuple(variants.names[n] for n in sorted(deltas))
            while sought not in (seen := self._state.launches("search", variants.names).get(deltas, [])):
                if len(seen) >= most or self._over():
                    shown = what(names, variants.names)
                    there = "fails" if sought == "fail" else "passes"
                    here = f"{' and '.join(dict.fromkeys(seen))} in {len(seen)}" if seen else "no time was left for a"
                    return f"by the matrix {shown} {there}, but here: {here} launch{'es' if len(seen) > 1 else ''}"
                self._launch("search", variants, names, deltas, "verify", None)
        return ""

    def _over(self) -> bool:
        return self._given.minutes is not None and self._state.seconds >= 60 * self._given.minutes

    def _search(self, stage: str, variants: Variants, make: Callable[[], Search], evidence: Sequence[Trial]) -> Finding:
        """Run one search to its end, several launches at a time where that is allowed."""
        with ThreadPoolExecutor(self._width, thread_name_prefix="gpuserve-launch") as threads:
            while True:
                launches = self._state.launches(stage, variants.names)
                if self._over() or (stage == "search" and self._silent(variants, evidence)):
                    return conclude_now(make(), launches)
                questions = ahead(make, launches, self._width)
                if questions and not questions[0].deltas and "pass" not in launches.get(frozenset(), ()):
                    questions = questions[:1]  # others are compared with the base: not before it passed once
                if not questions:
                    return cast(Finding, replay(make(), launches))
                jobs: list[Future[None]] = []
                try:
                    jobs += (threads.submit(self._ask, stage, variants, question) for question in questions)
                    for job in jobs:
                        job.result()
                except BaseException:
                    for job in jobs:
                        job.cancel()
                    self._launcher.stop()  # else they would be waited for
                    raise

    def _ask(self, stage: str, variants: Variants, question: Question) -> None:
        on = tuple(variants.names[n] for n in sorted(question.deltas))
        self._launch(stage, variants, on, question.deltas, question.purpose, None)

    def _refine(self, name: str, smaller: Variants) -> tuple[str, ...] | None:
        """Which parts of one delta are needed. The whole of it failed, with the others, in the search."""
        known = [Trial(frozenset(range(len(smaller.names))), "fail")] * max(2, self._given.calibrate)
        make = partial(
            search,
            tuple(smaller.weights),
            evidence=known,
            calibrate=max(1, min(2, self._given.calibrate)),
            budget=self._given.budget // 2,
            others=False,
        )
        finding = self._search(f"refine {name}", smaller, make, known)
        if finding.status == "base_fails":
            return ()
        if finding.status == "found":
            return tuple(smaller.names[n] for n in sorted(finding.sets[0]))
        return None

    def _remedy(self, blamed: Sequence[str], rate: float) -> tuple[Remedy | None, int]:
        """The first escape hatch with which the whole command passes often enough that it is no luck."""
        variants, left = self._variants, self._given.remedies
        everything = frozenset(range(len(variants.names)))
        times = _often_enough(rate)
        for remedy in variants.remedies(blamed):
            stage = f"remedy {remedy.name}"
            while True:
                known = [run.outcome for run in self._state.runs if run.stage == stage]
                if any(one != "pass" for one in known):
                    break
                if len(known) >= times:
                    return remedy, len(known)
                spent = sum(1 for run in self._state.runs if run.stage.startswith("remedy "))
                if spent >= left or self._over():
                    return None, 0
                self._launch(stage, variants, tuple(variants.names), everything, "remedy", remedy)
        return None, 0

    def _launch(
        self,
        stage: str,
        variants: Variants,
        names: tuple[str, ...],
        on: frozenset[int],
        purpose: str,
        remedy: Remedy | None,
    ) -> None:
        """One launch, kept on disk. What failed for the machine's sake is launched again."""
        with self._lock:
            number = next(self._numbers)
            cold = self._cold / str(next(self._colds))
        cold.mkdir(parents=True)
        wanted = variants.wanted(on, remedy, str(cold))
        self._say(running(number, stage, names, variants.names, purpose, remedy))
        seen: Seen | None = None
        for _ in range(1 + AGAIN):
            seen = self._once(wanted)
            if seen.mute or seen.signature.verdict not in ENVIRONMENT:
                break
            self._say(f"      {seen.signature}: {seen.text.splitlines()[0] if seen.text else ''}; again")
        assert seen is not None
        whole = on == frozenset(range(len(variants.names))) and stage == "search"
        with self._lock:
            seen = self._compared(seen, base=stage == "search" and not on)
            failed = not seen.signature.passed and seen.signature.verdict not in ENVIRONMENT
            if whole and self._state.target is None and failed:
                self._state.seek(seen.signature)
            run = Run(
                number=number,
                stage=stage,
                deltas=names,
                purpose=purpose,
                outcome=outcome(seen.signature, self._state.target),
                verdict=seen.signature.verdict,
                phase=seen.signature.phase,
                roots=tuple(sorted(seen.signature.roots)),
                seconds=round(seen.seconds, 2),
                text=seen.text[:2000],
                incident=seen.incident,
                log=seen.log,
            )
            self._state.add(run)
        self._say(told(run, self._state))

    def _compared(self, seen: Seen, *, base: bool) -> Seen:
        """With the completions of the base's first launch that passed; that launch itself is kept for it."""
        if base and self._state.base is None and seen.signature.passed and seen.outputs:
            self._state.base = seen.outputs
        compared = with_base(self._state.base, seen)
        if base and not compared.signature.passed and seen.signature.passed:
            self._state.base = ()
            note = "so no other launch is compared with it"
            return replace(seen, text=f"the base does not repeat itself, {note}: {compared.text}")
        return compared

    def _once(self, wanted: Any) -> Seen:
        adapter = get_engine(wanted.spec.engine)
        if is_pytest(self._probe):
            whole = self._variants.wanted(range(len(self._variants.names)))
            stopped, limit = self._launcher.stopped, self._given.probe_timeout
            seen = run_pytest(self._probe, wanted, whole, limit, self._given.output, stopped)
        elif wanted.command is None:
            seen = self._launcher(wanted.spec, adapter, lambda _: None)
        else:
            seen = self._launcher(wanted.spec, Given(adapter, wanted.command, self._given.ready), lambda _: None)
        if self._launcher.stopped():
            raise StoppedError("what became of it is our own doing")
        return seen


def _often_enough(rate: float) -> int:
    """Launches after which what fails at this rate would have failed, 19 times of 20."""
    return max(1, min(8, math.ceil(math.log(0.05) / math.log(1 - min(rate, 0.96)))))
