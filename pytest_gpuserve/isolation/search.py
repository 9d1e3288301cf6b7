"""Find the smallest set of deltas that makes a server fail, in few launches. Pure: no clock, no I/O.

The search is a generator of questions. ``search(...)`` yields a :class:`Question` (launch the base plus these deltas)
and is sent back an :data:`Outcome`; what it returns is a :class:`Finding`. It is deterministic, so a search is resumed
by answering its questions from the launches that were made (replay.py): none is repeated.

Model: deltas 0..n-1 over a base that passes; some minimal failing set M (at most ``max_size`` deltas); a launch with
deltas T fails with probability q (the repro rate) when T contains M, and with probability f (a false alarm) otherwise.
While runs look deterministic the shortest failing prefix, usual suspects first, is bisected where it is as likely to
fail as to pass: its last delta belongs to M. When they do not, launches are chosen by the information they are expected
to give about M while q is learnt along (belief.py). Every set is verified: it fails alone, and each set with one delta
less passes.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from .belief import Belief, deltas_of, mask_of

Outcome = Literal["fail", "pass", "unresolved"]
"""fail: the failure that is sought (same signature). unresolved: another failure, or a combination that cannot run."""

Purpose = Literal["calibrate", "search", "verify", "another"]
Status = Literal["found", "base_fails", "not_reproduced", "undecided"]

Search = Generator["Question", Outcome | None, "Finding"]
"""Sending None ends it (no time is left): it returns what it knows by then."""

_T = TypeVar("_T")
Asking = Generator["Question", Outcome | None, _T]

_VERIFY = 20
"""Launches, beyond those that each set needs, that one verification may take."""

_SURE = 0.99
"""A verified set is believed at least so firmly."""

_LIKELY = 0.5
"""A set that is likelier than not is put to the proof: what would make it likelier is the proof's own launches."""

_DOUBT = 3
"""Launches in a row that pass where a failure was seen but once: it may have been a false alarm."""


