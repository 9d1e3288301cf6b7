"""The seam to an inference engine: one small Protocol, which one file an engine implements."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..spec import ServerSpec
from ..vocabulary import Phase, RoleName


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server: argv (never a shell line) and what to add to the environment (None removes)."""

    argv: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadyProbe:
    """What must answer before a server is handed to a test.

    Attributes:
        path: URL path that answers 200 when start-up is over.
        generate: body of a one-token completion at ``generate_path``, sent once ``path`` answers; None: none is
            sent. A 200 on /health does not prove that tokens move (SGLang and vLLM answer it while wedged).
    """

    path: str = "/health"
    generate_path: str = "/v1/completions"
    generate: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Coordinates of a rank. ``label`` is how logs, stacks and verdicts name it: ``TP3``, ``DP1 PP0 TP3``."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None

    @property
    def label(self) -> str:
        parts = (("DP", self.dp), ("PP", self.pp), ("TP", self.tp), ("EP", self.ep))
        shown = [f"{name}{n}" for name, n in parts if n is not None and not (name == "EP" and self.tp is not None)]
        return " ".join(shown) or "?"


@dataclass(frozen=True, slots=True)
class ProcessRole:
    """What one process of a server is for, and which rank it is (None for processes that are no rank)."""

    role: RoleName
    rank: Rank | None = None

    @property
    def label(self) -> str:
        return self.rank.label if self.rank else self.role


@dataclass(frozen=True, slots=True)
class PhaseRule:
    """A log line that matches ``pattern`` puts its rank into ``phase`` (enter), or ends it (leave).

    Named groups ``done`` and ``total`` of the pattern, where present, are the progress inside the phase
    (shards, captured batch sizes).
    """

    pattern: re.Pattern[bytes]
    phase: Phase
    edge: Literal["enter", "leave"] = "enter"


@dataclass(frozen=True, slots=True)
class LogGrammar:
    """How an engine's log is read. All patterns are searched in one line without its terminator.

    Attributes:
        rank: finds the rank tag anywhere in a line; groups tp, pp, dp, ep (any subset) are numbers.
        rules: first match wins.
        heartbeats: lines that mean neither progress nor failure (wait loops).
    """

    rank: re.Pattern[bytes]
    rules: tuple[PhaseRule, ...]
    heartbeats: tuple[re.Pattern[bytes], ...] = ()


class Engine(Protocol):
    """An inference engine as the rest of the package sees it. Implementations are stateless and import lazily."""

    @property
    def name(self) -> str: ...

    @property
    def axes(self) -> Mapping[str, Collection[str]]:
        """Axes the engine knows, each with its legal value names (empty: any name)."""

    @property
    def grammar(self) -> LogGrammar: ...

    def launch(self, spec: ServerSpec, *, host: str, port: int, python: str) -> Launch:
        """argv and environment for ``spec``. CUDA_VISIBLE_DEVICES is set by the caller.

        Raises:
            EngineError: the engine is not installed for ``python``, or cannot express the spec.
            SpecError: the spec lacks something the engine needs, such as a model.
        """

    def ready(self, spec: ServerSpec) -> ReadyProbe: ...

    def served_model(self, spec: ServerSpec) -> str:
        """The model name that requests must carry."""

    def process_role(self, cmdline: Sequence[str], comm: str) -> ProcessRole | None:
        """Role of a process from its title; None when it is not one the engine names."""

    def own_timeout(self, launch: Launch) -> float | None:
        """Seconds after which the engine's own watchdog destroys the evidence; None when it has none."""
