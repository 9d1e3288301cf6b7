"""What a finished matrix proves."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.isolation.conclude import SURE, CellResult, Conclusion, conclude, from_json
from pytest_gpuserve.isolation.grid import grid, next_cell, text

Values = Mapping[str, str]
Outcome = tuple[str, str | None] | None

AXES = {
    "spec_decode": ("base", "eagle3"),
    "cuda_graph": ("on", "off"),
    "attention_backend": ("triton", "flashinfer"),
}
HANG: Outcome = ("hang", "cuda_graph")


def run(how: Callable[[Values], Outcome], axes: Mapping[str, tuple[str, ...]] = AXES, repeats: int = 1) -> Conclusion:
    results = []
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        for _ in range(repeats):
            verdict, phase = how(values) or ("ready", None)
            results.append(CellResult("-".join(combination), values, verdict, phase))
    return conclude(results)


def only(conclusion: Conclusion) -> str:
    (statement,) = conclusion.statements
    return statement.text


def test_one_axis() -> None:
    said = run(lambda v: HANG if v["cuda_graph"] == "on" else None)
    assert only(said) == (
        "hang in cuda_graph: fails in 4 of 4 cells with cuda_graph=on, passes in 4 of 4 with off: cuda_graph. "
        "The base cell fails too: eagle3 and flashinfer are not the cause."
    )
    (statement,) = said.statements
    assert (statement.kind, statement.axes) == ("cause", ("cuda_graph",))
    assert statement.confidence >= SURE


def test_a_cell_that_is_refused_before_its_launch_proves_nothing() -> None:
    """Mutation: ``refused`` is always false. A configuration that an engine dies of is evidence."""

    def seen(values: Values) -> Outcome:
        if values["spec_decode"] == "eagle3":
            return ("config", None)
        return HANG if values["cuda_graph"] == "on" else None

    said = run(seen)
    assert only(said).startswith("hang in cuda_graph: fails in 2 of 2 cells with cuda_graph=on")
    assert all(cell.get("spec_decode") != "eagle3" for cell in said.statements[0].decide)
    (statement,) = run(lambda v: ("config", "spawn") if v["cuda_graph"] == "on" else None).statements
    assert statement.axes == ("cuda_graph",)


def test_interaction() -> None:
    four = {**AXES, "overlap": ("on", "off")}
    said = run(
        lambda v: HANG if v["spec_decode"] == "eagle3" and v["attention_backend"] == "flashinfer" else None, four
    )
    assert only(said) == (
        "hang in cuda_graph: fails in 4 of 4 cells with spec_decode=eagle3 and attention_backend=flashinfer, "
        "passes in 12 of 12 of the others: only eagle3 + flashinfer: interaction."
    )
    (statement,) = said.statements
    assert (statement.kind, statement.axes) == ("interaction", ("attention_backend", "spec_decode"))


def test_base_broken_clears_every_axis() -> None:
    said = run(lambda _: ("hang", "distributed_init"))
    assert only(said) == (
        "hang in distributed_init: the base cell fails, and 8 of 8 cells do: "
        "eagle3, cuda_graph=off and flashinfer are not the cause."
    )
    assert said.statements[0].kind == "everywhere"
    assert next_cell(said) is None, "no axis to isolate"


def test_two_faults_are_two_conclusions() -> None:
    def how(v: Values) -> Outcome:
        if v["spec_decode"] == "eagle3":
            return ("crash", "draft_load")
        return ("hang", "serving") if v["cuda_graph"] == "on" else None

    hang, crash = run(how).statements
    assert (crash.fault, crash.axes) == ("crash in draft_load", ("spec_decode",))
    assert crash.confidence >= SURE
    assert (hang.fault, hang.axes) == ("hang in serving", ("cuda_graph",))
    assert hang.confidence < SURE, "cells that crash earlier say nothing of the hang"
    assert "probably" in hang.text
    assert "fails in 2 of 2 cells" in hang.text
    assert {cell["spec_decode"] for cell in hang.decide} == {"base"}, "what crashes earlier cannot decide"


def test_a_later_failure_counts_as_a_pass_of_an_earlier_phase() -> None:
    def how(v: Values) -> Outcome:
        if v["spec_decode"] == "eagle3":
            return ("crash", "draft_load")
        return ("hang", "serving")

    crash = next(s for s in run(how).statements if s.fault == "crash in draft_load")
    assert "passes in 4 of 4 with base" in crash.text
    assert crash.confidence >= SURE


def test_another_fault_in_the_same_phase_says_nothing() -> None:
    """Whether a server that crashes in a phase would also have hung in it, nobody knows."""
    said = run(lambda v: HANG if v["cuda_graph"] == "on" else ("crash", "cuda_graph"), {"cuda_graph": ("on", "off")}, 4)
    assert [s.fault for s in said.statements] == ["hang in cuda_graph", "crash in cuda_graph"]
    for statement in said.statements:
        assert "no other run got that far" in statement.text
        assert statement.confidence < SURE


def test_everything_fails_but_the_base_never_ran() -> None:
    axes = {"spec_decode": ("eagle3",), "cuda_graph": ("on", "off"), "attention_backend": ("triton", "fa3", "fa4")}
    results = run(lambda _: ("hang", "distributed_init"), axes, repeats=2).results
    base = {"spec_decode": "base", "cuda_graph": "on", "attention_backend": "triton"}
    (statement,) = conclude(results, base).statements
    assert statement.kind == "everywhere"
    assert "every cell fails, and 6 of 6 cells do" in statement.text
    assert "eagle3" not in statement.text, "it was never varied, so nothing is known of it"
    narrow = run(lambda _: ("hang", "distributed_init"), {"cuda_graph": ("on", "off")}, repeats=6)
    assert "cuda_graph=off is" in only(narrow)


def test_all_pass() -> None:
    said = run(lambda _: None)
    assert only(said) == "All 8 cells pass."
    (statement,) = said.to_json()["conclusion"]
    assert (statement["rate"], statement["confidence"]) == (1.0, 1.0)


def test_signatures_tell_faults_apart_that_look_alike() -> None:
    results = []
    for graph, backend in itertools.product(("on", "off"), ("triton", "flashinfer")):
        values = {"cuda_graph": graph, "attention_backend": backend}
        signature = {"on": "all_reduce", "off": "file_baton"}[graph]
        results += [CellResult(f"{graph}-{backend}", values, "hang", "cuda_graph", signature)] * 2
    assert [s.fault for s in conclude(results).statements] == ["all_reduce", "file_baton"]


def test_one_failing_cell_is_no_proof_until_it_failed_thrice() -> None:
    def how(v: Values) -> Outcome:
        return HANG if tuple(v.values()) == ("eagle3", "on", "flashinfer") else None

    once = run(how)
    assert once.statements[0].axes == tuple(sorted(AXES))
    assert once.statements[0].confidence < SURE
    assert "would decide: eagle3-cuda_graph=on-flashinfer again" in only(once)
    assert next_cell(once) == "eagle3-on-flashinfer"
    assert run(how, repeats=4).statements[0].confidence >= SURE
    wide = {
        **AXES,
        "spec_decode": ("base", "eagle", "eagle3"),
        "attention_backend": ("triton", "flashinfer", "fa3", "x"),
    }
    assert run(how, wide, repeats=2).statements[0].confidence < SURE, "twice is not enough either"
    assert run(how, wide, repeats=3).statements[0].confidence >= SURE


def test_flaky_cause_and_flaky_cells() -> None:
    turns = itertools.cycle([HANG, HANG, None, HANG, None])
    said = run(lambda v: next(turns) if v["cuda_graph"] == "on" else None, repeats=3)
    (statement,) = said.statements
    assert (statement.kind, statement.axes) == ("cause", ("cuda_graph",))
    assert statement.rate < 0.9
    assert "runs with cuda_graph=on, passes in 12 of 12 with off" in statement.text
    assert said.flaky
    assert all(0 < failed < runs == 3 for _, failed, runs in said.flaky)


def test_failures_at_random_blame_no_axis() -> None:
    turns = iter([HANG if n in (3, 20, 30, 41) else None for n in range(48)])
    (statement,) = run(lambda _: next(turns), repeats=6).statements
    assert statement.kind in ("flaky", "undecided")
    assert statement.axes == ()
    assert "4 of 48 runs" in statement.text


def test_axes_that_were_changed_together_are_undecided_and_the_deciding_cell_is_named() -> None:
    values = [{"cuda_graph": c, "attention_backend": a} for c, a in (("on", "triton"), ("off", "flashinfer"))]
    results = [CellResult(f"{n}", v, "ready" if n == 0 else "hang", "serving") for n, v in enumerate(values)] * 3
    (statement,) = conclude(results).statements
    assert statement.kind == "undecided"
    assert "3 of 6 runs, undecided between " in statement.text
    assert "cuda_graph=off (" in statement.text
    assert "attention_backend=flashinfer (" in statement.text
    assert dict(statement.decide[0]) in (
        {"cuda_graph": "on", "attention_backend": "flashinfer"},
        {"cuda_graph": "off", "attention_backend": "triton"},
    )


def test_of_deciding_cells_of_equal_worth_the_one_closest_to_the_base_is_named() -> None:
    axes = {"cuda_graph": ("on", "off"), "kv": ("auto", "fp8"), **dict.fromkeys("abc", ("on", "off", "other"))}
    runs = run(lambda v: HANG if v["cuda_graph"] == "off" else None, axes, repeats=3).results
    together = [r for r in runs if (r.values["cuda_graph"] == "on") == (r.values["kv"] == "auto")]
    (statement,) = conclude(together).statements
    assert statement.kind == "undecided"
    assert statement.decide
    assert [cell[axis] for cell in statement.decide for axis in "abc"] == ["on"] * 3 * len(statement.decide)


def test_at_most_three_rivals_are_named() -> None:
    values = [dict.fromkeys("abcdef", value) for value in ("on", "off")]
    (statement,) = conclude(
        [CellResult(v["a"], v, "ready" if v["a"] == "on" else "hang") for v in values] * 4
    ).statements
    assert statement.kind == "undecided"
    assert statement.text.count("%)") == 3
    assert len(statement.decide) == 2


def test_cells_that_fail_for_the_machines_sake_say_nothing() -> None:
    results = [
        CellResult("a", {"cuda_graph": "on"}, "port"),
        CellResult("b", {"cuda_graph": "off"}, "ready"),
        CellResult("c", {"cuda_graph": "piecewise"}, "skip", reason="excluded on sm120"),
    ]
    assert only(conclude(results)) == "All 1 cell pass; 1 port, 1 skip."
    assert only(conclude([])) == "No cell ran, so nothing is known (no result)."
    assert only(conclude(results[:1])) == "No cell ran, so nothing is known (1 port)."


def test_speculative_decoding_is_compared_with_its_base_cell() -> None:
    results = [
        CellResult("base-on", {"spec_decode": "base", "cuda_graph": "on"}, "ready", figures={"throughput": 100.0}),
        CellResult(
            "eagle3-on",
            {"spec_decode": "eagle3", "cuda_graph": "on"},
            "ready",
            figures={"throughput": 66.0, "accept_rate": 0.15},
        ),
        CellResult("eagle3-off", {"spec_decode": "eagle3", "cuda_graph": "off"}, "ready", figures={"throughput": 50.0}),
    ]
    _, slower, lonely = conclude(results).statements
    assert (slower.kind, slower.text) == ("slower", "eagle3-on: 0.66x slower than its base base-on (15% accepted).")
    assert lonely.kind == "undecided"
    assert "no base cell to compare with" in lonely.text


@pytest.mark.parametrize(
    ("base", "kind", "said"),
    [
        (50.0, "passes", "eagle3: 1.50x as against its base base."),
        (75.0, "passes", "eagle3: 1.00x as against its base base."),
        (0.5, "passes", "eagle3: 150.00x as against its base base."),
        (100.0, "slower", "eagle3: 0.75x slower than its base base."),
        (0.0, "undecided", "eagle3: 75 tokens/s, undecided: no base cell to compare with."),
    ],
)
def test_a_speedup_is_told_as_one(base: float, kind: str, said: str) -> None:
    results = [
        CellResult("base", {"spec_decode": "base"}, "ready", figures={"throughput": base}),
        CellResult("eagle3", {"spec_decode": "eagle3"}, "ready", figures={"throughput": 75.0}),
    ]
    statement = conclude(results).statements[-1]
    assert (statement.kind, statement.text) == (kind, said)


def test_grid_and_text() -> None:
    four = run(lambda v: HANG if v["cuda_graph"] == "on" else None)
    assert grid(four) == [
        "spec_decode  cuda_graph  attention_backend=triton  attention_backend=flashinfer",
        "base         on          hang cuda_graph           hang cuda_graph",
        "base         off         pass                      pass",
        "eagle3       on          hang cuda_graph           hang cuda_graph",
        "eagle3       off         pass                      pass",
    ]
    assert grid(four, width=60)[0] == "base-on-triton: hang cuda_graph"
    lines = text(four)
    assert lines[-1] == "To go on: gpuserve isolate --from matrix.json base-on-triton"
    missing = conclude(
        [
            *four.results[1:],
            CellResult("x", four.results[0].values, "ready"),
            CellResult("x", four.results[0].values, "hang"),
        ]
    )
    assert "1/2 hang, 1/2 pass" in "\n".join(grid(missing))
    assert "* flaky: x failed in 1 of 2 runs" in text(missing)


def test_matrix_json_is_read_back() -> None:
    said = run(lambda v: HANG if v["cuda_graph"] == "on" else None)
    raw = json.loads(json.dumps(said.to_json()))
    assert raw["conclusion"][0]["condition"] == [[["cuda_graph", "=", "on"]]]
    assert from_json(raw) == list(said.results)
    assert conclude(from_json(raw)) == said
    values = {"cuda_graph": "on"}
    full = [
        CellResult("a", values, "ready", None, None, {"accept_rate": 0.5, "throughput": 12.0}),
        CellResult("a", values, "hang", "cuda_graph", "all_reduce", {}),
        CellResult("b", {"cuda_graph": "off"}, "skip", reason="excluded"),
    ]
    raw = json.loads(json.dumps(conclude(full).to_json()))
    assert from_json(raw) == full
    assert raw["conclusion"][0]["confidence"] == round(conclude(full).statements[0].confidence, 3)
    assert raw["conclusion"][0]["confidence"] != conclude(full).statements[0].confidence
    for broken in (
        {},
        {"schema": "gpuserve.matrix/1"},
        {"schema": "other", "cells": []},
        {"schema": "gpuserve.matrix/1", "cells": [1]},
    ):
        with pytest.raises(ValueError):
            from_json(broken)
    for broken in ({}, {**raw["cells"][0], "values": [1]}):
        with pytest.raises(ValueError):
            CellResult.from_json(broken)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(1, 4), min_size=1),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_results_are_concluded_and_probabilities_are_such(sizes: dict[str, int], data: st.DataObject) -> None:
    axes = {axis: tuple(f"v{n}" for n in range(size)) for axis, size in sizes.items()}
    verdicts = st.sampled_from(["ready", "hang", "crash", "skip", "infra"])
    results = data.draw(
        st.lists(
            st.builds(
                lambda values, verdict, phase: CellResult(str(sorted(values.items())), values, verdict, phase),
                st.fixed_dictionaries({axis: st.sampled_from(values) for axis, values in axes.items()}),
                verdicts,
                st.sampled_from([None, "cuda_graph", "serving", "elsewhere"]),
            ),
            max_size=20,
        )
    )
    said = conclude(results)
    assert said.statements
    for statement in said.statements:
        assert 0 <= statement.confidence <= 1.0000001
        assert "\n" not in statement.text
        assert set(statement.axes) <= set(axes)
    json.dumps(said.to_json())
    text(said)


def _benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "conclusions.py"
    spec = importlib.util.spec_from_file_location("conclusions_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_thirty_planted_causes() -> None:
    module = _benchmark()
    assert len(module.CASES) == 30
    answers = [
        (case.name, *answer)
        for case in module.CASES
        for seed in range(3)
        for answer in module.judge(case, module.play(case, seed))
    ]
    right = [a for a in answers if a[1] == "right"]
    assert len(right) >= 0.95 * len(answers), [a for a in answers if a[1] != "right"]
    assert not [a for a in answers if a[1] == "wrong" and a[2] >= SURE]
