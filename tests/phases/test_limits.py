"""Limits on the seconds of a phase."""

from __future__ import annotations

import pytest

from pytest_gpuserve.errors import DegradedError, SpecError
from pytest_gpuserve.phases.limits import within
from pytest_gpuserve.phases.rank_phase import RankPhase


def rank(*seconds: float, phase: str = "ready") -> RankPhase:
    """A rank that was in weight_load so many times, for so many seconds."""
    history, now = [], 10.0
    for spent in seconds:
        history.append(("weight_load", now, now + spent))
        now += spent + 1.0
    return RankPhase(phase=phase, since=now, history=tuple(history))  # type: ignore[arg-type]


def test_seconds_by_rank_all_occurrences_together() -> None:
    ranks = {"TP0": rank(34.0), "TP1": rank(30.0, 4.5), "TP2": rank()}
    assert within(ranks, "weight_load", 60, "srv") == {"TP0": 34.0, "TP1": 34.5}
    assert within(ranks, "weight_load", 34.5, "srv")["TP1"] == 34.5


def test_the_slowest_rank_is_named_with_the_limit_and_the_others() -> None:
    ranks = {"TP0": rank(34.0), "TP1": rank(34.0), "TP2": rank(900.0, 600.0), "TP3": rank(35.5), "TP4": rank()}
    with pytest.raises(DegradedError) as caught:
        within(ranks, "weight_load", 60, "sglang-tp5")
    assert str(caught.value) == (
        "weight_load of sglang-tp5 took 1500.0 s on TP2, the slowest rank (limit 60 s); "
        "TP3: 35.5 s; TP0, TP1: 34.0 s; TP4: not in its log."
    )
    assert isinstance(caught.value, AssertionError)
    assert caught.value.verdict == "degraded"


def test_one_rank_has_no_others() -> None:
    with pytest.raises(DegradedError, match=r"61\.0 s on TP0.*\(limit 60 s\); it has no other rank"):
        within({"TP0": rank(61.0)}, "weight_load", 60, "srv")


def test_a_phase_that_never_ran_is_said_so() -> None:
    with pytest.raises(
        DegradedError, match=r"cuda_graph never ran on srv.*Phases of its ranks: weight_load, ready\."
    ) as e:
        within({"TP0": rank(1.0), "TP1": rank()}, "cuda_graph", 60, "srv")
    assert e.value.verdict == "undecided"
    with pytest.raises(DegradedError, match=r"Phases of its ranks: none\."):
        within({}, "weight_load", 60, "srv")


def test_a_wrong_name_lists_the_phases() -> None:
    with pytest.raises(SpecError, match=r"no phase 'load'\. Phases: spawn, .*weight_load"):
        within({"TP0": rank(1.0)}, "load", 60, "srv")  # type: ignore[arg-type]


def test_a_phase_under_way_counts_up_to_the_last_record() -> None:
    now = RankPhase(phase="weight_load", since=10.0, last=80.0)
    with pytest.raises(DegradedError, match=r"70\.0 s on TP0"):
        within({"TP0": now}, "weight_load", 60, "srv")
