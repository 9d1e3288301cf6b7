"""Before a running server serves another test: fresh ones, a cap on uses, and one token to show that it still can."""

from __future__ import annotations

import json

HEAD = """
import os, signal
from pytest import mark
pytestmark = mark.gpuserve(engine="sim", tp=1)
def who(server): return server.record.cookie
"""


def starts(project) -> int:
    return len(project.servers())


def test_a_fresh_server_is_nobody_elses(project):
    project.write(
        test_it=HEAD
        + """
seen = []
def test_a(server): seen.append(who(server))
@mark.gpuserve(fresh=True)
def test_b(server, gpuserve_pool):
    assert who(server) not in seen
    seen.append(who(server))
    assert gpuserve_pool.get() is server  # the same test
    other = gpuserve_pool.get(engine="sim", fresh=True)
    assert who(other) not in seen
@mark.gpuserve(fresh=True)
@mark.parametrize("n", range(2))
def test_c(server, n):
    assert who(server) not in seen
    seen.append(who(server))
def test_d(server): assert who(server) == seen[0]
"""
    )
    plan = project.run("--gpuserve=plan")
    plan.stdout.fnmatch_lines(["4 servers to start for 5 tests; 1 start fewer than one a test*"])
    project.run().assert_outcomes(passed=5)
    assert starts(project) == 5  # four by marks, one by hand
    project.assert_nothing_left()


def test_fresh_is_yes_or_no(project):
    project.write(test_it=HEAD + "@mark.gpuserve(fresh=3)\ndef test_a(server): pass\n")
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the gpuserve mark of test_it.py::test_a: fresh must be True or False, not 3.*"])


def test_a_cap_on_uses(project):
    project.write(test_it=HEAD + "@mark.parametrize('n', range(5))\ndef test_a(server, n): pass\n")
    plan = project.run("--gpuserve=plan", "--gpuserve-max-uses=2")
    plan.stdout.fnmatch_lines(["3 servers to start for 5 tests*"])
    result = project.run("--gpuserve-max-uses=2")
    result.assert_outcomes(passed=5)
    assert starts(project) == 3
    result.stdout.fnmatch_lines(["sim-tp1: not used again (2 times): it served 2 tests (--gpuserve-max-uses)"])


def test_a_server_that_wedged_between_two_tests_serves_no_third(project, monkeypatch):
    """The test after it passes on a fresh server, and the wedge is not silent."""
    project.write(
        conftest="""
        from pytest_gpuserve.plugin import fences
        fences.PATIENCE = 2.0
        """,
        test_it=HEAD
        + """
def test_a(server):
    os.kill(server.ranks()["TP0"], signal.SIGSTOP)
    test_a.server = server
def test_b(server):
    assert server is not test_a.server
    assert server.get("/health_generate").status_code == 200
""",
    )
    result = project.run()
    result.assert_outcomes(passed=2)
    assert starts(project) == 2
    result.stdout.fnmatch_lines(["hang: sim-tp1 in test_it.py::test_b (before its reuse): *"])
    incident = json.loads(next(project.path.glob("gpuserve-artifacts/*/incident.json")).read_text())
    assert (incident["verdict"], incident["culprits"]) == ("hang", ["TP0"])
    project.assert_nothing_left()
