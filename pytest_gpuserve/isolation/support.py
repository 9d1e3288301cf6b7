"""What launches say of a set of deltas by themselves, whatever a search believes of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, lgamma

from .search import Outcome

_ALARMS = 20.0
"""Launches without a false alarm that are believed beforehand."""


@dataclass(frozen=True, slots=True)
class Support:
    """Launches that failed, and all of them: with the whole set on, and without."""

    failed: int
    launched: int
    failed_without: int
    launched_without: int

    @property
    def probability(self) -> float:
        """That the set makes the difference, rather than that every launch fails by the same chance; half beforehand.
        Neither rate is known: both are averaged over (Beta distributions)."""
        passed, passed_without = self.launched - self.failed, self.launched_without - self.failed_without
        set_matters = _beta(self.failed + 1, passed + 1)
        set_matters += _beta(self.failed_without + 1, passed_without + _ALARMS) - _beta(1, _ALARMS)
        chance = _beta(self.failed + self.failed_without + 1, passed + passed_without + 1)
        return 1 / (1 + exp(min(chance - set_matters, 700.0)))

    def __str__(self) -> str:
        return (
            f"with it {self.failed} of {self.launched} launches failed, without it {self.failed_without} of "
            f"{self.launched_without}"
        )


def support(
    sets: Collection[frozenset[int]], launches: Iterable[Mapping[frozenset[int], Sequence[Outcome]]]
) -> Support:
    """Count; several sets are several causes, any of which will do."""
    counts = {True: [0, 0], False: [0, 0]}
    for mapping in launches:
        for deltas, outcomes in mapping.items():
            held = any(one <= deltas for one in sets)
            told = [outcome for outcome in outcomes if outcome != "unresolved"]
            counts[held][0] += told.count("fail")
            counts[held][1] += len(told)
    return Support(*counts[True], *counts[False])


def _beta(a: float, b: float) -> float:
    """Logarithm of the beta function."""
    return lgamma(a) + lgamma(b) - lgamma(a + b)
