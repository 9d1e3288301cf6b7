"""From what was read to a verdict: a failure and its cause, a stall and what speaks for it, or a server that works."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..phases.reader import RankPhase
from ..vocabulary import PHASES, Phase, Verdict
from .triage_events import Complaint, choose, named
from .triage_lines import Line
from .triage_rules import DEPTHS, Rule, Rules
from .triage_session import Session

_BUILDS: Final = ("compile", "autotune", "cuda_graph", "draft_cuda_graph", "warmup")
_FEW: Final = 5
_TEST: Final = re.compile(r"\S+\.py::\w\S*|test_\w+ \([\w.]+\)(?: \.\.\.)?")
_STALL: Final = "a log cannot tell slow from hung: gpuserve dump on the live server takes the stacks of every rank"
_UNKNOWN: Final = (
    "nothing in the log tells which engine wrote it, or what became of it: name it with gpuserve explain --engine"
)
_JIT: Final = (
    "kernels may be building: a compiler (nvcc, cicc, ptxas, ninja) among the server's children means slow, "
    "none means a lock left behind by a dead build"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with the line it rests on (``source`` is the number of its log), and what to say about it."""

    verdict: Verdict
    line: str | None = None
    number: int = 0
    rank: str | None = None
    kind: str = ""
    source: int = 0
    hints: tuple[str, ...] = ()


def decide(rules: Rules, sessions: Sequence[Session]) -> Finding:
    """The verdict on the sessions of one server, one of each log."""
    ready = any(session.ready for session in sessions)
    chosen = choose([found for session in sessions for found in session.complaints], ready=ready)
    complaint = chosen if chosen is not None and _ours(rules, sessions, chosen) else None
    stalled = _sign(sessions, ready)
    if complaint is not None and not (stalled and _follows(complaint, stalled)):
        hint = complaint.rule.hint if complaint.rule else ""
        return Finding(
            complaint.verdict,
            complaint.line,
            complaint.number,
            complaint.rank or named(complaint.line),
            complaint.name,
            complaint.source,
            (hint,) if hint else (),
        )
    if stalled is not None:
        return stalled
    if ready or any(_serves(session) for session in sessions):
        if degradations(rules, sessions)[1]:
            return Finding("degraded")
        if any(_unanswered(session) for session in sessions):
            return Finding("stalled", hints=("a request was taken up and none was answered since the start", _STALL))
        return Finding("ready")
    if unfinished := next(filter(None, map(_unfinished, sessions)), None):
        return unfinished
    if chosen is not None and complaint is None:
        return Finding("undecided", hints=(_foreign(chosen), _UNKNOWN))
    if any(_started(rules, session) for session in sessions):
        words = [rule.text for session in sessions for rule in _last_words(rules, session)]
        building = any(_building(session) for session in sessions) and not words
        return Finding("stalled", hints=(_STALL, *dict.fromkeys(words), *([_JIT] if building else [])))
    return Finding("undecided", hints=(_UNKNOWN,))


def degradations(rules: Rules, sessions: Sequence[Session]) -> tuple[tuple[str, ...], bool]:
    """What works worse than asked for, one sentence each, and whether that is enough to call the server degraded."""
    texts: list[str] = []
    enough = False
    for session in sessions:
        if poor := session.figures.poor(rules.speculation):
            texts.append(poor)
            enough = True
        for rule, line, count in session.fallbacks.values():
            texts.append(f"{rule.text}{f' ({count} times)' if count > 1 else ''}: {line}")
            enough = enough or rule.counts
    return tuple(dict.fromkeys(texts)), enough


def phase_of(sessions: Sequence[Session], ranks: Mapping[str, RankPhase], found: Finding) -> Phase | None:
    """Where the cause struck, else the furthest phase that was reached (teardown does not count as one)."""
    if found.verdict in ("ready", "degraded"):
        server = [session.phases.server.phase for session in sessions if session.phases]
        reached = [phase for phase in server if PHASES.index(phase) >= PHASES.index("ready")]
        return max(reached, key=PHASES.index, default="serving" if any(s.shapes.served for s in sessions) else None)
    if found.rank is not None and found.rank in ranks:
        return _before_teardown(ranks[found.rank])
    phases = [_before_teardown(rank) for rank in ranks.values()]
    return max(phases, key=PHASES.index, default=None)


