"""Who pays: a hung server is ended, a healthy one is not, whatever the test does."""

from __future__ import annotations

import pytest

from pytest_gpuserve.report.blame import EXIT_KILL, EXIT_SPARE, Witnesses, decide

OTHERS = ("test_timeout", "request_timeout", "session_deadline", "anything")
ASKED = {"reachable": True}


@pytest.mark.parametrize("seen", [{}, {"answers": True, "verdict": "ready"}, {"verdict": "slow"}])
def test_a_start_up_budget_is_kept(seen):
    assert decide("startup_budget", Witnesses(**seen)).exit_code == EXIT_KILL


@pytest.mark.parametrize("reason", OTHERS)
@pytest.mark.parametrize(
    ("seen", "kill"),
    [
        ({"answers": True}, False),
        ({"answers": True, "broken": ("TP1",)}, False),
        ({"answers": False}, True),
        ({"answers": False, "verdict": "ready"}, True),
        ({"broken": ("TP1",), **ASKED}, True),
        ({"broken": ("TP1",), "test_waits": False, **ASKED}, True),
        ({"reachable": False}, True),
        ({"reachable": None}, True),
        ({"test_waits": True, **ASKED}, True),
        ({"test_waits": None, **ASKED}, True),
        ({"test_waits": False, **ASKED}, False),
    ],
)
def test_other_reasons_are_about_evidence(reason, seen, kill):
    assert decide(reason, Witnesses(**seen)).kill is kill


@pytest.mark.parametrize(
    ("seen", "kill"),
    [
        ({}, True),
        ({"verdict": "hang"}, True),
        ({"verdict": "crash"}, True),
        ({"verdict": "slow"}, False),
        ({"verdict": "slow", "broken": ("TP1",)}, True),
        ({"answers": True, "verdict": "hang"}, False),
        ({"answers": False, "verdict": "undecided"}, True),
    ],
)
def test_no_progress(seen, kill):
    assert decide("no_progress", Witnesses(**seen)).kill is kill


@pytest.mark.parametrize(
    ("seen", "kill"),
    [
        ({}, False),
        ({"answers": False, "reachable": False}, False),
        ({"flood": True}, True),
        ({"flood": True, "answers": False}, True),
        ({"flood": True, "answers": True}, False),
        ({"flood": True, "soft": True}, False),
    ],
)
def test_a_log_at_its_limit_ends_only_who_prints_one_line_for_ever(seen, kill):
    """Its size is bounded in any case, so a start-up that prints much, for debugging, goes on; the option is named."""
    decision = decide("log_limit", Witnesses(**seen))
    assert decision.kill is kill
    assert "--gpuserve-log-limit" in decision.why


@pytest.mark.parametrize("reason", ["startup_budget", "no_progress", *OTHERS])
def test_soft_kills_nothing_and_says_what_it_would_have_done(reason):
    decision = decide(reason, Witnesses(soft=True, broken=("TP1",)))
    assert decision.exit_code == EXIT_SPARE
    assert "would have been ended" in decision.why
    healthy = decide("test_timeout", Witnesses(soft=True, answers=True))
    assert "would have" not in healthy.why


def test_who_only_asks_kills_nothing():
    assert decide("manual", Witnesses(broken=("TP1",), answers=False)).exit_code == EXIT_SPARE
