"""Which combination of axis values explains which cells failed? Bayes over small conditions. Pure.

A condition is a conjunction of at most three *literals* (``cuda_graph=on``; ``attention_backend other than triton``),
or two such conjunctions. A cell that meets it fails with probability q, any other with a small probability: q is not
known, so a fault that shows in two runs of three is found too. Conditions that hold in the same tested cells cannot be
told apart by them; simple ones are likelier beforehand, and what would decide is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

Values = Mapping[str, str]
"""Axis to value name."""

_FALSE_ALARM = 0.004
_RATES = ((0.996, 0.75), (0.85, 0.07), (0.7, 0.08), (0.5, 0.06), (0.3, 0.04))
"""How often a cell that meets the condition fails, and how likely that is beforehand."""

_NOISE_RATES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)

_PRIOR = {
    "always": 0.08,
    "noise": 0.03,
    "one": 0.5,
    "not": 0.04,
    "two": 0.24,
    "three": 0.08,
    "same axis": 0.02,
    "one or one": 0.006,
    "one or two": 0.003,
    "two or two": 0.001,
}

_MOST = 40_000
"""Alternatives of one kind that are weighed; kinds with more are left out (matrices with dozens of axes)."""


@dataclass(frozen=True, slots=True, order=True)
class Literal:
    """``axis=value``, or (``negated``) any other value of that axis."""

    axis: str
    value: str
    negated: bool = False

    def holds(self, values: Values) -> bool:
        return (values.get(self.axis) == self.value) is not self.negated

    def __str__(self) -> str:
        return f"{self.axis}{' other than ' if self.negated else '='}{self.value}"


@dataclass(frozen=True, slots=True)
class Condition:
    """Any of ``parts``, each a conjunction. No part: no cell; an empty part: every cell. ``noise``: at random."""

    parts: tuple[tuple[Literal, ...], ...]
    noise: bool = False

    def holds(self, values: Values) -> bool:
        return any(all(literal.holds(values) for literal in part) for part in self.parts)

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(literal.axis for part in self.parts for literal in part)


@dataclass(frozen=True, slots=True)
class Weighed:
    """A condition and how likely it is. ``rate``: how often a cell that meets it fails."""

    condition: Condition
    probability: float
    rate: float


@dataclass(slots=True)
class Evidence:
    """Runs of one cell as far as one failure is concerned."""

    values: Values
    failed: int = 0
    passed: int = 0


@dataclass(frozen=True, slots=True)
class Posterior:
    """Every condition that is not absurd, the likeliest first; among equals the simplest."""

    weighed: tuple[Weighed, ...]
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def best(self) -> Weighed:
        """The likeliest condition, in its simplest form; forms that mean the same cells count together."""
        cells = list(itertools.islice(itertools.product(*self.axes.values()), 4096))
        worlds = [dict(zip(self.axes, cell, strict=True)) for cell in cells]
        meaning: dict[tuple[bool, ...], list[Weighed]] = {}
        for weighed in self.weighed[:60]:
            key = (weighed.condition.noise, *map(weighed.condition.holds, worlds))
            meaning.setdefault(key, []).append(weighed)
        same = max(meaning.values(), key=lambda group: sum(w.probability for w in group))
        first = min(same, key=lambda w: (len(w.condition.parts), sum(map(len, w.condition.parts))))
        return replace(first, probability=sum(w.probability for w in same))

    def fails(self, values: Values) -> float:
        """Probability that one run of this cell would fail."""
        return sum(w.probability * _chance(w, values) for w in self.weighed)

    def information(self, values: Values) -> float:
        """Bits that one run of this cell is expected to tell about which condition it is."""
        inside = sum(w.probability * _entropy(_chance(w, values)) for w in self.weighed)
        return _entropy(self.fails(values)) - inside


def _chance(weighed: Weighed, values: Values) -> float:
    return weighed.rate if weighed.condition.holds(values) else _FALSE_ALARM


def _entropy(p: float) -> float:
    return 0.0 if p <= 0.0 or p >= 1.0 else -p * math.log2(p) - (1 - p) * math.log2(1 - p)


def infer(evidence: Sequence[Evidence], axes: Mapping[str, Sequence[str]]) -> Posterior:
    """Weigh every small condition over ``axes`` (axis to its values, one value included) against the evidence."""
    masks: dict[int, list[tuple[Condition, float]]] = {}
    literals = [Literal(axis, value) for axis, values in axes.items() if len(values) > 1 for value in values]
    negated = [Literal(axis, value, True) for axis, values in axes.items() if len(values) > 2 for value in values]
    holds = {
        literal: sum(1 << n for n, cell in enumerate(evidence) if literal.holds(cell.values))
        for literal in (*literals, *negated)
    }
    everything = (1 << len(evidence)) - 1
    for kind, conditions in _kinds(literals, negated).items():
        share = _PRIOR[kind] / max(1, len(conditions))
        for condition in conditions:
            masks.setdefault(_mask(condition, holds, everything), []).append((condition, share))

    failed, passed = [c.failed for c in evidence], [c.passed for c in evidence]
    scored: list[tuple[float, Condition, float]] = []
    for mask, members in masks.items():
        inside, outside = _sums(mask, failed, passed), _sums(everything & ~mask, failed, passed)
        likelihood, rate = _fit(inside, outside)
        scored += [(math.log(prior) + likelihood, condition, rate) for condition, prior in members]
    totals = _sums(everything, failed, passed)
    for noise in _NOISE_RATES:
        prior = _PRIOR["noise"] / len(_NOISE_RATES)
        scored.append((math.log(prior) + _log(totals, noise), Condition(((),), noise=True), noise))
    return Posterior(_normal(scored), {axis: tuple(values) for axis, values in axes.items()})


def _kinds(literals: Sequence[Literal], negated: Sequence[Literal]) -> dict[str, list[Condition]]:
    def apart(*some: Literal) -> bool:
        return len({literal.axis for literal in some}) == len(some)

    single = [(literal,) for literal in literals]
    two = [pair for pair in itertools.combinations(literals, 2) if apart(*pair)]
    three = [some for some in itertools.combinations(literals, 3) if apart(*some)] if len(literals) < 60 else []
    both = itertools.combinations(single, 2)
    mixed = ((one, pair) for one in single for pair in two if one[0] not in pair)
    twice = itertools.combinations(two, 2)
    kinds: dict[str, Iterable[tuple[tuple[Literal, ...], ...]]] = {
        "always": [((),)],
        "one": ((part,) for part in single),
        "not": (((literal,),) for literal in negated),
        "two": ((pair,) for pair in two),
        "three": ((triple,) for triple in three),
        "same axis": (parts for parts in itertools.combinations(single, 2) if parts[0][0].axis == parts[1][0].axis),
        "one or one": (parts for parts in both if parts[0][0].axis != parts[1][0].axis),
        "one or two": mixed if len(single) * len(two) <= _MOST else (),
        "two or two": twice if len(two) ** 2 / 2 <= _MOST else (),
    }
    return {kind: list(itertools.islice(map(Condition, parts), _MOST)) for kind, parts in kinds.items()}


def _mask(condition: Condition, holds: Mapping[Literal, int], everything: int) -> int:
    mask = 0
    for part in condition.parts:
        inside = everything
        for literal in part:
            inside &= holds[literal]
        mask |= inside
    return mask


def _sums(mask: int, failed: Sequence[int], passed: Sequence[int]) -> tuple[int, int]:
    bad = good = 0
    while mask:
        n = (mask & -mask).bit_length() - 1
        bad += failed[n]
        good += passed[n]
        mask &= mask - 1
    return bad, good


def _log(counts: tuple[int, int], rate: float) -> float:
    return counts[0] * math.log(rate) + counts[1] * math.log1p(-rate)


def _fit(inside: tuple[int, int], outside: tuple[int, int]) -> tuple[float, float]:
    """Log likelihood with q averaged over its prior, and the q that fits best."""
    logs = [math.log(weight) + _log(inside, rate) for rate, weight in _RATES]
    top = max(logs)
    best = _RATES[logs.index(top)][0]
    return top + math.log(sum(math.exp(value - top) for value in logs)) + _log(outside, _FALSE_ALARM), best


def _normal(scored: list[tuple[float, Condition, float]]) -> tuple[Weighed, ...]:
    top = max(score for score, _, _ in scored)
    kept = [(math.exp(score - top), condition, rate) for score, condition, rate in scored if score > top - 12]
    total = sum(weight for weight, _, _ in kept)
    kept.sort(key=lambda entry: (-entry[0], sum(map(len, entry[1].parts)), entry[1].parts))
    return tuple(Weighed(condition, weight / total, rate) for weight, condition, rate in kept)
