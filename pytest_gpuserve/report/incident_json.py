"""incident.json: schema ``gpuserve.incident/1``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import __version__
from ..diagnose.merge import Merged
from ..diagnose.model import ProcessDump
from ..diagnose.phase_frames import places
from .gather import Scene
from .incident_text import Words, sections
from .probe import Probe

SCHEMA = "gpuserve.incident/1"


def head(scene: Scene, began: float) -> dict[str, Any]:
    """What is known before anything is looked at. ``began``: CLOCK_MONOTONIC."""
    record = scene.record
    return {
        "schema": SCHEMA,
        "complete": False,
        "reason": scene.reason,
        "test": scene.test,
        "after": scene.after,
        "time": time.time() - (time.monotonic() - began),
        "engine": record.engine,
        "id": record.spec.id,
        "spec": record.spec.to_json(),
        "argv": list(record.argv),
        "python": record.python,
        "server": str(record.directory),
        "gpuserve": __version__,
        "verdict": "undecided",
        "phase": None,
        "culprits": [],
        "missing": [],
        "ranks": {},
    }


def body(words: Words, probe: Probe | None, test_waits: bool | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """What was found; the verdict's own keys are those of ``gpuserve.verdict/1``."""
    scene, evidence = words.scene, words.evidence
    verdict = words.judgement.to_json()
    del verdict["schema"]
    memory = evidence.memory
    asked = None
    if probe:
        asked = {"answers": probe.answers, "reachable": probe.reachable, "how": probe.how, "front": probe.front}
    return {
        **verdict,
        "kill": words.decision.kill,
        "why": words.decision.why,
        "rounds": len(scene.rounds),
        "ranks": _processes(scene, words.merged),
        "pytest": _process(words.owner) if words.owner else None,
        "probe": asked,
        "test_waits": test_waits,
        "requests": evidence.requests,
        "memory": {name: getattr(memory, name) for name in memory.__slots__} if memory else None,
        "gpus": [g.to_json() for g in scene.gpus],
        "environment": dict(environment),
        "problems": list(words.problems),
        "sections": sections(words),
    }


def _processes(scene: Scene, merged: Merged) -> dict[str, Any]:
    """Every process of the last round by a unique label."""
    labels = {m.process: m.label for m in merged.members}
    where = places(scene.log.phases, {m.label: m.frames for m in merged.members})
    found: dict[str, Any] = {}
    for dump in scene.rounds[-1] if scene.rounds else ():
        label = labels.get(dump.process, dump.label)
        phase, place = scene.log.phases.get(dump.label), where.get(dump.label)
        if phase is not None and place is not None and place.by is not None:  # its stack knows better than the log
            phase = replace(phase, phase=place.phase, done=None, total=None)
        found[label if label not in found else f"{label} (pid {dump.process.pid})"] = {
            **_process(dump),
            "phase": phase.phase if phase else None,
            "done": phase.done if phase else None,
            "total": phase.total if phase else None,
            "last_line": phase.last_line if phase else None,
        }
    return found


def _process(dump: ProcessDump) -> dict[str, Any]:
    leaf = dump.main.frames[0] if dump.main and dump.main.frames else None
    return {
        "pid": dump.process.pid,
        "start": dump.process.start,
        "role": dump.role.role,
        "title": dump.title,
        "state": dump.state,
        "dumper": dump.dumper,
        "problem": dump.problem,
        "leaf": f"{leaf.name} ({leaf.module or leaf.file}:{leaf.line or 0})" if leaf else None,
        "facts": dict(dump.facts),
    }
