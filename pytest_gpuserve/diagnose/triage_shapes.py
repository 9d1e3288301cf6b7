"""What a line does, told from its shape: of a million lines that differ in their numbers, one is looked at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, Literal

from ..engines.base import LogGrammar, PhaseRule
from .literals import Words, required
from .speculation_figures import MARKS
from .tracebacks import HEADER, LOOSE
from .triage_lines import glued, parse
from .triage_rules import Rule, Rules

VARYING: Final = b"0123456789abcdef"
"""What is left out of a line to see its shape: numbers, and the letters that ids are made of."""

RATES: Final = re.compile(
    rb"Avg prompt throughput: ([\d.]+).*Avg generation throughput: ([\d.]+)"
    rb".*Running: (\d+) reqs?(?:.*Waiting: (\d+) req)?"
)
BARS: Final = re.compile(rb"% Completed \||\d/\d+ \[\d\d:\d\d<")
"""A start-up at work."""
_SERVES: Final = re.compile(rb"\bDecode batch\b|\bPrefill batch\b|\"POST /(?:generate|v1/\w+(?:/\w+)?) HTTP/\S+\" 200")
"""A server at work."""
_NUMBERS: Final = re.compile(rb"(?i)exit|code|status|signal|errno")
"""In such a line the numbers make the difference."""
_NODES: Final = re.compile(rb"\bnnodes['\"]?[=: ]+(\d+)")
_WORLD: Final = re.compile(
    rb"\b(?:tp_size|tensor_parallel_size|world_size|nranks)['\"]?[=: ]+(\d+)|connected to (\d+) peer ranks"
)
_MANY: Final = 64
"""New shapes in one block that are worth a search of their own."""
_LONG: Final = 64
"""Bytes of a line that is more than the tag of a rank."""
_MEMO: Final = 1 << 14
_MEMO_LINE: Final = 512


class Kind(IntEnum):
    """DULL: nothing. MOVES: a step of work. READY: the server says so. FIGURES: a step, with figures of speculation.
    RATES: the engine's statistics. NOISE, SIGN: as a rule says. SPEAKS: its records must be read.
    """

    DULL = 0
    MOVES = 1
    READY = 2
    FIGURES = 3
    RATES = 4
    NOISE = 5
    SIGN = 6
    SPEAKS = 7


@dataclass(frozen=True, slots=True)
class Shape:
    """What is true of every line of one shape.

    Attributes:
        kind: what the line does; ``rule`` is the rule of a NOISE or a SIGN.
        phase: it may say something about a phase; "late" when it does so only once, after the server is ready.
        tagged: it may begin with the tag of a rank.
    """

    kind: Kind
    rule: Rule | None = None
    phase: Literal["", "any", "late"] = ""
    tagged: bool = False


_DULL: Final = Shape(Kind.DULL)
_TAGGED: Final = Shape(Kind.DULL, tagged=True)
_PREFIX: Final = Shape(Kind.DULL, phase="any", tagged=True)
"""A prefix alone: the progress bar that follows on a line of its own is this rank's."""
_MARKS: Final = (
    *("_size", "nranks", " peer ranks", " http/1.", "accept", "num_draft", " throughput: ", " batch", '"post /'),
    *("<", "% completed"),
)
"""Of these a line holds one that is looked at for something else than a rule or a phase."""


