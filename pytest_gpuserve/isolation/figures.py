"""What a configuration should reach, and whether it does: accept rate and length, tokens a second, speedup."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import SpecError

NAMES: Final[Mapping[str, str]] = {
    "accept_rate": "accept rate",
    "accept_length": "accept length",
    "tokens_per_s": "tok/s",
    "speedup": "speedup",
}
"""What can be expected: share of the drafted tokens that is accepted; tokens a verification gives (1 when nothing is
accepted); tokens a second; the same as a multiple of the base's, which differs in ``spec_decode`` alone."""

SPECULATIVE: Final = ("accept_rate", "accept_length", "speedup")
"""Those that say nothing of a server without speculation."""

_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_EXPECTED = re.compile(r"\s*(>=|<=|>|<)?\s*(\d+(?:\.\d*)?|\.\d+)\s*x?\s*")


@dataclass(frozen=True, slots=True, order=True)
class Expectation:
    """One entry of ``expect={"accept_rate": ">=0.5"}``."""

    name: str
    op: str
    limit: float

    def met(self, value: float) -> bool:
        return _OPERATORS[self.op](value, self.limit)

    @property
    def asked(self) -> str:
        return f"({self.op} {self.limit:g} asked)"


def parse(raw: object, source: str) -> tuple[Expectation, ...]:
    """From what a mark says: a mapping of a name to ``">=0.5"``, or to a number, which is the least that will do.

    Raises:
        SpecError: it is none, or names something that is not measured.
    """
    if not isinstance(raw, Mapping):
        raise SpecError(f'{source}: expect must be a mapping such as {{"accept_rate": ">=0.5"}}, not {raw!r}.')
    found = []
    for name, wanted in raw.items():
        if name not in NAMES:
            raise SpecError(f"{source}: expect knows no {name!r}. It knows {', '.join(NAMES)}.")
        if wanted is None:
            continue  # a stronger mark takes a weaker one's expectation back
        match = None if isinstance(wanted, bool) else _EXPECTED.fullmatch(str(wanted))
        if match is None:
            raise SpecError(f'{source}: expect {name} cannot be {wanted!r}: write ">=0.5", or a number, the least.')
        found.append(Expectation(str(name), match[1] or ">=", float(match[2])))
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one configuration.

    Attributes:
        id: of its spec. key: of its spec. family: of its spec without ``spec_decode``; equal for what can be compared.
        base: it does not speculate.
        useless: tokens were drafted, and not one was accepted.
    """

    id: str
    key: str
    family: str
    base: bool
    tokens_per_s: float
    accept_rate: float | None = None
    accept_length: float | None = None
    useless: bool = False

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Figures:
        return cls(**{name: raw[name] for name in cls.__slots__})

    def __str__(self) -> str:
        shown = [f"{self.tokens_per_s:.0f} tok/s"]
        shown += [f"accept rate {self.accept_rate:.2f}"] if self.accept_rate is not None else []
        shown += [f"accept length {self.accept_length:.2f}"] if self.accept_length is not None else []
        return ", ".join(shown)


@dataclass(frozen=True, slots=True)
class Judged:
    """What the figures of one configuration say of what was expected.

    Attributes:
        text: every figure that counts, with what was asked: ``accept rate 0.15 (>= 0.5 asked), 0.66x the base …``.
        failed: expectations that are not met (``useless`` when not a token was accepted).
        unknown: expectations of figures that the server does not tell.
        waiting: expectations that need a base configuration, which has not been measured.
    """

    text: str
    failed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()

    @property
    def verdict(self) -> str | None:
        """``degraded``; ``undecided`` where nothing but unknown figures is wrong; None: all is as expected."""
        return "degraded" if self.failed else "undecided" if self.unknown else None


def judge(figures: Figures, expect: Sequence[Expectation], base: Figures | None, *, of_matrix: bool = False) -> Judged:
    """Compare.

    Args:
        base: the configuration to be faster than; None: not measured.
        of_matrix: the test is a cell of a matrix over ``spec_decode``: what its marks expect of speculation is not
            meant for the base cell.
    """
    parts: list[str] = []
    failed: list[str] = []
    unknown: list[str] = []
    waiting: list[str] = []
    for wanted in expect:
        if figures.base and wanted.name in SPECULATIVE and (of_matrix or wanted.name == "speedup"):
            continue
        if wanted.name == "speedup":
            if base is None or base.tokens_per_s <= 0:
                waiting.append("speedup")
                continue
            value: float | None = figures.tokens_per_s / base.tokens_per_s
            parts.append(f"{value:.2f}x the base cell's {base.tokens_per_s:.0f} tok/s {wanted.asked}")
        elif (value := getattr(figures, wanted.name)) is None:
            unknown.append(wanted.name)
            parts.append(f"no {NAMES[wanted.name]}: the server tells none {wanted.asked}")
            continue
        elif wanted.name == "tokens_per_s":
            parts.append(f"{value:.0f} tok/s {wanted.asked}")
        else:
            parts.append(f"{NAMES[wanted.name]} {value:.2f} {wanted.asked}")
        if value is not None and not wanted.met(value):
            failed.append(wanted.name)
    if figures.useless and not figures.base:
        failed.append("useless")
        parts.insert(0, "not one drafted token was accepted")
    told = any(wanted.name == "speedup" for wanted in expect)
    if base is not None and base.tokens_per_s > 0 and not figures.base and not told:
        parts.append(f"{figures.tokens_per_s / base.tokens_per_s:.2f}x the base cell's {base.tokens_per_s:.0f} tok/s")
    return Judged(", ".join(parts), tuple(failed), tuple(unknown), tuple(waiting))


def base_of(figures: Figures, others: Iterable[Figures]) -> Figures | None:
    """The configuration that differs in nothing but that it does not speculate."""
    if figures.base:
        return None
    return next((other for other in others if other.base and other.family == figures.family), None)
