"""Thirty planted causes against ``conclude``: how often the axes named are the right ones, and the worst kind of error.

    python benchmarks/conclusions.py [--seeds N] [--verbose]

A conclusion is right when it names exactly the planted axes for every planted fault. Wrong at full confidence (0.95 and
more) must not happen. Flaky causes (they show in 70 % of the runs) run three times a cell, the others once.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pytest_gpuserve.isolation.conclude import SURE, CellResult, Conclusion, conclude
from pytest_gpuserve.isolation.matrix import expand

Values = Mapping[str, str]
Fault = tuple[frozenset[str], Callable[[Values, random.Random], bool], tuple[str, str]]
"""Axes to blame, whether a run shows it, (verdict, phase)."""

SMALL = {"spec_decode": ["base", "eagle3"], "cuda_graph": ["on", "off"], "attention_backend": ["triton", "flashinfer"]}
FOUR = {**SMALL, "overlap": ["on", "off"]}
WIDE = {
    "spec_decode": ["base", "eagle", "eagle3"],
    "cuda_graph": ["on", "off"],
    "attention_backend": ["triton", "flashinfer", "fa3", "trtllm_mha"],
}
LONG = {**FOUR, "kv_cache_dtype": ["auto", "fp8"], "custom_all_reduce": ["on", "off"]}

GRAPH = ("hang", "cuda_graph")
DRAFT = ("crash", "draft_load")
SERVING = ("hang", "serving")


def when(rate: float = 1.0, **wanted: str) -> Callable[[Values, random.Random], bool]:
    return lambda values, dice: all(values[a] == v for a, v in wanted.items()) and dice.random() < rate


def fault(how: tuple[str, str], rate: float = 1.0, **wanted: str) -> Fault:
    return frozenset(wanted), when(rate, **wanted), how


@dataclass(frozen=True)
class Case:
    name: str
    axes: Mapping[str, list[str]]
    faults: tuple[Fault, ...]
    repeats: int = 1
    coverage: str = "full"


CASES = (
    Case("single, base value", SMALL, (fault(GRAPH, cuda_graph="on"),)),
    Case("single, changed value", SMALL, (fault(DRAFT, spec_decode="eagle3"),)),
    Case("single of four axes", FOUR, (fault(SERVING, overlap="off"),)),
    Case("single of four values", WIDE, (fault(GRAPH, attention_backend="fa3"),)),
    Case("single of six axes, pairwise", LONG, (fault(SERVING, kv_cache_dtype="fp8"),), coverage="pairwise"),
    Case("single, one-off", FOUR, (fault(GRAPH, attention_backend="flashinfer"),), coverage="one_off"),
    Case("pair", SMALL, (fault(GRAPH, spec_decode="eagle3", cuda_graph="on"),)),
    Case("pair, changed values", SMALL, (fault(SERVING, spec_decode="eagle3", attention_backend="flashinfer"),)),
    Case("pair of four axes", FOUR, (fault(SERVING, overlap="off", cuda_graph="on"),)),
    Case("pair in a wide matrix", WIDE, (fault(GRAPH, spec_decode="eagle3", attention_backend="trtllm_mha"),)),
    Case("pair of six axes", LONG, (fault(GRAPH, spec_decode="eagle3", custom_all_reduce="on"),)),
    Case("triple", SMALL, (fault(GRAPH, spec_decode="eagle3", cuda_graph="on", attention_backend="flashinfer"),)),
    Case("triple of four axes", FOUR, (fault(SERVING, spec_decode="eagle3", cuda_graph="on", overlap="on"),)),
    Case(
        "triple in a wide matrix", WIDE, (fault(GRAPH, spec_decode="eagle", cuda_graph="on", attention_backend="fa3"),)
    ),
    Case("triple of six axes", LONG, (fault(SERVING, overlap="off", cuda_graph="on", kv_cache_dtype="fp8"),)),
    Case("two faults", SMALL, (fault(DRAFT, spec_decode="eagle3"), fault(SERVING, cuda_graph="on"))),
    Case(
        "two faults, four axes",
        FOUR,
        (fault(DRAFT, spec_decode="eagle3"), fault(GRAPH, attention_backend="flashinfer")),
    ),
    Case(
        "two faults, single and pair",
        FOUR,
        (fault(GRAPH, attention_backend="flashinfer"), fault(SERVING, spec_decode="eagle3", overlap="on")),
    ),
    Case("two faults, wide", WIDE, (fault(DRAFT, spec_decode="eagle3"), fault(GRAPH, attention_backend="fa3"))),
    Case(
        "two faults, one later", LONG, (fault(("oom", "kv_cache"), kv_cache_dtype="fp8"), fault(SERVING, overlap="off"))
    ),
    Case(
        "two causes, one look",
        LONG,
        (
            (
                frozenset({"overlap", "kv_cache_dtype"}),
                lambda v, _: v["overlap"] == "off" or v["kv_cache_dtype"] == "fp8",
                GRAPH,
            ),
        ),
    ),
    Case("flaky single", SMALL, (fault(GRAPH, 0.7, cuda_graph="on"),), 3),
    Case("flaky single, changed value", SMALL, (fault(SERVING, 0.7, spec_decode="eagle3"),), 3),
    Case("flaky single of four axes", FOUR, (fault(SERVING, 0.7, overlap="off"),), 3),
    Case("flaky pair of four axes", FOUR, (fault(GRAPH, 0.7, spec_decode="eagle3", cuda_graph="on"),), 3),
    Case("flaky everywhere", FOUR, (fault(SERVING, 0.7),), 3),
    Case("base broken", SMALL, (fault(("hang", "distributed_init")),)),
    Case("base broken, wide", WIDE, (fault(("oom", "weight_load")),)),
    Case("all pass", SMALL, ()),
    Case("all pass, wide", WIDE, ()),
)


def play(case: Case, seed: int) -> Conclusion:
    """Run the matrix once: a cell shows the fault of the earliest phase, as a real server would."""
    from pytest_gpuserve.vocabulary import PHASES

    dice = random.Random(f"{case.name} {seed}")
    runs = []
    for cell in expand(case.axes, coverage=case.coverage):  # type: ignore[arg-type]
        values = cell.names()
        for _ in range(case.repeats):
            shown = [how for _, shows, how in case.faults if shows(values, dice)]
            verdict, phase = min(shown, key=lambda how: PHASES.index(how[1]), default=("ready", None))  # type: ignore[arg-type]
            runs.append(CellResult(cell.id, values, verdict, phase))
    return conclude(runs)


def judge(case: Case, said: Conclusion) -> Iterator[tuple[str, float, str]]:
    """("right" | "wrong" | "undecided", confidence, text) of each planted fault."""
    if not case.faults:
        ok = [s.kind for s in said.statements] == ["passes"]
        yield ("right" if ok else "wrong", 1.0, " / ".join(s.text for s in said.statements))
    for axes, _, (verdict, phase) in case.faults:
        found = [s for s in said.statements if s.fault == f"{verdict} in {phase}"]
        if not found:
            yield "undecided", 0.0, "the fault never showed"
        for s in found:
            blamed = frozenset(s.axes)
            decided = s.kind in ("cause", "interaction", "everywhere")
            right = blamed == axes and (decided or (s.kind == "flaky" and not axes))
            yield ("right" if right else "wrong" if decided else "undecided"), s.confidence, s.text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    begin = time.perf_counter()
    for case in CASES:
        counts: Counter[str] = Counter()
        for seed in range(options.seeds if case.repeats > 1 else 1):
            for verdict, confidence, text in judge(case, play(case, seed)):
                weight = 1 if case.repeats > 1 else options.seeds
                sure = verdict == "wrong" and confidence >= SURE
                counts[verdict] += weight
                counts["wrong and sure"] += weight * sure
                if options.verbose and verdict != "right":
                    print(f"    {case.name} seed {seed}: {verdict} ({confidence:.2f}): {text}")
        total += counts
        shown = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
        print(f"{case.name:32} {shown}")
    answers = total["right"] + total["wrong"] + total["undecided"]
    share = total["right"] / answers
    print(
        f"{len(CASES)} causes, {answers} answers: {share:.1%} right, {total['undecided']} undecided, "
        f"{total['wrong']} wrong, {total['wrong and sure']} of them at full confidence "
        f"({time.perf_counter() - begin:.1f} s)"
    )
    return 0 if share >= 0.95 and not total["wrong and sure"] else 1


if __name__ == "__main__":
    sys.exit(main())
