"""The search on planted failing sets: right answers, few launches, budgets, resuming, looking ahead."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.isolation.belief import Belief, deltas_of, entropy, mask_of
from pytest_gpuserve.isolation.replay import ahead, conclude_now, replay
from pytest_gpuserve.isolation.search import Finding, Question, Trial, search

N = 12


def drive(run, answer) -> Finding:
    try:
        question = next(run)
        while True:
            question = run.send(answer(question.deltas))
    except StopIteration as stop:
        return stop.value


def monotone(*sets):
    return lambda deltas: "fail" if any(frozenset(one) <= deltas for one in sets) else "pass"


def only(n, answer, *sets):
    """No other combination of the ``n`` deltas can run, but the base and all."""
    runs = {frozenset(one) for one in (*sets, (), range(n))}
    return lambda deltas: answer(deltas) if deltas in runs else "unresolved"


def in_order(letters):
    outcomes = iter(letters)
    return lambda _: {"p": "pass", "f": "fail"}[next(outcomes)]


def flaky(planted, q, f, seed):
    rng = random.Random(seed)
    return lambda deltas: "fail" if rng.random() < (q if frozenset(planted) <= deltas else f) else "pass"


def flaky_too(*sets):
    rng = random.Random(1)
    return lambda deltas: "fail" if monotone(*sets)(deltas) == "fail" and rng.random() < 0.7 else "pass"


@pytest.mark.parametrize(("k", "factor", "proven"), [(1, 1.3, 5.5), (2, 1.5, 11.7), (3, 1.6, 16.3)])
def test_deterministic_failures_cost_little_more_than_the_floor(k: int, factor: float, proven: float) -> None:
    """Mutation: cuts into halves: 5.55, 11.73 and 16.82 launches with the proof."""
    found = []
    for seed in range(60):
        planted = random.Random(seed).sample(range(N), k)
        found.append(drive(search([1.0] * N, others=False), monotone(planted)))
        assert (found[-1].status, found[-1].sets) == ("found", (frozenset(planted),))
        assert found[-1].confidence > 0.98
    assert sum(one.launches("search") for one in found) / len(found) <= factor * math.log2(math.comb(N, k))
    assert sum(one.launches("search", "verify") for one in found) / len(found) <= proven


@pytest.mark.parametrize("n", [7, 8, 11, 12, 16, 19])
def test_a_single_delta_takes_no_more_launches_than_by_halving(n: int) -> None:
    """Mutation: the cut that is as likely to fail as to pass, whatever it costs a single one: 4.7 instead of 4.6."""
    launches = 0
    for delta in range(n):
        trials = drive(search([1.0] * n, others=False), monotone({delta})).trials
        asked = [trial.deltas for trial in trials if trial.purpose != "calibrate"]
        launches += len(set(asked[: asked.index(frozenset({delta})) + 1]))  # less what was doubted
    deep = math.ceil(math.log2(n))
    assert launches == n * deep - (1 << deep) + n + (n - 1), "each but the first is launched alone at last"


@pytest.mark.parametrize(("q", "f", "least"), [(1.0, 0.02, 29), (0.8, 0.02, 28), (0.5, 0.0, 27)])
def test_flaky_failures_are_found_within_the_budget(q: float, f: float, least: int) -> None:
    right = 0
    for seed in range(30):
        planted = random.Random(f"planted {seed}").sample(range(N), 1 + seed % 2)
        found = drive(search([1.0] * N, others=False), flaky(planted, q, f, seed))
        assert found.launches("search") <= 60
        right += found.sets == (frozenset(planted),)
    assert right >= least


def test_a_false_alarm_is_doubted_after_three_passes() -> None:
    """The last prefix fails by chance: delta 10 is blamed, and whatever is added to it passes."""
    planted, alarm = frozenset({7, 11}), frozenset(range(11))
    alarms = [alarm]

    def answer(deltas: frozenset[int]) -> str:
        if deltas in alarms:
            alarms.remove(deltas)
            return "fail"
        return "fail" if planted <= deltas else "pass"

    found = drive(search([1.0] * N, others=False), answer)
    assert not alarms
    assert (found.status, found.sets) == ("found", (planted,))
    assert found.launches("search") <= 11, "without a doubt it takes one innocent delta after the other: over 30"


def test_a_doubted_launch_that_can_no_longer_run_does_not_end_the_search() -> None:
    planted, alarm = frozenset({7, 11}), frozenset(range(11))
    asked = []

    def answer(deltas: frozenset[int]) -> str:
        asked.append(deltas)
        if deltas == alarm:
            return "fail" if asked.count(alarm) == 1 else "unresolved"
        return "fail" if planted <= deltas else "pass"

    found = drive(search([1.0] * N, others=False), answer)
    assert (found.status, found.sets, asked.count(alarm)) == ("found", (planted,), 2)


def test_a_false_alarm_of_the_base_costs_no_launch() -> None:
    """Mutation: the failed base counted as a failure of every set, so that no other alarm is doubted."""
    alarms = [frozenset[int](), frozenset(range(11))]

    def answer(deltas: frozenset[int]) -> str:
        if deltas in alarms:
            alarms.remove(deltas)
            return "fail"
        return "fail" if {7, 11} <= deltas else "pass"

    found = drive(search([1.0] * N, others=False), answer)
    assert not alarms
    assert found.sets == (frozenset({7, 11}),)
    assert found.launches("search") <= 11


def test_the_base_alone_is_asked_first_and_may_be_to_blame() -> None:
    run = search([1.0] * 4)
    assert next(run) == Question(frozenset(), "calibrate", pytest.approx(0.0, abs=0.05))
    found = drive(search([1.0] * 4), lambda _: "fail")
    assert (found.status, found.sets, found.launches()) == ("base_fails", (), 3)


@pytest.mark.parametrize(("fails", "blamed"), [(2, False), (3, True)])
def test_a_base_that_fails_more_often_than_not_is_to_blame(fails: int, blamed: bool) -> None:
    seen = itertools.count()

    def answer(deltas: frozenset[int]) -> str:
        if not deltas:
            return "fail" if next(seen) < fails else "pass"
        return "fail" if 2 in deltas else "pass"

    found = drive(search([1.0] * 4, calibrate=4, others=False), answer)
    assert (found.status == "base_fails") is blamed


def test_a_base_that_failed_once_proves_nothing_by_itself() -> None:
    """Mutation: bisection all the same: every set holds the empty one, so the first delta would be put to the proof."""
    alarms = [frozenset[int]()]

    def answer(deltas: frozenset[int]) -> str:
        if deltas in alarms:
            alarms.remove(deltas)
            return "fail"
        return "fail" if 2 in deltas else "pass"

    found = drive(search([1.0] * 6, others=False), answer)
    assert (found.status, found.sets) == ("found", (frozenset({2}),))
    assert not [trial for trial in found.trials if trial.purpose == "verify" and trial.deltas == {0}]


def test_nothing_fails() -> None:
    found = drive(search([1.0] * 4, calibrate=2), lambda _: "pass")
    assert (found.status, found.sets) == ("not_reproduced", ())
    assert found.launches() == 16  # both ends, four times as often: it may be rare


def test_two_sets_are_reported() -> None:
    found = drive(search([1.0] * 8), monotone({1, 2}, {5}))
    assert found.status == "found"
    assert set(found.sets) == {frozenset({1, 2}), frozenset({5})}
    assert drive(search([1.0] * 8, others=False), monotone({1, 2}, {5})).sets in (
        (frozenset({1, 2}),),
        (frozenset({5}),),
    )


@pytest.mark.parametrize("planted", [{0, 2, 4, 6, 7}, {0, 2, 4, 6}, {1, 2, 3, 4}, {0, 1, 2, 3, 4, 5, 6, 7}])
def test_a_set_larger_than_is_weighed(planted: set[int]) -> None:
    """Mutation: on to weighing sets of three at the first doubt, instead of making the launch again: 60 launches, and
    no set that is believed."""
    found = drive(search([1.0] * 8, others=False), monotone(planted))
    assert (found.status, found.sets) == ("found", (frozenset(planted),))
    assert found.confidence > 0.95
    assert found.launches("search") <= 5 * len(planted)


LAUNCHES = {
    "one": (search([1.0] * 8, others=False), monotone({5}), "found", [{5}], (6, 4, 1, 0)),
    "pair": (search([1.0] * 8), monotone({1, 6}), "found", [{1, 6}], (6, 7, 4, 1)),
    "two sets": (search([1.0] * 8), monotone({1, 2}, {5}), "found", [{5}, {1, 2}], (6, 9, 27, 8)),
    "suspects": (
        search([8.0, 1, 1, 4, 1, 1, 2, 1], others=False),
        *(monotone({3, 6}), "found", [{3, 6}], (6, 6, 5, 0)),
    ),
    "all": (search([1.0] * 3), monotone({0, 1, 2}), "found", [{0, 1, 2}], (6, 4, 6, 0)),
    "one delta": (search([1.0]), monotone({0}), "found", [{0}], (6, 0, 0, 0)),
    "flaky": (search([1.0] * 8), flaky({1, 6}, 0.6, 0.0, 1), "found", [{1, 6}], (6, 11, 13, 1)),
    "dear": (
        search([1.0] * 8, others=False, cost=(1.0, 10.0)),
        *(flaky({1, 6}, 0.6, 0.0, 1), "found", [{1, 6}], (6, 11, 18, 0)),
    ),
    "false alarms": (search([1.0] * 8, others=False), flaky({2}, 0.9, 0.05, 4), "found", [{2}], (6, 7, 2, 0)),
    "too rare": (
        search([1.0] * 6, calibrate=2, budget=10),
        *(flaky({2, 3}, 0.3, 0.0, 2), "undecided", [{2, 3, 5}], (4, 10, 5, 0)),
    ),
    "never": (search([1.0] * 6, calibrate=2), monotone(), "not_reproduced", [], (16, 0, 0, 0)),
    "once": (search([1.0] * N, calibrate=1, others=False), monotone({10}), "found", [{10}], (2, 4, 1, 0)),
    "the suspect": (search([30.0, 1, 1, 1, 1, 1], others=False), monotone({0}), "found", [{0}], (6, 0, 1, 0)),
    "no suspect": (search([30.0, 20, 20, 20, 1], others=False), monotone({4}), "found", [{4}], (6, 3, 1, 0)),
    "two pairs": (search([1.0] * 7), monotone({2, 5}, {3, 6}), "found", [{2, 5}, {3, 6}], (6, 11, 29, 6)),
    "all, flaky": (search([1.0] * 2), flaky({0, 1}, 0.6, 0.0, 1), "found", [{0, 1}], (6, 2, 4, 0)),
    "two sets, flaky": (search([1.0] * 4), flaky_too({0, 1}, {3}), "found", [{3}, {0, 1}], (24, 3, 9, 13)),
    "rare": (search([1.0] * 6, others=False), flaky({1, 4}, 0.4, 0.0, 1), "found", [{1, 4}], (24, 16, 29, 0)),
    "hopeless": (
        search([1.0] * 4, others=False),
        *(flaky({0, 1}, 0.1, 0.05, 2), "undecided", [{0, 1}], (24, 60, 21, 0)),
    ),
    "base": (search([1.0] * 6), lambda _: "fail", "base_fails", [], (3, 0, 0, 0)),
    "the last cut": (
        search([2.0, 4, 4, 4, 6, 1], budget=8, others=False),
        *(only(6, monotone({1}), {1, 2, 4}, {1, 4}, {1}, {0, 2, 3, 4}, {2}), "found", [{1}], (6, 3, 1, 0)),
    ),
    "alone at last": (
        search([4.0, 6, 1, 1, 7, 6], calibrate=1, budget=8, others=False),
        *(only(6, monotone({4}), {3, 4, 5}, {4}, {0, 1}), "found", [{4}], (2, 8, 2, 0)),
    ),
    "one alarm in three": (
        search([1.0] * 3, evidence=[Trial(frozenset({0}), "fail")], calibrate=1, budget=20),
        *(in_order("pfppffpf"), "found", [{0}], (2, 0, 4, 2)),
    ),
    "each alone": (search([1.0] * 2, calibrate=1), monotone({0}, {1}), "found", [{0}, {1}], (2, 1, 1, 2)),
}
"""Search, answers, status, sets, launches to calibrate, to search, to verify, to look for another set."""


@pytest.mark.parametrize("case", LAUNCHES)
def test_the_launches_of_known_cases(case: str) -> None:
    """Launches are minutes of somebody's GPUs: who changes how many there are shall know it."""
    run, answer, status, sets, launches = LAUNCHES[case]
    found = drive(run, answer)
    assert (found.status, [set(one) for one in found.sets]) == (status, sets)
    assert tuple(found.launches(p) for p in ("calibrate", "search", "verify", "another")) == launches
    assert 0.99 < found.confidence <= 1 if status in ("found", "base_fails") else found.confidence < 0.5


