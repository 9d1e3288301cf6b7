"""How to start it: one file an engine, found by name. Others register under the entry-point group below."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from ..errors import EngineError
from ..spec import ServerSpec
from ..text import one_line
from .base import Engine, Launch, LogGrammar, PhaseRule, ProcessRole, Rank, ReadyProbe

__all__ = [
    "ENTRY_POINT_GROUP",
    "Engine",
    "Launch",
    "LogGrammar",
    "PhaseRule",
    "ProcessRole",
    "Rank",
    "ReadyProbe",
    "engine_names",
    "get_engine",
    "uses_gpus",
]

ENTRY_POINT_GROUP = "pytest_gpuserve.engines"
"""A distribution adds an engine by an entry point of this group whose object is an :class:`Engine` instance."""

_BUILT_IN = ("sim", "command", "sglang", "vllm", "llama_cpp")


def engine_names() -> tuple[str, ...]:
    """Names of every engine that can be asked for, built in or registered."""
    return (
        *_BUILT_IN,
        *sorted({entry.name for entry in _registered(tuple(sys.path))} - set(_BUILT_IN)),
    )


@lru_cache(maxsize=4)
def _registered(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Looked for once a path: that takes milliseconds, and a dump asks for every process."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def uses_gpus(spec: ServerSpec) -> bool:
    """What the spec says, or else its engine: False where no GPU is to be leased.

    Raises:
        EngineError: there is no such engine.
    """
    return spec.uses_gpus if spec.uses_gpus is not None else bool(getattr(get_engine(spec.engine), "uses_gpus", True))


def get_engine(name: str) -> Engine:
    """The adapter called ``name``.

    Raises:
        EngineError: there is none; the message lists those there are.
    """
    if name in _BUILT_IN:
        return cast(Engine, import_module(f".{name}", __package__).ENGINE)
    for entry in _registered(tuple(sys.path)):
        if entry.name == name:
            return _load(entry)
    raise EngineError(
        f"there is no engine called {name!r}. Known engines: {', '.join(engine_names())}. Change engine= in the "
        f"gpuserve mark, or install the package that provides it (entry-point group {ENTRY_POINT_GROUP!r})."
    )


def _load(entry: EntryPoint) -> Engine:
    """An engine of somebody else's.

    Raises:
        EngineError: it cannot be imported, or is no engine.
    """
    source = f"{entry.value} of {entry.dist.name if entry.dist else 'an unknown distribution'}"
    try:
        found = entry.load()
    except Exception as error:
        raise EngineError(
            f"engine {entry.name!r} ({source}) cannot be imported: {type(error).__name__}: "
            f"{one_line(str(error), 300)}. Mend or uninstall that package, or choose another engine=."
        ) from error
    found = found() if isinstance(found, type) else found
    wanted = (name for name in vars(Engine) if not name.startswith("_"))
    if missing := [name for name in wanted if not hasattr(found, name)]:
        raise EngineError(
            f"engine {entry.name!r} ({source}) has no {', '.join(missing)}, so it is no engine for this version of "
            f"pytest-gpuserve. Update that package (docs/add-an-engine.md), or choose another engine=."
        )
    return cast(Engine, found)
