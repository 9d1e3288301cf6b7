"""Two crashes are told apart by what the log says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpuserve.isolation.signature import Signature
from pytest_gpuserve.report.failure import read_incident, signature

LOAD = (
    "[2026-01-01 10:00:00] Load weight begin. avail mem=138.28 GB\n"
    "[2026-01-01 10:00:02] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/x/scheduler.py", line 164, in run_scheduler_process\n    raise\n'
    "RuntimeError: CUDA error: an illegal memory access was encountered\n\n"
)
CAPTURE = (
    "[2026-01-01 10:00:00] Load weight begin. avail mem=138.28 GB\n"
    "[2026-01-01 10:00:02] Load weight end. elapsed=2.00 s, type=LlamaForCausalLM, avail mem=76.58 GB.\n"
    "[2026-01-01 10:00:03] Capture cuda graph begin. This can take up to several minutes. avail mem=76.48 GB\n"
    "Traceback (most recent call last):\n"
    '  File "/x/launch.py", line 10, in main\n    raise\n'
    "RuntimeError: Rank 0 scheduler died during initialization (exit code: 1).\n"
)


@pytest.fixture
def incident(tmp_path: Path):
    def made(log: str, **more: object) -> Path:
        directory = tmp_path / f"server-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        (directory / "server.log").write_text(log)
        content = {"verdict": "crash", "phase": None, "classes": [], "engine": "command", "server": str(directory)}
        (directory / "incident.json").write_text(json.dumps({**content, **more}))
        return directory

    return made


def seen(directory: Path) -> Signature:
    return signature("undecided", read_incident(directory))


def test_crashes_that_differ_in_phase_or_cause_are_not_the_same(incident) -> None:
    one, other = seen(incident(LOAD)), seen(incident(CAPTURE))
    assert (one.verdict, one.phase, one.roots) == ("crash", "weight_load", frozenset({"cuda_fault"}))
    assert (other.verdict, other.phase, other.roots) == ("crash", "cuda_graph", frozenset({"process_died"}))
    assert not one.same(other)
    assert one.same(seen(incident(LOAD)))


def test_what_the_incident_knows_comes_first(incident) -> None:
    assert seen(incident(LOAD, phase="kv_cache")).phase == "kv_cache"
    hang = seen(incident(LOAD, verdict="hang", phase="cuda_graph"))
    assert hang == Signature("hang", "cuda_graph"), "of a hang the ranks tell, not the log"


def test_a_log_that_is_gone_says_nothing(incident, tmp_path: Path) -> None:
    directory = incident(LOAD)
    (directory / "server.log").unlink()
    assert seen(directory) == Signature("crash")
    assert read_incident(tmp_path / "nowhere") is None
    assert signature("oom", None) == Signature("oom")
