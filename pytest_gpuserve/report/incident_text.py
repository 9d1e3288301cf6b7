"""What a person reads of an incident: a text for a terminal, the blocks of reports, stacks.txt; all escaped."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ..diagnose.crowd import crowded, unread
from ..diagnose.evidence import NO_PROGRESS, Evidence
from ..diagnose.merge import Merged, format_ranks
from ..diagnose.model import Judgement, ProcessDump, ThreadStack
from ..diagnose.phase_frames import Reached, places
from ..diagnose.stacks import refused
from ..text import escape, one_line
from .blame import Decision, fate
from .gather import Scene

_WIDTH = 160


@dataclass(frozen=True)
class Words:
    """Everything the texts are made of. ``redact`` is applied to foreign text before it is escaped."""

    scene: Scene
    evidence: Evidence
    merged: Merged
    judgement: Judgement
    decision: Decision
    owner: ProcessDump | None
    probe: str
    redact: Callable[[str], str]
    problems: Sequence[str] = ()

    def clean(self, text: str, width: int | None = None) -> str:
        return escape(self.redact(text), width)

    def line(self, text: str, width: int | None = _WIDTH) -> str:
        return one_line(self.redact(text), width)


def summary(words: Words, where: str) -> str:
    """The text of the failing test's report: at most 60 lines for any number of ranks."""
    scene, judgement = words.scene, words.judgement
    parts = [words.clean(judgement.text)]
    healthy = not words.decision.kill and bool(scene.answers)
    late = scene.reason in (*NO_PROGRESS, "session_deadline")
    if healthy and late:  # the server's stacks are of no interest here, the test's own are
        parts.append(f"the server answers; the test is stuck in its own code{_owner_place(words)}.")
        parts += takewhile(lambda line: "/_pytest/" not in line, _owner_lines(words)[:20])
    else:
        parts += _phase_lines(words)
        parts += _stack_lines(words, 24)
        parts += _log_lines(words, 12)
        parts += _machine_lines(words)
    parts += [words.line(note, None) for note in _notes(words)]
    parts.append(f"{fate(words.decision.kill, scene.reason)}: {words.line(words.decision.why)}")
    parts.append(f"dumps: {words.line(where, None)}")
    return "\n".join(parts)


def sections(words: Words) -> dict[str, list[str]]:
    """The blocks of lines that reports show, by title; redacted and escaped, empty ones left out."""
    found = {
        "Phases": _phase_lines(words),
        "Stacks": _stack_lines(words, 60) if words.merged.members else [],
        "Last lines of the log": _log_lines(words, 40)[1:],  # less its own title
        "Machine": _machine_lines(words),
        "The test's process": _owner_lines(words),
        "Notes": [words.line(note, None) for note in _notes(words)],
    }
    return {title: lines for title, lines in found.items() if lines}


def stacks_text(merged: Merged | None, rounds: Sequence[Sequence[ProcessDump]], owner: ProcessDump | None) -> str:
    """stacks.txt: the merged stacks, then one block a process of the last round, in py-spy's form (raw: not redacted).

    ``gpuserve explain`` reads it back.
    """
    parts = [escape(merged.text())] if merged else []
    last = rounds[-1] if rounds else []
    parts += [_block(dump) for dump in (*last, *((owner,) if owner else ())) if not crowded(dump)]
    parts += [f"# {note}" for note in (unread(last),) if note]
    return "\n\n".join(parts) + "\n"


def _block(dump: ProcessDump) -> str:
    title = one_line(dump.title) or "?"
    lines = [f"# {dump.label}: state {dump.state}, {dump.dumper}", f"Process {dump.process.pid}: {title}"]
    if dump.problem:
        lines.append(f"# {one_line(dump.problem)}")
    for thread in sorted(dump.threads, key=lambda t: not t.main):
        lines += ["", *_thread(thread)]
    return "\n".join(lines)


def _thread(thread: ThreadStack) -> list[str]:
    activity = "active" if thread.active else "idle"
    name = f': "{one_line(thread.name)}"' if thread.name else ': "MainThread"' if thread.main else ""
    number = f"{thread.tid} " if thread.tid else f"0x{thread.ident:X} " if thread.ident else ""
    lines = [f"Thread {number}({activity}{'+gil' if thread.owns_gil else ''}){name}"]
    for frame in thread.frames:
        place = frame.module if frame.native else frame.file
        line = f":{frame.line}" if frame.line and not frame.native else ""
        lines.append(f"    {one_line(frame.name)} ({one_line(place or '?')}{line})")
    return lines


