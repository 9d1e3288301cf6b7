"""Everything but the stacks: collected side by side, under one limit. What does not come in time is left out."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import gpu, procfs
from ..server.control import Control
from ..server.record import ServerRecord
from . import flight, locks, machine, ras
from .evidence import Progress, Witness
from .merge import Merged, merge
from .model import ProcessDump

RAS_GAP = 2.0
"""Seconds between the two questions to NCCL's RAS: counts that stand still over them are a lag."""


def collect(record: ServerRecord, rounds: Sequence[Sequence[ProcessDump]], *, limit: float = 10.0) -> dict[str, Any]:
    """Fields of :class:`pytest_gpuserve.diagnose.evidence.Evidence` that the machine knows: memory, gpus, gpu_busy,
    shm_free, nccl, locks, witnesses, progress, requests, expected, tp, engine, axes, server_exit. Takes at most
    ``limit`` seconds.

    Use: ``Evidence(reason=..., rounds=rounds, phases=..., **collect(record, rounds))``.
    """
    merged = merge(rounds)
    pids = {m.process.pid: m.label for m in merged.members}
    told = _progress_file(record.directory)
    jobs: dict[str, Callable[[], Any]] = {
        "memory": lambda: machine.memory(list(pids), oom_before=told.get("oom_before")),
        "locks": lambda: locks.locks(merged, limit=limit / 2),
        "gpus": lambda: _gpus(record, limit / 2),
        "ras": lambda: _ras(merged, limit),
        "flight": lambda: _flight(merged, limit / 2),
        "shm_free": machine.shm_free,
    }
    found = _side_by_side(jobs, limit)
    gpus, busy = found.get("gpus") or ((), ())
    environment = next((procfs.environ(m.process.pid) for m in merged.ranks), {})
    exited = Control(record.directory).last("exited")
    return {
        "memory": found.get("memory"),
        "locks": found.get("locks") or (),
        "gpus": gpus,
        "gpu_busy": busy,
        "shm_free": found.get("shm_free"),
        "nccl": machine.nccl_variables(environment),
        "witnesses": (*(found.get("ras") or ()), *(found.get("flight") or ())),
        "progress": progress(told),
        "requests": told.get("requests"),
        "expected": expected(record),
        "tp": record.spec.tp,
        "engine": record.engine,
        "axes": {axis: value.name for axis, value in record.spec.axes},
        "server_exit": exited.data.get("code") if exited else None,
    }


def expected(record: ServerRecord) -> tuple[str, ...]:
    """Labels of the ranks that a server should have; none for one GPU, where engines name no rank."""
    return tuple(f"TP{n}" for n in range(record.spec.tp)) if record.spec.tp > 1 else ()


def progress(told: Mapping[str, Any]) -> Progress | None:
    """What the watcher last wrote (``progress.json``); None when nobody watched, or it is from long ago."""
    if not told or time.monotonic() - float(told.get("monotonic", 0.0)) > 60.0:
        return None
    return Progress(
        state=told.get("state"),
        still=told.get("still"),
        window=told.get("window"),
        last=str(told.get("last") or ""),
        moving=tuple(told.get("moving") or ()),
        history=tuple(told.get("history") or ()),
    )


def _progress_file(directory: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        told = json.loads((directory / "progress.json").read_text())
        if isinstance(told, dict):
            return told
    return {}


def _side_by_side(jobs: Mapping[str, Callable[[], Any]], limit: float) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def run(name: str, job: Callable[[], Any]) -> None:
        with suppress(Exception):  # one witness that fails must not cost the others
            found[name] = job()

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in jobs.items()]
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _gpus(record: ServerRecord, limit: float) -> tuple[tuple[gpu.Gpu, ...], tuple[str, ...]]:
    if not record.gpus:
        return (), ()
    every = gpu.devices(limit)
    mine = gpu.visible(every, ",".join(record.gpus))
    busy: list[str] = []
    if gpu.pids_match():  # in a container the driver's list of processes is empty or somebody else's
        busy = [g.label for g in every if (g.utilisation or 0) >= 90 and g.processes == () and not g.mig]
    return mine, tuple(busy)


def _ras(merged: Merged, limit: float) -> tuple[Witness, ...]:
    labels = {m.process.pid: m.label for m in merged.ranks}
    places = {ras.address(procfs.environ(pid)) for pid in labels}
    for where in sorted(place for place in places if place):
        first = ras.ask(where, limit / 3)
        if first is None:
            continue
        time.sleep(min(RAS_GAP, limit / 4))
        second = ras.ask(where, limit / 3)
        return ras.witnesses(ras.parse(first), ras.parse(second) if second else None, labels)
    return ()


def _flight(merged: Merged, limit: float) -> tuple[Witness, ...]:
    records: dict[str, flight.Flight] = {}
    deadline = time.monotonic() + limit
    for member in merged.ranks:
        if member.group or not member.label.startswith("TP") or member.condition:
            continue
        environment = procfs.environ(member.process.pid)
        raw = flight.dump(environment, int(member.label[2:]), max(0.1, deadline - time.monotonic()))
        if raw is not None:
            with suppress(ValueError):
                records[member.label] = flight.read(raw)
    return flight.witnesses(records)
