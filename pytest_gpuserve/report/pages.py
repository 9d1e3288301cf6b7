"""verdict.md, from incident.json alone, so that any machine can make it again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from .. import shell
from ..diagnose.merge import format_ranks
from ..diagnose.model import Gone
from ..vocabulary import LOG_LIMIT, PHASES
from .blame import fate
from .markdown import block, code, plain

REASONS: Final = {
    "startup_budget": "the start-up budget was over",
    "test_timeout": "the test's timeout was reached",
    "request_timeout": "a request timed out",
    "no_progress": "nothing moved",
    "session_deadline": "the session's deadline was reached",
    LOG_LIMIT: "its log reached its limit",
    "exited": "it ended by itself",
    "manual": "asked for",
    "end": "its time was over",
}


def verdict_page(incident: Mapping[str, Any]) -> str:
    """The paragraph first, then what it rests on. Foreign text stands in code or with its markup written out."""
    spec_id = plain(incident.get("id"))
    test = f" in {plain(incident['test'])}" if incident.get("test") else ""
    reason = REASONS.get(str(incident.get("reason"))) or plain(incident.get("reason"))
    became = fate(bool(incident.get("kill")), str(incident.get("reason")))
    lines = [
        f"# {plain(incident.get('verdict'))}: {spec_id}",
        "",
        plain(incident.get("text", "")),
        "",
        f"{reason}{test}, {moment(incident)}; {became}: {plain(incident.get('why') or 'it is not known yet why')}. "
        f"Confidence {number(incident.get('confidence')):.2f}.",
        "",
    ]
    if facts := pairs(incident.get("facts"), "claim", "witness"):
        lines += ["## What it rests on", "", *(f"- {plain(c)} ({plain(w)})" for c, w in facts), ""]
    if ruled_out := pairs(incident.get("ruled_out"), "what", "by"):
        lines += ["## What it is not", "", *(f"- {plain(c)}: {plain(by)}" for c, by in ruled_out), ""]
    for title, body in sections(incident):
        lines += [f"## {plain(title)}", "", *code(body), ""]
    command = block(shell.line(strings(incident.get("argv"))), 100_000)
    lines += ["## Command", "", *code(command), ""]
    return "\n".join(lines)


def sections(incident: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The blocks of lines that the incident kept: phases, stacks, log, machine ..."""
    for title, body in mapping(incident.get("sections")).items():
        if isinstance(body, list) and body:
            yield str(title), [line for entry in body for line in block(entry, 1200) or [""]]


def where(incident: Mapping[str, Any]) -> str:
    """`` in cuda_graph``; `` past weight_load`` where nothing says what came next; "" where it is not known."""
    word = "past" if incident.get("phase_over") is True else "in"
    return f" {word} {incident['phase']}" if incident.get("phase") else ""


def gone(incident: Mapping[str, Any]) -> list[str]:
    """``TP1: killed by SIGKILL, first of all, last phase cuda_graph``, one a line."""
    entries = incident.get("gone")
    found = []
    for raw in entries[:64] if isinstance(entries, list) else ():
        entry = mapping(raw)
        phase = entry.get("phase")
        words = Gone(
            (), str(entry.get("how"))[:200], phase if phase in PHASES else None, entry.get("first") is True
        ).words
        found.append(f"{format_ranks(strings(entry.get('ranks')))}: {words}")
    return found


def pairs(entries: Any, first: str, second: str) -> list[tuple[str, str]]:
    """Of a list of objects, two of their keys."""
    found = entries if isinstance(entries, list) else []
    return [(str(e.get(first)), str(e.get(second))) for e in found if isinstance(e, Mapping)]


def strings(value: Any) -> list[str]:
    """The entries of a list as text; of anything else none."""
    return [str(entry) for entry in value] if isinstance(value, list) else []


def mapping(value: Any) -> Mapping[str, Any]:
    """An object; of anything else an empty one."""
    return value if isinstance(value, dict) else {}


def moment(incident: Mapping[str, Any]) -> str:
    """When it was, in the local time of who reads."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(number(incident.get("time"))))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def number(value: Any) -> float:
    """Zero for what is none."""
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0
    except OverflowError:
        return 0.0
