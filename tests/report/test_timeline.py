"""What happened when: phases of every rank, samples, events, in the order of time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.phases.rank_phase import RankPhase
from pytest_gpuserve.procfs import ProcessId
from pytest_gpuserve.redaction.redact import Redactor
from pytest_gpuserve.report.files import Store
from pytest_gpuserve.report.logs import Log
from pytest_gpuserve.report.timeline import timeline
from pytest_gpuserve.server.control import Event
from pytest_gpuserve.server.record import ServerRecord
from pytest_gpuserve.spec import ServerSpec

LOADING = RankPhase("weight_load", 120.0, 12, 64, history=(("spawn", 100.0, 110.0), ("distributed_init", 110.0, 120.0)))
LOADED = RankPhase(
    "weight_load", 120.0, 64, 64, history=(("spawn", 100.0, 120.0), ("weight_load", 120.0, 154.0)), left=154.0
)


@pytest.fixture
def record(tmp_path: Path) -> ServerRecord:
    return ServerRecord(
        ServerSpec("sglang", tp=2), "sglang", (), "", "127.0.0.1", 1, (), "python", "", ProcessId(1, 1), None, None,
        tmp_path, tmp_path / "server.log", 99.0,
    )  # fmt: skip


def events(*kinds: tuple[str, dict[str, Any]]) -> list[Event]:
    return [Event(kind, 200.0 + n, 1.0 + n, data) for n, (kind, data) in enumerate(kinds)]


def test_phases_of_every_rank_and_the_front_end(record: ServerRecord) -> None:
    log = Log({"TP0": LOADED, "TP1": LOADING}, server=RankPhase("spawn", 100.0))
    found = [line for line in timeline(record, log, [], "no_progress", 300.0) if line["kind"] == "phase"]
    assert [list(line) for line in found] == [["t", "kind", "rank", "phase", "end", "done", "total"]] * len(found)
    told = {(line["rank"], line["phase"]): (line["t"], line["end"], line["done"], line["total"]) for line in found}
    assert told == {
        ("TP0", "spawn"): (100.0, 120.0, None, None),
        ("TP0", "weight_load"): (120.0, 154.0, 64, 64),
        ("TP1", "spawn"): (100.0, 110.0, None, None),
        ("TP1", "distributed_init"): (110.0, 120.0, None, None),
        ("TP1", "weight_load"): (120.0, None, 12, 64),
        ("server", "spawn"): (100.0, None, None, None),
    }


def test_events_and_samples_in_the_order_of_time(record: ServerRecord) -> None:
    (record.directory / "samples.jsonl").write_text(
        '{"t":150,"kind":"sample","state":"moving"}\n'
        '{"t":140,"kind":"event","text":"test x began"}\nnonsense\n[1]\n{"t":1'
    )
    told = events(
        ("started", {"pid": 7}),
        ("armed", {"name": "test_timeout"}),
        ("fired", {"name": "test_timeout"}),
        ("dumped", {"name": "test_timeout", "code": None, "seconds": 24.0}),
        ("killing", {"why": "alarm", "name": "test_timeout"}),
    )
    found = timeline(record, Log(), told, "test_timeout", 202.5)
    assert [line.get("text") or line["state"] for line in found] == [
        "launched",
        "test x began",
        "moving",
        "started (pid 7)",
        "the alarm test_timeout went off",
        "incident: test_timeout",
        "the dump of test_timeout was cut off at its limit after 24.0 s",
        "being ended: the alarm test_timeout",
    ]
    assert [line["t"] for line in found] == sorted(line["t"] for line in found)


def test_a_flood_of_events_keeps_the_first_and_the_last(record: ServerRecord) -> None:
    told = events(("started", {"pid": 7}), *([("fired", {"name": "manual"})] * 5000), ("stopped", {}))
    found = timeline(record, Log(), told, "manual", 0.0)
    assert len(found) < 600
    assert {"started (pid 7)", "nothing of it is left"} <= {line.get("text") for line in found}


def test_it_is_redacted_while_it_is_written(record: ServerRecord, tmp_path: Path) -> None:
    record = replace(record, started=50.0)
    lines = timeline(
        record, Log({"hunter2-secret": LOADING}), events(("failed", {"error": "no hunter2-secret"})), "x", 1.0
    )
    Store(tmp_path, Redactor(["hunter2-secret"]), 0o644).write_lines("timeline.jsonl", lines)
    text = (tmp_path / "timeline.jsonl").read_text()
    assert "hunter2" not in text
    assert "secret-1" in text
    assert len([json.loads(line) for line in text.splitlines()]) == len(lines)
