"""One start of one server in one log, read line by line: what was complained of, what moved, what was only noise."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ..engines.base import LogGrammar
from ..phases.reader import PhaseReader
from .speculation_figures import Figures
from .tracebacks import Chain, Tracebacks
from .triage_events import LONGEST_QUOTE, Complaint, from_chain, from_line
from .triage_lines import Line, clock, parse, pieces, seconds
from .triage_rules import DEPTHS, EngineMarks, Rule, Rules
from .triage_shapes import BARS, RATES, VARYING, Kind, Shape, Shapes

_KEPT: Final = 500
"""Complaints that are kept: the cause is among the first of a failure, or among the last ones."""
_MESSAGE: Final = 8
"""Lines of an exception's message that may tell its cause."""
_GROWING: Final = 100
"""Chains of exceptions to which another link may still be added."""
_RANK_OF_PID: Final = re.compile(rb" pid=(\d+)[^)]*\).*\bworld_size=\d+ rank=(\d+)")
_LATE: Final = 3
"""Lines of a server at work that are enough to show that it is."""
_REFUSAL: Final = re.compile(r"^\s*\S.*\[type=\w+, input_value=|^\s*(?:Value error|Assertion failed), ")
"""What pydantic found wrong; the line above it is the name of the field."""
_COMPLETED: Final = re.compile(r"last completed (?:NCCL )?work: (-?\d+)")
_REQUEST: Final = re.compile(
    r"Exception in ASGI application|[Ee]rror (?:in|while|during) (?:\w+ )*(?:chat|completion|generation|request)"
)
_DIES: Final = re.compile(r"hit an exception|failed to start|fatal error|[Uu]ncaught|[Uu]nhandled|^Process \S+:?$")
_SILENCE: Final = 300.0
"""Seconds of silence after which the giving up of a harness says something about a program that we do not know."""


