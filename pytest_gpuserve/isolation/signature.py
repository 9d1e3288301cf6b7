"""When are two failures the same one? Verdict, phase and root class. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..shape import Maybe, checked
from ..vocabulary import PHASES
from .search import Outcome

PASSING = ("ready", "pass")
ENVIRONMENT = ("infra", "port", "leak", "undecided")
"""Verdicts about the machine or an earlier server; they say nothing of what was launched."""

_CLASS = {"role": str | None, "kind": str | None, "path": Maybe([str]), "signature": str | None}
SHAPE = {"verdict": str, "phase": str | None, "roots": Maybe([str]), "classes": Maybe([_CLASS])}

_FAMILY = {"stalled": "hang", "slow": "hang"}
_RANKS = ("scheduler", "worker", "engine_core")


@dataclass(frozen=True, slots=True)
class Signature:
    """What was seen of one launch.

    Attributes:
        verdict: of :data:`pytest_gpuserve.vocabulary.Verdict`, ``pass``, ``test`` (a test failed and no server was to
            blame) or ``probe`` (the user's own check failed).
        phase: where; None where unknown.
        roots: names of the root cause: functions in which the odd ranks are, rules of log triage, an exception.
    """

    verdict: str
    phase: str | None = None
    roots: frozenset[str] = frozenset()

    @property
    def passed(self) -> bool:
        return self.verdict in PASSING

    def same(self, other: Signature) -> bool:
        """The same failure, as far as both are known."""
        if _family(self.verdict) != _family(other.verdict):
            return False
        if self.phase and other.phase and self.phase != other.phase:
            return False
        return not (self.roots and other.roots) or bool(self.roots & other.roots)

    def __str__(self) -> str:
        where = f" in {self.phase}" if self.phase else ""
        return f"{self.verdict}{where}{f' ({chr(44).join(sorted(self.roots)[:2])})' if self.roots else ''}"

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "phase": self.phase, "roots": sorted(self.roots)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Signature:
        """From :meth:`to_json`, or from an ``incident.json`` (schema ``gpuserve.incident/1``).

        Raises:
            ValueError: it is neither.
        """
        checked(raw, SHAPE)
        roots = frozenset(raw.get("roots") or ())
        if (classes := raw.get("classes")) is not None:  # after a crash they are those that were left, by chance
            roots = incident_roots(classes) if _family(raw["verdict"]) == "hang" else frozenset()
        return cls(raw["verdict"], raw.get("phase"), roots)


def incident_roots(classes: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Of an incident's classes of ranks: what names the odd ones.

    Where a rank is the cause, or is somewhere else while others wait, that is the root; else where all of them are.
    """
    ranks = [c for c in classes if c.get("role") in _RANKS]
    for kinds in (("cause",), ("other",), ("waits",), ("idle",)):
        found = [c for c in ranks if c.get("kind") in kinds]
        if found:
            return frozenset(_root(c) for c in found)
    return frozenset()


def outcome(seen: Signature, target: Signature | None) -> Outcome:
    """What one launch says of the failure that is sought; None: of any failure.

    Another failure in a later phase got past the place of this one; in an earlier one, or there, it hides it.
    """
    if seen.passed or (seen.verdict == "degraded" and (target is None or target.verdict != "degraded")):
        return "pass"
    if seen.verdict in ENVIRONMENT:
        return "unresolved"
    if target is None or seen.same(target):
        return "fail"
    if seen.phase in PHASES and target.phase in PHASES and PHASES.index(seen.phase) > PHASES.index(target.phase):
        return "pass"
    return "unresolved"


def _family(verdict: str) -> str:
    return _FAMILY.get(verdict, verdict)


def _root(entry: Mapping[str, Any]) -> str:
    path = entry.get("path") or ["?"]
    return str(entry.get("signature") or path[-1])