def test_combinations_that_cannot_run_are_passed_over() -> None:
    def answer(deltas):
        if 3 in deltas and 4 not in deltas:
            return "unresolved"  # 3 needs 4
        return monotone({3, 4})(deltas)

    found = drive(search([1.0] * 8, others=False), answer)
    assert (found.status, found.sets) == ("found", (frozenset({3, 4}),)), "3 alone cannot run, so it is no answer"
    assert "unresolved" in {trial.outcome for trial in found.trials}
    asked = [trial.deltas for trial in found.trials if trial.outcome == "unresolved"]
    assert len(asked) <= len(set(asked)) + 3, "a launch that cannot be made is not made again and again"


def test_a_set_is_found_as_surely_as_what_can_run_tells() -> None:
    answer = only(4, monotone({0, 2, 3}), {0, 2, 3}, {1, 3}, {0, 1}, {0, 1, 3})
    found = drive(search([8.0, 3, 3, 9], others=False), answer)
    assert (found.status, found.sets) == ("found", (frozenset({0, 2, 3}),))
    assert 0.5 < found.confidence < 0.9
    assert found.launches("verify") <= 41, "no further proof where nothing that can run would tell more"


def test_usual_suspects_come_first() -> None:
    weights = [1.0] * N
    weights[7] = 30.0
    usual = drive(search(weights, others=False), monotone({7})).launches("search")
    assert usual < drive(search([1.0] * N, others=False), monotone({7})).launches("search")


