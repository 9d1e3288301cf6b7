"""The judgement: what it is, whose fault, on what it rests, and what it is not.

Rules in the order of their strength; the first that applies decides. A dead or stopped rank outranks every stack; a
waiting rank is a victim; a lock's holder is the culprit; where all ranks are alike, the layer is named and no rank;
two ranks have no majority.
"""

from __future__ import annotations

from collections.abc import Callable

from . import rules_stacks, rules_state
from .case import Case
from .evidence import Evidence
from .finding import Finding
from .model import Judgement
from .wording import judgement

RULES: tuple[Callable[[Case], Finding | None], ...] = (
    rules_state.exited,
    rules_state.answering,
    rules_state.stopped,
    rules_state.hidden_failure,
    rules_state.flooding,
    rules_state.resumed,
    rules_state.spinning,
    rules_state.moving,
    rules_state.nothing_asked,
    rules_stacks.locks,
    rules_stacks.causes,
    rules_stacks.witnesses,
    rules_state.without_stacks,
    rules_stacks.roles,
    rules_stacks.outliers,
    rules_stacks.pair,
    rules_stacks.desync,
    rules_stacks.symmetric,
    rules_state.frozen_places,
)
"""In the order of their strength."""


def judge(evidence: Evidence) -> Judgement:
    """Judge a server. Never raises for what the evidence holds or lacks; pure: no I/O."""
    case = Case(evidence)
    for rule in RULES:
        finding = rule(case)
        if finding is not None:
            return judgement(case, finding)
    return judgement(case, Finding("undecided", "nothing in the evidence decides", confidence=0.2))
