"""The examples do what their first lines say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_quickstart(project):
    shutil.copy(EXAMPLES / "quickstart" / "test_quickstart.py", project.path)
    result = project.run("--strict-markers", "-W", "error")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["1 server start for 1 configuration, reused 1 time"])
    project.assert_nothing_left()


def test_hang(project):
    shutil.copy(EXAMPLES / "hang" / "test_hang.py", project.path)
    result = project.run("--strict-markers", "-W", "error")
    result.assert_outcomes(passed=1, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*not ready within its start-up budget of 8 s*TP3*"])
    result.stdout.fnmatch_lines(["the test's timeout of 6 s was reached: sim-tp8 was dumped, then ended.*"])
    assert len(project.incidents()) == 2
    for incident in project.incidents():  # by whatever the machine allows: CI runs this without ptrace too
        told = json.loads((incident / "incident.json").read_text())
        assert told["missing"] == []
        stacks = (incident / "stacks.txt").read_text()
        assert [n for n in range(8) if f"TP{n}" not in told["ranks"] or f"scheduler_TP{n}" not in stacks] == []
    project.assert_nothing_left()
