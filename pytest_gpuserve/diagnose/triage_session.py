"""One start of one server in one log, read line by line: what was complained of, what moved, what was only noise."""

from __future__ import annotations

import re
from collections import Counter
from enum import IntEnum
from typing import Final

from ..engines.base import LogGrammar
from ..watch.phases import PhaseReader
from .speculation_figures import MARKS, Figures
from .tracebacks import HEADER, LOOSE, Chain, Tracebacks
from .triage_events import Complaint, from_chain, from_line
from .triage_lines import GLUED, Line, clock, parse, pieces, plain, seconds
from .triage_rules import EngineMarks, Rule, Rules

_MEMO: Final = 1 << 14
_MEMO_LINE: Final = 512
_KEPT: Final = 500
"""Complaints that are kept: the cause is among the first of a failure, or among the last ones."""

_SERVES: Final = re.compile(rb"\bDecode batch\b|\bPrefill batch\b|\"POST /(?:generate|v1/\w+(?:/\w+)?) HTTP/\S+\" 200")
_BARS: Final = re.compile(rb"% Completed \||\d/\d+ \[\d\d:\d\d<")
"""Lines that show a server, or a start-up, at work."""
_RATES: Final = re.compile(
    rb"Avg prompt throughput: ([\d.]+).*Avg generation throughput: ([\d.]+)"
    rb".*Running: (\d+) reqs?(?:.*Waiting: (\d+) req)?"
)
_NODES: Final = re.compile(rb"\bnnodes['\"]?[=: ]+(\d+)")
_COMPLETED: Final = re.compile(r"last completed (?:NCCL )?work: (-?\d+)")
_WORLD: Final = re.compile(
    rb"\b(?:tp_size|tensor_parallel_size|world_size|nranks)['\"]?[=: ]+(\d+)|connected to (\d+) peer ranks"
)
_REQUEST: Final = re.compile(
    r"Exception in ASGI application|[Ee]rror (?:in|while|during) (?:\w+ )*(?:chat|completion|generation|request)"
)
_DIES: Final = re.compile(r"hit an exception|failed to start|fatal error|[Uu]ncaught|[Uu]nhandled|^Process \S+:?$")
_SILENCE: Final = 300.0
"""Seconds of silence after which the giving up of a harness says something about a program that we do not know."""


class Kind(IntEnum):
    """What is known of a line by its shape alone, so that the next one like it costs nothing."""

    DULL = 0
    MOVES = 1
    READY = 2
    FIGURES = 3
    NOISE = 4
    SIGN = 5
    SPEAKS = 6


