"""A few of the SIGKILLs of pytest of benchmarks/bundle_kills.py, the same ones each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).parents[2] / "benchmarks" / "bundle_kills.py"


@pytest.mark.skipif(not KILLS.exists(), reason="benchmarks/ is not here")
def test_a_pytest_that_is_killed_during_an_incident_leaves_bundles_that_say_what_is_missing() -> None:
    words = ["--kills", "3", "--jobs", "3", "--span", "4", "--seed", "5"]
    done = subprocess.run(
        [sys.executable, str(KILLS), *words], capture_output=True, text=True, timeout=300, check=False
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "3 kills, 0 with a problem" in done.stdout
    assert "missing" in done.stdout or "whole" in done.stdout
