"""A few of the random SIGKILLs of benchmarks/chaos.py, the same ones each time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.skipif(not CHAOS.exists(), reason="benchmarks/ is not here")
def test_a_few_kills(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    words = ["--kills", "3", "--seed", "11", "--workers", "2", "--span", "2", "--slack", "10", "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, str(CHAOS), *words], capture_output=True, text=True, timeout=400, check=False
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    found = json.loads(figures.read_text())
    assert sum(found["kills"].values()) == 3
    assert (found["left"], found["decoys_killed"], found["stuck"]) == ([], 0, 0)
    assert found["decoys"] >= 4
