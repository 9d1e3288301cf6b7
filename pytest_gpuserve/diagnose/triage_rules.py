"""What triage knows, as data: ``triage_rules.toml`` beside this file, read once."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from typing import Any, Final, Literal, TypeVar, get_args

from ..vocabulary import Verdict
from .literals import Words, required
from .tracebacks import LOOSE

_Named = TypeVar("_Named", "Rule", "CauseRule")

Depth = Literal["root", "wrapper", "killed", "communication", "native", "peer", "notice", "consequence"]
"""How far a complaint is from its cause: the smaller, the nearer. A peer that lost its connection is a later
complaint than the rank that died; "see root cause above" is the latest."""

_LEVELS: Final = ("error", "critical", "fatal", "exception", "traceback", "interrupt", "]:[e")
"""Of these a line holds one that is an exception, or a record at level ERROR or above."""

DEPTHS: Final[Mapping[str, int]] = {name: n for n, name in enumerate(get_args(Depth))}


@dataclass(frozen=True, slots=True)
class Rule:
    """A named pattern. ``text`` is what to tell a person: why benign, what a sign means, what was replaced.

    ``counts``: a fallback that is enough by itself for the verdict ``degraded``. ``exceptions`` and ``advice``: see the
    head of the section of benign lines in the data file.
    """

    name: str
    pattern: re.Pattern[str]
    text: str = ""
    example: str = ""
    since: str = "any"
    engine: str | None = None
    counts: bool = False
    exceptions: bool = False
    advice: bool = False


@dataclass(frozen=True, slots=True)
class CauseRule:
    """A class of failure. ``anywhere`` and ``fatal``: see the head of the section in the data file."""

    name: str
    verdict: Verdict
    pattern: re.Pattern[str]
    depth: Depth = "root"
    anywhere: bool = False
    fatal: bool = False
    hint: str = ""
    example: str = ""


@dataclass(frozen=True, slots=True)
class EngineMarks:
    """How an engine's log is told from others (``marks``; its ``names`` only decide between engines), and where it
    prints its version."""

    name: str
    marks: re.Pattern[str]
    names: re.Pattern[str]
    version: tuple[re.Pattern[str], ...]
    launch: tuple[bytes, ...]
    every_rank: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """When an exception is about a setting: by its type, and its message or the code that raised it."""

    types: frozenset[str]
    advice_types: frozenset[str]
    advice: re.Pattern[str]
    demands: re.Pattern[str]
    inner: re.Pattern[str]
    frames: re.Pattern[str]
    functions: re.Pattern[str]

    def concerns(self, name: str, message: str, file: str, function: str = "") -> bool:
        """Whether an exception of type ``name``, raised in ``function`` of ``file``, is about an option."""
        if name in self.advice_types:
            if self.advice.search(message):
                return True
            if self.demands.search(message) and not self.inner.search(file):
                return True
        return name in self.types and bool(self.frames.search(file) or self.functions.search(function))


class Rules:
    """All rules, and which of them a line can match at all: most lines hold nothing that any rule needs."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        setting = data["setting"]
        self.engines = tuple(_engine(entry) for entry in data["engine"])
        self.stack = _join(data["stack"]["marks"])
        self.records = _join(data["stack"]["records"])
        self.noise = tuple(_rule(entry) for entry in (*data["heartbeat"], *data["benign"]))
        self._noise_of_exceptions = tuple(rule for rule in self.noise if rule.exceptions)
        self.heartbeats = frozenset(entry["name"] for entry in data["heartbeat"])
        self.signs = tuple(_rule(entry) for entry in data["sign"])
        self.causes = tuple(_cause(entry) for entry in data["cause"])
        self.fallbacks = tuple(_rule(entry) for entry in data["fallback"])
        self.setting = Setting(
            types=frozenset(setting["types"]),
            advice_types=frozenset(setting["advice_types"]),
            advice=_join(setting["advice"], ignore_case=True),
            demands=_join(setting["demands"], ignore_case=True),
            inner=_join(setting["inner"]),
            frames=_join(setting["frames"]),
            functions=_join(setting["functions"]),
        )
        self.last_words = tuple(_rule(entry) for entry in data["last_word"])
        self.speculation: Mapping[str, float] = data["speculation"]
        self._users = _index(data)
        self._words = Words(self._users)
        self.gate = Words(_gate(data))
        """A line outside tracebacks that any rule matches holds one of these, in lower case."""
        self._candidates = lru_cache(maxsize=64)(self._names)
        self.classify = lru_cache(maxsize=1024)(self._classify)
        self.noise_in = lru_cache(maxsize=1024)(self._noise_in)

    def cause(self, name: str) -> CauseRule:
        """The rule of that name; KeyError when there is none."""
        for rule in self.causes:
            if rule.name == name:
                return rule
        raise KeyError(name)

    def _noise_in(self, text: str) -> Rule | None:
        """The heartbeat or benign rule that matches, and nothing in the line is worse."""
        rule = self._first(self._noise_of_exceptions if LOOSE.match(text) else self.noise, text)
        return None if rule is not None and rule.advice and self.classify(text) else rule

    def sign_in(self, text: str) -> Rule | None:
        """The sign of a stall that matches."""
        return self._first(self.signs, text)

    def _classify(self, text: str) -> CauseRule | None:
        """The first cause rule that matches ``Type: message`` or a line."""
        return self._first(self.causes, text)

    def fallbacks_in(self, text: str) -> tuple[Rule, ...]:
        """The fallback rules that match."""
        names = self._candidates(text)
        return tuple(rule for rule in self.fallbacks if rule.name in names and rule.pattern.search(text))

    def _first(self, rules: Sequence[_Named], text: str) -> _Named | None:
        names = self._candidates(text)
        if not names:
            return None
        return next((rule for rule in rules if rule.name in names and rule.pattern.search(text)), None)

    def _names(self, text: str) -> set[str]:
        """Names of the rules that can match."""
        names: set[str] = set()
        for word in self._words.all_in(text.lower()):
            names |= self._users[word]
        return names