class Session:
    """The log of one launch.

    Attributes:
        begin, end: line numbers.
        engine, version: as far as known.
        stack: the log speaks of GPU libraries, whatever the engine. recognised: marks of the engine were found in it.
        launched: the line was seen that the engine prints once a launch, so the log has its beginning.
        shapes: what kinds of line there are; phases: reads the phases, once the engine is known.
        benign, heartbeats: how often each rule of noise matched.
        fallbacks: rule name to (rule, line, how often).
        sign: what speaks for a stall since the last progress: (rule, line).
        beats: heartbeats since the last progress.
        running: requests that run or wait by the last line of statistics; ``frozen`` is the first such line since the
            last progress in which there are some and no token moves.
        ready: number of the line that said so, 0 if none did.
        asked, answered: steps since the server was ready, and whether any request had an answer since.
        completed: collectives that each rank had completed when its watchdog gave up.
        last: the last line that is not empty.
    """

    def __init__(self, rules: Rules, source: int, begin: int) -> None:
        self.rules = rules
        self.source = source
        self.begin = self.end = begin
        self.engine: str | None = None
        self.marks: EngineMarks | None = None
        self.version: str | None = None
        self.stack = False
        self.recognised = False
        self.launched = False
        self.phases: PhaseReader | None = None
        self.figures = Figures()
        self.benign: Counter[str] = Counter()
        self.heartbeats: Counter[str] = Counter()
        self.fallbacks: dict[str, tuple[Rule, str, int]] = {}
        self.complaints: list[Complaint] = []
        self.sign: tuple[Rule, Line] | None = None
        self.beats = 0
        self.running: int | None = None
        self.frozen: Line | None = None
        self.steps = 0
        self.ready = 0
        self.completed: dict[str, int] = {}
        self.asked = 0
        self.answered = False
        self.last = b""
        self.shapes = Shapes(rules)
        self._tracebacks = Tracebacks()
        self._chains: dict[int, Complaint] = {}
        self._queue: list[tuple[int, bytes]] = []
        self._latest: dict[tuple[bytes | None, ...], tuple[int, bytes]] = {}
        self._dull: list[tuple[int, Sequence[bytes]]] = []
        self._late = 0
        self._waiting: list[Complaint] = []
        self._pids: dict[str, str] = {}
        self._announced: dict[str, tuple[int, str]] = {}
        self._message: tuple[str, int, Chain | None] = "", 0, None
        self._validation: Complaint | None = None

    def use(self, engine: str, marks: EngineMarks | None, grammar: LogGrammar | None) -> None:
        """The engine is known: phases can be read from here on."""
        self.engine, self.marks = engine, marks
        self.phases = PhaseReader(grammar) if grammar else None
        self.shapes.use(grammar)

    def feed(self, number: int, raw: bytes, shape: bytes) -> None:
        """Take one line, or a piece of one that carriage returns divide; ``shape`` as in :meth:`Shapes.of`."""
        known = self.shapes.of(raw, shape)
        if known.phase:
            self._phase(known, number, raw)
        elif known.tagged and (tag := self._tag(raw)):
            self._latest[tag] = (number, raw)
        kind = known.kind
        if kind is Kind.SPEAKS:
            if not self._records(number, raw):
                self.shapes.said_nothing(raw, shape)
        elif kind is not Kind.DULL:
            self._act(kind, known.rule, number, raw)
        elif self._tracebacks.reading:
            self._records(number, raw)
        self.end = number
        if raw:
            self.last = raw

    @property
    def inside(self) -> bool:
        """A traceback is open, so that lines that say nothing may belong to it."""
        return self._tracebacks.reading

    def pass_over(self, number: int, lines: Sequence[bytes]) -> None:
        """Lines from this one on say nothing but whose they are."""
        self._dull.append((number, lines))
        self.end = number + len(lines) - 1
        self.last = next(filter(None, reversed(lines)), self.last)

    def bars(self, number: int, line: bytes) -> None:
        """A line of progress bars: its pieces are lines of their own, except to those who read the phases."""
        queued = len(self._queue)
        for piece in line.split(b"\r"):
            self.feed(number, piece, piece.translate(None, VARYING))
        self._queue[queued:] = [(number, line)]

    def flush(self) -> None:
        """Hand on what was read since the last time: lines about phases, and the last line of each rank."""
        if self._dull and self.shapes.grammar is not None:
            tag = self.shapes.grammar.rank.match
            dull = (line for number, lines in self._dull for line in enumerate(lines, number))
            latest = {match.groups(): line for line in dull if (match := tag(line[1]))}
            for rank, line in latest.items():
                self._latest[rank] = max(line, self._latest.get(rank, line))
        self._dull.clear()
        if self.phases is not None and (self._queue or self._latest):
            lines = heapq.merge(self._queue, sorted(self._latest.values()))
            self.phases.feed(b"\n".join((*(line for _, line in lines), b"")), 0.0)
        self._queue.clear()
        self._latest.clear()

    def _phase(self, known: Shape, number: int, raw: bytes) -> None:
        if known.phase == "late":
            if not self.ready or self._late > _LATE:
                return
            self._late += 1
        self._queue.append((number, raw))
        if b"world_size=" in raw and (found := _RANK_OF_PID.search(raw)):
            self._pids[found[1].decode()] = f"TP{int(found[2])}"
        if self._latest and (tag := self._tag(raw)):
            self._latest.pop(tag, None)

    def _tag(self, raw: bytes) -> tuple[bytes | None, ...] | None:
        match = self.shapes.grammar.rank.match(raw) if self.shapes.grammar else None
        return match.groups() if match else None

    # --- what a line does

    def _act(self, kind: Kind, rule: Rule | None, number: int, raw: bytes) -> None:
        if kind is Kind.MOVES:
            self._step(number, raw)
        elif kind is Kind.READY:
            self._step(number, raw)
            self.ready = self.ready or number
            self._settle(forgive=True)
        elif kind is Kind.FIGURES:
            self.figures.feed(raw)
            self._step(number, raw)
        elif kind is Kind.RATES:
            self._rates(number, raw)
        elif kind is Kind.NOISE:
            assert rule is not None
            if rule.name in self.rules.heartbeats:
                self.heartbeats[rule.name] += 1
                self.beats += 1
            else:
                self.benign[rule.name] += 1
            if self._tracebacks.reading:
                self._records(number, raw)
        elif kind is Kind.SIGN:
            assert rule is not None
            if self._stronger(rule):
                self._sign(rule, parse(number, raw, self.shapes.grammar))

    def _step(self, number: int, raw: bytes) -> None:
        """Something moved: what spoke for a stall is void, and complaints of the same rank grow old."""
        self.steps += 1
        if b'"POST ' in raw:  # a streamed answer's 200 comes before its tokens: no sign that they move
            self.answered = self.answered or self.ready > 0
        else:
            self.beats = 0
            self.frozen = self.sign = None
            self.asked += self.ready > 0 and b" batch" in raw
        if self._waiting:
            rank = parse(number, raw, self.shapes.grammar).rank
            for found in self._waiting:
                if found.rank in (None, rank):
                    found.steps += 1
                    found.survived = found.outlived
            self._waiting = [found for found in self._waiting if not found.survived]

    def _stronger(self, rule: Rule) -> bool:
        signs = self.rules.signs
        return self.sign is None or signs.index(rule) < signs.index(self.sign[0])

    def _sign(self, rule: Rule, line: Line) -> None:
        if rule.name == "harness_timeout" and self.engine is None and not self.stack:
            then, now = seconds(clock(self.last.decode("utf-8", "replace"))), seconds(clock(line.raw))
            if then is None or now is None or now - then < _SILENCE:
                return
        self.sign = (rule, line)

    def _records(self, number: int, raw: bytes) -> bool:
        """Read the records of a line. Whether any of them said something, so that its like must be read too."""
        said = False
        for piece in pieces(raw):
            said = self._record(parse(number, piece, self.shapes.grammar), piece) or said
        return said

    def _record(self, line: Line, raw: bytes) -> bool:
        mine, chain = self._tracebacks.feed(line)
        if mine:
            if chain is not None:
                self._exception(chain, line)
                self._message = line.stream, line.number, chain
            return True
        if self._explains(line):
            return True
        moved = bool(BARS.search(raw))
        if moved:
            self._step(line.number, raw)
        if self._validation and _REFUSAL.search(line.text):
            found, self._validation = self._validation, None
            found.number, found.line = line.number, line.text.strip()[:LONGEST_QUOTE]
            return True
        fallbacks = self.rules.fallbacks_in(line.text)
        for rule in fallbacks:
            _, first, count = self.fallbacks.get(rule.name, (rule, line.text.strip()[:LONGEST_QUOTE], 0))
            self.fallbacks[rule.name] = (rule, first, count + 1)
        completed = _COMPLETED.search(line.text) if line.rank else None
        if completed and line.rank:
            self.completed[line.rank] = int(completed[1])
        request = self._takes_requests and (bool(_REQUEST.search(line.text)) or "serving_" in line.file)
        word = "request" if request else "dies" if _DIES.search(line.text) else ""
        if word:
            self._announced[line.stream] = (line.number, word)
        complaint = from_line(self.rules, line, self.source, seconds(clock(line.raw)))
        if complaint is not None:
            if request:
                complaint.of_a_request()
            self._complain(complaint)
            self._refused(complaint)
        return moved or bool(fallbacks or completed or word or complaint)

    def _rates(self, number: int, raw: bytes) -> None:
        """The engine's line of statistics."""
        rates = RATES.search(raw)
        assert rates is not None
        self.running = int(rates[3]) + int(rates[4] or 0)
        if float(rates[1]) or float(rates[2]):
            self._step(number, b"")
        elif self.running:
            self.frozen = self.frozen or parse(number, raw, self.shapes.grammar)

    # --- complaints

    @property
    def _takes_requests(self) -> bool:
        """Whether an error can be a request's: not while the server starts, unless the log begins later."""
        return self.ready > 0 or not self.launched

    def _explains(self, line: Line) -> bool:
        """Whether a line is part of the message of the exception above it, and tells the cause as its first did not."""
        stream, number, chain = self._message
        if chain is None or line.stream != stream or line.number > number + _MESSAGE:
            return False
        raised, rule = chain.raised[-1], self.rules.classify(line.text)
        if rule is None or DEPTHS[rule.depth] or not rule.anywhere or self.rules.classify(raised.all):
            return False
        chain.raised[-1] = replace(raised, more=line.text.strip()[:LONGEST_QUOTE])
        self._exception(chain, line)
        return True

    def _exception(self, chain: Chain, line: Line) -> None:
        """A chain is complete, or an exception was added to it: its complaint is made or made anew."""
        made = from_chain(self.rules, chain, self.source, seconds(chain.time or clock(line.raw)))
        if self.rules.noise_in(made.line):
            return
        if sign := self.rules.sign_in(made.line):
            if self._stronger(sign):
                self._sign(sign, line)
            return
        number, word = self._announced.get(chain.stream) or self._announced.get("") or (0, "")
        near = 0 <= chain.begin - number <= 2
        if chain.level in ("W", "I", "D"):
            made.sure = False
        if near and word == "request":
            made.of_a_request()
        if _DIES.search(chain.context) or (near and word == "dies"):
            made.confirmed = True
        old = self._chains.get(chain.begin)
        if old is not None:
            made.steps, made.confirmed = old.steps, old.confirmed or made.confirmed
            self.complaints = [made if found is old else found for found in self.complaints]
            self._waiting = [made if found is old else found for found in self._waiting]
        else:
            self._complain(made)
        self._chains[chain.begin] = made
        if len(self._chains) > _GROWING:
            del self._chains[next(iter(self._chains))]
        self._refused(made)

    def _refused(self, made: Complaint) -> None:
        """pydantic counts the errors in its first line; what is wrong stands below."""
        self._validation = made if "validation error" in made.line else None

    def _complain(self, made: Complaint) -> None:
        if made.rank is None:
            made.rank = self._pids.get(made.stream.rpartition(" ")[2])
        if made.deadly:
            self._settle()
        if len(self.complaints) >= _KEPT:
            self.complaints = [found for found in self.complaints if not found.survived]
            del self.complaints[_KEPT // 2 : -_KEPT // 4]
            kept = {id(found) for found in self.complaints}
            self._waiting = [found for found in self._waiting if id(found) in kept]
        self.complaints.append(made)
        if not made.confirmed:
            self._waiting.append(made)

    def _settle(self, *, forgive: bool = False) -> None:
        """The server is ready (forgive), or something died: complaints before it are void, or confirmed."""
        for found in self._waiting:
            found.settle(forgive=forgive)
            found.confirmed = not found.survived
        self._waiting.clear()

    def finish(self) -> None:
        """The log, or this launch in it, is over."""
        for found in self._waiting:
            found.settle(end=self.end)
        self._waiting.clear()
