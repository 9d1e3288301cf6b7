"""Real vLLM TP=2 on the CPU: the example as it is, then one worker stopped, then one killed.

GPUSERVE_REAL_VLLM names the interpreter that has vLLM; examples/vllm_cpu/install.sh makes one.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

PYTHON = os.environ.get("GPUSERVE_REAL_VLLM", "")
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "vllm_cpu" / "test_vllm_cpu.py"

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="set GPUSERVE_REAL_VLLM to an interpreter that has vLLM's CPU build"),
    pytest.mark.usefixtures("nothing_left"),
]


def run(example: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return example.runpytest_subprocess(f"--gpuserve-python={PYTHON}", "--junitxml=junit.xml", *arguments, timeout=900)


def junit(example: pytest.Pytester) -> dict[str, bool]:
    """Test to whether it passed."""
    cases = ElementTree.parse(example.path / "junit.xml").iter("testcase")
    return {case.get("name", ""): case.find("failure") is None and case.find("error") is None for case in cases}


def starts(example: pytest.Pytester) -> list[Path]:
    return sorted((example.path / "state" / "sessions").glob("*/*/server.json"))


def test_the_example(example: pytest.Pytester) -> None:
    shutil.copy(EXAMPLE, example.path)
    result = run(example)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*1 server start for 1 configuration, reused 2 times*"])
    assert len(starts(example)) == 1


MARK = EXAMPLE.read_text().partition("def test_")[0] if EXAMPLE.exists() else ""


def test_a_stopped_worker_costs_one_test(example: pytest.Pytester) -> None:
    example.makepyfile(
        test_stopped=MARK
        + """
import os, signal

def test_before(server):
    assert complete(server, "2+2=")

@pytest.mark.timeout(20)
def test_worker_1_stops(server):
    os.kill(server.ranks()["TP1"], signal.SIGSTOP)
    complete(server, "2+2=")

@pytest.mark.timeout(60)
def test_next_one_gets_a_fresh_server(server):
    assert complete(server, "2+2=")
"""
    )
    result = run(example)
    result.assert_outcomes(passed=2, failed=1)
    assert len(starts(example)) == 2
    (incident,) = [path.parent for path in example.path.glob("gpuserve-artifacts/*/incident.json")]
    found = json.loads((incident / "incident.json").read_text())
    assert found["verdict"] == "hang"
    assert found["test"] == "test_stopped.py::test_worker_1_stops"
    assert {"TP0", "TP1", "engine_core", "api"} <= {
        path.name.partition(".")[0] for path in incident.glob("stacks/*.json")
    }
    assert "TP1" in found["culprits"]
    assert junit(example) == {
        "test_before": True,
        "test_worker_1_stops": False,
        "test_next_one_gets_a_fresh_server": True,
    }
    result.stdout.fnmatch_lines(["*hang in serving*TP1 is stopped*", "*timeout of 20 s was reached*"])


def test_a_killed_worker_is_a_crash_although_vllm_exits_with_0(example: pytest.Pytester) -> None:
    example.makepyfile(
        test_killed=MARK
        + """
import os, signal, time

@pytest.mark.timeout(120)
def test_worker_1_dies(server):
    os.kill(server.ranks()["TP1"], signal.SIGKILL)
    while True:  # answers 500 for some seconds, then it is gone
        server.post("/v1/completions", json={"model": server.model, "prompt": "2+2="})
        time.sleep(0.2)

def test_next_one_gets_a_fresh_server(server):
    assert complete(server, "2+2=")
"""
    )
    result = run(example)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*ServerExitedError*exited with code 0*"])
    assert len(starts(example)) == 2
