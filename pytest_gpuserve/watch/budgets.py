"""How long may nothing move? Windows per phase, learned from healthy runs, and never so long that the engine's own
watchdog destroys the evidence first."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..home import xdg
from ..vocabulary import PHASES, Phase

WINDOWS: Final[Mapping[Phase, float]] = {
    "spawn": 90.0,
    "distributed_init": 60.0,
    "weight_load": 75.0,
    "draft_load": 75.0,
    "kv_cache": 60.0,
    "compile": 90.0,
    "autotune": 75.0,
    "cuda_graph": 75.0,
    "draft_cuda_graph": 75.0,
    "warmup": 75.0,
    "ready": 45.0,
    "serving": 45.0,
    "shutdown": 45.0,
}
"""Seconds without any sign of progress before a server counts as hung. "No sign" is strict: no log line, no bytes read,
no page faults, no memory, no compiler, no token; a slow start shows one of them every few seconds."""

FIRST_REQUEST: Final = 90.0
"""The window while the server has not answered its first request: ready is not warm."""

BUSY: Final = 2.0
"""Factor of the window while ranks use CPU and show no other sign: work in one C call, or a spin; nobody can tell."""

OWN_SHARE: Final = 0.5
"""Share of the engine's own timeout that no window exceeds."""

FACTOR: Final = 3.0
"""A learned window is this many times the longest stillness seen in a healthy run."""

_SCHEMA = "gpuserve.stillness/1"
_KEPT = 400


@dataclass(frozen=True, slots=True)
class Budgets:
    """Windows of one server, in seconds.

    Attributes:
        windows: phase to window, before learning and capping.
        fixed: phases whose window a person set: learning does not change them.
        seen: phase to the longest stillness of earlier healthy runs with the same engine, model and host.
        own_timeout: the engine's own, None when it has none.
    """

    windows: Mapping[Phase, float] = field(default_factory=lambda: dict(WINDOWS))
    first_request: float = FIRST_REQUEST
    busy: float = BUSY
    fixed: frozenset[Phase] = frozenset()
    seen: Mapping[str, float] = field(default_factory=dict)
    own_timeout: float | None = None

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], *, seen: Mapping[str, float] | None = None, own_timeout: float | None = None
    ) -> Budgets:
        """From JSON: ``window`` (all phases), ``phases`` (phase to seconds), ``first_request``, ``busy``.

        Raises:
            ValueError: an unknown key or phase, or a number that is not above 0.
        """
        if unknown := sorted(set(settings) - {"window", "phases", "first_request", "busy"}):
            raise ValueError(f"unknown budget {', '.join(unknown)}: known are window, phases, first_request, busy")
        windows: dict[Phase, float] = dict(WINDOWS)
        fixed: set[Phase] = set()
        if settings.get("window") is not None:
            windows = dict.fromkeys(PHASES, _seconds("window", settings["window"]))
            fixed = set(PHASES)
        for phase, value in (settings.get("phases") or {}).items():
            if phase not in PHASES:
                raise ValueError(f"unknown phase {phase!r} in budgets: known are {', '.join(PHASES)}")
            windows[phase] = _seconds(phase, value)
            fixed.add(phase)
        first = settings.get("first_request")
        if first is None:
            first = max(FIRST_REQUEST, windows["serving"]) if settings.get("window") is None else windows["serving"] * 2
        return cls(
            windows=windows,
            first_request=_seconds("first_request", first),
            busy=max(1.0, _seconds("busy", settings.get("busy") or BUSY)),
            fixed=frozenset(fixed),
            seen=seen or {},
            own_timeout=own_timeout,
        )

    def window(self, phase: Phase | None, *, first_request: bool = False, busy: bool = False) -> float:
        """Seconds without progress, after which the server is hung."""
        name: Phase = phase or "spawn"
        seconds = self.windows.get(name, WINDOWS[name])
        if name not in self.fixed and (seen := self.seen.get(name)):
            seconds = max(seconds / 2, seen * FACTOR)
        if first_request:
            seconds = max(seconds, self.first_request)
        if busy:
            seconds *= self.busy
        return min(seconds, self.cap)

    @property
    def cap(self) -> float:
        """The most that any window may be."""
        return self.own_timeout * OWN_SHARE if self.own_timeout else float("inf")


def _seconds(name: str, value: Any) -> float:
    seconds = float(value)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"budget {name}: {value!r} is no number of seconds above 0")
    return seconds


def cache_directory() -> Path:
    """``$GPUSERVE_CACHE``, else ``$XDG_CACHE_HOME/gpuserve``, else ``~/.cache/gpuserve``; not created here."""
    if given := os.environ.get("GPUSERVE_CACHE"):
        return Path(given)
    return xdg("XDG_CACHE_HOME", "~/.cache") / "gpuserve"


def key(engine: str, model: str | None, tp: int) -> str:
    """What shares its stillness: engine, model, number of ranks, host. A hash, so that no path is left in the cache."""
    return hashlib.sha256(json.dumps([engine, model, tp, socket.gethostname()]).encode()).hexdigest()[:16]


def learned(directory: Path, name: str) -> dict[str, float]:
    """Phase to the longest stillness seen in healthy runs; empty when nothing is known or the file is damaged."""
    entry = _load(directory / "stillness.json").get(name)
    if not isinstance(entry, dict):
        return {}
    return {phase: float(v) for phase, v in entry.items() if phase in PHASES and isinstance(v, (int, float))}


def learn(directory: Path, name: str, stillness: Mapping[str, float]) -> None:
    """Remember a healthy run: the longest stillness of each phase; values decay slowly, so one slow day fades.

    A cache that cannot be written is no error.
    """
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / "stillness.json"
        with open(os.open(directory / "stillness.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = _load(path)
            old = learned(directory, name)
            entries.pop(name, None)
            entries[name] = {
                phase: round(max(stillness.get(phase, 0.0), old.get(phase, 0.0) * 0.9), 2)
                for phase in {*old, *stillness}
            }
            kept = dict(list(entries.items())[-_KEPT:])
            new = path.with_suffix(f".{os.getpid()}.tmp")
            new.write_text(json.dumps({"schema": _SCHEMA, "servers": kept}))
            new.replace(path)


def _load(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    servers = raw.get("servers") if isinstance(raw, dict) and raw.get("schema") == _SCHEMA else None
    return servers if isinstance(servers, dict) else {}
