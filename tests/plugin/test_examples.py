"""The examples do what their first lines say."""

from __future__ import annotations

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
    project.assert_nothing_left()
