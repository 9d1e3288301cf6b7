"""A log in, the sessions in it out: blocks of whole lines, lines of one shape looked at once, launches told apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from ..engines import engine_names, get_engine
from ..engines.base import LogGrammar
from ..errors import EngineError
from .logfile import Gap
from .outer import strip
from .triage_lines import LONGEST, plain
from .triage_rules import EngineMarks, Rules
from .triage_session import Session
from .triage_shapes import VARYING

_SEARCHED: Final = 4
"""Blocks in which the marks of an engine are looked for."""
_KEPT: Final = 20
"""Earlier launches in one log that are remembered."""


class Reader:
    """Reads one log. ``source`` is its number among those read together; ``engine`` is set when the user named it."""

    def __init__(self, rules: Rules, source: int, engine: str | None = None) -> None:
        self.rules = rules
        self.source = source
        self.sessions: list[Session] = []
        self._forced = engine
        self._blocks = 0
        self._line = 0
        self._start(None)

    @property
    def session(self) -> Session:
        """The launch that is being read: the last one of the log at its end."""
        return self.sessions[-1]

    def read(self, chunks: Iterable[bytes | Gap]) -> None:
        """Read the whole log. Memory does not grow with it, nor with its longest line."""
        for block, whole in _blocks(chunks):
            if isinstance(block, Gap):
                self._line += block.lines
            else:
                self._block(block, whole)
        self.session.finish()
        if self.session.phases:
            self.session.phases.finish(0.0)

    def _start(self, marks: EngineMarks | None) -> None:
        if self.sessions:
            self.session.finish()
            del self.sessions[:-_KEPT]
        self.sessions.append(Session(self.rules, self.source, self._line + 1))
        name = self._forced or (marks.name if marks else None)
        if name is not None:
            self._use(name)

    def _use(self, name: str) -> None:
        marks = next((found for found in self.rules.engines if found.name == name), None)
        self.session.use(name, marks, grammar_of(name))

    def _block(self, block: bytes, whole: bool) -> None:
        self._blocks += 1
        block = self._bare(plain(block).replace(b"\r\n", b"\n"))
        begin = 0
        for at, marks in self._cuts(block):
            self._part(block[begin:at], whole)
            if self.session.steps or self.session.complaints:
                self._start(marks)
            self.session.launched = True
            begin = at
        self._part(block[begin:], whole)

    def _bare(self, block: bytes) -> bytes:
        """Without what other programs put before the lines; of a program that we do not know, as it is."""
        bare = strip(block)
        if bare is block or self.session.engine or self.session.stack:
            return bare
        text = bare.decode("utf-8", "replace")
        known = (*(marks.marks for marks in self.rules.engines), self.rules.stack)
        return bare if any(marks.search(text) for marks in known) else block

    def _cuts(self, block: bytes) -> list[tuple[int, EngineMarks]]:
        """Where a line stands that an engine prints once a launch."""
        found: dict[int, EngineMarks] = {}
        for marks in self.rules.engines:
            for text in marks.launch:
                at = block.find(text)
                while at >= 0:
                    found[block.rfind(b"\n", 0, at) + 1] = marks
                    at = block.find(text, at + 1)
        return sorted(found.items())

    def _part(self, part: bytes, whole: bool) -> None:
        if not part:
            return
        session = self.session
        if self._blocks <= _SEARCHED and not (session.recognised and session.version):
            self._recognise(part)
        lines = part.split(b"\n")
        if not lines[-1]:
            lines.pop()
        shapes = part.translate(None, VARYING).split(b"\n")[: len(lines)]
        dull = session.shapes.dull(lines, shapes)
        loud = [at for at, shape in enumerate(shapes) if shape not in dull] if dull else range(len(lines))
        feed = session.feed
        first, at = self._line + 1, 0
        for stop in (*loud, len(lines)):
            while at < stop and session.inside:  # what says nothing may belong to a traceback
                feed(first + at, lines[at], shapes[at])
                at += 1
            if at < stop:
                session.pass_over(first + at, lines[at:stop])
            at = stop + 1
            if stop == len(lines):
                break
            if b"\r" in lines[stop]:
                session.bars(first + stop, lines[stop])
            else:
                feed(first + stop, lines[stop], shapes[stop])
        number = self._line + len(lines)
        session.flush()
        self._line = number if whole else number - 1

    def _recognise(self, part: bytes) -> None:
        session = self.session
        text = part.decode("utf-8", "replace")
        if session.marks is not None:
            session.recognised = session.recognised or bool(session.marks.marks.search(text))
        elif session.engine is None:
            own = [(set(marks.marks.findall(text)), marks) for marks in self.rules.engines]
            votes = [(len(seen) + len(set(marks.names.findall(text))), marks) for seen, marks in own if seen]
            if votes:
                self._use(max(votes, key=lambda vote: vote[0])[1].name)
                session.recognised = True
        if session.version is None and session.marks is not None:
            for pattern in session.marks.version:
                if match := pattern.search(text):
                    session.version = match[1]
                    break
        if session.engine is None:
            session.stack = session.stack or bool(self.rules.stack.search(text))


def grammar_of(name: str) -> LogGrammar | None:
    """The log grammar of an engine, or None when no adapter of that name is installed."""
    if name not in engine_names():
        return None
    try:
        return get_engine(name).grammar
    except (EngineError, ImportError, AttributeError):
        return None


def _blocks(chunks: Iterable[bytes | Gap]) -> Iterator[tuple[bytes | Gap, bool]]:
    """Blocks of whole lines, as many as fit (True), and parts of a line that goes on (False).

    A long line is cut at its carriage returns, so that progress bars are read however long they grow; of any other
    endless line the first part is read, and nothing more until it ends.
    """
    rest, dropping = b"", False
    for chunk in chunks:
        if isinstance(chunk, Gap):
            if rest:
                yield rest, True
            yield Gap(chunk.lines + (not rest and not dropping)), True  # the line in which it ends is passed over too
            rest, dropping = b"", True
            continue
        begin = 0
        if dropping:
            begin = chunk.find(b"\n") + 1
            if not begin:
                continue
            dropping = False
        data = rest + chunk if rest else chunk[begin:]
        cut = data.rfind(b"\n") + 1
        if cut:
            yield data[:cut], True
        rest = data[cut:]
        if len(rest) > LONGEST and (cut := rest.rfind(b"\r") + 1):
            yield rest[:cut], False
            rest = rest[cut:]
        if len(rest) > LONGEST:
            yield rest[:LONGEST] + b"\n", True
            rest, dropping = b"", True
    if rest:
        yield rest, True
