"""The fake server of tests/report."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture
def fake_server(tmp_path):
    path = Path(__file__).parents[1] / "report" / "conftest.py"
    spec = importlib.util.spec_from_file_location("report_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = module.Fake(tmp_path / "state" / "server", tmp_path / "artifacts", 2, "no", ())
    yield server
    server.end()
