"""Real engines: each lane runs where an environment variable names an interpreter that has the engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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
def example(pytester: pytest.Pytester, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """An empty project with the model in it, and a state directory of its own."""
    shutil.copytree(tiny_model, pytester.path / "tiny")
    monkeypatch.setenv("GPUSERVE_STATE", str(pytester.path / "state"))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\naddopts = -p no:randomly -p no:cacheprovider\n")
    return pytester


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test: no process of this user's that was not there, no file in /dev/shm that nobody holds."""
    before = set(_shm())
    yield
    deadline = time.monotonic() + 30
    while (left := _orphans(before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []


def _shm() -> list[str]:
    return [entry.name for entry in SHM.iterdir()]


def _orphans(before: set[str]) -> list[str]:
    """New files in /dev/shm that no live process has open or mapped."""
    new = set(_shm()) - before
    for process in Path("/proc").iterdir():
        if not new:
            break
        if process.name.isdigit():
            try:
                held = (process / "maps").read_text(errors="replace")
                held += "\n".join(str(entry.readlink()) for entry in (process / "fd").iterdir())
            except OSError:
                continue
            new = {name for name in new if f"/dev/shm/{name}" not in held}
    return sorted(new)
