"""In a container whose PID 1 reaps nobody, what we end stays a zombie: it counts as gone, and nothing waits for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PID1 = """
import subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[1:]])
sys.exit(child.wait())  # for this one alone
"""
ENTER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def test_zombies_that_nobody_reaps_are_gone(programs: Path, state: Path, tagged: Any) -> None:
    """Mutation: a zombie that counts as alive (procfs.Stat.alive): its owner's server is never freed."""
    if subprocess.run([*ENTER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a PID namespace")
    argv = [*ENTER, sys.executable, "-c", PID1, str(programs / "under_pid1.py"), str(state), tagged.tag]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    print(done.stdout, done.stderr)
    assert len(said) == 2, done.stderr
    for after in said:
        assert after["left"] == []
        assert after["alive"] == []
        assert after["zombies"] >= 1  # indeed nobody reaps
        assert after["seconds"] < 12.0
