"""Where every rank is by its log, which are behind the others, and which never spoke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..engines.base import Rank
from ..phases.reader import RankPhase
from ..vocabulary import PHASES, Phase
from .triage_lines import clock
from .triage_session import Session

_ORDER: Final = {phase: n for n, phase in enumerate(PHASES)}


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank at the end of its log. ``phase`` None: it was asked for and never spoke. ``last_time``: as written."""

    phase: Phase | None = None
    last_line: str | None = None
    last_time: str | None = None


def ranks_of(sessions: Sequence[Session], names: Sequence[str]) -> dict[str, RankPhase]:
    """Ranks of all logs read together. A label that several logs have is told apart by the name of the log."""
    ranks = [(session.phases.ranks() if session.phases else {}) for session in sessions]
    often = Counter(label for found in ranks for label in found)
    return {
        label if often[label] == 1 else f"{label} of {Path(names[session.source]).name}": rank
        for session, found in zip(sessions, ranks, strict=True)
        for label, rank in found.items()
    }


def states(ranks: Mapping[str, RankPhase], missing: Sequence[str]) -> dict[str, RankState]:
    """What is shown of each rank."""
    shown = {
        label: RankState(rank.phase, rank.last_line or None, clock(rank.last_line)) for label, rank in ranks.items()
    }
    return {**shown, **{label: RankState() for label in missing}}


def absent(sessions: Sequence[Session], ranks: Mapping[str, RankPhase]) -> tuple[str, ...]:
    """Ranks that were asked for and never spoke, where the labels leave no doubt about who that is."""
    world = max((session.shapes.world or 0 for session in sessions), default=0)
    nodes = max((session.shapes.nodes for session in sessions), default=1)
    every = all(session.marks is not None and session.marks.every_rank for session in sessions)
    if not every or len(sessions) < nodes or not any(rank.last_line for rank in ranks.values()):
        return ()
    expected = [Rank(tp=number).label for number in range(world)]
    return () if set(ranks) - set(expected) else tuple(label for label in expected if label not in ranks)


def behind(sessions: Sequence[Session], ranks: Mapping[str, RankPhase]) -> tuple[str, ...]:
    """Ranks that others have left behind.

    An engine whose ranks all print their phases shows it at once. Of another engine a silent rank proves nothing,
    unless most of its peers have spoken, or it has not even come through the rendezvous.
    """
    reaches = {label: _reach(rank) for label, rank in ranks.items()}
    if len(set(reaches.values())) < 2:
        return ()
    every = all(session.marks is not None and session.marks.every_rank for session in sessions)
    furthest = max(reaches.values())
    if every:
        return tuple(label for label, reach in reaches.items() if reach < furthest)
    common, count = Counter(reaches.values()).most_common(1)[0]
    early = _ORDER["weight_load"]
    return tuple(
        label
        for label, reach in reaches.items()
        if (reach < common and count > 2 and 2 * count > len(reaches)) or (reach < early <= furthest)
    )


def _reach(rank: RankPhase) -> float:
    return _ORDER[rank.phase] + (0.5 if rank.left is not None else 0.0)


def remarks(
    sessions: Sequence[Session], ranks: Mapping[str, RankPhase], lagging: Sequence[str], missing: Sequence[str]
) -> tuple[str, ...]:
    """What there is to say about ranks that differ, one sentence each."""
    said: list[str] = []
    if missing:
        said.append(f"{', '.join(missing)} never printed a line: not started, or lost before its first record")
    late = [label for label in lagging if label not in missing]
    if late:
        where = {label: ranks[label].phase for label in late}
        places = ", ".join(f"{label} in {phase}" for label, phase in where.items())
        said.append(f"behind the other ranks: {places}")
    completed = {label: count for session in sessions for label, count in session.completed.items()}
    if len(set(completed.values())) > 1:
        least = min(completed.values())
        slow = [label for label, count in completed.items() if count == least]
        said.append(f"{', '.join(slow)} completed the fewest collectives ({least}): look there first")
    if quiet := silent(sessions, ranks):
        said.append(f"{', '.join(quiet)} printed no error while a peer lost its connection: the first suspect")
    return tuple(said)


def silent(sessions: Sequence[Session], ranks: Mapping[str, RankPhase]) -> tuple[str, ...]:
    """Ranks that printed no error while another lost a peer: one of them went first."""
    complained = {found.rank for session in sessions for found in session.complaints if found.rank}
    lost = any(found.name == "peer_lost" for session in sessions for found in session.complaints)
    return tuple(label for label in ranks if label not in complained) if lost and complained else ()