def _before_teardown(rank: RankPhase) -> Phase:
    if rank.phase != "shutdown":
        return rank.phase
    return next((phase for phase, _, _ in reversed(rank.history) if phase != "shutdown"), rank.phase)


def _ours(rules: Rules, sessions: Sequence[Session], found: Complaint) -> bool:
    """Whether a complaint is within our knowledge: a known engine's, or a record of a communication library."""
    session = next(session for session in sessions if session.source == found.source)
    if session.engine is not None:
        return True
    return found.rule is not None and bool(rules.records.search(found.line))


def _foreign(found: Complaint) -> str:
    """What was seen in a log that is no server's, as far as we know: a hint, no verdict."""
    what = f"a sign of {found.verdict} ({found.name})" if found.rule else "an exception"
    return f"{what} is in it, line {found.number}, but no server's log was recognised: {found.line[:200]}"


def _sign(sessions: Sequence[Session], ready: bool) -> Finding | None:
    """What speaks for a stall and was not made void by later progress."""
    signs = [
        _from_line(session, session.sign[1], session.sign[0].name, session.sign[0].text)
        for session in sessions
        if session.sign
    ]
    if ready or any(_serves(session) for session in sessions):
        signs += [
            _from_line(session, session.frozen, "no_tokens", "requests are running and no token moves")
            for session in sessions
            if session.frozen
        ]
        if not signs and any(session.beats and session.running != 0 for session in sessions):
            return Finding("stalled", hints=("the engine core waits for its workers since the last progress", _STALL))
    return min(signs, key=lambda sign: (sign.source, sign.number), default=None)


def _from_line(session: Session, line: Line, kind: str, text: str) -> Finding:
    return Finding("stalled", line.text.strip(), line.number, line.rank, kind, session.source, (text, _STALL))


def _follows(complaint: Complaint, sign: Finding) -> bool:
    """Whether a death is what came of the stall: the engine's watchdog or a harness ends what does not move."""
    late = complaint.depth > DEPTHS["communication"] or complaint.depth == DEPTHS["killed"]
    return late and sign.number > 0 and sign.source == complaint.source and sign.number < complaint.number


def _serves(session: Session) -> bool:
    """A log without its beginning in which requests are at work, or the figures of a finished run."""
    started = session.phases is not None and any(
        rank.phase != "spawn" and rank.phase not in ("ready", "serving", "shutdown")
        for rank in session.phases.ranks().values()
    )
    return not started and (session.shapes.served or session.figures.lines > 0)


def _unanswered(session: Session) -> bool:
    """The log ends in the first request: a few steps, no answer, although answers are logged."""
    return session.shapes.access_log and 0 < session.asked < _FEW and not session.answered


def _unfinished(session: Session) -> Finding | None:
    """A test runner's log that ends in the name of a test: begun, and without an outcome."""
    text = session.last.decode("utf-8", "replace").strip()
    if not _TEST.fullmatch(text):
        return None
    hint = "the last test has no outcome: it, or the fixture it waits for, did not end"
    return Finding("stalled", text, session.end, None, "unfinished_test", session.source, (hint, _STALL))


def _started(rules: Rules, session: Session) -> bool:
    if session.engine is not None:
        return session.steps > 0 or session.recognised
    return session.stack and bool(rules.stack.search(session.last.decode("utf-8", "replace")))


def _last_words(rules: Rules, session: Session) -> list[Rule]:
    """What the end of the log says of a stretch that no phase names."""
    lines = [rank.last_line for rank in session.phases.ranks().values()] if session.phases else []
    lines.append(session.last.decode("utf-8", "replace"))
    return [rule for rule in rules.last_words if any(rule.pattern.search(line) for line in lines)]


def _building(session: Session) -> bool:
    return session.phases is not None and any(rank.phase in _BUILDS for rank in session.phases.ranks().values())
