"""Units, their order, the simulated run, and the text of --gpuserve=plan."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.isolation.plan import (
    PlannedTest,
    Unit,
    choose,
    longest_first,
    lower_bound,
    make_units,
    minutes,
    plan_text,
    simulate,
)

TESTS = [
    PlannedTest("t::a1", "A", "sim-tp1", 1),
    PlannedTest("t::free"),
    PlannedTest("t::b1", "B", "sim-tp4", 4),
    PlannedTest("t::a2", "A", "sim-tp1", 1),
    PlannedTest("t::b2", "B", "sim-tp4", 4),
    PlannedTest("t::c", "C", "sim-tp1-x", 1),
]


def _unit(key: str, gpus: int, seconds: float, tests: int = 3) -> Unit:
    return Unit(key, key if gpus else "", gpus, tuple(range(tests)), seconds)


def test_one_unit_a_server_in_the_order_of_appearance() -> None:
    units = make_units(TESTS, {"t::a1": 30.0, "t::b1": 5.0, "t::b2": 3.0})
    assert [(u.key, u.tests, u.seconds) for u in units] == [
        ("A", (0, 3), 60.0),
        ("t::free", (1,), None),
        ("B", (2, 4), 8.0),
        ("C", (5,), None),
    ]


def test_groups_join_servers() -> None:
    groups = ["g", None, "h", None, None, "g"]
    units = make_units(TESTS, {}, groups)
    assert sorted(u.tests for u in units) == [(0, 3, 5), (1,), (2, 4)]
    joined = next(u for u in units if 0 in u.tests)
    assert (joined.id, joined.gpus) == ("sim-tp1 + sim-tp1-x", 1)


def test_most_gpus_first_then_longest_then_collection_then_tests_without_a_server() -> None:
    units = make_units(TESTS, {"t::a1": 10, "t::a2": 10, "t::c": 25, "t::b1": 1, "t::b2": 1, "t::free": 999})
    assert [u.key for u in longest_first(units)] == ["B", "C", "A", "t::free"]
    unknown = make_units(TESTS, {})
    assert [u.key for u in longest_first(unknown)] == ["B", "A", "C", "t::free"]


@pytest.mark.parametrize(
    ("queue", "others", "idle", "expected"),
    [
        ([8, 4, 1], [4], 0, 8),
        ([4, 2, 1], [], 3, 4),
        ([4, 2, 1], [4], 2, 2),
        ([4, 2, 1], [4, 2], 1, 1),
        ([4, 2, 1], [2, 1, 1], 0, 4),
        ([4, 2, 1], [4, 4], 1, 1),
        ([4, 2], [4, 4], 0, 2),
        ([4, 2, 1], [8], 0, 4),
        ([0, 0], [4], 0, 0),
    ],
)
def test_choose_keeps_gpus_and_workers_busy(queue: list[int], others: list[int], idle: int, expected: int) -> None:
    waiting = [_unit(f"q{n}", g, 1.0) for n, g in enumerate(queue)]
    running = [_unit(f"r{n}", g, 1.0) for n, g in enumerate(others)]
    assert choose(waiting, others=running, idle=idle, gpus=8).gpus == expected
    assert choose(waiting, others=running, idle=idle, gpus=None) is waiting[0]


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 4, 8]), st.integers(1, 50)), min_size=1, max_size=14),
    st.integers(1, 5),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_a_simulated_run_is_a_schedule_and_never_beats_the_bound(
    work: list[tuple[int, int]], workers: int, lookahead: bool
) -> None:
    units = longest_first([_unit(f"u{n}", g, float(s)) for n, (g, s) in enumerate(work)])
    line = simulate(units, workers=workers, gpus=8, lookahead=lookahead)
    assert set(line.end) == {u.key for u in units}
    for moment in line.begin.values():
        running = [u for u in units if line.begin[u.key] <= moment < line.end[u.key]]
        assert sum(u.gpus for u in running) <= 8
        assert len(running) <= workers
    assert line.makespan >= lower_bound(units, workers=workers, gpus=8) - 1e-6


def test_known_bounds() -> None:
    assert lower_bound([_unit("a", 8, 10), _unit("b", 8, 10)], workers=4, gpus=8) == 20
    assert lower_bound([_unit("a", 1, 10), _unit("b", 1, 4), _unit("c", 1, 4)], workers=2, gpus=8) == 10
    assert lower_bound([_unit("a", 3, 6), _unit("b", 3, 6), _unit("c", 3, 6)], workers=4, gpus=8) == 9
    assert lower_bound([_unit("a", 8, 10), *(_unit(f"{n}", 1, 5) for n in range(4))], workers=2, gpus=8) == 20


@pytest.mark.parametrize("seed", range(6))
def test_a_mixed_workload_is_close_to_the_bound(seed: int) -> None:
    dice = random.Random(seed)
    units = [_unit(f"u{n}", dice.choice([1, 1, 2, 2, 4, 8]), dice.uniform(20, 200)) for n in range(60)]
    line = simulate(longest_first(units), workers=4, gpus=8, lookahead=False)
    assert line.makespan <= 1.2 * lower_bound(units, workers=4, gpus=8)


def test_plan_text() -> None:
    lines = plan_text(TESTS, {"t::a1": 100, "t::a2": 20, "t::b1": 300, "t::b2": 60}, workers=2, gpus=2)
    assert lines == [
        "sim-tp4  (4 GPUs, about 6 min)",
        "    t::b1",
        "    t::b2",
        "    cannot run here: 4 GPUs wanted, 2 to lease",
        "sim-tp1-x  (1 GPU, duration unknown)",
        "    t::c",
        "sim-tp1  (1 GPU, about 2 min)",
        "    t::a1",
        "    t::a2",
        "3 servers to start for 5 tests; 1 test without one; 2 starts fewer than one a test. Nothing was started.",
        "Expected: 4 min with 2 workers on 2 GPUs, from past runs of 2 of 3 servers.",
    ]


def test_a_server_without_gpus_is_said_to_have_none() -> None:
    """Mutation: ``unit.gpus`` shown as it is: 0 GPUs."""
    assert plan_text([PlannedTest("t::a", "k", "sim-tp4")], {})[0] == "sim-tp4  (no GPU, duration unknown)"


def test_plan_text_without_history_or_servers() -> None:
    assert plan_text(TESTS[:1], {})[-1] == "Expected time unknown: no past run of these tests is recorded."
    assert plan_text([PlannedTest("t::x")], {}) == [
        "0 servers to start for 0 tests; 1 test without one. Nothing was started."
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (59.0, "59 s"), (90, "1.5 min"), (120, "2 min"), (7500, "2 h 5 min")]
)
def test_minutes(seconds: float, text: str) -> None:
    assert minutes(seconds) == text
