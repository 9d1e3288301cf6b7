"""From a finding to the paragraph a maintainer can paste, and to the Judgement."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..vocabulary import Phase
from .advice import advice
from .case import Case
from .evidence import LockFact, Memory
from .finding import Finding
from .mechanism import contradicted, mechanism
from .merge import Member, format_ranks, label_order
from .model import Frame, Gone, Judgement, RankClass
from .phase_frames import Reached
from .proc_facts import exit_words
from .signatures import by_id, last_name

GB = 1e9
_STILL = 2.0
"""Seconds up to which nothing is said of stillness: the watcher's samples are up to a second apart."""

_DRAFT = re.compile(r"(?i)eagle|draft|spec_?dec|speculat|spec_util|mtp|ngram|medusa|verify_tree|spec_worker")
_SPEC_NAMES = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "mtp": "MTP", "ngram": "n-gram speculation"}


def judgement(case: Case, finding: Finding) -> Judgement:
    """Put a finding into words and add what else is known: memory, speculative decoding, what was ruled out."""
    classes = tuple(
        RankClass(c.role, c.group, c.ranks, case.kind(c), c.path, c.signature, c.moving) for c in case.merged.classes
    )
    finding = _settled(case, finding)
    place = case.phase_of(finding.culprits)
    ruled_out, facts = _ruled_out(case, finding), _facts(case, finding)
    return Judgement(
        verdict=finding.verdict,
        phase=place.phase if place else None,
        phase_over=bool(place and place.over),
        culprits=finding.culprits,
        classes=classes,
        missing=case.missing or case.undumped,
        ruled_out=tuple(ruled_out),
        confidence=round(finding.confidence, 2),
        text=_text(case, finding, place),
        facts=tuple(facts),
        cause=_cause(case, finding),
        advice=" ".join(advice(case, finding)),
        known=_reports(finding),
        gone=_gone(case, finding.first),
    )


def _gone(case: Case, first: str) -> tuple[Gone, ...]:
    """Who is not there any more: the first to end, then the others in groups of the same end."""
    found: dict[tuple[str, Phase | None, bool], list[str]] = {}
    order = sorted(case.dead, key=lambda label: (label != first, label_order(label)))
    for label in order:
        phase = case.phases[label].phase if label in case.phases else None
        found.setdefault((exit_words(case.dead[label]), phase, label == first), []).append(label)
    return tuple(Gone(tuple(labels), how, phase, ahead) for (how, phase, ahead), labels in found.items())


def _settled(case: Case, finding: Finding) -> Finding:
    """Less a signature that what the process does speaks against, and no surer of a spin than one can be."""
    members = [case.merged.by_label[label] for label in finding.culprits if label in case.merged.by_label]
    found = [mechanism(member) for member in members]
    if signature := finding.signature:
        there = [m for entry in case.merged.classes if entry.signature == signature.id for m in case.merged.of(entry)]
        if any(contradicted(signature, member) for member in members or there):
            finding = replace(finding, signature=None)
    if finding.verdict == "hang" and found and all(entry and entry.kind == "spin" for entry in found):
        finding = replace(finding, confidence=min(finding.confidence, 0.6))
    return finding


def _cause(case: Case, finding: Finding) -> str:
    """What happened, without a full stop; "" where nothing more than the verdict is known."""
    clauses = [finding.what] if finding.what else []
    if not finding.complete and finding.verdict in ("hang", "slow", "undecided"):
        clauses.extend(_class_clauses(case, finding))
    if finding.undecided:
        clauses.append(finding.undecided)
    return "; ".join(clause.rstrip(". ") for clause in clauses)


def _text(case: Case, finding: Finding, place: Reached | None) -> str:
    evidence = case.evidence
    head: str = finding.verdict
    if place and finding.verdict not in ("ready",):
        head += f" {'past' if place.over else 'in'} {place.phase}"
    progress = None if evidence.flood else evidence.progress  # what moves there is one line
    if finding.verdict == "hang" and progress and (progress.still or 0.0) > _STILL:
        head += f" after {progress.still:.0f} s without progress"
    elif evidence.after is not None and finding.verdict in ("hang", "slow", "undecided"):
        head += f" after {evidence.after:.0f} s"
    said = _cause(case, finding)
    sentences = [f"{head}: {said}." if said else f"{head}."]
    if finding.slow:
        sentences.append(_slow_sentence(finding))
    sentences.extend(advice(case, finding))
    sentences.extend(_known(finding))
    if finding.verdict in ("hang", "slow", "crash", "undecided"):
        sentences.append(memory_sentence(evidence.memory, finding.verdict))
    if finding.verdict == "hang":
        sentences.append(_spec_sentence(case))
    if case.undumped and finding.verdict != "ready":
        sentences.append(f"Not dumped: {format_ranks(case.undumped)}.")
    if evidence.gpu_busy:
        sentences.append(
            f"Busy with no process: {', '.join(evidence.gpu_busy)}; such a GPU must be reset by an operator."
        )
    return " ".join(s for s in sentences if s)


