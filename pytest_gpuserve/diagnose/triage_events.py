"""What a log complains of, how far each complaint is from its cause, and the choice of the root cause."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..vocabulary import Verdict
from .tracebacks import LOOSE, Chain, Raised
from .triage_lines import Line
from .triage_rules import DEPTHS, CauseRule, Rules

LONGEST_QUOTE: Final = 2000
"""Characters of a line that are kept."""
_SURVIVED: Final = 3
"""Steps of serving or start-up after a complaint, before anything failed, that show it was none of its causes."""
_OUTLIVED: Final = 10
"""The same after a line that speaks of a death: it was no process that mattered."""
_INSTEAD: Final = re.compile(
    r"\binstead\b|\bfall(?:ing|s)? ?back\b|\b[Dd]isabl|\b[Uu]sing \w+|\b[Ss]kipp|\bavoid\b|\b[Ii]gnor"
)
"""A line that names an obstacle and the way around it."""
_NEAR: Final = 200
"""Lines before a failure in which a bad word without an exception may be its cause."""
_LAST: Final = 3
"""Lines before the end of a log in which a bad word without an exception may be why it ends."""
_ENGINE: Final = ("EngineCore", "Worker", "VllmWorker", "RayWorker")
"""Processes whose exceptions are the engine's own, even without a rank."""
_SPOKEN_OF: Final = re.compile(r"\b(?:Rank |rank |scheduler_|VllmWorker-|Worker_TP|scheduler_TP)(\d+)\b")
_ERROR_LINE: Final = CauseRule("error_line", "crash", pattern=None, depth="notice")  # type: ignore[arg-type]


@dataclass(slots=True)
class Complaint:
    """One line that may be the cause.

    Attributes:
        source: number of the log it stands in.
        rule: its class; None for an exception that no rule knows.
        verdict: what it makes of the server if it is the cause.
        depth: distance from the root, see :data:`DEPTHS`.
        sure: an exception, a record at level ERROR, or a line that speaks of a death: not merely a bad word.
        steps: progress lines after it and before the next death notice.
        confirmed: a death notice followed.
        survived: the process, or the server, went on.
        last: the log ended with it.
        time: seconds on the log's clock, None where unknown.
    """

    source: int
    number: int
    line: str
    rank: str | None
    stream: str
    rule: CauseRule | None
    verdict: Verdict
    depth: int
    sure: bool
    time: float | None = None
    steps: int = 0
    confirmed: bool = False
    survived: bool = False
    last: bool = False

    @property
    def name(self) -> str:
        """The class that JSON shows."""
        return self.rule.name if self.rule else "exception"

    @property
    def deadly(self) -> bool:
        """Speaks of a process that ended."""
        return self.rule is not None and self.rule.fatal

    def of_a_request(self) -> None:
        """It concerns one request: a cause only where something died and nothing else was complained of."""
        self.sure = False
        self.depth = max(self.depth, DEPTHS["notice"])

    @property
    def outlived(self) -> bool:
        """What came after it shows that it did not matter."""
        return self.steps >= (_OUTLIVED if self.deadly else _SURVIVED)

    def settle(self, *, forgive: bool = False, end: int | None = None) -> None:
        """No more steps will be counted: it stands, or what followed shows that it did not matter.

        ``end`` is the number of the log's last line, when that is why.
        """
        self.last = end is not None and end - self.number <= _LAST
        self.survived = forgive


def from_line(rules: Rules, line: Line, source: int, time: float | None) -> Complaint | None:
    """A complaint from a line outside tracebacks, or None when it is none."""
    if line.text.startswith("#"):  # a comment, or a prompt of a shell
        return None
    loose = LOOSE.search(line.text)
    if loose and (loose.start() == 0 or line.error or "xception" in line.text[: loose.start("type")]):
        text = line.text.strip()
        raised = Raised(line.number, loose["type"], loose["message"] or "", text)
        return from_chain(
            rules, Chain(line.rank, line.stream, line.number, line.level, "", raised=[raised]), source, time
        )
    rule = rules.classify(line.text)
    if rule is None and line.error:
        rule = _ERROR_LINE
    if rule is None or not (line.error or rule.fatal or (rule.anywhere and not _INSTEAD.search(line.text))):
        return None
    return Complaint(
        source,
        line.number,
        line.text.strip()[:LONGEST_QUOTE],
        line.rank,
        line.stream,
        rule,
        rule.verdict,
        DEPTHS[rule.depth],
        sure=rule.fatal or (line.error and rule is not _ERROR_LINE),
        time=time,
    )