def test_evidence_saves_launches() -> None:
    known = [Trial(frozenset(), "pass")] * 3 + [Trial(frozenset(range(N)), "fail")] * 3
    known += [Trial(frozenset({2, 3}), "fail"), Trial(frozenset({0, 1, 2}), "pass")]
    found = drive(search([1.0] * N, evidence=known, others=False), monotone({3}))
    assert found.sets == (frozenset({3}),)
    assert found.launches("calibrate") == 0
    assert found.launches("search") <= 3


def test_the_budget_ends_the_search_with_its_best_guess() -> None:
    found = drive(search([1.0] * N, budget=3, others=False), flaky({1, 5}, 0.5, 0.0, 3))
    assert found.launches("search") <= 3
    assert found.status in ("undecided", "found")
    assert len(found.sets) == 1


def test_proofs_have_a_budget_too() -> None:
    planted = frozenset(random.Random(32).sample(range(12), 3))  # proofs fail again and again, searching hardly goes on
    found = drive(search([1.0] * 12, budget=60, others=False), flaky(planted, 0.1, 0.0, 32))
    assert found.status == "undecided"
    assert 60 <= found.launches("verify") < 79


def test_evidence_is_weighed() -> None:
    known = [Trial(frozenset({5, 6}), "fail")] * 2 + [Trial(frozenset({5}), "pass")] * 2
    found = conclude_now(search([1.0] * 8, evidence=known), {})
    assert (found.status, found.sets) == ("undecided", (frozenset({6}),))