class Shapes:
    """Judges shapes, and remembers them as long as there is room.

    Attributes:
        grammar: of the engine, once it is known.
        world, nodes: how many ranks, and machines, the lines speak of.
        served: a line showed a request at work.
        access_log: the log shows requests as they are answered.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.grammar: LogGrammar | None = None
        self.world: int | None = None
        self.nodes = 1
        self.served = False
        self.access_log = False
        self._memo: dict[bytes, Shape] = {}
        self._dull: set[bytes] = set()
        self.use(None)

    def use(self, grammar: LogGrammar | None) -> None:
        """Read with this grammar from here on."""
        self.grammar = grammar
        self._memo.clear()
        self._phases = Words(_words(grammar) if grammar else ())
        self._anything = Words((*self.rules.gate.words, *self._phases.words, *_MARKS))

    def of(self, line: bytes, shape: bytes) -> Shape:
        """The shape of a line without its terminator, which is ``shape`` when :data:`VARYING` is left out of it."""
        return self._memo.get(shape) or self._look(line, shape)

    def dull(self, lines: Sequence[bytes], shapes: Sequence[bytes]) -> set[bytes]:
        """Of lines that are next, shapes of those that say nothing but, by their tags, that a rank wrote them. Where no
        two are alike they are found in one search of all; none are told where few are new."""
        fresh = set(shapes) - self._memo.keys()
        if len(fresh) < _MANY:
            return set()
        picked = [n for n, x in enumerate(shapes) if x in fresh and len(lines[n]) >= _LONG and b"\r" not in x]
        speaks = self._anything.rough_lines(b"\n".join([lines[n] for n in picked]).lower())
        dull = {shapes[n] for n in picked} - {shapes[picked[number]] for number in speaks}
        for shape in dull & self._dull:  # not so rare
            self._keep(shape, _DULL if self.grammar is None else _TAGGED)
        self._dull = dull
        return dull

    def said_nothing(self, line: bytes, shape: bytes) -> None:
        """A line that might have spoken did not: neither will its like, unless its numbers decide."""
        if (known := self._memo.get(shape)) and not _NUMBERS.search(line):
            self._memo[shape] = replace(known, kind=Kind.DULL)

    def _look(self, line: bytes, shape: bytes) -> Shape:
        low = line.lower()
        tag = self.grammar.rank.match(line) if self.grammar else None
        if tag and not line[tag.end() :].strip():
            return self._keep(shape, _PREFIX)
        if not self._anything.any_in(low):
            return self._keep(shape, _TAGGED if tag else _DULL)
        if b"_size" in low or b"nranks" in low or b" peer ranks" in low:
            self._note_world(line)
        if b" http/1." in low:
            self.access_log = True
        phase = self._phase(line, low)
        kind, rule = self._kind(line, low, phase)
        if kind is Kind.SPEAKS and not phase and glued(line):
            phase = "any"
        return self._keep(shape, Shape(kind, rule, phase, tag is not None))

    def _keep(self, shape: bytes, found: Shape) -> Shape:
        if len(shape) <= _MEMO_LINE:
            if len(self._memo) >= _MEMO:
                self._memo.clear()
            self._memo[shape] = found
        return found

    def _note_world(self, line: bytes) -> None:
        for size, peers in _WORLD.findall(line):
            self.world = max(self.world or 0, int(size) if size else int(peers) + 1)
        if nodes := _NODES.search(line):
            self.nodes = int(nodes[1])

    def _kind(self, line: bytes, low: bytes, phase: str) -> tuple[Kind, Rule | None]:
        if b"accept" in low or b"num_draft" in low:
            if any(mark in line for mark in MARKS) and not self._complains(line, parse(0, line).text):
                return Kind.FIGURES, None
        elif b" throughput: " in low and RATES.search(line):
            return Kind.RATES, None
        moves = self._moves(line, low, phase)
        if not self.rules.gate.any_in(low):
            return moves or Kind.DULL, None
        text = parse(0, line).text
        if rule := self.rules.noise_in(text):
            return Kind.NOISE, rule
        if rule := self.rules.sign_in(text):
            return Kind.SIGN, rule
        return (moves if moves is not None and not self._complains(line, text) else Kind.SPEAKS), None

    def _complains(self, line: bytes, text: str) -> bool:
        """Whether a line that shows work also says, or carries behind its progress bar, something else."""
        return bool(glued(line) or HEADER.search(text) or LOOSE.search(text) or self.rules.classify(text))

    def _moves(self, line: bytes, low: bytes, phase: str) -> Kind | None:
        """MOVES or READY when the line shows work, or a phase that begins or ends."""
        if phase == "any" and self.grammar is not None and (rule := _rule(self.grammar, line)):
            return Kind.READY if rule.phase in ("ready", "serving") and rule.edge == "enter" else Kind.MOVES
        if (b" batch" in low or b'"post /' in low) and _SERVES.search(line):
            self.served = True
            return Kind.MOVES
        return Kind.MOVES if (b"<" in low or b"% completed" in low) and BARS.search(line) else None

    def _phase(self, line: bytes, low: bytes) -> Literal["", "any", "late"]:
        """What the engine's grammar sees in the line."""
        if self.grammar is None or not self._phases.any_in(low):
            return ""
        rule = _rule(self.grammar, line)
        return "" if rule is None else "late" if rule.after else "any"


def _words(grammar: LogGrammar) -> set[str]:
    """A line that matches a rule of the grammar holds one of these: the empty text when it cannot be told."""
    return {word for rule in grammar.rules for word in required(rule.pattern.pattern.decode()) or ("",)}


def _rule(grammar: LogGrammar, line: bytes) -> PhaseRule | None:
    if any(beat.search(line) for beat in grammar.heartbeats):
        return None
    return next((rule for rule in grammar.rules if rule.pattern.search(line)), None)
