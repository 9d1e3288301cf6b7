"""What a rule of the verdict found, before it is put into words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..vocabulary import Verdict
from .evidence import LockFact
from .signatures import Signature


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule's answer.

    Attributes:
        verdict: the word.
        what: what happened, a clause without a full stop; "" where the classes say it.
        culprits: labels of ranks or roles; empty where none is to blame or none can be named.
        advice: what to do, whole sentences; the signature's, where empty.
        facts: (claim, witness).
        undecided: why no rank is named, a clause.
        layer: what is to blame instead of a rank.
        lock: the lock it is about.
        slow: describe it as work that goes on.
        first: who ended before all others of the server.
        complete: ``what`` says everything, the classes need not be told.
    """

    verdict: Verdict
    what: str
    culprits: tuple[str, ...] = ()
    advice: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    confidence: float = 0.5
    signature: Signature | None = None
    undecided: str = ""
    layer: str = ""
    lock: LockFact | None = None
    slow: bool = False
    first: str = ""
    complete: bool = False

    def blaming(self, culprits: tuple[str, ...]) -> Finding:
        """The same, with these culprits."""
        return replace(self, culprits=culprits)

    def noting(self, *facts: tuple[str, str]) -> Finding:
        """The same, with more facts."""
        return replace(self, facts=(*self.facts, *facts))
