"""What runs of pytest mean, when failures are the same, how commits are chosen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.isolation.bisect import contradicted, narrowed, next_commit, repeat_for, summary
from pytest_gpuserve.isolation.judge import (
    BAD,
    BROKEN,
    GOOD,
    SKIP,
    Judged,
    Report,
    Session,
    confidence,
    decided,
    judge_session,
    repeats,
)
from pytest_gpuserve.isolation.signature import Signature, outcome

PASSED = Report("t::a", "passed")
FAILED = Report("t::b", "failed", reason="assert 1 == 2", error="AssertionError")
HUNG = Report("t::c", "failed", verdict="hang", phase="cuda_graph", roots=("synchronize",))
CRASHED = Report("t::d", "failed", verdict="crash", phase="weight_load")
LEAK = Report("t::e", "failed", verdict="leak")
OURS = Report("t::f", "skipped", ours=True, reason="sim-tp2 failed 2 times and is not started again")
THEIRS = Report("t::g", "skipped", reason="needs python 4")
GPU = Report("t::h", "skipped", ours=True, reason="needs 2 GPUs of compute capability sm120; found none")
TARGET = Signature("hang", "cuda_graph", frozenset({"synchronize"}))


@pytest.mark.parametrize(
    ("code", "reports", "target", "expected"),
    [
        (0, [PASSED], None, GOOD),
        (0, [PASSED, THEIRS], None, GOOD),
        (0, [PASSED, OURS], None, SKIP),
        (0, [THEIRS], None, SKIP),
        (0, [OURS], None, SKIP),
        (0, [], None, SKIP),
        (5, [], None, SKIP),
        (0, [GPU], None, BROKEN),
        (0, [PASSED, GPU], None, BROKEN),
        (1, [PASSED, FAILED], None, BAD),
        (1, [FAILED, OURS], None, BAD),
        (1, [FAILED, GPU], None, BAD),
        (1, [HUNG], None, BAD),
        (1, [LEAK], None, SKIP),
        (1, [LEAK, FAILED], None, BAD),
        (1, [HUNG], TARGET, BAD),
        (1, [CRASHED], TARGET, SKIP),
        (1, [CRASHED, HUNG], TARGET, BAD),
        (1, [FAILED, PASSED], TARGET, SKIP),
        (1, [PASSED], None, SKIP),
        (2, [PASSED], None, SKIP),
        (3, [PASSED], None, SKIP),
        (4, [], None, SKIP),
        (-9, [PASSED], None, SKIP),
        (-11, [FAILED], None, BAD),
        (0, None, None, BROKEN),
        (1, None, None, BROKEN),
        (2, None, None, SKIP),
        (3, None, None, SKIP),
        (4, None, None, SKIP),
        (-9, None, None, SKIP),
    ],
)
def test_codes(code: int, reports: list[Report] | None, target: Signature | None, expected: int) -> None:
    judged = judge_session(Session(code, None if reports is None else tuple(reports)), target)
    assert judged.code == expected, judged.reason
    assert judged.reason
    assert (judged.signature is not None) == (expected == BAD)


@given(st.integers(-15, 255), st.sampled_from([None, TARGET]))
def test_pytests_own_codes_never_read_as_bad(code: int, target: Signature | None) -> None:
    """Property: bad needs a test that failed; good needs exit code 0 and a test that passed."""
    for reports in (None, (), (PASSED,), (PASSED, OURS), (THEIRS,)):
        judged = judge_session(Session(code, reports), target)
        assert judged.code in (GOOD, SKIP, BROKEN)
        assert judged.code != GOOD or (code == 0 and reports == (PASSED,))


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([PASSED, Report("t::b", "passed")], GOOD),
        ([PASSED, Report("t::b", "passed"), THEIRS], GOOD),
        ([PASSED, Report("t::b", "skipped")], SKIP),
        ([PASSED, Report("t::b", "passed"), Report("t::c", "skipped")], SKIP),
        ([PASSED], SKIP),
    ],
)
def test_a_good_commit_passes_the_tests_that_are_sought(reports: list[Report], expected: int) -> None:
    judged = judge_session(Session(0, tuple(reports)), TARGET, ("t::b", "t::c"))
    assert judged.code == expected, judged.reason
    assert judged.tests == (("t::b",) if expected == GOOD else ())
    assert judge_session(Session(0, tuple(reports)), TARGET, ("t::b", "t::c"), every=True).code == SKIP


def test_another_test_that_fails_alike_is_another_failure() -> None:
    """Most failures are an AssertionError; what a server did is told by more than that."""
    target = FAILED.signature
    assert judge_session(Session(1, (PASSED, FAILED)), target, ("t::a",)).code == SKIP
    assert judge_session(Session(1, (PASSED, FAILED)), target, ("t::b",)).code == BAD
    assert judge_session(Session(1, (PASSED, HUNG)), TARGET, ("t::a",)).code == BAD


def test_a_commit_whose_pytest_does_not_report_stops_no_bisection() -> None:
    assert judge_session(Session(0, None), None, ("t::a",)).code == SKIP


def test_a_full_disk_is_the_machines() -> None:
    full = Report("t::a", "failed", reason="OSError: [Errno 28] No space left on device", error="OSError")
    talks = Report("t::b", "failed", reason="assert 'OSError: [Errno 28]' in text", error="AssertionError")
    assert judge_session(Session(1, (full,)), None).code == SKIP
    assert judge_session(Session(1, (full, talks)), None).code == BAD


def test_the_tests_that_failed_alike() -> None:
    again = Report("t::i", "failed", error="AssertionError")
    assert judge_session(Session(1, (FAILED, HUNG, again)), None).tests == ("t::b", "t::i")


def test_a_session_that_did_not_end() -> None:
    assert judge_session(Session(-2, (PASSED,), timed_out=True), None).code == SKIP


def test_a_lost_gpu_stops_the_bisection() -> None:
    lost = Report("t::x", "failed", verdict="crash", reason="Xid 79: GPU has fallen off the bus")
    assert judge_session(Session(1, (lost,)), TARGET).code == BROKEN
    mentions = Report("t::y", "failed", reason="assert 'Xid 79' in text", error="AssertionError")
    assert judge_session(Session(1, (mentions,)), TARGET).code == SKIP, "a test that only talks of it"


def test_repeats() -> None:
    good, bad, skip = Judged(GOOD, "1 passed"), Judged(BAD, "x", TARGET), Judged(SKIP, "lost")
    assert decided([], 1) is None
    assert decided([good], 1).code == GOOD
    assert decided([good], 3) is None
    assert decided([good, good, bad], 3).code == BAD
    assert decided([good, skip], 3) is None, "one run may be lost"
    assert decided([good, skip, good, good], 3).code == GOOD
    assert decided([good, skip, skip], 3).code == SKIP
    assert decided([skip], 1).code == SKIP
    assert decided([Judged(BROKEN, "gpu")], 5).code == BROKEN


@pytest.mark.parametrize(("rate", "miss", "runs"), [(1.0, 0.01, 1), (0.5, 0.01, 7), (0.8, 0.005, 4), (0.9, 0.01, 2)])
def test_how_often(rate: float, miss: float, runs: int) -> None:
    assert repeats(rate, miss) == runs
    assert (1 - rate) ** runs <= miss + 1e-9
    assert confidence(rate, runs) >= 1 - miss


def test_how_often_the_bad_end_failed_decides() -> None:
    assert repeat_for(3, 3, 0.99) == 1
    assert repeat_for(2, 3, 0.99) > 3
    assert repeat_for(1, 3, 0.99) > repeat_for(2, 3, 0.99)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (TARGET, Signature("stalled", "cuda_graph"), True),
        (TARGET, Signature("hang", "weight_load"), False),
        (TARGET, Signature("hang", None, frozenset({"other"})), False),
        (TARGET, Signature("hang", "cuda_graph", frozenset({"other", "synchronize"})), True),
        (TARGET, Signature("crash", "cuda_graph"), False),
    ],
)
def test_same_failure(one: Signature, other: Signature, same: bool) -> None:
    assert one.same(other) is same
    assert other.same(one) is same


@pytest.mark.parametrize(
    ("seen", "target", "expected"),
    [
        (Signature("ready"), TARGET, "pass"),
        (Signature("hang", "cuda_graph"), TARGET, "fail"),
        (Signature("crash", "weight_load"), TARGET, "unresolved"),
        (Signature("crash", "serving"), TARGET, "pass"),
        (Signature("hang", "cuda_graph", frozenset({"elsewhere"})), TARGET, "unresolved"),
        (Signature("infra"), None, "unresolved"),
        (Signature("oom", "kv_cache"), None, "fail"),
        (Signature("degraded", "serving"), TARGET, "pass"),
        (Signature("degraded", "serving"), Signature("degraded", "serving"), "fail"),
    ],
)
def test_what_a_launch_says(seen: Signature, target: Signature | None, expected: str) -> None:
    assert outcome(seen, target) == expected


def test_the_root_is_where_the_odd_rank_is() -> None:
    def entry(kind: str, leaf: str, role: str = "scheduler", signature: str | None = None) -> dict:
        return {"role": role, "kind": kind, "path": ["main", leaf], "signature": signature}

    raw = {"verdict": "hang", "phase": "cuda_graph", "classes": [entry("waits", "all_reduce"), entry("other", "sleep")]}
    assert Signature.from_json(raw).roots == {"sleep"}
    raw["classes"] += [entry("cause", "flock", signature="file-lock"), entry("other", "poll", role="detokenizer")]
    assert Signature.from_json(raw).roots == {"file-lock"}
    assert Signature.from_json({**raw, "verdict": "crash"}).roots == frozenset(), "who was left after a crash is chance"
    assert Signature.from_json(TARGET.to_json()) == TARGET
    with pytest.raises(ValueError, match="no verdict"):
        Signature.from_json({"phase": "x"})


def chain(n: int) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    names = [f"c{number:02d}" for number in range(n)]
    return names[:0:-1], {names[k]: (names[k - 1],) for k in range(1, n)}


@settings(deadline=None)
@given(st.integers(2, 70), st.data())
def test_bisection_ends_in_the_smallest_range(n: int, data) -> None:
    """Property: on a line of commits with any skips, the range holds the culprit and only skipped commits beside it."""
    culprit = data.draw(st.integers(1, n - 1))
    skips = data.draw(st.sets(st.integers(1, max(1, n - 2)), max_size=n // 4)) - {n - 1}
    all_candidates, parents = chain(n)
    bad, good, skipped, tests = n - 1, 0, set(), 0
    while True:
        candidates = [c for c in all_candidates if good < int(c[1:]) <= bad]
        found = narrowed(candidates, f"c{bad:02d}", parents, skipped)
        commit = next_commit(found, parents)
        if commit is None:
            break
        tests += 1
        number = int(commit[1:])
        assert good < number < bad
        assert commit not in skipped
        if number in skips:
            skipped.add(commit)
        elif number >= culprit:
            bad = number
        else:
            good = number
    assert f"c{culprit:02d}" in found.candidates
    assert all(c == found.bad or int(c[1:]) in skips for c in found.candidates)
    assert found.culprit == (found.bad if len(found.candidates) == 1 else None)
    assert found.good == (f"c{good:02d}",)
    if not skips:
        assert found.culprit == f"c{culprit:02d}"
        assert tests <= n.bit_length()


def test_skips_that_stand_together_are_left_at_once() -> None:
    candidates, parents = chain(65)
    skipped: set[str] = set()
    for _ in range(6):
        commit = next_commit(narrowed(candidates, "c64", parents, skipped), parents)
        assert commit is not None
        if not 22 <= int(commit[1:]) <= 42:
            return
        skipped.add(commit)
    pytest.fail(f"still among the 21 that cannot be tested: {skipped}")


def test_merges() -> None:
    #   a - b - c - m - z     m merges side branch s (from a)
    parents = {"z": ("m",), "m": ("c", "s"), "c": ("b",), "b": ("a",), "s": ("a",)}
    found = narrowed(["z", "m", "s", "c", "b"], "z", parents, ())
    assert found.good == ("a",)
    assert next_commit(found, parents) in ("c", "m")
    both = narrowed(["m"], "m", parents, ())
    assert both.good == ("c", "s")
    assert both.culprit == "m"


def test_what_is_told() -> None:
    candidates, parents = chain(5)
    verdicts = {"c03": Judged(BAD, "hang"), "c02": Judged(SKIP, "no build"), "c01": Judged(GOOD, "1 passed")}
    found = narrowed(["c03", "c02"], "c03", parents, {"c02"})
    text = "\n".join(summary(found, verdicts, {"c03": "faster graphs"}))
    assert "one of these 2" in text
    assert "bad side:  c03 faster graphs: bad, hang" in text
    assert "skipped:   c02 : skip, no build" in text
    assert "good side: c01 : good, 1 passed" in text
    assert contradicted(found, verdicts) is None
    assert contradicted(found, {**verdicts, "c01": Judged(BAD, "hang")}) == "c01"
    assert candidates
