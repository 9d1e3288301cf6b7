"""What an isolation has found so far, on disk after every run: killed at any moment, it goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import GpuserveError
from ..isolation.search import Outcome
from ..isolation.signature import Signature, outcome
from ..redaction.redact import Redactor
from ..report.files import Store
from ..server.greedy import Greedy
from ..shape import NUMBER, OBJECT, Maybe, checked, read
from ..text import one_line

SCHEMA = "gpuserve.isolate/1"
NAME = "isolate.json"


_RUN = {
    **dict.fromkeys(("stage", "purpose", "verdict"), str),
    **dict.fromkeys(("phase", "text", "incident", "log"), str | None),
    "number": int,
    "deltas": [str],
    "outcome": ("fail", "pass", "unresolved"),
    "roots": [str],
    "seconds": NUMBER,
}
_SHAPE = {
    "schema": (SCHEMA,),
    "fingerprint": str,
    "command": str,
    "target": Maybe(OBJECT),
    "base": Maybe([OBJECT]),
    "runs": [_RUN],
    "result": Maybe(OBJECT),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One launch.

    Attributes:
        stage: ``search``, ``refine NAME`` or ``remedy NAME``.
        deltas: names of what was on.
        purpose: why it was asked for.
        text: what happened, escaped and redacted.
    """

    number: int
    stage: str
    deltas: tuple[str, ...]
    purpose: str
    outcome: Outcome
    verdict: str
    phase: str | None
    roots: tuple[str, ...]
    seconds: float
    text: str = ""
    incident: str | None = None
    log: str | None = None

    @property
    def signature(self) -> Signature:
        return Signature(self.verdict, self.phase, frozenset(self.roots))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Run:
        """Raises ValueError for what was not made of a run."""
        checked(raw, _RUN)
        values: dict[str, Any] = {name: raw.get(name) for name in cls.__slots__}
        values |= {"deltas": tuple(raw["deltas"]), "roots": tuple(raw["roots"]), "text": raw.get("text") or ""}
        return cls(**values)


@dataclass(slots=True)
class State:
    """One isolation.

    Attributes:
        target: the failure that is sought, of the first launch of the whole command that failed.
        base: completions at temperature 0 of the first launch of the base alone that passed, with which those of every
            other launch are compared; empty: the base does not repeat itself, so nothing is. None: not known yet.
    """

    directory: Path
    fingerprint: str
    command: str
    redactor: Redactor
    runs: list[Run] = field(default_factory=list)
    target: Signature | None = None
    base: tuple[Greedy, ...] | None = None
    result: dict[str, Any] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seconds(self) -> float:
        """Spent on launches, those before an interruption included."""
        return sum(run.seconds for run in self.runs)

    def launches(self, stage: str, names: Sequence[str]) -> dict[frozenset[int], list[Outcome]]:
        """Outcomes of a stage by set of deltas, in order: what :func:`isolation.replay.replay` takes.

        Raises:
            GpuserveError: the file speaks of deltas that there are not.
        """
        position = {name: n for n, name in enumerate(names)}
        found: dict[frozenset[int], list[Outcome]] = {}
        for run in self.runs:
            if run.stage == stage:
                if strange := set(run.deltas) - position.keys():
                    raise GpuserveError(
                        f"{self.directory / NAME} cannot be read: run {run.number} is about "
                        f"{one_line(min(strange), 80)}, which this command has not. Begin anew with --fresh."
                    )
                found.setdefault(frozenset(position[name] for name in run.deltas), []).append(run.outcome)
        return found

    def add(self, run: Run) -> None:
        """Keep a run; it is on disk when this returns."""
        with self._lock:
            self.runs.append(run)
            self.save()

    def seek(self, target: Signature) -> None:
        """The failure that is sought is known now: read what was launched before in its light."""
        self.target = target
        self.runs = [replace(run, outcome=outcome(run.signature, target)) for run in self.runs]

    def save(self) -> None:
        """Write the file, whole or not at all, flushed to the disk.

        Raises:
            GpuserveError: it cannot be written.
        """
        content = {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "command": self.command,
            "target": self.target.to_json() if self.target else None,
            "base": None if self.base is None else [one.to_json() for one in self.base],
            "runs": [asdict(run) for run in self.runs],
            "result": self.result,
        }
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            Store(self.directory, self.redactor, 0o644).write_json(NAME, content)
        except OSError as error:
            raise GpuserveError(
                f"{self.directory / NAME} cannot be written: {error.strerror}. Choose another place with --output."
            ) from error


def fingerprint(*parts: object) -> str:
    """Tells one isolation from another: everything that decides what is launched and how it is checked."""
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()[:16]


def open_state(directory: Path, mark: str, command: str, redactor: Redactor, *, fresh: bool) -> State:
    """The state in ``directory``: read back, or new.

    Raises:
        GpuserveError: it is of another command, or cannot be read.
    """
    state = State(directory, mark, command, redactor)
    path = directory / NAME
    if fresh or not path.exists():
        return state
    try:
        raw = read(path, _SHAPE)
        if raw["fingerprint"] != mark:
            raise GpuserveError(
                f"{path} is about another command ({raw['command']}) or another check. Give this one a directory of "
                f"its own with --output, or begin anew with --fresh."
            )
        state.runs = [Run.from_json(run) for run in raw["runs"]]
        state.target = Signature.from_json(raw["target"]) if raw.get("target") else None
        state.base = None if raw.get("base") is None else tuple(map(Greedy.from_json, raw["base"]))
        state.result = raw.get("result")
    except (OSError, ValueError) as error:
        raise GpuserveError(f"{path} cannot be read: {one_line(str(error), 300)}. Begin anew with --fresh.") from error
    return state


def lock(path: Path, taken: str, advice: str = "") -> int:
    """Keep others out while this process lives; ``taken`` is what they are told.

    Raises:
        GpuserveError: another one holds it, or it cannot be made.
    """
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise GpuserveError(f"{taken}.{advice}") from None
    except OSError as error:
        raise GpuserveError(f"{path.parent} cannot be written: {error.strerror}.{advice}") from error
    return held