def from_chain(rules: Rules, chain: Chain, source: int, time: float | None) -> Complaint:
    """The complaint of a chain of exceptions: the first of them that says what went wrong."""
    best: tuple[tuple[int, int, int], Raised, CauseRule | None] | None = None
    for position, raised in enumerate(chain.raised):
        rule = rules.classify(raised.all)
        depth = DEPTHS[rule.depth] if rule else 0
        telling = 0 if rule and depth == 0 else 2 if raised.lookup or depth > DEPTHS["wrapper"] else 1
        if rule and DEPTHS["wrapper"] < depth < DEPTHS["notice"]:
            telling = 1
        key = (telling, position, 0)
        if best is None or key < best[0]:
            best = key, raised, rule
    assert best is not None
    _, raised, rule = best
    verdict: Verdict = rule.verdict if rule else "crash"
    if rule is None and rules.setting.concerns(raised.name, raised.message, raised.file, raised.function):
        rule, verdict = rules.cause("validation"), "config"
    return Complaint(
        source,
        raised.number,
        raised.line.strip()[:LONGEST_QUOTE],
        chain.rank,
        chain.stream,
        rule,
        verdict,
        DEPTHS[rule.depth] if rule else 0,
        sure=True,
        time=time,
    )


def choose(complaints: Iterable[Complaint], *, ready: bool) -> Complaint | None:
    """The root cause: the complaint nearest to the root, of those the earliest; None when nothing failed.

    Of a server that was ready an exception counts only when a process of the engine raised it, or something died.
    """
    standing = [found for found in complaints if not found.survived]
    died = any(found.sure and (found.confirmed or found.deadly) for found in standing)
    sure = sorted((found.source, found.number) for found in standing if found.sure)
    candidates = [found for found in standing if _counts(found, sure, died=died, ready=ready)]
    several = len({found.source for found in candidates}) > 1 and all(found.time for found in candidates)
    first = min(candidates, key=lambda found: _order(found, several), default=None)
    if first is not None and first.depth == DEPTHS["peer"]:
        return min(_silent(candidates), key=lambda found: _order(found, several), default=first)
    return first


def named(line: str) -> str | None:
    """The rank that a line of the front end speaks of."""
    match = _SPOKEN_OF.search(line)
    return f"TP{match[1]}" if match else None


def _silent(candidates: Sequence[Complaint]) -> list[Complaint]:
    """Notices of the death of ranks that said nothing themselves: when all others complain of a peer, it is theirs."""
    spoke = {tag for found in candidates if not found.deadly and found.rank for tag in found.rank.split()}
    return [found for found in candidates if found.deadly and (rank := named(found.line)) and rank not in spoke]


def _counts(found: Complaint, sure: Sequence[tuple[int, int]], *, died: bool, ready: bool) -> bool:
    if died:
        return found.sure or (found.confirmed and _leads_to(found, sure))
    if ready:
        return found.sure and (found.rank is not None or found.stream.startswith(_ENGINE))
    return found.sure or (found.depth == 0 and found.last and not found.steps)


def _leads_to(found: Complaint, sure: Sequence[tuple[int, int]]) -> bool:
    """Whether a bad word stands so close before a failure that it may be why."""
    after = bisect_right(sure, (found.source, found.number))
    return after < len(sure) and sure[after] <= (found.source, found.number + _NEAR)


def _order(found: Complaint, several: bool) -> tuple[int, float, int, int]:
    """Nearest to the root first; then the earlier, over several logs by their clocks."""
    return (found.depth, (found.time or 0.0) if several else 0.0, found.source, found.number)
