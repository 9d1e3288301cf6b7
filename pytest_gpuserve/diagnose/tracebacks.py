"""Python tracebacks in a log that several processes write at once: grouped by process, linked into chains."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from .triage_lines import Line, clock

HEADER: Final = re.compile(r"(?:^|[\s:>])Traceback \(most recent call last\):?")
_FRAME = re.compile(r"""^\s*File ["“](?P<file>[^"”]+)["”], line \d+(?:, in (?P<function>.+))?""")
_RAISED = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:\(\w+\))?|"
    r"(?:[A-Za-z_]\w*\.)+(?:[a-z]*error|timeout))"  # socket.gaierror
    r"(?:: ?(?P<message>.*)|:?\s*)$"
)
LOOSE: Final = re.compile(
    r"(?:^|[\s:>'\"(])"
    r"(?P<type>(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception|Interrupt|Expired|OutOfResources))"
    r"(?:: ?(?P<message>.*)|\s*)$"
)
"""An exception that is named in a line without its traceback."""
_GROUP = re.compile(r"^\s*(?:[|+][-+| \d]*)(?= |$|Exception)")
_DIRECT = "The above exception was the direct cause of the following exception"
_DURING = "During handling of the above exception, another exception occurred"
_PATIENCE = 40
"""Lines of other things between two lines of one traceback that the same process wrote."""
_ABANDONED = 2000
"""Lines after the last one of a traceback by which it was cut off."""
_LINKS = 50
"""Exceptions of one chain that are kept together."""
_LOOKUPS = frozenset(
    {"KeyError", "AttributeError", "IndexError", "StopIteration", "Empty", "Full", "CancelledError", "LookupError"}
)
"""Raised and caught as a matter of course: what was raised while handling them says more."""

Link = Literal["cause", "context", None]


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception: the line that names it, the innermost frame above that line, and what of the lines below it tells
    more than its message does."""

    number: int
    type: str
    message: str
    line: str
    file: str = ""
    function: str = ""
    more: str = ""

    @property
    def name(self) -> str:
        """The bare name of the type, without its module."""
        return self.type.split("(")[0].rpartition(".")[2]

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def all(self) -> str:
        """The text with what more is known of it."""
        return f"{self.text}\n{self.more}" if self.more else self.text

    @property
    def lookup(self) -> bool:
        return self.name in _LOOKUPS


@dataclass(slots=True)
class Chain:
    """Exceptions that Python printed as one, the first raised first.

    Attributes:
        rank, stream: of the process that printed it.
        begin: line number of the first header.
        level: of the record that carries it ("W": the program itself took it for a warning); time: as written there.
        context: what the record says before the traceback.
    """

    rank: str | None
    stream: str
    begin: int
    level: str
    context: str
    time: str | None = None
    raised: list[Raised] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.raised[-1].number if self.raised else self.begin


@dataclass(slots=True)
class _Open:
    chain: Chain
    file: str = ""
    function: str = ""
    frames: int = 0
    foreign: int = 0
    last: int = 0
    own_prefix: bool = False


class Tracebacks:
    """Fed with every line while one is open; complete chains come back as they end."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._closed: dict[str, Chain] = {}
        self._linked: dict[str, Chain] = {}
        self._mute: tuple[str, Chain] | None = None

    @property
    def reading(self) -> bool:
        """Whether a traceback is open, so that the next lines must be seen whatever they say."""
        return bool(self._open) or self._mute is not None

    def feed(self, line: Line) -> tuple[bool, Chain | None]:
        """Take a line. Returns whether it belongs to a traceback, and the chain that it completes or extends."""
        text = _GROUP.sub("", line.text) if line.text.lstrip().startswith(("|", "+")) else line.text
        if header := HEADER.search(text):
            self._begin(line, text[: header.start()].strip(" :>"))
            return True, None
        if text.startswith((_DIRECT, _DURING)):
            if closed := self._closed.get(self._key(line)):
                self._linked[self._key(line)] = closed
            return True, None
        if self._mute is not None and text.strip():
            (stream, chain), self._mute = self._mute, None
            if stream == line.stream:  # a message that begins on the line after its type
                last = chain.raised[-1]
                said = text.strip()
                chain.raised[-1] = replace(last, message=said, line=f"{last.type}: {said}")
                return True, chain
        if not self._open:
            return False, None
        for old in [old for old, found in self._open.items() if line.number - found.last > _ABANDONED]:
            del self._open[old]
        key = self._reader(line, text)
        return self._continue(key, line, text) if key is not None else (False, None)

    def _begin(self, line: Line, context: str) -> None:
        key = line.stream
        chain = self._linked.pop(self._key(line), None)
        if chain is None or len(chain.raised) >= _LINKS:
            chain = Chain(line.rank, key, line.number, line.level, context, clock(line.raw))
        self._open[key] = _Open(chain, last=line.number)

    def _reader(self, line: Line, text: str) -> str | None:
        """The traceback that a line continues: its own process's, or for a bare line the last one without prefixes."""
        if line.stream in self._open:
            return line.stream
        if line.stream:
            return None
        bare = [key for key, found in self._open.items() if not found.own_prefix]
        return bare[-1] if bare else None

    def _continue(self, key: str, line: Line, text: str) -> tuple[bool, Chain | None]:
        found = self._open[key]
        found.own_prefix = found.own_prefix or bool(key and line.stream == key)
        if frame := _FRAME.match(text):
            found.file, found.function = frame["file"], frame["function"] or ""
            found.frames += 1
            found.foreign = 0
            found.last = line.number
            return True, None
        if not text.strip() or text[0] in " \t" or text.lstrip().startswith(("^", "~")):
            return True, None
        raised = _RAISED.match(text)
        if raised and (found.frames or LOOSE.match(text)):
            del self._open[key]
            found.chain.raised.append(
                Raised(line.number, raised["type"], raised["message"] or "", line.text, found.file, found.function)
            )
            self._closed[key] = self._closed[""] = found.chain
            if text.rstrip().endswith(":") and not (raised["message"] or "").strip():
                self._mute = line.stream, found.chain
            return True, found.chain
        found.foreign += 1
        if found.foreign > _PATIENCE:
            del self._open[key]
        return False, None

    def _key(self, line: Line) -> str:
        return line.stream if line.stream in self._closed else ""
