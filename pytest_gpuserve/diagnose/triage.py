"""Read the logs of one server and say what became of it: what ``gpuserve explain`` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..vocabulary import Phase, Verdict
from .logfile import LogFile
from .triage_events import LONGEST_QUOTE
from .triage_ranks import RankState, absent, behind, ranks_of, remarks, silent, states
from .triage_reader import Reader
from .triage_rules import Rules, load
from .triage_session import Session
from .triage_verdict import decide, degradations, phase_of

SCHEMA: Final = "gpuserve.triage/1"


@dataclass(frozen=True, slots=True)
class Cause:
    """The root-cause line. ``number`` counts newlines from 1; ``kind`` is the name of a rule in triage_rules.toml,
    ``exception`` for one that no rule knows. ``log`` is the file, as the user named it. Foreign text, unescaped."""

    line: str
    number: int
    rank: str | None
    kind: str
    log: str


@dataclass(frozen=True, slots=True)
class Noise:
    """Lines that look bad and are not, folded."""

    count: int
    why: str
    since: str


@dataclass(frozen=True, slots=True)
class Triage:
    """What the logs of one server say. Everything quoted from a log is foreign text: escape it before showing it.

    Attributes:
        verdict: ``stalled`` for a server that neither failed nor became ready: a log cannot tell slow from hung.
        phase: the furthest phase that was reached, or where the cause struck.
        ranks: by label; a rank that was asked for and never spoke has no phase.
        lagging: labels of ranks that are behind the others, or missing.
        silent: ranks that printed no error while another lost a peer; not in the JSON, a hint says it.
        benign: name of a rule to what it folded; heartbeats too.
        degraded: what works worse than asked for, one sentence each, with figures.
        hints: what to look at next, one sentence each.
        several: more than one log was read, so the cause names its file.
    """

    engine: str | None
    version: str | None
    verdict: Verdict
    phase: Phase | None
    ranks: dict[str, RankState]
    lagging: tuple[str, ...]
    cause: Cause | None
    benign: dict[str, Noise]
    degraded: tuple[str, ...]
    hints: tuple[str, ...]
    several: bool = False
    silent: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The object of schema ``gpuserve.triage/1``; ``cause.log`` is there when several logs were read."""
        cause: dict[str, Any] | None = None
        if self.cause is not None:
            found = self.cause
            cause = {"line": found.line, "lineno": found.number, "rank": found.rank, "class": found.kind}
            if self.several:
                cause["log"] = found.log
        return {
            "schema": SCHEMA,
            "engine": self.engine,
            "version": self.version,
            "verdict": self.verdict,
            "phase": self.phase,
            "ranks": {
                label: {"phase": rank.phase, "last_line": rank.last_line, "last_time": rank.last_time}
                for label, rank in self.ranks.items()
            },
            "lagging": list(self.lagging),
            "cause": cause,
            "benign": {
                name: {"count": noise.count, "why": noise.why, "since": noise.since}
                for name, noise in self.benign.items()
            },
            "degraded": list(self.degraded),
            "hints": list(self.hints),
        }


def explain(names: Sequence[str], engine: str | None = None, most: int | None = None) -> Triage:
    """Read the logs of one server (per rank, per node, or one for all) and judge them together.

    Of a log that holds several launches the last one is judged, and the others are told of in a hint.

    Args:
        names: paths (plain, .gz, .bz2, .xz, .zst), or ``-`` for standard input.
        engine: name of the engine; None: the log says it.
        most: bytes of a plain log that are read, at its beginning and its end; None: all.

    Raises:
        LogError: a log cannot be read.
    """
    rules = load()
    files = [LogFile(name) for name in names]
    readers = [Reader(rules, source, engine) for source in range(len(files))]
    for reader, file in zip(readers, files, strict=True):
        reader.read(file.chunks(most))
    found = _judge(rules, [reader.session for reader in readers], names)
    more = [file.problem for file in files if file.problem]
    for reader, name in zip(readers, names, strict=True):
        more += _earlier(rules, reader.sessions, name)
    engines = sorted({reader.session.engine for reader in readers if reader.session.engine})
    if len(engines) > 1:
        more.append(f"these logs are of different engines ({', '.join(engines)}): read one server's logs at a time")
    return replace(found, hints=(*found.hints, *more))


def _judge(rules: Rules, sessions: Sequence[Session], names: Sequence[str]) -> Triage:
    found = decide(rules, sessions)
    ranks = ranks_of(sessions, names)
    well = found.verdict in ("ready", "degraded")
    missing = () if well else absent(sessions, ranks)
    lagging = () if well else (*behind(sessions, ranks), *missing)
    hints = (*found.hints, *remarks(sessions, ranks, lagging, missing))
    cause = None
    if found.line is not None:
        cause = Cause(found.line[:LONGEST_QUOTE], found.number, found.rank, found.kind, names[found.source])
    return Triage(
        engine=next((session.engine for session in sessions if session.engine), None),
        version=next((session.version for session in sessions if session.version), None),
        verdict=found.verdict,
        phase=phase_of(sessions, ranks, found),
        ranks=states(ranks, missing),
        lagging=lagging,
        silent=() if well else silent(sessions, ranks),
        cause=cause,
        benign=_noise(rules, sessions),
        degraded=degradations(rules, sessions)[0],
        hints=tuple(dict.fromkeys(hints)),
        several=len(names) > 1,
    )


def _noise(rules: Rules, sessions: Sequence[Session]) -> dict[str, Noise]:
    counts: Counter[str] = Counter()
    for session in sessions:
        counts.update(session.benign)
        counts.update(session.heartbeats)
    known = {rule.name: rule for rule in rules.noise}
    return {name: Noise(count, known[name].text, known[name].since) for name, count in counts.most_common()}


def _earlier(rules: Rules, sessions: Sequence[Session], name: str) -> Iterator[str]:
    """One sentence on each launch in a log before the one that was judged."""
    for session in sessions[:-1]:
        found = _judge(rules, [session], [name])
        why = f": {found.cause.line[:200]}" if found.cause else ""
        yield (
            f"{name} holds more than one launch: lines {session.begin} to {session.end} ({session.engine}) "
            f"ended as {found.verdict}{why}"
        )