@pytest.mark.parametrize("weights", [[], [1.0, 0.0]])
def test_impossible_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one delta"):
        next(search(weights))


@settings(max_examples=12, deadline=None)
@given(st.sets(st.integers(0, 7), min_size=1, max_size=3), st.integers(0, 30), st.sampled_from([1.0, 0.7]))
def test_a_search_resumes_without_repeating_a_launch(planted, cut, q) -> None:
    """Property: replaying any prefix of the launches brings the search to the same next question, and the same end."""
    answer = flaky(planted, q, 0.0, 5)
    outcomes: dict[frozenset[int], list[str]] = {}
    asked = []
    while isinstance(question := replay(search([1.0] * 8), outcomes), Question):
        asked.append(question)
        outcomes.setdefault(question.deltas, []).append(answer(question.deltas))
    assert sum(map(len, outcomes.values())) == len(asked) == question.launches()
    prefix: dict[frozenset[int], list[str]] = {}
    used: dict[frozenset[int], int] = {}
    for question_ in asked[:cut]:
        n = used.get(question_.deltas, 0)
        used[question_.deltas] = n + 1
        prefix.setdefault(question_.deltas, []).append(outcomes[question_.deltas][n])
    again = replay(search([1.0] * 8), prefix)
    assert again == (asked[cut] if cut < len(asked) else question)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_looking_ahead_finds_the_same_in_fewer_rounds(width: int) -> None:
    def make():
        return search([1.0] * N, others=False)

    answer, outcomes, rounds = monotone({4, 9}), {}, 0
    while questions := ahead(make, outcomes, width):
        rounds += 1
        assert len(questions) <= width
        assert questions[0] == replay(make(), outcomes)
        for question in questions:
            outcomes.setdefault(question.deltas, []).append(answer(question.deltas))
    assert replay(make(), outcomes).sets == (frozenset({4, 9}),)
    alone = drive(make(), answer).launches()
    assert rounds == alone if width == 1 else rounds < alone * 0.75


