"""Find the smallest set of deltas that makes a server fail, in few launches. Pure: no clock, no I/O.

The search is a generator of questions. ``search(...)`` yields a :class:`Question` (launch the base plus these deltas)
and is sent back an :data:`Outcome`; what it returns is a :class:`Finding`. It is deterministic, so a search is resumed
by sending it the outcomes it already had (:func:`resume`): no launch is repeated.

Model: deltas 0..n-1 over a base that passes; some minimal failing set M (at most ``max_size`` deltas); a launch with
deltas T fails with probability q (the repro rate) when T contains M, and with probability f (a false alarm) otherwise.
While runs look deterministic the shortest failing prefix is bisected, ordered and split by the prior: its last delta
belongs to M. When they do not, launches are chosen by the information they are expected to give about M while q is
learnt along. Every set is verified: it fails alone, and each set with one delta less passes.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

Outcome = Literal["fail", "pass", "unresolved"]
"""fail: the failure that is sought (same signature). unresolved: another failure, or a combination that cannot run."""

Purpose = Literal["calibrate", "search", "verify", "another"]

Search = Generator["Question", Outcome, "Finding"]

_MAX_VERIFY = 12

MAX_EXACT = 16
"""Up to this many deltas all 2**n sets are weighed in the information-gain stage; above, the likeliest ones are."""

_GRID = tuple((q, f) for q in (0.995, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2) for f in (0.002, 0.03))
_LOGS = tuple((math.log(q), math.log1p(-q), math.log(f), math.log1p(-f)) for q, f in _GRID)
_LOG_PRIOR = tuple(math.log(6 if q > 0.99 else 1) for q, _ in _GRID)  # half of all failures are deterministic


@dataclass(frozen=True, slots=True)
class Question:
    """Launch the base plus ``deltas``. ``purpose`` says why; ``belief`` is how sure we are that it fails, 0..1."""

    deltas: frozenset[int]
    purpose: Purpose
    belief: float = 0.5


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

    status: Literal["found", "base_fails", "not_reproduced", "undecided"]
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
    confidence: float = 0.97,
    max_size: int = 3,
    others: bool = True,
    cost: tuple[float, float] = (1.0, 1.0),
) -> Search:
    """Search among ``len(prior)`` deltas.

    Args:
        prior: weight of each delta (how often it was to blame before); only ratios matter.
        evidence: launches already made elsewhere; they cost nothing.
        calibrate: launches of each end before the search.
        budget: launches for ``search``; calibration, verification and looking for another set are bounded by
            themselves.
        confidence: the information-gain stage stops here.
        max_size: largest minimal failing set considered.
        others: look for further minimal failing sets once one is verified.
        cost: (of a launch that passes, of one that fails), e.g. minutes; cheap launches are preferred.

    Raises:
        ValueError: no deltas, or a weight that is not positive.
    """
    if not prior or min(prior) <= 0:
        raise ValueError("search needs at least one delta, each with a positive prior weight")
    state = _State(tuple(prior), list(evidence), [], budget, confidence, max_size, cost)
    everything = frozenset(range(len(prior)))

    base = yield from _calibrate(state, frozenset(), calibrate)
    if base.count("fail") * 2 > len(base):
        return state.finding("base_fails")
    full = yield from _calibrate(state, everything, calibrate)
    if set(full) != {"fail"}:  # flaky, rare, or not there: a search that knows the repro rate needs far fewer launches
        full = yield from _calibrate(state, everything, 4 * calibrate)
        base = yield from _calibrate(state, frozenset(), 4 * calibrate)
    if "fail" not in full:
        return state.finding("not_reproduced")

    found: frozenset[int] | None = None
    if set(full) == {"fail"} and "fail" not in base:
        found = yield from _prefix_bisection(state)
        if found is not None and not (yield from _verify(state, found)):
            found = None
    while found is None and state.left > 0:
        guess = yield from _information_gain(state)
        if guess is None:
            break
        if (yield from _verify(state, guess)):
            found = guess
    if found is None:
        return state.finding("undecided", state.posterior().best[:1])
    sets = [found]
    if others and len(prior) > len(found):
        yield from _look_for_others(state, everything, sets)
    return state.finding("found", sets)


def resume(run: Search, outcomes: Iterable[Outcome]) -> Question | Finding:
    """Bring a fresh ``run`` to where it was after ``outcomes``; returns the next question, or the finding."""
    try:
        question = next(run)
        for outcome in outcomes:
            question = run.send(outcome)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    return question


@dataclass(frozen=True, slots=True)
class _Posterior:
    """Belief over the minimal failing set, by bit mask; ``rate`` is E[q] given the set, ``false_alarm`` E[f]."""

    weight: dict[int, float]
    rate: dict[int, float]
    false_alarm: float

    @property
    def best(self) -> list[frozenset[int]]:
        return [_deltas(mask) for mask in sorted(self.weight, key=lambda m: (-self.weight[m], m))]

    @property
    def mean_rate(self) -> float:
        return sum(self.weight[m] * self.rate[m] for m in self.weight)


@dataclass(slots=True)
class _State:
    prior: tuple[float, ...]
    evidence: list[Trial]
    trials: list[Trial]
    budget: int
    confidence: float
    max_size: int
    cost: tuple[float, float]
    start: dict[int, float] = field(init=False)
    hits: dict[int, list[int]] = field(init=False)
    totals: list[int] = field(default_factory=lambda: [0, 0])
    counted: int = 0

    def __post_init__(self) -> None:
        n, total = len(self.prior), sum(self.prior)
        self.start = {
            # sizes are about alike a priori; inside a size, sets of usual suspects come first
            _mask(combo): sum(math.log(self.prior[i] / total * n) for i in combo)
            - math.log(math.comb(n, size))
            - 0.4 * (size - 1)
            for size in range(1, min(self.max_size, n) + 1)
            for combo in combinations(range(n), size)
        }
        self.hits = {mask: [0, 0] for mask in self.start}

    @property
    def left(self) -> int:
        return self.budget - sum(1 for trial in self.trials if trial.purpose == "search")

    @property
    def known(self) -> list[Trial]:
        return [trial for trial in self.evidence + self.trials if trial.outcome != "unresolved"]

    def ask(
        self, deltas: frozenset[int], purpose: Purpose, belief: float = 0.5
    ) -> Generator[Question, Outcome, Outcome]:
        outcome = yield Question(deltas, purpose, belief)
        self.trials.append(Trial(deltas, outcome, purpose))
        return outcome

    def implied(self, deltas: frozenset[int]) -> Outcome | None:
        """What a deterministic, monotone failure says of ``deltas`` without a launch."""
        for trial in self.known:
            if trial.outcome == "fail" and trial.deltas <= deltas:
                return "fail"
            if trial.outcome == "pass" and deltas <= trial.deltas:
                return "pass"
        return "unresolved" if any(t.deltas == deltas for t in self.trials) else None

    def posterior(self) -> _Posterior:
        """Belief over M given every launch so far: each set of up to max_size deltas against a grid of (q, f)."""
        known = self.known
        for trial in known[self.counted :]:
            tested, failed = _mask(trial.deltas), trial.outcome == "fail"
            self.totals[failed] += 1
            for mask, hits in self.hits.items():
                if mask & tested == mask:
                    hits[failed] += 1
        self.counted = len(known)
        passes, fails = self.totals
        peak, rows = -math.inf, {}
        for mask, (hit_passes, hit_fails) in self.hits.items():
            rows[mask] = row = [
                start + hit_fails * lq + hit_passes * l1q + (fails - hit_fails) * lf + (passes - hit_passes) * l1f
                for start in (self.start[mask],)
                for lq, l1q, lf, l1f in _LOGS
            ]
            row[:] = [value + prior for value, prior in zip(row, _LOG_PRIOR, strict=True)]
            peak = max(peak, *row)
        weight: dict[int, float] = {}
        rate: dict[int, float] = {}
        alarms = 0.0
        for mask, row in rows.items():
            powers = [math.exp(value - peak) for value in row]
            weight[mask] = sum(powers)
            rate[mask] = sum(p * q for p, (q, _) in zip(powers, _GRID, strict=True)) / (weight[mask] or 1.0)
            alarms += sum(p * f for p, (_, f) in zip(powers, _GRID, strict=True))
        scale = sum(weight.values())
        return _Posterior({mask: w / scale for mask, w in weight.items()}, rate, alarms / scale)

    def finding(
        self,
        status: Literal["found", "base_fails", "not_reproduced", "undecided"],
        sets: Sequence[frozenset[int]] = (),
    ) -> Finding:
        belief = self.posterior()
        mask = sum(1 << i for i in sets[0]) if sets else 0
        sure = belief.weight.get(mask, 0.0) if sets else 1.0 if status == "base_fails" else 0.0
        if status == "found":
            sure = max(sure, self.confidence)  # verified as well
        return Finding(status, tuple(sets), sure, belief.mean_rate, tuple(self.trials))


def _calibrate(state: _State, deltas: frozenset[int], times: int) -> Generator[Question, Outcome, list[Outcome]]:
    seen = [trial.outcome for trial in state.evidence + state.trials if trial.deltas == deltas]
    while len(seen) < times:
        seen.append((yield from state.ask(deltas, "calibrate", 1.0 if deltas else 0.0)))
    return seen


def _prefix_bisection(state: _State) -> Generator[Question, Outcome, frozenset[int] | None]:
    """Deterministic failures: about log2(n) launches a delta. None when a launch is unresolved or contradicts."""
    order = sorted(range(len(state.prior)), key=lambda i: (-state.prior[i], i))
    fixed: frozenset[int] = frozenset()
    high = len(order)
    while True:
        low = 0  # fixed + order[:low] passes, fixed + order[:high] fails
        if fixed:
            verdict = yield from _known_or_ask(state, fixed)
            if verdict == "fail":
                return fixed
            if verdict == "unresolved" or high == 0:
                return None
        while high - low > 1:
            middle = _split(state.prior, order, low, high)
            verdict = yield from _known_or_ask(state, fixed | frozenset(order[:middle]))
            if verdict == "unresolved" or state.left <= 0:
                return None
            low, high = (low, middle) if verdict == "fail" else (middle, high)
        fixed |= {order[high - 1]}
        high -= 1


def _split(prior: Sequence[float], order: Sequence[int], low: int, high: int) -> int:
    """The prefix length between low and high that halves the prior mass of where the last delta can be."""
    masses = [prior[order[i]] for i in range(low, high)]
    half, running = sum(masses) / 2, 0.0
    best, distance = (low + high) // 2, math.inf
    for step, mass in enumerate(masses[:-1], start=1):
        running += mass
        # equal masses: the middle, rounded down, as in plain bisection
        if abs(running - half) < distance - 1e-12:
            best, distance = low + step, abs(running - half)
    return best


def _known_or_ask(state: _State, deltas: frozenset[int]) -> Generator[Question, Outcome, Outcome]:
    implied = state.implied(deltas)
    return implied if implied is not None else (yield from state.ask(deltas, "search"))


def _information_gain(state: _State) -> Generator[Question, Outcome, frozenset[int] | None]:
    """Launch what tells most about the set until one set is believed; None when the budget ends first."""
    while True:
        belief = state.posterior()
        best = belief.best[0]
        if belief.weight[_mask(best)] >= state.confidence:
            return best
        if state.left <= 0:
            return None
        choice = _most_informative(state, belief)
        if choice is None:
            return best
        yield from state.ask(_deltas(choice[0]), "search", choice[1])


def _most_informative(state: _State, belief: _Posterior) -> tuple[int, float] | None:
    """The set of deltas whose launch tells most about the minimal failing set, per expected cost; its P(fail)."""
    n = len(state.prior)
    dead = {_mask(t.deltas) for t in state.evidence + state.trials if t.outcome == "unresolved"}
    pay_pass, pay_fail = state.cost
    noise = _entropy(belief.false_alarm)
    best: tuple[float, int, float] | None = None
    for mask, inside, fails, entropy in _candidates(n, belief):
        if mask in dead:
            continue
        chance = fails + (1 - inside) * belief.false_alarm
        gain = _entropy(chance) - entropy - (1 - inside) * noise
        score = gain / (chance * pay_fail + (1 - chance) * pay_pass)
        if gain > 1e-9 and (best is None or score > best[0] + 1e-12):
            best = (score, mask, chance)
    return (best[1], best[2]) if best else None


def _candidates(n: int, belief: _Posterior) -> Iterable[tuple[int, float, float, float]]:
    """(set, P(M inside it), P(M inside it and fails), expected outcome entropy given M inside) for sets worth weighing.

    For up to MAX_EXACT deltas a subset-sum transform gives all 2**n sets in n * 2**n additions.
    """
    terms = [(m, w, w * belief.rate[m], w * _entropy(belief.rate[m])) for m, w in belief.weight.items() if w > 1e-7]
    if n <= MAX_EXACT:
        size = 1 << n
        inside, fails, entropy = [0.0] * size, [0.0] * size, [0.0] * size
        for mask, w, a, e in terms:
            inside[mask], fails[mask], entropy[mask] = w, a, e
        for bit in range(n):
            step = 1 << bit
            for start in range(step, size, 2 * step):
                for i in range(start, start + step):
                    below = i - step
                    if inside[below]:
                        inside[i] += inside[below]
                        fails[i] += fails[below]
                        entropy[i] += entropy[below]
        yield from zip(range(size), inside, fails, entropy, strict=True)
        return
    # many deltas: unions of the likeliest sets, and the complements of each
    ranked = sorted(terms, key=lambda term: -term[1])[:200]
    everything = (1 << n) - 1
    union, masks = 0, set()
    for mask, *_ in ranked:
        union |= mask
        masks |= {union, mask, everything & ~mask, everything & ~union}
    for mask in sorted(masks):
        held = [term for term in terms if term[0] & mask == term[0]]
        yield mask, sum(t[1] for t in held), sum(t[2] for t in held), sum(t[3] for t in held)


def _verify(state: _State, deltas: frozenset[int]) -> Generator[Question, Outcome, bool]:
    """The set fails alone, each set with one delta less passes, and no other set explains all launches as well."""
    if not any(t.deltas == deltas and t.outcome == "fail" for t in state.known):
        for _ in range(_repeats(state)):
            if (yield from state.ask(deltas, "verify", 0.9)) == "fail":
                break
        else:
            return False
    for delta in sorted(deltas) if len(deltas) > 1 else ():
        smaller = deltas - {delta}
        if not any(t.deltas == smaller for t in state.known):
            yield from state.ask(smaller, "verify", 0.05)
    for _ in range(_MAX_VERIFY):
        belief = state.posterior()
        if belief.best[0] != deltas:
            return False
        if belief.weight[_mask(deltas)] >= state.confidence:
            return True
        choice = _most_informative(state, belief)
        if choice is None:
            return True  # nothing that can be launched would tell more
        yield from state.ask(_deltas(choice[0]), "verify", choice[1])
    return False


def _repeats(state: _State, miss: float = 0.05) -> int:
    """Launches after which a set that fails at the learnt rate would have failed at least once."""
    rate = min(state.posterior().mean_rate, 0.97)
    return max(1, min(8, math.ceil(math.log(miss) / math.log(1 - rate))))


def _look_for_others(
    state: _State, everything: frozenset[int], sets: list[frozenset[int]]
) -> Generator[Question, Outcome, None]:
    """Does it still fail with one delta of the set taken out? Then another set is to blame as well."""
    repeats = _repeats(state)
    for delta in sorted(sets[0]):
        rest = everything - {delta}
        if not rest or any(other <= rest for other in sets[1:]):
            continue
        failures = 0
        for _ in range(repeats):
            failures += (yield from state.ask(rest, "another", 0.1)) == "fail"
        if failures * 2 < max(repeats, 2):
            continue  # at the learnt rate a real second set would fail oftener than that
        order = sorted(rest, key=lambda i: (-state.prior[i], i))
        kept = list(order)
        for candidate in reversed(order):  # plain deletion: rare, and every step is a proof
            trial = frozenset(kept) - {candidate}
            outcomes: list[Outcome] = []
            for _ in range(repeats):
                outcomes.append((yield from state.ask(trial, "another", 0.5)))
                if outcomes[-1] == "fail":
                    break
            if "fail" in outcomes:
                kept.remove(candidate)
        if kept and frozenset(kept) not in sets:
            sets.append(frozenset(kept))


def _mask(deltas: Iterable[int]) -> int:
    return sum(1 << i for i in deltas)


def _deltas(mask: int) -> frozenset[int]:
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)


def _entropy(p: float) -> float:
    return 0.0 if p <= 0 or p >= 1 else -(p * math.log2(p) + (1 - p) * math.log2(1 - p))