@lru_cache(maxsize=1)
def load() -> Rules:
    """The rules of this installation."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return Rules(toml.loads(files(__package__).joinpath("triage_rules.toml").read_text(encoding="utf-8")))


def _needs(data: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """Words of which a line must hold one, each with the names of the rules that can match when it does."""
    users: dict[str, set[str]] = {}
    for entry in entries:
        for pattern in entry["patterns"]:
            texts = required(pattern, data["words"])
            if not texts:
                raise ValueError(f"rule {entry['name']}: every match of {pattern!r} must hold some text of 3 letters")
            for text in texts:
                word = next((word for word in data["words"] if word in text), text)
                users.setdefault(word, set()).add(entry["name"])
    for word in sorted(users, key=len):  # a word that holds another one needs no search of its own
        for longer in [other for other in users if word in other and word != other]:
            users[word] |= users.pop(longer)
    return users


def _index(data: Mapping[str, Any]) -> dict[str, set[str]]:
    return _needs(data, [e for group in ("heartbeat", "benign", "sign", "cause", "fallback") for e in data[group]])


def _gate(data: Mapping[str, Any]) -> set[str]:
    """Causes that count only as an exception or at level ERROR need no words of their own.

    Neither do benign rules: they fold lines that look bad, and the words of ``looks_bad`` are what makes them.
    """
    entries = [entry for group in ("heartbeat", "sign", "fallback") for entry in data[group]]
    entries += [entry for entry in data["cause"] if entry.get("anywhere") or entry.get("fatal")]
    return {*_needs(data, entries), *_LEVELS, *data["looks_bad"]}


def _join(patterns: Sequence[str], *, ignore_case: bool = False) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE if ignore_case else 0)


def _pattern(entry: Mapping[str, Any]) -> re.Pattern[str]:
    return _join(entry["patterns"], ignore_case=entry.get("ignore_case", False))


def _rule(entry: Mapping[str, Any]) -> Rule:
    return Rule(
        name=entry["name"],
        pattern=_pattern(entry),
        text=entry.get("why") or entry["text"],
        example=entry["example"],
        since=entry.get("since", "any"),
        engine=entry.get("engine"),
        counts=entry.get("verdict", False),
        exceptions=entry.get("exceptions", False),
        advice=entry.get("advice", False),
    )


def _cause(entry: Mapping[str, Any]) -> CauseRule:
    return CauseRule(
        name=entry["name"],
        verdict=entry["verdict"],
        pattern=_pattern(entry),
        depth=entry.get("depth", "root"),
        anywhere=entry.get("anywhere", False) or entry.get("fatal", False),
        fatal=entry.get("fatal", False),
        hint=entry.get("hint", ""),
        example=entry["example"],
    )


def _engine(entry: Mapping[str, Any]) -> EngineMarks:
    return EngineMarks(
        name=entry["name"],
        marks=re.compile("|".join(entry["marks"]), re.MULTILINE),
        names=_join(entry["names"]),
        version=tuple(re.compile(pattern) for pattern in entry["version"]),
        launch=tuple(text.encode() for text in entry["launch"]),
        every_rank=entry["every_rank"],
    )
