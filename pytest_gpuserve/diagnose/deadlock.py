"""Deadlocks: who waits for a lock holds up its holder, who waits for them, round in a circle. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .case import Case
from .evidence import LockFact
from .finding import Finding
from .merge import format_ranks
from .model import RankClass
from .signatures import Signature


def deadlock(case: Case, signature: Signature | None) -> Finding | None:
    """A circle of locks, or a lock whose holder waits in a collective for those that wait for it; else None."""
    held = [lock for lock in case.evidence.locks if lock.holder_alive and lock.holder_label]
    return _circle(held, signature) or _collective(case, held, signature)


def _circle(held: Sequence[LockFact], signature: Signature | None) -> Finding | None:
    """Each waits for a lock that the next one holds, and the last one for the first: all are to blame, or none."""
    waits_for = {waiter: lock for lock in held for waiter in lock.waiters}
    for first in waits_for:
        path = [first]
        while (lock := waits_for.get(path[-1])) and lock.holder_label and lock.holder_label not in path:
            path.append(lock.holder_label)
        lock = waits_for.get(path[-1])
        if lock is None or lock.holder_label != first or len(path) < 2:
            continue
        links = [
            f"{label} waits for {_name(waits_for[label])}, which {waits_for[label].holder_label} holds"
            for label in path
        ]
        return Finding(
            "hang",
            f"deadlock: {', and '.join(links)}",
            culprits=tuple(sorted(path)),
            advice="Take the locks in the same order everywhere.",
            facts=tuple(
                (f"{_name(waits_for[label])} is held by {waits_for[label].holder_label}", _WITNESS) for label in path
            ),
            signature=signature,
            lock=waits_for[first],
            confidence=0.95,
        )
    return None


def _collective(case: Case, held: Sequence[LockFact], signature: Signature | None) -> Finding | None:
    for lock in held:
        holder = str(lock.holder_label)
        own, group = _class_of(case, holder)
        if own is None or case.kind(own) != "waits":
            continue
        peers = {label for entry in group if entry is not own for label in entry.ranks}
        victims = [label for label in lock.waiters if label in peers]
        if not victims:
            continue
        them = format_ranks(victims)
        return Finding(
            "hang",
            f"deadlock: {them} {'wait' if len(victims) > 1 else 'waits'} for {_name(lock)}, which {holder} holds, and "
            f"{holder} waits in a collective for {them}",
            culprits=(holder,),
            advice="Give the lock back before the collective, or let every rank take it before.",
            facts=((f"{_name(lock)} is held by {holder}", _WITNESS),),
            signature=signature,
            lock=lock,
            confidence=0.95,
        )
    return None


_WITNESS = "/proc/locks and the file"


def _class_of(case: Case, label: str) -> tuple[RankClass | None, Sequence[RankClass]]:
    """The class of a rank, and all classes of its role and parallel group."""
    for group in case.groups:
        for entry in group:
            if label in entry.ranks:
                return entry, group
    return None, ()


def _name(lock: LockFact) -> str:
    return f"the lock {lock.path}" if lock.path else "a lock"
