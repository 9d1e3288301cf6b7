from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load(name: str) -> ModuleType:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"gpu_tests_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def _fake_library(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, Path]:
    fake = _load("fake")
    directory = tmp_path_factory.mktemp("fakenvml")
    if reason := fake.build(directory):
        pytest.skip(reason)
    return fake, directory


@pytest.fixture
def nvml(_fake_library: tuple[ModuleType, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Eight fake GPUs (sm_120, 97,887 MiB, 3 MiB used) for every process started from now on."""
    fake, directory = _fake_library
    library = fake.FakeNvml(directory, tmp_path / "gpus")
    library.module = fake
    for name, value in library.environment.items():
        monkeypatch.setenv(name, value)
    return library
