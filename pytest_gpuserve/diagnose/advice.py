"""What to do next. The signature's advice where there is one; else what the mechanism, the log, the machine suggest."""

from __future__ import annotations

from .case import Case
from .finding import Finding
from .mechanism import mechanism
from .merge import Member, format_ranks

_BY_PLACE = {
    "pipe": "Find out who should be at the other end of that pipe: it is dead, or waits itself.",
    "socket": "Find out who should send on that socket: it is dead, or waits itself.",
    "child": "Look at the child that it waits for.",
    "disk": "Look at the storage: the mount, its server, dmesg.",
    "device": "Look at the driver: dmesg for Xid or NVRM lines, nvidia-smi.",
    "sleep": "Find out what it waits for: a device synchronisation and a poll loop both sleep like this.",
}

MAY_BE_SLOW = "It uses CPU all the time, so it may be slow and not hung: its C frames, or more time, would tell."


def advice(case: Case, finding: Finding) -> list[str]:
    """Whole sentences; none where nothing is known."""
    lock = finding.lock
    if lock and lock.holder_alive is False and lock.path:
        if lock.kind == "file" and not (finding.signature and finding.signature.lock):
            return [f"If {lock.path} is a lock, whoever made it is gone: remove it."]
        return ["Remove the lock."]
    if finding.advice:
        return [finding.advice]
    members = [case.merged.by_label[label] for label in finding.culprits if label in case.merged.by_label]
    if finding.signature:
        seen = not case.unnamed and (
            len(case.ranks) > 1 or not case.evidence.foreign
        )  # a paste may show one rank of many
        everyone = seen and finding.layer != "desync" and not finding.culprits
        if text := (everyone and finding.signature.together) or finding.signature.advice:
            return [text, *_caveat(finding, members)]
    if finding.verdict in ("hang", "slow", "undecided") and members and (found := mechanism(members[0])):
        return [found.advice.format(who=format_ranks(m.label for m in members)), *_caveat(finding, members)]
    if finding.verdict in ("ready", "slow", "degraded"):
        return []
    if lock and lock.holder_label in case.merged.by_label:
        holder = case.merged.by_label[lock.holder_label]
        waits = " waits in a collective for the rank that wants the lock, and" if holder.kind == "waits" else ""
        return [f"{lock.holder_label}{waits} must let go of the lock first."]
    if finding.verdict != "hang":
        return [fact.claim[:300].rstrip(". ") + "." for fact in case.evidence.log if fact.hint][:1]
    return [_at(case, members)] if members else _nobody(case)


def _caveat(finding: Finding, members: list[Member]) -> list[str]:
    found = [mechanism(m) for m in members]
    spin = bool(found) and all(f is not None and f.kind == "spin" for f in found)
    return [MAY_BE_SLOW] if spin and finding.verdict == "hang" else []


def _at(case: Case, members: list[Member]) -> str:
    who = format_ranks(m.label for m in members)
    first = members[0]
    if first.frames and first.frames[0].native:
        return f"Only {who} is in this place: look at what it calls there."
    return _BY_PLACE.get(case.wait(first).place) or f"Only {who} is in this place: its C frames say what it waits for."


def _nobody(case: Case) -> list[str]:
    """Nobody stands out."""
    if case.phase in ("ready", "serving"):
        return ["Follow one request through the processes: front end, scheduler, ranks, detokenizer."]
    return ["Look at what the ranks share: the driver, the network, a barrier that somebody outside never reached."]
