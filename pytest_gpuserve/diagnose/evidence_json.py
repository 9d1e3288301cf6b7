"""Evidence as JSON, so that another machine, or a later version, can judge it again: ``gpuserve.evidence/1``.

The stacks are not in it: an incident keeps them in a file a process, which parse.py reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, Final, TypeVar

from ..engines.base import ProcessRole
from ..gpu import Gpu
from ..phases.rank_phase import RankPhase
from ..vocabulary import PHASES, VERDICTS
from .evidence import Departure, Evidence, LockFact, LogFact, Memory, Progress, Witness
from .model import ProcessDump
from .roles import rank_in

SCHEMA: Final = "gpuserve.evidence/1"

T = TypeVar("T")

_PLAIN: Final = (
    "reason", "after", "expected", "exits", "server_exit", "engine", "axes", "tp", "gpu_busy", "shm_free", "nccl",
    "answers", "ready", "front", "requests", "test", "flood", "foreign",
)  # fmt: skip


def to_json(evidence: Evidence) -> dict[str, Any]:
    """Everything but the stacks; ``labels`` keeps what each process of them was known to be."""
    labels = {str(dump.process.pid): dump.label for dumps in evidence.rounds for dump in dumps if dump.role.rank}
    return {
        "schema": SCHEMA,
        **{name: getattr(evidence, name) for name in _PLAIN},
        "labels": labels,
        "phases": {label: asdict(phase) for label, phase in evidence.phases.items()},
        "departures": [asdict(entry) for entry in evidence.departures],
        "log": [asdict(fact) for fact in evidence.log],
        "memory": asdict(evidence.memory) if evidence.memory else None,
        "gpus": [gpu.to_json() for gpu in evidence.gpus],
        "locks": [asdict(lock) for lock in evidence.locks],
        "witnesses": [asdict(witness) for witness in evidence.witnesses],
        "progress": asdict(evidence.progress) if evidence.progress else None,
    }


def from_json(raw: Mapping[str, Any], rounds: Sequence[Sequence[ProcessDump]] = ()) -> Evidence:
    """The evidence, with the stacks of :func:`pytest_gpuserve.diagnose.parse.as_rounds`.

    Raises:
        ValueError: it is no such object, or holds what cannot be.
    """
    if raw.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {raw.get('schema')!r}, not {SCHEMA}")
    try:
        plain = {name: raw[name] for name in _PLAIN if name in raw}
        plain["expected"], plain["gpu_busy"] = tuple(map(str, raw["expected"])), tuple(map(str, raw["gpu_busy"]))
        labels = {int(pid): str(label) for pid, label in raw["labels"].items()}
        evidence = Evidence(
            **plain,
            rounds=[[_named(dump, labels) for dump in dumps] for dumps in rounds],
            phases={str(label): _phase(phase) for label, phase in raw["phases"].items()},
            departures=_all(lambda entry: _one(Departure, entry), raw.get("departures", ())),
            log=_all(_log_fact, raw["log"]),
            memory=_one(Memory, raw["memory"], killed=tuple) if raw["memory"] else None,
            gpus=_all(Gpu.from_json, raw["gpus"]),
            locks=_all(lambda entry: _one(LockFact, entry, waiters=tuple), raw["locks"]),
            witnesses=_all(lambda entry: _one(Witness, entry, ranks=tuple), raw["witnesses"]),
            progress=_one(Progress, raw["progress"], moving=tuple, history=tuple) if raw["progress"] else None,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no evidence of ours: {type(error).__name__}: {error}") from None
    return evidence


def _all(make: Callable[[Any], T], raw: Sequence[Any]) -> tuple[T, ...]:
    return tuple(make(entry) for entry in raw)


def _one(kind: type[T], raw: Mapping[str, Any], **convert: Callable[[Any], Any]) -> T:
    """A dataclass from what ``asdict`` made of it; keys of later versions are passed over."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: convert[key](value) if key in convert else value for key, value in raw.items() if key in known})


def _phase(raw: Mapping[str, Any]) -> RankPhase:
    phase = _one(RankPhase, raw, history=lambda entries: tuple((n, float(a), float(b)) for n, a, b in entries))
    if phase.phase not in PHASES:
        raise TypeError(f"there is no phase {phase.phase!r}")
    return replace(phase, since=float(phase.since))


def _log_fact(raw: Mapping[str, Any]) -> LogFact:
    fact = _one(LogFact, raw, silent=tuple)
    if fact.verdict is not None and fact.verdict not in VERDICTS:
        raise TypeError(f"there is no verdict {fact.verdict!r}")
    return fact


def _named(dump: ProcessDump, labels: Mapping[int, str]) -> ProcessDump:
    """With the rank that the log told when its title did not yet."""
    label = labels.get(dump.process.pid)
    rank = rank_in(label) if label and dump.role.rank is None else None
    return replace(dump, role=ProcessRole(dump.role.role, rank)) if rank else dump
