"""Helpers of this room, as fixtures: there is no package to import them from."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"diagnose_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def targets() -> ModuleType:
    """Processes to dump, and launchers without rights (targets.py)."""
    return _load("targets")


@pytest.fixture(scope="session")
def dumps() -> ModuleType:
    """Dumps made by hand, and recorded ones (dumps.py)."""
    return _load("dumps")
