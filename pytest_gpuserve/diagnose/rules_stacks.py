"""Rules that compare stacks: locks, known causes, odd ones out, desync, symmetry."""

from __future__ import annotations

from collections.abc import Sequence

from .case import BUSY, Case, same_primitive
from .deadlock import deadlock
from .finding import Finding
from .mechanism import mechanism
from .merge import Member, format_ranks, label_order
from .model import RankClass
from .signatures import Signature, by_id
from .wording import holder_words


def locks(case: Case) -> Finding | None:
    """Who waits for a lock is a victim of its holder; a lock without a live holder is itself to blame."""
    waiters = [m for group in case.groups for c in group if _is_lock(case, c) for m in case.merged.of(c)]
    if not waiters:
        return None
    labels = tuple(m.label for m in waiters)
    lock = case.lock_of(labels)
    signature = next((m.signature for m in waiters if m.signature and m.signature.lock), None)
    whole = len(waiters) == len(case.ranks) and len(case.ranks) > 1
    if circle := deadlock(case, signature):
        return circle
    if lock is None:
        if signature and signature.progressive and not case.suspected:
            return _may_progress(case, [c for group in case.groups for c in group if _is_lock(case, c)], signature)
        culprits = () if whole else labels
        return Finding(
            "hang", "", culprits=culprits, signature=signature, confidence=0.7 if culprits else 0.6, layer="lock"
        )
    fact = (f"the lock {lock.path or '(path unknown)'} is {holder_words(lock)}", "/proc/locks and the file")
    if lock.holder_label and lock.holder_alive and lock.holder_label not in labels:
        holder = case.merged.by_label.get(lock.holder_label)
        building = holder is not None and holder.signature is not None and holder.signature.progressive
        if building and not case.suspected and holder is not None:
            return _may_progress(case, list(case.merged.classes), holder.signature)
        return Finding(
            "hang", "", culprits=(lock.holder_label,), signature=signature, facts=(fact,), lock=lock, confidence=0.9
        )
    return Finding(
        "hang",
        "",
        culprits=() if whole else labels,
        signature=signature,
        facts=(fact,),
        lock=lock,
        confidence=0.95 if lock.holder_alive is False else 0.85,
        layer="lock",
    )


def _is_lock(case: Case, entry: RankClass) -> bool:
    signature = by_id().get(entry.signature or "")
    polled = {label for lock in case.evidence.locks if lock.path for label in lock.waiters}
    if entry.kind not in ("waits", "idle") and set(entry.ranks) <= polled:
        rest = [c for group in case.groups for c in group if not set(c.ranks) <= polled]
        return all(c.kind in ("waits", "idle") for c in rest)  # who is elsewhere may have made the file, and work
    return (signature is not None and signature.lock) or all(
        case.wait(m).place == "lock" and m.kind in ("other", "cause") for m in case.merged.of(entry)
    )


def _may_progress(case: Case, entries: Sequence[RankClass], signature: Signature | None) -> Finding:
    """Normal slow work, seen once: nobody watched whether it moves."""
    advice = signature.advice if signature else ""
    return Finding("slow", "", signature=signature, advice=advice, confidence=0.55, slow=True, layer="jit")


def causes(case: Case) -> Finding | None:
    """Ranks in a place known to hold others up, while others wait."""
    entries = [c for group in case.groups for c in group if case.kind(c) == "cause"]
    if not entries:
        return None
    labels = tuple(label for entry in entries for label in entry.ranks)
    signatures = [s for s in (by_id().get(c.signature or "") for c in entries) if s]
    signature = signatures[0] if signatures else None
    if signatures and all(s.progressive for s in signatures) and not case.suspected:
        return _may_progress(case, entries, signature)
    if len(labels) == len(case.ranks) and len(labels) > 1:
        return Finding("hang", "", signature=signature, confidence=0.7, layer=signature.layer if signature else "")
    agree = _accused(case)
    facts = tuple((w.claim, w.source) for w in case.witnesses if w.ranks)
    weak = bool(signatures) and all(s.weak for s in signatures)
    if agree and not set(agree) & set(labels):
        return Finding("hang", "", culprits=tuple(agree), facts=facts, confidence=0.6)
    confidence = 0.95 if agree else 0.7 if weak else 0.9
    return Finding("hang", "", culprits=labels, signature=signature, facts=facts, confidence=confidence)


def _accused(case: Case) -> list[str]:
    """Ranks that a second witness names, those that all of them name first."""
    named = [set(w.ranks) for w in case.witnesses if w.ranks]
    if not named:
        return []
    common = set.intersection(*named)
    return sorted(common or set.union(*named), key=label_order)


def witnesses(case: Case) -> Finding | None:
    """NCCL's RAS, the Flight Recorder or the GPUs name a rank, and no stack speaks against it."""
    accused = _accused(case)
    ranks = {m.label for m in case.ranks} | set(case.evidence.expected)
    if not accused or len(accused) >= max(2, len(ranks)):
        return None
    facts = tuple((w.claim, w.source) for w in case.witnesses)
    odd = odd_ones(case)
    agree = bool(odd) and set(odd) == set(accused)
    return Finding(
        "hang", "", culprits=tuple(accused), facts=facts, confidence=0.95 if agree else 0.85 if not odd else 0.7
    )


