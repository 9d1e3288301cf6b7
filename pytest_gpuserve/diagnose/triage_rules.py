"""What triage knows, as data: ``triage_rules.toml`` beside this file, read once."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from typing import Any, Final, Literal, get_args

from ..vocabulary import Verdict

Depth = Literal["root", "wrapper", "killed", "communication", "native", "peer", "notice", "consequence"]
"""How far a complaint is from its cause: the smaller, the nearer. A peer that lost its connection is a later
complaint than the rank that died; "see root cause above" is the latest."""

DEPTHS: Final[Mapping[str, int]] = {name: n for n, name in enumerate(get_args(Depth))}


@dataclass(frozen=True, slots=True)
class Rule:
    """A named pattern. ``text`` is what to tell a person: why benign, what a sign means, what was replaced."""

    name: str
    pattern: re.Pattern[str]
    text: str = ""
    example: str = ""
    since: str = "any"
    engine: str | None = None
    counts: bool = False
    """A fallback: enough by itself for the verdict ``degraded``."""


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
    """How an engine's log is told from others, and where it prints its version."""

    name: str
    marks: re.Pattern[str]
    version: tuple[re.Pattern[str], ...]
    launch: re.Pattern[str]
    every_rank: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """When an exception is about a setting: by its type, and its message or the file that raised it."""

    types: frozenset[str]
    advice_types: frozenset[str]
    advice: re.Pattern[str]
    demands: re.Pattern[str]
    inner: re.Pattern[str]
    frames: re.Pattern[str]

    def concerns(self, name: str, message: str, file: str) -> bool:
        """Whether an exception of type ``name``, raised in ``file``, is about an option."""
        if name in self.advice_types:
            if self.advice.search(message):
                return True
            if self.demands.search(message) and not self.inner.search(file):
                return True
        return name in self.types and bool(self.frames.search(file))


@dataclass(frozen=True, slots=True)
class Rules:
    words: tuple[bytes, ...]
    engines: tuple[EngineMarks, ...]
    stack: re.Pattern[str]
    benign: tuple[Rule, ...]
    heartbeats: tuple[Rule, ...]
    signs: tuple[Rule, ...]
    causes: tuple[CauseRule, ...]
    fallbacks: tuple[Rule, ...]
    setting: Setting
    speculation: Mapping[str, float] = field(default_factory=dict)

    def cause(self, name: str) -> CauseRule:
        """The rule of that name; KeyError when there is none."""
        for rule in self.causes:
            if rule.name == name:
                return rule
        raise KeyError(name)

    def classify(self, text: str) -> CauseRule | None:
        """The first cause rule that matches ``Type: message`` or a line."""
        return next((rule for rule in self.causes if rule.pattern.search(text)), None)


@lru_cache(maxsize=1)
def load() -> Rules:
    """The rules of this installation."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    data = toml.loads(files(__package__).joinpath("triage_rules.toml").read_text(encoding="utf-8"))
    setting = data["setting"]
    return Rules(
        words=tuple(word.encode() for word in data["words"]),
        engines=tuple(_engine(entry) for entry in data["engine"]),
        stack=_join(data["stack"]["marks"]),
        benign=tuple(_rule(entry) for entry in data["benign"]),
        heartbeats=tuple(_rule(entry) for entry in data["heartbeat"]),
        signs=tuple(_rule(entry) for entry in data["sign"]),
        causes=tuple(_cause(entry) for entry in data["cause"]),
        fallbacks=tuple(_rule(entry) for entry in data["fallback"]),
        setting=Setting(
            types=frozenset(setting["types"]),
            advice_types=frozenset(setting["advice_types"]),
            advice=_join(setting["advice"], ignore_case=True),
            demands=_join(setting["demands"], ignore_case=True),
            inner=_join(setting["inner"]),
            frames=_join(setting["frames"]),
        ),
        speculation=data["speculation"],
    )


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
        version=tuple(re.compile(pattern) for pattern in entry["version"]),
        launch=re.compile(entry["launch"]),
        every_rank=entry["every_rank"],
    )