def test_several_servers_at_once_never_ask_for_more_of_one_launch_than_the_search_will() -> None:
    first = ahead(lambda: search([1.0] * 6, calibrate=3), {}, 4)
    assert [question.deltas for question in first] == [frozenset()] * 3 + [frozenset(range(6))]


def test_no_time_left() -> None:
    launches = {frozenset(): ["pass"] * 3, frozenset(range(8)): ["fail"] * 3, frozenset({0, 1, 2, 3}): ["fail"]}
    found = conclude_now(search([1.0] * 8), launches)
    assert found.status == "undecided"
    assert found.sets[0] <= {0, 1, 2, 3}
    assert conclude_now(search([1.0] * 8), {}).sets == ()


def test_belief_is_a_distribution_that_launches_move() -> None:
    belief = Belief([1.0] * 6, 2)
    for _ in range(3):
        belief.add(mask_of(range(6)), True)
        belief.add(0, False)
    before = belief.posterior()
    belief.add(mask_of({2, 3}), True)
    after = belief.posterior()
    assert math.isclose(sum(after.weight.values()), 1.0)
    assert after.weight[mask_of({2, 3})] > before.weight[mask_of({2, 3})]
    assert after.weight[mask_of({0})] < before.weight[mask_of({0})] / 20
    assert deltas_of(after.best) <= {2, 3}
    assert after.chance(mask_of({2, 3, 4})) > 0.8 > 0.2 > after.chance(mask_of({0, 1}))


def test_the_repro_rate_is_learnt() -> None:
    belief = Belief([1.0] * 4, 1)
    for n in range(20):
        belief.add(0b1111, n % 2 == 0)
    assert 0.4 < belief.posterior().mean_rate < 0.6


def test_the_chosen_launch_is_about_the_most_informative_of_all() -> None:
    rng = random.Random(4)
    for _ in range(10):
        belief = Belief([1.0] * 7, 2)
        for _ in range(rng.randrange(2, 8)):
            mask = rng.randrange(128)
            belief.add(mask, mask & 0b101 == 0b101)
        posterior = belief.posterior()
        noise = entropy(posterior.false_alarm)

        def gain(mask, posterior=posterior, noise=noise):
            inside = [(w, posterior.rate[m]) for m, w in posterior.weight.items() if m & mask == m]
            held = sum(w for w, _ in inside)
            return entropy(posterior.chance(mask)) - sum(w * entropy(r) for w, r in inside) - (1 - held) * noise

        choice = belief.most_informative((1.0, 1.0))
        best = max(map(gain, range(128)))
        assert choice is not None
        assert gain(choice[0]) >= 0.9 * best


def test_a_cheap_launch_is_preferred() -> None:
    belief = Belief([1.0] * 8, 1)
    belief.add(0b11111111, True)
    _, even = belief.most_informative((1.0, 1.0)) or (0, 0.0)
    _, costly = belief.most_informative((1.0, 30.0)) or (0, 0.0)
    assert costly < even, "a launch that fails costs the watchdog's patience"
