"""Was a phase quick enough? For load-time regressions: 34 s yesterday, 25 minutes today."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import DegradedError, SpecError
from ..vocabulary import PHASES, Phase
from .rank_phase import RankPhase

_SHOWN = 16
"""Groups of ranks that a message lists."""


def within(ranks: Mapping[str, RankPhase], phase: Phase, max_s: float, who: str) -> dict[str, float]:
    """Seconds that each rank spent in ``phase``, all its occurrences together; ranks that never entered it are left out
    (engines print some phases on the first rank alone).

    Args:
        ranks: phases by label. who: the server, for the message.

    Raises:
        DegradedError: a rank took longer than ``max_s``; the message names the slowest one, the limit and the others.
            Verdict ``undecided``: no rank's log says that the phase ran, so nothing can be said of it.
        SpecError: there is no such phase.
    """
    if phase not in PHASES:
        raise SpecError(f"assert_phase: there is no phase {phase!r}. Phases: {', '.join(PHASES)}.")
    found = {label: rank.seconds(phase) for label, rank in ranks.items()}
    spent = {label: seconds for label, seconds in found.items() if seconds is not None}
    if not spent:
        seen = {name for rank in ranks.values() for name in (rank.phase, *(entry[0] for entry in rank.history))}
        names = ", ".join(name for name in PHASES if name in seen) or "none"
        raise DegradedError(
            f"{phase} never ran on {who}, by its log (limit {max_s:g} s). Phases of its ranks: {names}.",
            verdict="undecided",
        )
    slowest = max(spent, key=spent.__getitem__)
    if spent[slowest] > max_s:
        others = _others({label: found[label] for label in found if label != slowest})
        raise DegradedError(
            f"{phase} of {who} took {spent[slowest]:.1f} s on {slowest}, the slowest rank (limit {max_s:g} s); "
            f"{others}."
        )
    return spent


def _others(found: Mapping[str, float | None]) -> str:
    """Other ranks by what they took, slowest first; those that took the same stand together."""
    groups: dict[str, list[str]] = {}
    for label, seconds in sorted(found.items(), key=lambda pair: -1.0 if pair[1] is None else pair[1], reverse=True):
        groups.setdefault("not in its log" if seconds is None else f"{seconds:.1f} s", []).append(label)
    shown = [f"{', '.join(labels)}: {text}" for text, labels in list(groups.items())[:_SHOWN]]
    more = [f"{len(groups) - _SHOWN} more groups"] if len(groups) > _SHOWN else []
    return "; ".join([*shown, *more]) or "it has no other rank"
