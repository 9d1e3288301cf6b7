"""Stand-in installs: a package whose ``--help`` prints what a real version printed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def installs() -> ModuleType:
    """The helper module beside this file."""
    spec = importlib.util.spec_from_file_location("gpuserve_test_installs", Path(__file__).with_name("installs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests that only want a command line."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _private_cache(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))


@pytest.fixture(scope="session")
def sglang_of(installs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """SGLang of a version, made once."""
    return cache(lambda version: installs.sglang(tmp_path_factory.mktemp("sglang"), version))


@pytest.fixture(scope="session")
def vllm_of(installs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """vLLM of a version, made once."""
    return cache(lambda version: installs.vllm(tmp_path_factory.mktemp("vllm"), version))