def odd_ones(case: Case) -> tuple[str, ...]:
    """Minority ranks outside any wait, in groups of three or more with a clear majority."""
    odd: list[str] = []
    for group in case.groups:
        total = sum(len(c.ranks) for c in group)
        largest = max(group, key=lambda c: len(c.ranks))
        rest = [c for c in group if c is not largest]
        if total < 3 or len(largest.ranks) * 2 <= total:
            elsewhere = [c for c in group if case.kind(c) == "other"]
            waiting = [c for c in group if case.kind(c) == "waits"]
            if total >= 3 and waiting and len(elsewhere) == 1 and len(elsewhere) + len(waiting) == len(group):
                odd.extend(elsewhere[0].ranks)
            continue
        if case.kind(largest) == "other" and any(case.kind(c) == "waits" for c in rest):
            continue
        for entry in rest:
            if case.kind(entry) == "other" and not same_primitive(case.merged.of(entry), case.merged.of(largest)):
                odd.extend(entry.ranks)
    return tuple(odd)


def roles(case: Case) -> Finding | None:
    """The ranks wait for orders: look at who gives them, unless it waits for messages itself."""
    entries = [c for group in case.groups for c in group]
    if not entries or not all(c.kind == "idle" for c in entries):
        return None
    order = ("engine_core", "detokenizer", "api")
    suspects = [m for m in case.others if m.role in order and m.has_stack and _holds_up(case, m)]
    if not suspects:
        return _silent(case)
    first = min(suspects, key=lambda m: order.index(m.role))
    busy = f", at {first.cpu:.1f} cores" if (first.cpu or 0) > BUSY else ""
    words = case.wait(first).words
    return Finding(
        "hang",
        f"the ranks are idle; {first.label} does not give them work: it is in {first.leaf}{busy}"
        + (f" and {words}" if words and case.wait(first).local else ""),
        culprits=(first.label,),
        signature=first.signature,
        confidence=0.8,
        complete=True,
    )


def _silent(case: Case) -> Finding | None:
    """The ranks wait for work, and whoever owns the port answers nothing, not even a page that needs no engine."""
    if case.evidence.front != "silent":
        return None
    front = tuple(m.label for m in case.others if m.role == "api")
    who = ", ".join(front) or "the front end"
    return Finding(
        "hang",
        f"the port is open and accepts connections, but nothing is answered there, not even GET /health: {who} is "
        "stuck while the ranks wait for work",
        culprits=front if len(front) == 1 else (),
        advice="Look at the threads of the front end: its event loop is blocked, or it no longer reads its sockets.",
        confidence=0.8,
        complete=True,
    )


def _holds_up(case: Case, member: Member) -> bool:
    """It works, or waits for something else than messages. Without facts of the kernel, its stack has to do."""
    if member.kind in ("idle", "waits"):
        return False
    wait = case.wait(member)
    if member.kind == "cause" or wait.local or (member.cpu or 0) > BUSY:
        return True
    return not wait.place and member.role == "engine_core"


def outliers(case: Case) -> Finding | None:
    odd = odd_ones(case)
    if not odd:
        return None
    once = case.evidence.foreign and not case.suspected and len(case.evidence.rounds) < 2
    if once and not any(case.kind(c) in ("waits", "idle") for group in case.groups for c in group):
        return None  # ranks at work are here and there: nobody waits for the one that is elsewhere
    confidence = 0.85 if case.suspected else 0.6
    return Finding("hang", "", culprits=odd, confidence=confidence)


def pair(case: Case) -> Finding | None:
    """Two ranks: no majority. Only a rank that certainly waits for no peer, beside one that does, is named."""
    pairs = [group for group in case.groups if len(group) == 2 and sum(len(c.ranks) for c in group) == 2]
    for first, second in pairs:
        kinds = {case.kind(first), case.kind(second)}
        if kinds <= {"waits", "idle"} or _alike(case, first, second):
            continue
        local = [
            c for c in (first, second) if all(case.wait(m).local for m in case.merged.of(c)) and case.kind(c) == "other"
        ]
        if len(local) == 1:
            member = case.merged.of(local[0])[0]
            words = case.wait(member).words
            return Finding(
                "hang",
                "",
                culprits=local[0].ranks,
                confidence=0.75,
                facts=((f"{member.label} {words}", "/proc/PID/wchan"),),
            )
        burning = [
            m.label for c in (first, second) for m in case.merged.of(c) if (how := mechanism(m)) and how.kind == "spin"
        ]
        slow = f" {format_ranks(burning)} may be slow and not hung: CPU is used there all the time." if burning else ""
        return Finding(
            "hang",
            "",
            confidence=0.5,
            undecided="two ranks have no majority and no second witness decides: whose fault it is stays undecided",
            advice="NCCL's RAS service, the Flight Recorder or GPU utilisation would decide." + slow,
        )
    return None


