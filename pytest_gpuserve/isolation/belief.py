"""What launches tell about the minimal failing set and the repro rate. Pure; the arithmetic behind search.py.

A hypothesis is a set of at most ``max_size`` deltas, held as a bit mask. A launch that holds the whole set fails with
probability q, any other with probability f (a false alarm). Neither q nor f is known: both are averaged over a grid.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

_RATES = (0.998, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.12)
_ALARMS = (0.001, 0.01, 0.04)
_GRID = tuple((q, f) for q in _RATES for f in _ALARMS)
_LOGS = tuple(
    # half of all failures are deterministic; most machines raise no false alarms
    (
        math.log(q),
        math.log1p(-q),
        math.log(f),
        math.log1p(-f),
        math.log((17 if q > 0.99 else 1) * (3 if f < 0.01 else 1)),
    )
    for q, f in _GRID
)
_DOUBT_PER_DELTA = 0.2
"""Log odds by which a set with one delta more is less likely beforehand, all sets of a size together."""

_WEIGHED = 160
"""Hypotheses that are looked at to choose a launch: the likeliest ones, which hold nearly all the weight."""


@dataclass(frozen=True, slots=True)
class Posterior:
    """Belief over the minimal failing set. ``weight`` by mask sums to 1; ``rate`` is E[q] given the set."""

    weight: dict[int, float]
    rate: dict[int, float]
    false_alarm: float

    @property
    def best(self) -> int:
        """The likeliest set, as a mask."""
        return max(self.weight, key=lambda mask: (self.weight[mask], -mask))

    @property
    def mean_rate(self) -> float:
        return sum(weight * self.rate[mask] for mask, weight in self.weight.items())

    def chance(self, mask: int) -> float:
        """Probability that a launch with these deltas fails."""
        inside = [(w, self.rate[m]) for m, w in self.weight.items() if m & mask == m]
        held = sum(w for w, _ in inside)
        return sum(w * rate for w, rate in inside) + (1 - held) * self.false_alarm


class Belief:
    """Counts launches and weighs every hypothesis by them."""

    def __init__(self, prior: Sequence[float], max_size: int) -> None:
        self._prior = prior
        self._n = len(prior)
        sizes = range(1, min(max_size, self._n) + 1)
        self._start = {
            mask: self._before(mask) for size in sizes for mask in map(mask_of, combinations(range(self._n), size))
        }
        self._inside = dict.fromkeys(self._start, (0, 0))
        self._excluded: set[int] = set()
        self._launches: list[tuple[int, bool]] = []
        self._passes = self._fails = 0
        self._known: Posterior | None = None

    def _before(self, mask: int) -> float:
        """Log weight of a set before any launch."""
        deltas, mean = deltas_of(mask), sum(self._prior) / self._n
        usual = sum(math.log(self._prior[i] / mean) for i in deltas)
        return usual - math.log(math.comb(self._n, len(deltas))) - _DOUBT_PER_DELTA * (len(deltas) - 1)

    def consider(self, mask: int) -> None:
        """Weigh this set too, however large it is."""
        if mask not in self._start and mask not in self._excluded:
            self._start[mask] = self._before(mask)
            held = [failed for launched, failed in self._launches if mask & launched == mask]
            self._inside[mask] = (held.count(False), held.count(True))
            self._known = None

    def exclude(self, mask: int) -> None:
        """This set cannot run by itself, so it is not what a person can be given as the answer."""
        self._excluded.add(mask)
        if len(self._start) > 1 and self._start.pop(mask, None) is not None:
            del self._inside[mask]
            self._known = None

    def add(self, mask: int, failed: bool) -> None:
        """A launch with the deltas of ``mask`` and what came of it."""
        self._launches.append((mask, failed))
        self._passes += not failed
        self._fails += failed
        for hypothesis, (passes, fails) in self._inside.items():
            if hypothesis & mask == hypothesis:
                self._inside[hypothesis] = (passes + (not failed), fails + failed)
        self._known = None

    def posterior(self) -> Posterior:
        """Belief after every launch so far."""
        if self._known is None:
            self._known = self._weigh()
        return self._known

    def _weigh(self) -> Posterior:
        seen: dict[tuple[int, int], tuple[float, float, float]] = {}
        for counts in set(self._inside.values()):  # many hypotheses, few different counts
            passes, fails = counts
            row = [
                prior + fails * lq + passes * l1q + (self._fails - fails) * lf + (self._passes - passes) * l1f
                for lq, l1q, lf, l1f, prior in _LOGS
            ]
            peak = max(row)
            powers = [math.exp(value - peak) for value in row]
            mass = sum(powers)
            rate = sum(p * q for p, (q, _) in zip(powers, _GRID, strict=True)) / mass
            alarm = sum(p * f for p, (_, f) in zip(powers, _GRID, strict=True)) / mass
            seen[counts] = (peak + math.log(mass), rate, alarm)
        logs = {mask: start + seen[self._inside[mask]][0] for mask, start in self._start.items()}
        peak = max(logs.values())
        weight = {mask: math.exp(value - peak) for mask, value in logs.items()}
        scale = sum(weight.values())
        weight = {mask: w / scale for mask, w in weight.items()}
        rates = {mask: seen[self._inside[mask]][1] for mask in weight}
        alarm = sum(w * seen[self._inside[mask]][2] for mask, w in weight.items())
        return Posterior(weight, rates, alarm)

    def most_informative(self, cost: tuple[float, float], dead: Collection[int] = ()) -> tuple[int, float] | None:
        """The launch that tells most about the minimal failing set per expected cost, and its chance to fail.

        Found by changing one delta at a time, uphill, from the likeliest sets and from everything; ``dead`` are
        launches that cannot be made. None: no launch would tell anything.
        """
        belief = self.posterior()
        ranked = sorted(belief.weight, key=lambda mask: (-belief.weight[mask], mask))[:_WEIGHED]
        terms = [
            (m, belief.weight[m], belief.rate[m], entropy(belief.rate[m])) for m in ranked if belief.weight[m] > 1e-6
        ]
        alarm, noise = belief.false_alarm, entropy(belief.false_alarm)
        pay_pass, pay_fail = cost
        known: dict[int, tuple[float, float]] = {}

        def score(mask: int) -> float:
            if mask not in known:
                inside = fails = blur = 0.0
                for hypothesis, weight, rate, spread in terms:
                    if hypothesis & mask == hypothesis:
                        inside += weight
                        fails += weight * rate
                        blur += weight * spread
                chance = fails + (1 - inside) * alarm
                gain = entropy(chance) - blur - (1 - inside) * noise
                value = gain / (chance * pay_fail + (1 - chance) * pay_pass)
                known[mask] = (value if mask not in dead else -1.0, chance)
            return known[mask][0]

        everything = (1 << self._n) - 1
        half = 0
        held = 0.0
        for mask, weight, *_ in terms:
            half |= mask
            held += weight
            if held > 0.5:
                break
        for start in {everything, half, terms[0][0], everything & ~terms[0][0]}:
            here = start
            while True:
                there = max((here ^ (1 << bit) for bit in range(self._n)), key=lambda mask: (score(mask), mask))
                if score(there) <= score(here) + 1e-12:
                    break
                here = there
        best = max(known, key=lambda mask: (known[mask][0], mask))
        return (best, known[best][1]) if known[best][0] > 1e-9 else None


def mask_of(deltas: Iterable[int]) -> int:
    return sum(1 << i for i in deltas)


def deltas_of(mask: int) -> frozenset[int]:
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)


def entropy(p: float) -> float:
    """Bits of one outcome."""
    return 0.0 if p <= 0 or p >= 1 else -(p * math.log2(p) + (1 - p) * math.log2(1 - p))
