"""What to do next. The signature's advice where there is one; else what the place, the log or the machine suggest."""

from __future__ import annotations

from .case import BUSY, Case
from .finding import Finding
from .merge import Member, format_ranks

_BY_PLACE = {
    "pipe": "Find out who should be at the other end of that pipe: it is dead, or waits itself.",
    "socket": "Find out who should send on that socket: it is dead, or waits itself.",
    "child": "Look at the child that it waits for.",
    "disk": "Look at the storage: the mount, its server, dmesg.",
    "device": "Look at the driver: dmesg for Xid or NVRM lines, nvidia-smi.",
    "sleep": "Find out what it waits for: a device synchronisation and a poll loop both sleep like this.",
}


def advice(case: Case, finding: Finding) -> list[str]:
    """Whole sentences; none where nothing is known."""
    lock = finding.lock
    if lock and lock.holder_alive is False and lock.path:
        return ["Remove the lock."]
    if finding.advice:
        return [finding.advice]
    if finding.signature:
        everyone = finding.layer != "desync" and not finding.culprits
        if text := (everyone and finding.signature.together) or finding.signature.advice:
            return [text]
    if finding.verdict in ("ready", "slow", "degraded"):
        return []
    if lock and lock.holder_label in case.merged.by_label:
        holder = case.merged.by_label[lock.holder_label]
        waits = " waits in a collective for the rank that wants the lock, and" if holder.kind == "waits" else ""
        return [f"{lock.holder_label}{waits} must let go of the lock first."]
    if finding.verdict != "hang":
        return [fact.claim[:300].rstrip(". ") + "." for fact in case.evidence.log if fact.hint][:1]
    members = [case.merged.by_label[label] for label in finding.culprits if label in case.merged.by_label]
    return [_at(case, members)] if members else _nobody(case)


def _at(case: Case, members: list[Member]) -> str:
    who = format_ranks(m.label for m in members)
    first = members[0]
    place = case.wait(first).place
    if (first.cpu or 0) > BUSY or place == "cpu":
        return f"{who} burns CPU outside Python: its C frames say where (stacks/*.native.json, or perf top -p PID)."
    if first.frames and first.frames[0].native:
        return f"Only {who} is in this place: look at what it calls there."
    return _BY_PLACE.get(place) or f"Only {who} is in this place: its C frames say what it waits for."


def _nobody(case: Case) -> list[str]:
    """Nobody stands out."""
    if case.phase in ("ready", "serving"):
        return ["Follow one request through the processes: front end, scheduler, ranks, detokenizer."]
    return ["Look at what the ranks share: the driver, the network, a barrier that somebody outside never reached."]