def _alike(case: Case, first: RankClass, second: RankClass) -> bool:
    return same_primitive(case.merged.of(first), case.merged.of(second))


def desync(case: Case) -> Finding | None:
    """Every rank waits, but not in the same place: the collectives do not match."""
    for group in case.groups:
        if len(group) < 2 or case.unnamed:
            continue
        kinds = [case.kind(c) for c in group]
        waiting = all(kind in ("waits", "idle") for kind in kinds) and "waits" in kinds
        largest = max(group, key=lambda c: len(c.ranks))
        moved_on = case.kind(largest) == "other" and any(kind == "waits" for kind in kinds)
        alike = all(_alike(case, largest, c) for c in group if c is not largest)
        if waiting or moved_on or alike:
            return Finding(
                "hang",
                "",
                confidence=0.7,
                layer="desync",
                undecided="the ranks' collectives do not match (desync): every rank waits, in different places, and a "
                "lone rank may be the victim of those that moved on",
                advice="Compare the order and count of collectives on the ranks (Flight Recorder); look for a branch "
                "that only some ranks take.",
            )
    return None


def symmetric(case: Case) -> Finding | None:
    """All ranks are in the same place: no rank is to blame, a layer is."""
    entries = [c for group in case.groups for c in group]
    if not entries:
        return None
    per_group = [len(group) for group in case.groups]
    if any(count > 1 for count in per_group):
        return None
    kind = case.kind(entries[0])
    signature = by_id().get(entries[0].signature or "")
    layer, words, facts = _layer(case, entries, signature)
    advice = ""
    if layer == "ipc" and kind == "idle" and not _asked(case):  # then no message is lost, whatever idles so
        layer, signature, advice = "", None, "The stacks of the front end say what it waits for."
        words = "look at the front end: the ranks wait for work, and no request of ours is known to be on its way"
    if len(case.ranks) == 1 and kind == "other" and not case.spinning and not case.unnamed:
        if not case.suspected and case.evidence.answers is None:
            return None
        return Finding("hang", "", culprits=entries[0].ranks, confidence=0.6, layer=layer, facts=facts)
    if not case.suspected and case.evidence.answers is None and kind != "waits":
        return None
    alone = len(case.ranks) == 1
    undecided = "" if alone else f"no rank stands out, so {words}"
    if case.unnamed:  # whoever has no name yet may be elsewhere
        words, undecided = "", f"this is not every rank: {case.unnamed_words}"
        layer, facts = (layer, facts) if layer == "gpu" else ("", ())
    if alone and case.evidence.foreign and layer in ("nccl", "network", "rendezvous"):
        words, undecided = "", "what its peers do is not in this dump"
    return Finding(
        "hang",
        words if alone else "",
        signature=signature,
        advice=advice,
        layer=layer,
        facts=facts,
        confidence=0.75 if case.suspected else 0.6,
        undecided=undecided,
    )


_LOST = {
    "healthy": ": GET /health answers 200 while tokens stand still",
    "responds": ": the front end answers other requests while tokens stand still",
}


def _asked(case: Case) -> bool:
    """A request of ours is in flight; one that we sent to a server that was never ready proves nothing."""
    evidence = case.evidence
    return bool(evidence.requests or evidence.reason == "request_timeout") or (
        evidence.answers is False and evidence.ready is not False
    )


def _layer(
    case: Case, entries: Sequence[RankClass], signature: Signature | None
) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    if case.spinning:
        return "gpu", f"look at the GPU: {case.spinning}", ((case.spinning, "NVML"),)
    if kernel := next((w for w in case.witnesses if w.layer == "gpu" and not w.ranks), None):
        return "gpu", f"look at the GPU: {kernel.claim}", ((kernel.claim, kernel.source),)
    layer = signature.layer if signature else ""
    if all(c.kind == "idle" for c in entries):
        lost = "look at the messages between the processes: a request or an answer was lost"
        return "ipc", lost + _LOST.get(case.evidence.front or "", ""), ()
    words = {
        "gpu": "look at the GPU: a kernel or a collective on it never ends",
        "nccl": "look at NCCL and the links between the GPUs: every rank has entered the collective and none leaves it",
        "network": "look at the network between the ranks",
        "rendezvous": "look at the rendezvous: a rank that is not here, or an address that nobody reaches",
        "ipc": "look at the messages between the processes: one was lost",
        "lock": "look at the lock: nobody gives it back",
        "jit": "look at the build: it does not end",
        "storage": "look at the storage: nothing is read any more",
        "python": "look at the Python side: threads wait for each other",
    }
    if layer in words:
        return layer, words[layer], ()
    places = {case.wait(m).words for c in entries for m in case.merged.of(c)} - {""}
    if len(places) == 1:
        where = places.pop()
        return "peers", f"look at what they share: each one {where}", ((f"every rank {where}", "/proc/PID/wchan"),)
    return "", "look at what they share (GPU, NCCL, network, a lost message)", ()
