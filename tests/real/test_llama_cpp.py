"""Real llama.cpp: the example as it is, with a cell that cannot load and a server that is stopped.

GPUSERVE_REAL_LLAMA_CPP names an interpreter that has llama-cpp-python[server] and gguf (examples/llama_cpp/README.md).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("GPUSERVE_REAL_LLAMA_CPP", "")
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "llama_cpp"

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="set GPUSERVE_REAL_LLAMA_CPP to an interpreter with llama-cpp-python"
)


@pytest.fixture
def llama(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """The example in a directory of its own, with its model."""
    monkeypatch.setenv("GPUSERVE_STATE", str(pytester.path / "state"))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\naddopts = -p no:randomly -p no:cacheprovider\n")
    subprocess.run(
        [PYTHON, str(EXAMPLE / "make_tiny_gguf.py"), "tiny.gguf"], check=True, cwd=pytester.path, timeout=120
    )
    shutil.copy(EXAMPLE / "test_llama_cpp.py", pytester.path)
    return pytester


def run(llama: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return llama.runpytest_subprocess(f"--gpuserve-python={PYTHON}", *arguments, timeout=300)


def test_the_example(llama: pytest.Pytester) -> None:
    result = run(llama)
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(["*5 server starts for 5 configurations, reused 2 times*"])


def test_a_stopped_server_and_a_model_that_is_none(llama: pytest.Pytester) -> None:
    (llama.path / "broken.gguf").write_bytes(b"GGUF and nothing else")
    head = (EXAMPLE / "test_llama_cpp.py").read_text().partition("def test_")[0]
    (llama.path / "test_llama_cpp.py").unlink()
    llama.makepyfile(
        test_stopped=head
        + """
import os, signal

@pytest.mark.timeout(5)
def test_stops(server):
    os.kill(server.record.root.pid, signal.SIGSTOP)
    complete(server, "2+2=")

def test_next(server):
    assert complete(server, "2+2=")

@pytest.mark.gpuserve(model="./broken.gguf")
def test_broken(server):
    pass
"""
    )
    result = run(llama)
    result.assert_outcomes(passed=1, failed=1, errors=1)
    found = {}
    for path in llama.path.glob("gpuserve-artifacts/*/incident.json"):
        incident = json.loads(path.read_text())
        found[incident["reason"]] = incident
    assert found["test_timeout"]["verdict"] == "hang"
    assert "TP0" in found["test_timeout"]["culprits"]
    assert found["exited"]["verdict"] in ("crash", "config")
