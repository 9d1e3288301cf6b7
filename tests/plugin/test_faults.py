"""The main job: a TP=8 server with one sick rank costs one failed test and leaves every rank's stack on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

KINDS = ("sleep", "gil", "spin", "flock", "stop", "die")

MODULE = """
import pytest
from pytest import mark

def ask(server):
    body = {"model": server.model, "prompt": "2+2=", "max_tokens": 4, "temperature": 0}
    return server.post("/v1/completions", json=body).json()["choices"][0]["text"]

def well(server):
    assert ask(server)

"""

START_UP = """
@mark.gpuserve(engine="sim", tp=8, startup_timeout=BUDGET, args={"fault": "KIND@cuda_graph:rank=3"})
def test_KIND(server):
    well(server)
"""

SERVING = """
@mark.gpuserve(engine="sim", tp=8, args={"fault": "KIND@serving:rank=3:requests=1"})
@mark.timeout(TIMEOUT)
class TestKIND:
    def test_before(self, server): well(server)
    def test_KIND(self, server): well(server)
    def test_after(self, server): well(server)
"""

HEALTHY = """
@mark.gpuserve(engine="sim", tp=2)
def test_healthy(server):
    well(server)
"""

BUDGET = 20
"""Seconds of start-up in which the ranks of five servers have to come as far as their fault, whatever else runs."""

TIMEOUT = 8
"""Seconds of a test whose server hangs; those before and after it need far less."""

NEVER = 120
"""Seconds of a limit that a server which dies is not to reach."""

ARGUMENTS = ("--junitxml=junit.xml", "--gpuserve-dump-timeout=60", "--gpuserve-grace=3")
TOGETHER = ("-n5", "--dist=loadfile")
"""The time of these runs is spent waiting, so all that hang do so at once."""


def run(project, template: str, *arguments: str, kinds: tuple[str, ...] = KINDS) -> pytest.RunResult:
    files = {}
    for kind in kinds:
        text = template.replace("KIND", kind)
        for word, limit in (("BUDGET", BUDGET), ("TIMEOUT", TIMEOUT)):
            text = text.replace(word, str(NEVER if kind == "die" else limit))
        files[f"test_file_{kind}"] = MODULE + text
    project.write(**files, test_file_healthy=MODULE + HEALTHY)
    result = project.run(*ARGUMENTS, *arguments, timeout=300)
    project.assert_nothing_left()
    return result


BLAMED = {"sleep": "TP3", "gil": "TP3", "stop": "TP3", "flock": "TP4"}
"""Whose fault it is, told in any time; TP4 holds the lock that TP3 waits for. One that spins may be slow."""


def properties(case: Any) -> dict[str, str]:
    return {entry.get("name"): entry.get("value") for entry in case.iter("property")}


def check_incident(case: Any, kind: str, phase: str) -> dict[str, Any]:
    """Dumps of eight ranks and the front end are on disk, and rank 3 is the one that differs."""
    found = properties(case)
    where = Path(found["gpuserve_incident"])
    incident = json.loads((where / "incident.json").read_text())
    assert found["gpuserve_phase"] == incident["phase"] == phase
    labels = set(incident["ranks"])
    assert {f"TP{n}" for n in range(8)} <= labels | set(incident["missing"])
    assert "api" in labels
    if kind != "die":
        assert {f"TP{n}" for n in range(8)} <= labels
        dumped = {path.name.partition(".")[0] for path in (where / "stacks").glob("*.json")}
        assert {f"TP{n}" for n in range(8)} | {"api"} <= dumped
    apart = [entry for entry in incident["classes"] if "TP3" in entry["ranks"]]
    assert [entry["ranks"] for entry in apart] == [["TP3"]], incident["text"]
    assert "TP3" in incident["text"]
    if kind in BLAMED:
        assert (incident["verdict"], incident["culprits"]) == ("hang", [BLAMED[kind]]), incident["text"]
    return incident


@pytest.fixture(scope="module")
def start_ups(new_project):
    """One run with a start-up hang of every kind."""
    project = new_project()
    return run(project, START_UP, *TOGETHER), project.junit()


def check_crash(case: Any) -> None:
    """No budget ran out: it exited, and an incident says how."""
    found = properties(case)
    assert found["gpuserve_verdict"] == "crash"
    incident = json.loads((Path(found["gpuserve_incident"]) / "incident.json").read_text())
    assert incident["reason"] == "exited"
    assert incident["complete"]


class TestStartUp:
    def test_one_error_a_fault_and_the_rest_passes(self, start_ups):
        result, cases = start_ups
        result.assert_outcomes(errors=len(KINDS), passed=1)
        assert set(cases) == {f"test_{kind}" for kind in KINDS} | {"test_healthy"}

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "die"])
    def test_every_rank_is_on_disk_and_rank_3_is_named(self, start_ups, kind):
        _, cases = start_ups
        check_incident(cases[f"test_{kind}"], kind, "cuda_graph")
        assert "TP3" in cases[f"test_{kind}"].find("error").get("message")

    def test_a_dead_rank_is_a_crash_at_once(self, start_ups):
        _, cases = start_ups
        check_crash(cases["test_die"])
        assert "exit code" in cases["test_die"].find("error").text or "killed" in cases["test_die"].find("error").text

    def test_no_traceback_of_ours(self, start_ups):
        result, _ = start_ups
        text = result.stdout.str()
        assert "pytest_gpuserve/plugin" not in text
        assert "pytest_gpuserve/server" not in text


@pytest.fixture(scope="module")
def servings(new_project):
    """One run with a hang of every kind while serving."""
    project = new_project()
    return run(project, SERVING, *TOGETHER), project.junit(), project


class TestServing:
    def test_one_failure_a_fault_and_the_rest_passes(self, servings):
        result, cases, _ = servings
        bad = {
            name for name, case in cases.items() if case.find("failure") is not None or case.find("error") is not None
        }
        assert bad == {f"test_{kind}" for kind in KINDS}
        result.assert_outcomes(failed=len(KINDS), passed=2 * len(KINDS) + 1)

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "die"])
    def test_every_rank_is_on_disk_and_rank_3_is_named(self, servings, kind):
        _, cases, _ = servings
        incident = check_incident(cases[f"test_{kind}"], kind, "serving")
        assert incident["reason"] == "test_timeout"
        assert incident["test"].endswith(f"::test_{kind}")

    def test_the_next_test_gets_a_fresh_server(self, servings):
        _, _, project = servings
        assert len(project.servers()) == 2 * len(KINDS) + 1

    def test_a_dead_rank_is_no_hang(self, servings):
        result, cases, _ = servings
        check_crash(cases["test_die"])
        result.stdout.fnmatch_lines(["sim-tp8 was killed by SIGKILL (signal 9), not by us."])


ALWAYS = """
@mark.gpuserve(engine="sim", tp=8, args={"fault": "KIND@serving:rank=3"})
@mark.timeout(3)
def test_KIND(server): well(server)
"""


@pytest.mark.parametrize(
    "arguments",
    [("-n2",), ("--reruns", "1"), ("-n2", "--reruns", "1", "--timeout-method=thread")],
    ids=lambda arguments: " ".join(arguments),
)
def test_with_xdist_and_reruns(project, arguments):
    result = run(project, ALWAYS, *arguments, kinds=("sleep",))
    attempts = 2 if "--reruns" in arguments else 1
    assert result.parseoutcomes() == {"passed": 1, "failed": 1, **({"rerun": 1} if attempts == 2 else {})}
    cases = project.junit()
    assert set(cases) == {"test_sleep", "test_healthy"}
    check_incident(cases["test_sleep"], "sleep", "serving")
    reasons = [json.loads((where / "incident.json").read_text())["reason"] for where in project.incidents()]
    assert reasons == ["test_timeout"] * attempts  # each attempt had its clock
    result.stdout.fnmatch_lines([f"{attempts + 1} server starts for 2 configurations, reused 0 times"])


def test_a_second_hang_skips_the_rest_with_the_reason(project):
    project.write(
        test_it=MODULE
        + """
@mark.gpuserve(engine="sim", tp=2, args={"fault": "sleep@serving:rank=1"})
@mark.timeout(2)
@mark.parametrize("n", range(4))
def test_hang(server, n):
    well(server)
"""
        + HEALTHY
    )
    result = project.run(*ARGUMENTS, "-rs")
    result.assert_outcomes(failed=2, skipped=2, passed=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED *test_it.py*: sim-tp2 failed 2 times and is not started again: it hung in test_it.py::test_hang?1?*"]
    )
    project.assert_nothing_left()


def test_a_second_start_failure_skips_the_rest_with_the_reason(project):
    project.write(
        test_it=MODULE
        + """
@mark.gpuserve(engine="command", command=["false", "{port}"])
@mark.parametrize("n", range(4))
def test_it(server, n):
    well(server)
"""
        + HEALTHY
    )
    result = project.run(*ARGUMENTS, "-rs")
    result.assert_outcomes(errors=2, skipped=2, passed=1)
    result.stdout.fnmatch_lines(["SKIPPED *: command-tp1-* failed 2 times and is not started again: it did not start*"])
    project.assert_nothing_left()