def _phase_lines(words: Words) -> list[str]:
    """``phases: TP0-2,4-7 cuda_graph 3/24; TP3 weight_load 12/64``; ranks that are anywhere in a phase are joined.

    The verdict may know better than the log, by the rank's stack; then both are said.
    """
    phases = words.scene.log.phases
    where = places(phases, {label: member.frames for label, member in words.merged.by_label.items()})
    groups: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for label, phase in phases.items():
        done = f" {phase.done}/{phase.total}" if phase.done is not None and phase.total is not None else ""
        groups[phase.phase, _corrected(where.get(label))][done].append(label)
    for label in words.judgement.missing:
        if label not in phases:
            groups["not there", ""][""].append(label)
    found: list[tuple[list[str], str]] = []
    for (name, known), inside in groups.items():
        if len(inside) <= 4:
            found += [(labels, f"{name}{done}{known}") for done, labels in inside.items()]
        else:
            labels = [label for entry in inside.values() for label in entry]
            least, most = (pick(labels, key=lambda label: phases[label].done or 0) for pick in (min, max))
            ends = f"{phases[least].done or 0}/{phases[least].total} ({least}) to {phases[most].done or 0}"
            found.append((labels, f"{name} {ends}/{phases[most].total}{known}"))
    found.sort(key=lambda item: -len(item[0]))
    shown = "; ".join(f"{format_ranks(labels)} {what}" for labels, what in found[:8])
    more = f"; {len(found) - 8} more" if len(found) > 8 else ""
    lines = [words.line(f"phases: {shown}{more}", 1000)] if found else []
    gone = words.judgement.gone
    lines += [words.line(f"gone: {format_ranks(entry.ranks)}: {entry.words}", 400) for entry in gone[:8]]
    return lines


def _corrected(place: Reached | None) -> str:
    if place is None:
        return ""
    if place.by is not None:
        return f" by the log, {place.phase} by the stack"
    return " (over)" if place.over else ""


def _stack_lines(words: Words, limit: int) -> list[str]:
    return words.clean(words.merged.text(max_lines=limit), _WIDTH).splitlines()


def _log_lines(words: Words, limit: int) -> list[str]:
    """Last lines by rank: of the culprits and of those who are behind first, of the others as far as there is room."""
    lines = words.scene.log.lines
    first = [label for label in (*words.judgement.culprits, *words.judgement.missing) if label in lines]
    order = list(dict.fromkeys([*first, *lines]))
    every = len(order) * 3 <= limit
    result: list[str] = []
    for label in order:
        keep = 3 if every or label in first else 1
        for text in lines[label][-keep:]:
            if len(result) >= limit:
                return [*result, f"  … {len(order)} ranks in all: log_tail.txt"]
            result.append("  " + words.line(text))  # the engine's own tag names the rank
    return ["last lines of the log:", *result] if result else []


def _machine_lines(words: Words) -> list[str]:
    lines = []
    memory = words.evidence.memory
    if memory is not None and memory.resident:
        limit = f" of {_gib(memory.limit)}" if memory.limit else ""
        kills = f", {memory.oom_kills} killed for memory" if memory.oom_kills else ""
        lines.append(f"memory: {_gib(memory.resident)} resident{limit}{kills} (address space {_gib(memory.virtual)})")
    for gpu in words.scene.gpus[:16]:
        used = _gib(gpu.memory_used) if gpu.memory_used is not None else "?"
        busy = f"{gpu.utilisation} %" if gpu.utilisation is not None else "? %"
        power = f", {gpu.power:.0f} W" if gpu.power is not None else ""
        xids = f", Xid {', '.join(map(str, gpu.xids))}" if gpu.xids else ""
        lines.append(words.line(f"{gpu.label}: {used}, {busy}{power}{xids}{f', {gpu.error}' if gpu.error else ''}"))
    return lines


_LIBRARY = re.compile(r"/lib(?:64)?/python[\d.]+/|/(?:site|dist)-packages/|^<")
_OURS = f"{Path(__file__).parents[1]}/"


def _owner_place(words: Words) -> str:
    """Where in the user's own code the test is: the innermost frame that is of no library."""
    main = words.owner.main if words.owner else None
    frames = [f for f in main.frames if not f.native] if main else []
    frame = next(
        (f for f in frames if not (_LIBRARY.search(f.file) or f.file.startswith(_OURS))), frames[0] if frames else None
    )
    return words.line(f", at {frame.name} ({frame.file.rpartition('/')[2]}:{frame.line or '?'})") if frame else ""


def _owner_lines(words: Words) -> list[str]:
    return words.clean(_block(words.owner), _WIDTH).splitlines()[:60] if words.owner else []


def _notes(words: Words) -> list[str]:
    """Said once, whatever the number of processes."""
    last = words.scene.rounds[-1] if words.scene.rounds else []
    notes = [note for note in (refused(last), unread(last)) if note]
    without = [d for d in last if not d.threads and d.role.rank is not None]
    notes += [f"{d.label} (pid {d.process.pid}) has no stack: {d.problem}" for d in without[:8]]
    if words.probe:
        notes.append(f"asked just now: {words.probe}")
    return [*notes, *words.problems]


def _gib(size: int | None) -> str:
    return f"{(size or 0) / (1 << 30):.1f} GiB"
