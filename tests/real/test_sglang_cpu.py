"""Real SGLang TP=2 on the CPU: the example as it is, then one scheduler stopped. By hand, not in CI: it takes 11 GB.

GPUSERVE_REAL_SGLANG names the virtual environment that examples/sglang_cpu/install.sh made.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

VENV = os.environ.get("GPUSERVE_REAL_SGLANG", "")
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "sglang_cpu" / "test_sglang_cpu.py"
MARK = EXAMPLE.read_text().partition("def test_")[0] if EXAMPLE.exists() else ""

pytestmark = [
    pytest.mark.skipif(not VENV, reason="set GPUSERVE_REAL_SGLANG to a virtual environment that has SGLang"),
    pytest.mark.usefixtures("nothing_left"),
]


@pytest.fixture(autouse=True)
def _venv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_VENV", VENV)


def starts(example: pytest.Pytester) -> list[Path]:
    return sorted((example.path / "state" / "sessions").glob("*/*/server.json"))


def test_the_example(example: pytest.Pytester) -> None:
    shutil.copy(EXAMPLE, example.path)
    result = example.runpytest_subprocess(timeout=900)
    result.assert_outcomes(passed=3)
    assert len(starts(example)) == 1


def test_a_stopped_scheduler_costs_one_test(example: pytest.Pytester) -> None:
    example.makepyfile(
        test_stopped=MARK
        + """
import os, signal

def test_before(server):
    assert complete(server, "2+2=")

@pytest.mark.timeout(30)
def test_rank_1_stops(server):
    os.kill(server.ranks()["TP1"], signal.SIGSTOP)
    complete(server, "2+2=")

@pytest.mark.timeout(120)
def test_next_one_gets_a_fresh_server(server):
    assert complete(server, "2+2=")
"""
    )
    result = example.runpytest_subprocess(timeout=900)
    result.assert_outcomes(passed=2, failed=1)
    assert len(starts(example)) == 2
    (incident,) = [path.parent for path in example.path.glob("gpuserve-artifacts/*/incident.json")]
    found = json.loads((incident / "incident.json").read_text())
    assert found["verdict"] == "hang"
    assert "TP1" in found["culprits"]
    stacks = {path.name.partition(".")[0] for path in incident.glob("stacks/*.json")}
    assert {"TP0", "TP1", "api", "detokenizer"} <= stacks
