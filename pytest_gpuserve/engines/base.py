"""The seam to an inference engine: one small Protocol, which one file an engine implements."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from ..spec import ServerSpec
from ..vocabulary import Phase, RoleName


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server: argv (never a shell line) and what to add to the environment (None removes).

    Attributes:
        key_variable: environment variable in which the engine takes the API key that its clients must send.
        key_config: option that names a YAML file of options, for an engine that takes the key in no other private way.
            With neither, no key is made (server/api_key.py).
    """

    argv: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    key_variable: str | None = None
    key_config: str | None = None


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
    """What one kind of log line says about the phase of the rank that printed it.

    Attributes:
        pattern: searched in one record. Named groups ``done`` and ``total``, where present, are the progress inside the
            phase (shards, captured batch sizes); ``world`` is a rank number for a line that carries no tag.
        phase: the phase that the line enters, leaves or moves on.
        edge: ``enter``; ``leave`` (the phase is over, the next one has not begun); ``progress`` (we are in it).
        again: phase of the second and later ``enter`` on one rank, and another phase that ``leave`` and ``progress``
            may mean (a draft model is loaded by the lines that loaded the target).
        scope: ``rank``: the rank that printed it; ``server``: every rank (lines of the front end).
        leader: only the first rank of a group prints it, so that silence of the others proves nothing.
        after: counts only once this phase has been reached.
    """

    pattern: re.Pattern[bytes]
    phase: Phase
    edge: Literal["enter", "leave", "progress"] = "enter"
    again: Phase | None = None
    scope: Literal["rank", "server"] = "rank"
    leader: bool = False
    after: Phase | None = None


PAGE_ASKED: Final = re.compile(rb'"(?:GET|HEAD|OPTIONS) /')
"""Access line of a page (uvicorn and its like): somebody looks, ourselves included; no rank does anything for it."""


@dataclass(frozen=True, slots=True)
class LogGrammar:
    """How an engine's log is read. A record is a line, or what follows a prefix glued to a progress bar.

    Attributes:
        rank: the prefix that begins a record, found anywhere in a line. Groups, all optional: tp, pp, dp, ep
            (coordinates of the rank), pid, worker (the record is some rank's), world (number in the whole world: a rank
            only until its coordinates are known), core (data-parallel number of an engine core, which is a rank only
            while no worker is known).
        rules: first match wins; the frequent ones (bars) come first for speed.
        heartbeats: records that mean neither progress nor failure (wait loops, health checks).
        clock: the record's own time; groups month, day, h, m, s (seconds may have a fraction) and perhaps year.
        anchors: cheap patterns; a record that matches a rule or a heartbeat is on a line that matches one of them, so
            that other lines need no closer look. Empty: every line gets it.
    """

    rank: re.Pattern[bytes]
    rules: tuple[PhaseRule, ...]
    heartbeats: tuple[re.Pattern[bytes], ...] = ()
    clock: re.Pattern[bytes] | None = None
    anchors: tuple[re.Pattern[bytes], ...] = ()


class Engine(Protocol):
    """An inference engine as the rest of the package sees it. Implementations are stateless and import lazily.

    One whose servers need no GPU says so by an attribute ``uses_gpus = False``: none is then chosen for them.
    ``info_paths``, where it is there, are paths whose GET answers with JSON about the server, also while ranks hang.
    """

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