def _class_clauses(case: Case, finding: Finding) -> list[str]:
    """What the ranks do: victims first, culprits last; roles that are no ranks only where they are culprits."""
    ranks = {m.label for m in case.ranks}
    entries = [c for c in case.merged.classes if set(c.ranks) <= ranks or set(c.ranks) & set(finding.culprits)]
    joined: dict[tuple[object, ...], tuple[RankClass, list[Member]]] = {}
    for entry in entries:
        guilty = bool(set(entry.ranks) & set(finding.culprits))
        key = (guilty, entry.kind, entry.signature, entry.path)
        joined.setdefault(key, (entry, []))[1].extend(case.merged.of(entry))
    order = sorted(joined.items(), key=lambda item: (item[0][0], -len(item[1][1])))
    clauses = []
    for _, (entry, members) in order[:5]:
        clauses.append(f"{format_ranks(m.label for m in members)} {doing(case, entry, members, finding.lock)}")
    if len(order) > 5:
        left = sum(len(members) for _, (_, members) in order[5:])
        clauses.append(f"{left} more processes are in {len(order) - 5} other places")
    return clauses


def doing(case: Case, entry: RankClass, members: Sequence[Member], lock: LockFact | None = None) -> str:
    """``wait in a collective (all_reduce at distributed_c10d.py:3252)`` for ranks of one class."""
    many = len(members) > 1
    first = members[0]
    place = first.frames[0] if first.frames else None
    if first.condition == "stopped":
        text = "is stopped (SIGSTOP, state T)"
    elif first.condition == "dead":
        text = "is dead (zombie)"
    else:
        signature = by_id().get(entry.signature or "")
        words = case.wait(first).words
        how = mechanism(first) if not (lock and set(entry.ranks) & set(lock.waiters)) else None
        if signature and contradicted(signature, first):
            signature, place = None, first.conduct.leaf or place
        if how and signature is None:
            place = first.conduct.leaf or place
            text = how.verb + (f" ({_at(place)})" if place else "") + f": {how.seen}"
            return plural(text) if many else text
        if signature:
            text = signature.title
        elif words and case.wait(first).place not in ("cpu", "poll", "futex"):
            text = words
        else:
            text = "" if first.frames else f"has no stack ({first.problem or 'not a Python process'})"
        if lock and set(entry.ranks) & set(lock.waiters):
            if lock.kind == "file" and not (signature and signature.lock):
                text = "polls for the file"
            text += f" {lock.path or ''}".rstrip() + f", which is {holder_words(lock)}"
    if place:
        text = f"{text} ({_at(place)})" if text else f"is in {_at(place)}"
    if (first.cpu or 0) > 0.8 and not first.condition:
        text += ", using a whole core"
    return plural(text) if many else text


def _at(frame: Frame) -> str:
    """``all_reduce at distributed_c10d.py:3252``."""
    line = f":{frame.line}" if frame.line else ""
    return f"{last_name(frame.name)} at {(frame.module or frame.file).rpartition('/')[2]}{line}"


def plural(text: str) -> str:
    """The verb of a title for several ranks: ``waits for`` -> ``wait for``, ``is stuck`` -> ``are stuck``."""
    verb, space, rest = text.partition(" ")
    special = {"is": "are", "has": "have", "copies": "copy", "does": "do"}
    if verb not in special and not verb.endswith("s"):
        return text
    return special.get(verb, verb[:-1]) + space + rest.replace(" its ", " their ", 1)


def holder_words(lock: LockFact) -> str:
    """``held by pid 812 (python train.py)``; ``left behind: its writer (pid 812) is gone``."""
    if lock.holder is None:
        return (
            "stale: it is there and nobody has it open"
            if lock.holder_alive is False
            else "held by nobody that can be seen"
        )
    who = lock.holder_label or f"pid {lock.holder}"
    title = f", {lock.holder_title[:60]}" if lock.holder_title and not lock.holder_label else ""
    if lock.holder_alive is False:
        return f"stale: its writer (pid {lock.holder}) is gone"
    return f"held by {who}{title}"


def _slow_sentence(finding: Finding) -> str:
    if finding.facts:
        return "It is alive: " + "; ".join(claim for claim, _ in finding.facts[:3]) + "."
    return "That is normal work while a compiler has CPU time or bytes are read; nobody watched whether it moves."


def _reports(finding: Finding) -> tuple[str, ...]:
    """Public reports of the same, as addresses."""
    if finding.signature is None or finding.verdict not in ("hang", "slow"):
        return ()
    return tuple(url for url in finding.signature.sources if "#" in _short(url))


def _known(finding: Finding) -> list[str]:
    signature, reports = finding.signature, _reports(finding)
    if signature is None or not reports:
        return []
    return [f"Known: {_short(reports[0])}{f', fixed in {signature.fixed_in}' if signature.fixed_in else ''}."]


def _short(url: str) -> str:
    """``https://github.com/sgl-project/sglang/issues/11275`` -> ``sgl-project/sglang#11275``."""
    return re.sub(r"^https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull|discussions)/(\d+)$", r"\1#\2", url)