class Session:
    """The log of one launch.

    Attributes:
        begin, end: line numbers.
        engine, version: as far as known.
        stack: the log speaks of GPU libraries, whatever the engine. recognised: marks of the engine were found in it.
        phases: reads the phases, once the engine is known.
        benign, heartbeats: how often each rule of noise matched.
        fallbacks: rule name to (rule, line, how often).
        sign: what speaks for a stall since the last progress: (rule, line).
        beats: heartbeats since the last progress.
        running: requests that run or wait by the last line of statistics; ``frozen`` is the first such line since the
            last progress in which there are some and no token moves.
        served: a request was at work.
        ready: number of the line that said so, 0 if none did.
        world, nodes: how many ranks, and machines, were asked for.
        asked, answered: steps since the server was ready, and whether any request had an answer since.
        access_log: the log shows requests as they are answered.
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
        self.served = False
        self.steps = 0
        self.ready = 0
        self.world: int | None = None
        self.nodes = 1
        self.completed: dict[str, int] = {}
        self.asked = 0
        self.answered = False
        self.access_log = False
        self.last = b""
        self._grammar: LogGrammar | None = None
        self._tracebacks = Tracebacks()
        self._chains: dict[int, Complaint] = {}
        self._memo: dict[bytes, tuple[Kind, Rule | None]] = {}
        self._waiting: list[Complaint] = []
        self._announced: dict[str, tuple[int, str]] = {}
        self._validation: tuple[Chain, Complaint] | None = None

    def use(self, engine: str, marks: EngineMarks | None, grammar: LogGrammar | None) -> None:
        """The engine is known: phases can be read from here on."""
        self.engine, self.marks, self._grammar = engine, marks, grammar
        self.phases = PhaseReader(grammar) if grammar else None
        self._memo.clear()

    def feed(self, number: int, raw: bytes, shape: bytes) -> None:
        """Take one whole line. ``shape`` is the line without digits: of many lines of one shape, one is looked at."""
        kind, rule = self._memo.get(shape) or self._look(raw, shape)
        if kind is not Kind.DULL:
            self._act(kind, rule, number, raw)
        elif self._tracebacks.reading:
            self._records(number, raw)
        self.end = number
        if raw:
            self.last = raw

    # --- what a shape means

    def _look(self, raw: bytes, shape: bytes) -> tuple[Kind, Rule | None]:
        found = self._judge(raw)
        if len(shape) <= _MEMO_LINE:
            if len(self._memo) >= _MEMO:
                self._memo.clear()
            self._memo[shape] = found
        return found

    def _judge(self, raw: bytes) -> tuple[Kind, Rule | None]:
        if b"_size" in raw or b"nranks" in raw or b" peer ranks" in raw:
            self._note_world(raw)
        if b" HTTP/1." in raw:
            self.access_log = True
        if any(mark in raw for mark in MARKS):
            return Kind.FIGURES, None
        if b"\r" not in raw:
            low = raw.lower()
            if any(word in low for word in self.rules.words):
                text = parse(0, plain(raw)).text
                for rule in (*self.rules.heartbeats, *self.rules.benign):
                    if rule.pattern.search(text):
                        return Kind.NOISE, rule
                for rule in self.rules.signs:
                    if rule.pattern.search(text):
                        return Kind.SIGN, rule
                moves = None if b" throughput: " in raw else self._moves(raw)
                return (Kind.SPEAKS if moves is None or self._complains(raw, text) else moves), None
            return self._moves(raw) or Kind.DULL, None
        return Kind.SPEAKS, None

    def _complains(self, raw: bytes, text: str) -> bool:
        """Whether a line that shows work also says, or carries behind its progress bar, something else."""
        return bool(GLUED.search(raw) or HEADER.search(text) or LOOSE.search(text) or self.rules.classify(text))

    def _moves(self, raw: bytes) -> Kind | None:
        """MOVES or READY when the line shows work, or a phase that begins or ends."""
        if self._grammar is not None:
            anchors = self._grammar.anchors
            if not anchors or any(anchor.search(raw) for anchor in anchors):
                if any(beat.search(raw) for beat in self._grammar.heartbeats):
                    return None
                for rule in self._grammar.rules:
                    if rule.pattern.search(raw):
                        ready = rule.phase in ("ready", "serving") and rule.edge == "enter" and rule.after is None
                        return Kind.READY if ready else Kind.MOVES
        if _SERVES.search(raw):
            self.served = True
            return Kind.MOVES
        return Kind.MOVES if _BARS.search(raw) else None

    def _note_world(self, raw: bytes) -> None:
        for size, peers in _WORLD.findall(raw):
            self.world = max(self.world or 0, int(size) if size else int(peers) + 1)
        if nodes := _NODES.search(raw):
            self.nodes = int(nodes[1])

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
        elif kind is Kind.NOISE:
            assert rule is not None
            if rule in self.rules.heartbeats:
                self.heartbeats[rule.name] += 1
                self.beats += 1
            else:
                self.benign[rule.name] += 1
            if self._tracebacks.reading:
                self._records(number, raw)
        elif kind is Kind.SIGN:
            assert rule is not None
            if self._stronger(rule):
                self._sign(rule, parse(number, plain(raw), self._grammar))
        else:
            self._records(number, raw)

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
            rank = parse(number, plain(raw), self._grammar).rank
            for found in self._waiting:
                if found.rank in (None, rank):
                    found.steps += 1

    def _stronger(self, rule: Rule) -> bool:
        signs = self.rules.signs
        return self.sign is None or signs.index(rule) < signs.index(self.sign[0])

    def _sign(self, rule: Rule, line: Line) -> None:
        if rule.name == "harness_timeout" and self.engine is None and not self.stack:
            then, now = seconds(clock(self.last.decode("utf-8", "replace"))), seconds(clock(line.raw))
            if then is None or now is None or now - then < _SILENCE:
                return
        self.sign = (rule, line)

    def _records(self, number: int, raw: bytes) -> None:
        for piece in pieces(plain(raw)):
            self._record(parse(number, piece, self._grammar), piece)

    def _record(self, line: Line, raw: bytes) -> None:
        mine, chain = self._tracebacks.feed(line)
        if mine:
            if chain is not None:
                self._exception(chain, line)
            return
        if _BARS.search(raw):
            self._step(line.number, raw)
        if rates := _RATES.search(raw):
            self._rates(line, rates)
            return
        if self._validation and line.text.lstrip().startswith("Value error, "):
            chain, found = self._validation
            found.number, found.line, self._validation = line.number, line.text.strip(), None
            return
        for rule in self.rules.fallbacks:
            if rule.pattern.search(line.text):
                _, first, count = self.fallbacks.get(rule.name, (rule, line.text.strip(), 0))
                self.fallbacks[rule.name] = (rule, first, count + 1)
        if line.rank and (completed := _COMPLETED.search(line.text)):
            self.completed[line.rank] = int(completed[1])
        if _REQUEST.search(line.text):
            self._announced[line.stream] = (line.number, "request")
        complaint = from_line(self.rules, line, self.source, seconds(clock(line.raw)))
        if complaint is not None:
            self._complain(complaint)
        if _DIES.search(line.text):
            self._announced[line.stream] = (line.number, "dies")

    def _rates(self, line: Line, rates: re.Match[bytes]) -> None:
        self.running = int(rates[3]) + int(rates[4] or 0)
        if float(rates[1]) or float(rates[2]):
            self._step(line.number, b"")
        elif self.running:
            self.frozen = self.frozen or line

    # --- complaints

    def _exception(self, chain: Chain, line: Line) -> None:
        """A chain is complete, or an exception was added to it: its complaint is made or made anew."""
        made = from_chain(self.rules, chain, self.source, seconds(clock(line.raw)))
        if any(rule.pattern.search(made.line) for rule in self.rules.benign):
            return
        if sign := next((rule for rule in self.rules.signs if rule.pattern.search(made.line)), None):
            if self._stronger(sign):
                self._sign(sign, line)
            return
        number, word = self._announced.get(chain.stream) or self._announced.get("") or (0, "")
        near = 0 <= chain.begin - number <= 2
        if chain.level in ("W", "I", "D") or (near and word == "request"):
            made.sure = False
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
        self._validation = (chain, made) if "validation error" in made.line else None

    def _complain(self, made: Complaint) -> None:
        if made.deadly:
            self._settle()
        if not made.confirmed:
            self._waiting.append(made)
        if len(self.complaints) < _KEPT:
            self.complaints.append(made)
        else:
            self.complaints = [found for found in self.complaints if not found.survived]
            del self.complaints[_KEPT // 2 : -_KEPT // 4]
            self.complaints.append(made)

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
