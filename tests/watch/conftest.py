"""Helpers of this room, as fixtures: there is no package to import them from."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"watch_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def replay() -> ModuleType:
    """Recordings of real servers as samples (replay.py)."""
    return _load("replay")


@pytest.fixture(scope="session")
def scenes() -> ModuleType:
    """scene.py."""
    return _load("scene")


@pytest.fixture
def scene(scenes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A session directory whose watcher and servers are ended after the test."""
    monkeypatch.setenv("GPUSERVE_STATE", str(tmp_path / "state"))
    found = scenes.Scene(tmp_path)
    yield found
    found.close()
