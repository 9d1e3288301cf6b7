"""In which phase is a rank, by its own stack? Data: phase_frames.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from ..phases.rank_phase import RankPhase
from ..vocabulary import PHASES, Phase
from .model import Frame
from .signatures import last_name, read_toml

_STARTED = PHASES.index("warmup")


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a rank is. ``over``: that phase has ended, and nothing says which came after it. ``by``: the frame that
    knows better than the log."""

    phase: Phase
    over: bool = False
    by: Frame | None = None


@dataclass(frozen=True, slots=True)
class _Rules:
    draft: re.Pattern[str]
    functions: Mapping[str, tuple[Phase, Phase]]


@lru_cache(maxsize=1)
def _rules() -> _Rules:
    raw = read_toml(resources.files(__package__).joinpath("phase_frames.toml").read_text("utf-8"))
    named = {
        f: (entry["name"], entry.get("draft", entry["name"])) for entry in raw["phase"] for f in entry["functions"]
    }
    return _Rules(re.compile(raw["draft"]), named)


def reached(told: RankPhase, frames: Sequence[Frame]) -> Reached:
    """What the log told of a rank, corrected by its stack (leaf first): not back to a phase that was."""
    if told.phase in PHASES[_STARTED:]:
        return Reached(told.phase)
    found = _by_stack(frames)
    if found is None:
        return Reached(told.phase, over=told.left is not None)
    phase, frame = found
    if phase == told.phase:
        return Reached(phase)
    later = PHASES.index(phase) > PHASES.index(told.phase)
    open_ended = told.left is not None or told.assumed
    if (later or open_ended) and phase not in {name for name, _, _ in told.history}:
        return Reached(phase, by=frame)
    return Reached(told.phase, over=told.left is not None)


def places(told: Mapping[str, RankPhase], stacks: Mapping[str, Sequence[Frame]]) -> dict[str, Reached]:
    """Where each rank is of which the log told a phase, by the log and by its stack."""
    return {label: reached(phase, stacks.get(label, ())) for label, phase in told.items() if phase.phase in PHASES}


def _by_stack(frames: Sequence[Frame]) -> tuple[Phase, Frame] | None:
    rules = _rules()
    for frame in frames:
        if phases := rules.functions.get(last_name(frame.name)):
            drafts = any(rules.draft.search(f"{f.name} {f.file}") for f in frames)
            return phases[drafts], frame
    return None