def memory_sentence(memory: Memory | None, verdict: str) -> str:
    """``Not out of memory (33 of 449 GB resident, no oom_kill; 425 GB are address space).``"""
    if memory is None or not memory.resident:
        return ""
    limit = f" of {_gb(memory.limit)}" if memory.limit else ""
    space = f"; {_gb(memory.virtual)} GB are address space" if memory.virtual > 4 * memory.resident else ""
    if memory.oom_kills:
        return f"The kernel killed {memory.oom_kills} process(es) for memory since the launch."
    if memory.short or (memory.pressure or 0) > 20:
        return f"Memory is short ({_gb(memory.resident)}{limit} GB resident, {_gb(memory.swapped)} GB swapped)."
    kills = ", no oom_kill" if memory.oom_kills == 0 else ""
    return f"Not out of memory ({_gb(memory.resident)}{limit} GB resident{kills}{space})."


def _gb(size: int) -> str:
    """Gigabytes, with a decimal below ten."""
    return f"{size / GB:.1f}" if 0 < size < 10 * GB else f"{size / GB:.0f}"


def _spec(case: Case) -> str | None:
    """Name of the speculative decoding in use, None for the base server."""
    name = case.evidence.axes.get("spec_decode", "base")
    return None if name in ("base", "off", "none", "") else _SPEC_NAMES.get(name, name)


def draft_frames(members: Iterable[Member]) -> list[tuple[str, str]]:
    """(label, frame) of frames that belong to a drafter or its verification."""
    return [(m.label, f.name) for m in members for f in m.frames if _DRAFT.search(f"{f.name} {f.file}")]


def _spec_sentence(case: Case) -> str:
    name = _spec(case)
    stacks = [m for m in case.ranks if m.has_stack]
    if name is None or not stacks or len(stacks) < len(case.ranks):
        return ""
    found = draft_frames(stacks)
    if not found:
        return f"{name} is not involved: no draft frame in any stack."
    label, frame = found[0]
    return f"{name} is involved: {frame} is in the stack of {label}."


def _ruled_out(case: Case, finding: Finding) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    memory = case.evidence.memory
    if memory and memory.resident and finding.verdict != "oom" and not memory.oom_kills and not memory.short:
        limit = f" of {_gb(memory.limit)}" if memory.limit else ""
        found.append(
            (
                "out of memory",
                f"{_gb(memory.resident)}{limit} GB resident" + (", no oom_kill" if memory.oom_kills == 0 else ""),
            )
        )
    name = _spec(case)
    stacks = [m for m in case.ranks if m.has_stack]
    if name and stacks and len(stacks) == len(case.ranks) and not draft_frames(stacks):
        found.append((name, "no draft frame in any stack"))
    progress = case.evidence.progress
    if finding.verdict == "hang":
        if progress and (progress.still or 0.0) > _STILL and not case.evidence.flood:
            found.append(("slow", f"nothing moved for {progress.still:.0f} s"))
        elif len(case.evidence.rounds) > 1 and not case.compilers:
            found.append(("a running build", "no compiler below the server used CPU between the rounds"))
        everyone = len(case.ranks) >= max(len(case.evidence.expected), case.evidence.tp or 0)
        if everyone and not case.dead and case.merged.members and not case.evidence.foreign:
            found.append(("a dead rank", f"all {len(case.ranks)} ranks are alive"))
    if finding.verdict == "slow" and case.compilers:
        found.append(("hang", f"{case.compilers[0]} uses CPU"))
    return found


def _facts(case: Case, finding: Finding) -> list[tuple[str, str]]:
    found = list(finding.facts)
    for entry in case.merged.classes:
        members = case.merged.of(entry)
        if entry.role in ("helper", "other") and not set(entry.ranks) & set(finding.culprits):
            continue
        found.append((f"{format_ranks(entry.ranks)} {doing(case, entry, members)}", _dumper(members)))
    for label, place in case.phases.items():
        if place.by is not None and label in finding.culprits:
            found.append((f"{label} is in {place.phase}: it is inside {place.by.name}", "stack"))
    progress = case.evidence.progress
    if progress and progress.still is not None and progress.still > _STILL:
        found.append((f"nothing moved for {progress.still:.0f} s; last: {progress.last or 'unknown'}", "watcher"))
    found.extend(
        (f"{claim.claim}", claim.source) for claim in case.witnesses if (claim.claim, claim.source) not in found
    )
    if case.evidence.answers is False:
        found.append((f"a completion sent just now got no answer{_FRONT.get(case.evidence.front or '', '')}", "HTTP"))
    found.extend(
        (f"{fact.claim}", fact.witness) for fact in case.evidence.log[:5] if (fact.claim, fact.witness) not in found
    )
    return found[:40]


_FRONT = {
    "healthy": ", while GET /health answered 200",
    "responds": ", while the front end answered other requests",
    "silent": ", nor did GET /health, though the port accepts connections",
    "closed": ": its port is closed",
}


def _dumper(members: Sequence[Member]) -> str:
    return ", ".join(sorted({m.dumper for m in members}))
