"""Real engines: each lane runs where an environment variable names an interpreter that has the engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_gpuserve import procfs

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SHM = Path("/dev/shm")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model, made by the interpreter of whichever lane runs."""
    python = os.environ.get("GPUSERVE_REAL_VLLM") or f"{os.environ['GPUSERVE_REAL_SGLANG']}/bin/python"
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([python, str(EXAMPLES / "vllm_cpu" / "make_tiny_model.py"), str(folder)], check=True, timeout=300)
    return folder


@pytest.fixture
def example(
    pytester: pytest.Pytester,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> pytest.Pytester:
    """An empty project with the model in it, a state directory of its own, and one cache for all tests here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))  # pytester has moved HOME
    shutil.copytree(tiny_model, pytester.path / "tiny")
    monkeypatch.setenv("GPUSERVE_STATE", str(pytester.path / "state"))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\naddopts = -p no:randomly -p no:cacheprovider\n")
    return pytester


@pytest.fixture
def nothing_left(example: pytest.Pytester) -> Iterator[None]:
    """After the test: none of the processes is left that a server of it had, and no file in /dev/shm that they held."""
    example.makeconftest(NOTE)
    yield
    for record in (example.path / "state" / "sessions").glob("*/*/server.json"):
        assert procfs.carriers(json.loads(record.read_text())["cookie"]) == [], record
    held = set((example.path / "shm.txt").read_text().split())
    assert len(held) > 2  # the engines do use it
    deadline = time.monotonic() + 30
    while (left := [name for name in held if (SHM / name).exists()]) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []


NOTE = """
import pathlib, re
import pytest
from pytest_gpuserve.server.record import processes

@pytest.fixture(autouse=True)
def note_shared_memory(request):
    if "server" not in request.fixturenames:
        yield
        return
    server = request.getfixturevalue("server")
    names = set()
    for process in processes(server.record):
        text = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
        names.update(re.findall(r"/dev/shm/(\\S+)", text))
    with open("shm.txt", "a") as file:
        file.write("\\n".join(names) + "\\n")
    yield
"""