@dataclass(frozen=True, slots=True)
class Question:
    """Launch the base plus ``deltas``. ``purpose`` says why; ``belief`` is how likely it is to fail, 0..1."""

    deltas: frozenset[int]
    purpose: Purpose
    belief: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One launch and what came of it. Also how earlier runs (the cells of a matrix) are given as evidence."""

    deltas: frozenset[int]
    outcome: Outcome
    purpose: Purpose = "search"


@dataclass(frozen=True, slots=True)
class Finding:
    """What the search ends with.

    Attributes:
        status: ``found``: ``sets`` hold verified minimal failing sets. ``base_fails``: the base alone fails, so no
            delta is to blame. ``not_reproduced``: all deltas together never failed. ``undecided``: the budget is spent
            or nothing passed verification; ``sets`` holds the best guess, if any.
        sets: minimal failing sets, the first found first.
        confidence: 0..1, of the first set.
        repro_rate: estimated probability that a launch with the whole set fails.
        trials: every launch, in order.
    """

    status: Status
    sets: tuple[frozenset[int], ...]
    confidence: float
    repro_rate: float
    trials: tuple[Trial, ...]

    def launches(self, *purposes: Purpose) -> int:
        """Launches made for these purposes (all when none is named)."""
        return sum(1 for trial in self.trials if not purposes or trial.purpose in purposes)


def search(
    prior: Sequence[float],
    *,
    evidence: Iterable[Trial] = (),
    calibrate: int = 3,
    budget: int = 60,
    confidence: float = 0.95,
    max_size: int = 3,
    others: bool = True,
    cost: tuple[float, float] = (1.0, 1.0),
) -> Search:
    """Search among ``len(prior)`` deltas.

    Args:
        prior: weight of each delta (how often it was to blame before); only ratios matter.
        evidence: launches already made elsewhere; they cost nothing.
        calibrate: launches of each end before the search; four times as many where the outcomes differ.
        budget: launches for ``search``; when a proof fails after as many of its own, there is no further one.
            Calibration and looking for another set are bounded by themselves.
        confidence: a verified set is believed at least so firmly (and at least at 0.99).
        max_size: largest minimal failing set considered where runs are flaky.
        others: look for further minimal failing sets once one is verified.
        cost: (of a launch that passes, of one that fails), e.g. minutes; cheap launches are preferred.

    Raises:
        ValueError: no deltas, or a weight that is not positive.
    """
    if not prior or min(prior) <= 0:
        raise ValueError("search needs at least one delta, each with a positive prior weight")
    state = _State(tuple(prior), list(evidence), budget, confidence, cost, Belief(prior, max_size))
    try:
        return (yield from _search(state, calibrate, others))
    except _StopError:
        if state.sets:
            return state.finding("found", state.sets)
        return state.finding("undecided", [deltas_of(state.belief.posterior().best)] if state.known else [])


def _search(state: _State, calibrate: int, others: bool) -> Asking[Finding]:
    base = yield from _calibrate(state, frozenset(), calibrate)
    if base.count("fail") * 2 > len(base):
        return state.finding("base_fails")
    full = yield from _calibrate(state, state.everything, calibrate)
    if set(full) != {"fail"}:  # flaky, rare, or not there: a search that knows the repro rate needs far fewer launches
        full = yield from _calibrate(state, state.everything, 4 * calibrate)
        base = yield from _calibrate(state, frozenset(), 4 * calibrate)
    if "fail" not in full:
        return state.finding("not_reproduced")

    found = (yield from _prefix_bisection(state)) if set(full) == {"fail"} else None
    if found is None:
        found = yield from _information_gain(state)
    while not (yield from _verify(state, found)):
        if min(state.left(), state.left("verify")) <= 0:
            return state.finding("undecided", [deltas_of(state.belief.posterior().best)])
        found = yield from _information_gain(state)
    state.sets.append(found)
    state.sure = state.belief.posterior().weight[mask_of(found)]
    if others:
        yield from _look_for_others(state)
    return state.finding("found", state.sets)


class _StopError(Exception):
    """No further launch is wanted."""


@dataclass(slots=True)
class _State:
    prior: tuple[float, ...]
    evidence: list[Trial]
    budget: int
    confidence: float
    cost: tuple[float, float]
    belief: Belief
    trials: list[Trial] = field(default_factory=list)
    sets: list[frozenset[int]] = field(default_factory=list)
    sure: float = 0.0
    """Belief in the first set when it was verified; a second one contradicts the model of a single cause."""

    def __post_init__(self) -> None:
        for trial in self.evidence:
            self._weigh(trial)

    def left(self, purpose: Purpose = "search") -> int:
        return self.budget - sum(1 for trial in self.trials if trial.purpose == purpose)

    @property
    def known(self) -> list[Trial]:
        return [trial for trial in self.evidence + self.trials if trial.outcome != "unresolved"]

    @property
    def everything(self) -> frozenset[int]:
        return frozenset(range(len(self.prior)))

    def ask(self, deltas: frozenset[int], purpose: Purpose) -> Asking[Outcome]:
        outcome = yield Question(deltas, purpose, self.belief.posterior().chance(mask_of(deltas)))
        if outcome is None:
            raise _StopError
        self.trials.append(Trial(deltas, outcome, purpose))
        self._weigh(self.trials[-1])
        return outcome

    def _weigh(self, trial: Trial) -> None:
        if trial.outcome == "unresolved":
            self.belief.exclude(mask_of(trial.deltas))
        else:
            self.belief.add(mask_of(trial.deltas), trial.outcome == "fail")

    def ask_most_informative(self, purpose: Purpose) -> Asking[bool]:
        """False: no launch that can be made would tell anything."""
        dead = {mask_of(t.deltas) for t in self.evidence + self.trials if t.outcome == "unresolved"}
        choice = self.belief.most_informative(self.cost, dead)
        if choice is not None:
            yield from self.ask(deltas_of(choice[0]), purpose)
        return choice is not None

    def failures(self, deltas: frozenset[int]) -> int:
        """Launches with these deltas or some of them that failed, where none passed that had all of theirs."""
        passed = [trial.deltas for trial in self.known if trial.outcome == "pass"]
        failed = [t.deltas for t in self.known if t.outcome == "fail" and t.deltas <= deltas]
        return sum(1 for one in failed if not any(one <= other for other in passed))

    def implied(self, deltas: frozenset[int]) -> Outcome | None:
        """What a deterministic, monotone failure says of ``deltas`` without a launch."""
        if any(trial.outcome == "pass" and deltas <= trial.deltas for trial in self.known):
            return "pass"
        if self.failures(deltas):
            return "fail"
        return "unresolved" if any(t.deltas == deltas for t in self.trials) else None

    def finding(self, status: Status, sets: Sequence[frozenset[int]] = ()) -> Finding:
        belief = self.belief.posterior()
        sure = belief.weight[mask_of(sets[0])] if sets else 1.0 if status == "base_fails" else 0.0
        return Finding(status, tuple(sets), max(sure, self.sure), belief.mean_rate, tuple(self.trials))


def _calibrate(state: _State, deltas: frozenset[int], times: int) -> Asking[list[Outcome]]:
    seen = [trial.outcome for trial in state.evidence + state.trials if trial.deltas == deltas]
    while len(seen) < times:
        seen.append((yield from state.ask(deltas, "calibrate")))
    return seen


def _prefix_bisection(state: _State) -> Asking[frozenset[int] | None]:
    """Deterministic failures: about log2(n) launches a delta.

    None when a launch is unresolved or contradicts. Where all rests on one failure and nothing has failed since, that
    launch is made again: after a false alarm one innocent delta after the other would be blamed.
    """
    order = sorted(range(len(state.prior)), key=lambda i: (-state.prior[i], i))
    fixed: frozenset[int] = frozenset()
    high, passed = len(order), 0
    while True:
        low = -1 if fixed else 0  # fixed + order[:low] passes, fixed + order[:high] fails
        while high - low > 1:
            middle = _split(state, fixed, order, low, high) if low >= 0 else 0
            verdict = yield from _known_or_ask(state, fixed | frozenset(order[:middle]))
            if verdict == "unresolved" or state.left() <= 0:
                return None
            low, high, passed = (low, middle, 0) if verdict == "fail" else (middle, high, passed + 1)
            failing = fixed | frozenset(order[:high])
            if passed >= _DOUBT and state.failures(failing) < 2:
                verdict = yield from state.ask(failing, "verify")
                if verdict != "fail":  # anew where it passed; no launch is made again
                    return (yield from _prefix_bisection(state)) if verdict == "pass" else None
        if high == 0:
            return fixed
        fixed |= {order[high - 1]}
        high -= 1


def _split(state: _State, fixed: frozenset[int], order: Sequence[int], low: int, high: int) -> int:
    """The prefix length between low and high that is about as likely to fail as to pass.

    That is more than half of the way where several deltas may be to blame. Where all are alike, it is none after which
    a single one would take more launches than by halving.
    """
    first, last = low + 1, high - 1
    if state.prior[order[low]] == state.prior[order[last]]:
        half = 1 << (high - low - 1).bit_length() - 1
        longest = min(half, high - low - half // 2)
        first, last = high - longest, low + longest
    belief = state.belief.posterior()
    chances = {m: belief.chance(mask_of(fixed.union(order[:m]))) for m in range(first, last + 1)}
    return min(chances, key=lambda m: (abs(chances[m] - 0.5), m))


def _known_or_ask(state: _State, deltas: frozenset[int]) -> Asking[Outcome]:
    likely = state.belief.posterior().weight.get(mask_of(deltas), 0.0) >= _LIKELY
    return state.implied(deltas) or (yield from state.ask(deltas, "verify" if likely else "search"))


def _information_gain(state: _State) -> Asking[frozenset[int]]:
    """Launch what tells most about the set until one set is likely, or the budget ends; the likeliest set."""
    enough = min(_LIKELY, state.confidence)
    while (belief := state.belief.posterior()).weight[belief.best] < enough and state.left() > 0:
        if not (yield from state.ask_most_informative("search")):
            return deltas_of(belief.best)
    return deltas_of(belief.best)


def _verify(state: _State, deltas: frozenset[int]) -> Asking[bool]:
    """The set fails alone, each set with one delta less passes, and no other set explains all launches as well."""
    mask = mask_of(deltas)
    state.belief.consider(mask)
    if not any(t.deltas == deltas and t.outcome == "fail" for t in state.known):
        for _ in range(_repeats(state)):
            outcome = yield from state.ask(deltas, "verify")
            if outcome == "fail":
                break
            if outcome == "unresolved":
                return False
        else:
            return False
    for delta in sorted(deltas):
        if not any(t.deltas == deltas - {delta} for t in state.known):
            yield from state.ask(deltas - {delta}, "verify")
    for _ in range(_VERIFY):
        belief = state.belief.posterior()
        if belief.best != mask:
            return False
        if belief.weight[mask] >= max(_SURE, state.confidence):
            return True
        if not (yield from state.ask_most_informative("verify")):
            return True  # nothing that can be launched would tell more
    return False


def _repeats(state: _State, miss: float = 0.05) -> int:
    """Launches after which a set that fails at the learnt rate would have failed at least once."""
    return min(8, math.ceil(math.log(miss) / math.log(1 - state.belief.posterior().mean_rate)))


def _look_for_others(state: _State) -> Asking[None]:
    """Does it still fail with one delta of the set taken out? Then another set is to blame as well."""
    repeats = _repeats(state)
    for delta in sorted(state.sets[0]):
        rest = state.everything - {delta}
        if any(other <= rest for other in state.sets[1:]):
            continue
        seen = [trial.outcome for trial in state.known if trial.deltas == rest]
        while len(seen) < repeats:
            seen.append((yield from state.ask(rest, "another")))
        failures = seen.count("fail")
        if failures * 2 < max(len(seen), 2):
            continue  # at the learnt rate a real second set would fail oftener than that
        kept = sorted(rest, key=lambda i: (-state.prior[i], i))
        for candidate in reversed(list(kept)):  # plain deletion: rare, and every step is a proof
            trial = frozenset(kept) - {candidate}
            for _ in range(repeats):
                if (yield from state.ask(trial, "another")) == "fail":
                    kept.remove(candidate)
                    break
        if kept:
            state.sets.append(frozenset(kept))
