"""A test's timeout T: start-up is not charged, a hung server is ended at T, the message says T, both methods alike."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

DUMP = 6
"""Seconds of dump budget; pytest-timeout itself comes T + twice that for a test that is stuck in its own code."""

HEAD = """
import time, pytest
from pytest import fixture, mark
from pytest_gpuserve.errors import ServerHungError

def ask(server, **options):
    body = {"model": server.model, "prompt": "2+2=", "max_tokens": 4, "temperature": 0}
    return server.post("/v1/completions", json=body, **options).json()["choices"][0]["text"]

def sick(after=0, tp=2, fault="sleep"):
    return mark.gpuserve(engine="sim", tp=tp, args={"fault": f"{fault}@serving:rank=1:requests={after}"})

well = mark.gpuserve(engine="sim", tp=1)
"""

CASES = """
@mark.timeout(2)
@mark.gpuserve(engine="sim", tp=1, args={"load_seconds": 3})
def test_start_up_is_not_charged(server):
    assert ask(server)

@mark.timeout(2)
@sick()
def test_hang(server, record_property):
    record_property("begin", time.monotonic())
    ask(server)

@mark.timeout(2)
@sick(tp=3)
def test_swallows_the_error(server):
    try:
        ask(server)
    except Exception:
        pass

@mark.xfail(raises=ServerHungError, strict=True, reason="it is known to hang")
@mark.timeout(2)
@sick(tp=3)
@mark.gpuserve(env={"AS": "EXPECTED"})
def test_swallows_as_expected(server):
    test_swallows_the_error(server)

@mark.timeout(2)
@sick(tp=3)
@mark.gpuserve(env={"AS": "SKIPPED"})
def test_swallows_and_skips(server):
    test_swallows_the_error(server)
    pytest.skip("it does not answer")

@mark.timeout(2)
@sick(tp=4)
def test_other_client(server):
    from urllib.request import Request, urlopen
    headers = {"Authorization": f"Bearer {server.api_key}"}
    urlopen(Request(server.url + "/v1/completions", b'{"prompt": "x", "max_tokens": 4}', headers)).read()

@mark.timeout(2)
@well
def test_slow_beside_a_healthy_server(server):
    time.sleep(3)

@mark.timeout(2)
@well
def test_the_same_server_again(server, record_property):
    record_property("cookie", server.record.cookie)
    assert ask(server)

@fixture
def slow_teardown(server):
    yield
    ask(server)

@mark.timeout(2)
@sick(tp=5)
def test_fails_then_hangs_in_teardown(server, slow_teardown):
    assert 0

@fixture
def slow_set_up(server):
    time.sleep(2.5)

@mark.timeout(2, func_only=True)
@sick(tp=6)
def test_func_only(server, slow_set_up, record_property):
    record_property("begin", time.monotonic())
    ask(server)

@fixture
def slow_fixture(server):
    time.sleep(2.5)
    yield
    time.sleep(2.5)

@mark.timeout(2, func_only=True)
@well
def test_func_only_leaves_fixtures_alone(slow_fixture, server):
    assert ask(server)

@fixture(scope="module")
def wide(gpuserve_pool):
    return gpuserve_pool.get(engine="sim", tp=7, args={"fault": "sleep@serving:rank=1"})

@well
def test_wide_first(wide, server):
    assert ask(server)

@mark.timeout(2)
@well
def test_wide_hangs(wide, server):
    ask(wide)

@mark.timeout(2)
@well
def test_fires_again_after_a_failure(server):
    assert 0

@well
def test_no_timeout(server):
    time.sleep(0.1)
"""


def properties(case) -> dict[str, str]:
    return {entry.get("name"): entry.get("value") for entry in case.iter("property")}


@pytest.fixture(scope="module")
def shared_project(new_project):
    return new_project()


@pytest.fixture(scope="module")
def result(shared_project):
    """One run with the signal method; the tests below look at parts of it."""
    shared_project.write(test_it=HEAD + CASES)
    result = shared_project.run(
        "--junitxml=junit.xml", f"--gpuserve-dump-timeout={DUMP}", "--gpuserve-grace=2", "-rA", timeout=300
    )
    shared_project.assert_nothing_left()
    return result


@pytest.fixture(scope="module")
def cases(result, shared_project):
    return shared_project.junit()


def section(result: pytest.RunResult, name: str) -> str:
    """The gpuserve section of a failed test's report."""
    text = result.stdout.str()
    report = re.search(rf"^_+ (?:ERROR at teardown of )?{name} _+$(.*?)(?=^_{{5,}}|^={{5,}})", text, re.M | re.S)
    assert report, f"no report of {name}"
    found = re.search(r"^-+ gpuserve -+$(.*)", report[1], re.M | re.S)
    return found[1] if found else ""


def fired(project, spec_id: str) -> tuple[float, float]:
    """(deadline, when it went off) of the test alarm of the only hung server of a spec."""
    for server in project.servers():
        events = project.events(server)
        if server.name.endswith(spec_id) and any(e["event"] == "fired" for e in events):
            moment = next(e["monotonic"] for e in events if e["event"] == "fired")
            armed = [e for e in events if e["event"] == "armed" and e["monotonic"] < moment]
            return armed[-1]["deadline"], moment
    raise AssertionError(f"no alarm of {spec_id} went off")


def test_every_test_is_in_junit_with_the_right_outcome(cases):
    bad = {name for name, case in cases.items() if case.find("failure") is not None or case.find("error") is not None}
    assert bad == {
        "test_hang",
        "test_swallows_the_error",
        "test_swallows_and_skips",
        "test_other_client",
        "test_slow_beside_a_healthy_server",
        "test_fails_then_hangs_in_teardown",
        "test_func_only",
        "test_wide_hangs",
        "test_fires_again_after_a_failure",
    }
    assert len(cases) == 15


def test_the_server_is_ended_at_t(cases, result, shared_project):
    deadline, moment = fired(shared_project, "sim-tp2")
    begin = float(properties(cases["test_hang"])["begin"])
    assert 0.5 < deadline - begin <= 2.0  # set-up counts, a start does not
    assert 0 <= moment - deadline < 1.0
    text = section(result, "test_hang")
    assert text.count("the test's timeout of 2 s was reached: sim-tp2 was dumped, then ended.") == 1
    assert "Timeout (>" not in result.stdout.str().split("test_slow_beside")[0]


def test_properties_name_verdict_and_incident(cases):
    found = properties(cases["test_hang"])
    written = json.loads((Path(found["gpuserve_incident"]) / "incident.json").read_text())
    assert written["kill"]
    assert (found["gpuserve_verdict"], found["gpuserve_phase"]) == (written["verdict"], "serving")
    assert not {name for name in properties(cases["test_the_same_server_again"]) if name.startswith("gpuserve")}


def test_a_swallowed_error_still_fails(cases, result):
    message = cases["test_swallows_the_error"].find("failure").get("message")
    assert "went on to its end, but the test's timeout of 2 s was reached" in message
    assert "sim-tp3 was dumped, then ended" in section(result, "test_swallows_the_error")
    failure = cases["test_swallows_and_skips"].find("failure")
    assert "skipped itself, but the test's timeout of 2 s was reached" in failure.get("message")
    assert failure.get("message").startswith("pytest_gpuserve.errors.ServerHungError: ")
    assert "outcome.py" not in failure.text  # one paragraph, no traceback of ours


def test_a_server_that_was_ended_is_the_failure_that_xfail_expects(cases, result):
    """Under strict xfail it was called an unexpected pass, as if the hang had been mended."""
    skipped = cases["test_swallows_as_expected"].find("skipped")
    assert (skipped.get("type"), skipped.get("message")) == ("pytest.xfail", "it is known to hang")
    assert properties(cases["test_swallows_as_expected"])["gpuserve_verdict"]
    result.assert_outcomes(passed=5, failed=9, errors=1, xfailed=1)


def test_a_client_of_ones_own_gets_the_report_too(result):
    text = section(result, "test_other_client")
    assert "the test's timeout of 2 s was reached: sim-tp4 was dumped, then ended." in text
    assert "TP1" in text


def test_stuck_in_its_own_code_is_no_hang_of_the_server(cases, result, shared_project):
    text = section(result, "test_slow_beside_a_healthy_server")
    assert "the test's timeout of 2 s was reached while sim-tp1 was healthy" in text
    again = properties(cases["test_the_same_server_again"])["cookie"]
    slow = [server for server in shared_project.servers() if (server / "server.json").read_text().count(again)]
    kinds = [event["event"] for event in shared_project.events(slow[0])]
    assert "spared" in kinds
    assert list(shared_project.path.glob("gpuserve-artifacts/*sim-tp1-test_timeout"))


def test_teardown_is_timed_after_a_failure(cases, result, shared_project):
    """pytest-timeout 2.4.0 cancels its timer when a test fails."""
    case = cases["test_fails_then_hangs_in_teardown"]
    assert case.find("failure") is not None
    fired(shared_project, "sim-tp5")


def test_func_only_times_the_call_alone(cases, shared_project):
    deadline, _ = fired(shared_project, "sim-tp6")
    begin = float(properties(cases["test_func_only"])["begin"])
    assert 1.5 < deadline - begin <= 2.0


def test_a_server_of_a_wider_fixture_is_armed_too(result, shared_project):
    fired(shared_project, "sim-tp7")
    assert "sim-tp7 was dumped, then ended" in section(result, "test_wide_hangs")


def test_without_a_timeout_nothing_is_armed(cases, shared_project):
    cookie_free = [
        server
        for server in shared_project.servers()
        if not any(e["event"] == "armed" and e["name"] == "test_timeout" for e in shared_project.events(server))
    ]
    assert all("tp1" in server.name for server in cookie_free)


def test_each_configuration_is_started_again_only_after_a_failure(result):
    result.stdout.fnmatch_lines(["* server starts for 10 configurations, reused * times"])
    result.stdout.fnmatch_lines(["sim-tp2: hung 1 time", "*: sim-tp2 in test_it.py::test_hang (test_timeout): *"])


THREAD = """
@mark.timeout(3)
@sick(after=1)
class TestSick:
    def test_before(self, server):
        assert ask(server)
    def test_hang(self, server):
        ask(server)
    def test_after(self, server):
        assert ask(server)
"""


@pytest.mark.parametrize("arguments", [(), ("-n2",)], ids=["one process", "xdist"])
def test_thread_method_leaves_junit_whole(project, arguments):
    """pytest-timeout's thread method would end the process: the server is ended first."""
    project.write(test_it=HEAD + THREAD)
    result = project.run(
        "--timeout-method=thread",
        "--junitxml=junit.xml",
        f"--gpuserve-dump-timeout={DUMP}",
        "--dist=loadfile",
        *arguments,
    )
    result.assert_outcomes(passed=2, failed=1)
    cases = project.junit()
    assert set(cases) == {"test_before", "test_hang", "test_after"}
    assert {"gpuserve_verdict", "gpuserve_phase", "gpuserve_incident"} <= set(properties(cases["test_hang"]))
    result.stdout.fnmatch_lines(["*the test's timeout of 3 s was reached: sim-tp2 was dumped, then ended.*"])
    project.assert_nothing_left()


def test_thread_method_in_a_stuck_test_leaves_the_dump_in_the_crash_report(project):
    project.write(
        test_it=HEAD
        + """
@mark.timeout(2)
@well
def test_stuck(server):
    time.sleep(60)

def test_other(): pass
"""
    )
    result = project.run("-n1", "--timeout-method=thread", "--gpuserve-dump-timeout=5", "--junitxml=junit.xml")
    result.assert_outcomes(passed=1, failed=1)
    (incident,) = project.incidents()
    text = result.stdout.str()
    assert re.search(r"worker 'gw0' crashed while running 'test_it.py::test_stuck'.*-+ gpuserve -+", text, re.S)
    assert incident.name in text
    assert incident.name in project.junit()["test_stuck"].find("error").get("message")
    project.assert_nothing_left()


def test_the_message_of_a_test_stuck_in_its_own_code_names_its_timeout(project):
    """Mutation: ``Clock.say_what_was_asked`` does nothing: pytest-timeout names the sum of T and what came on top."""
    project.write(test_it=HEAD + "@mark.timeout(1.5)\n@well\ndef test_stuck(server):\n    time.sleep(60)\n")
    result = project.run("--gpuserve-dump-timeout=2")
    result.assert_outcomes(failed=1)
    text = " ".join(result.stdout.str().split())
    assert "Timeout (>1.5s) from pytest-timeout; the test was still running 4 s later" in text
    assert "5.5s" not in text


def test_a_worker_that_died_and_whose_test_is_run_again_has_a_name_in_junit(project):
    """Mutation: ``Controller._name_in_junit`` does nothing: <testcase time="0.000"/>."""
    project.write(
        test_it="""
        import os, pathlib

        def test_dies_once():
            mark = pathlib.Path("died")
            if not mark.exists():
                mark.touch()
                os._exit(1)
        """
    )
    project.run("-n1", "--reruns=1", "--junitxml=junit.xml").assert_outcomes(passed=1)
    cases = list(ET.parse(project.path / "junit.xml").iter("testcase"))
    assert [case.get("name") for case in cases] == ["test_dies_once"] * 2
    assert ["was run again" in ET.tostring(case, "unicode") for case in cases] == [True, False]


def test_each_rerun_has_the_whole_timeout(project):
    """pytest-timeout lets reruns share the timer of the first attempt."""
    project.write(
        test_it=HEAD
        + """
attempts = []

@fixture
def slow():
    yield
    time.sleep(2.5)

@mark.timeout(4)
@well
def test_second_time_lucky(slow, server):
    attempts.append(server.record.cookie)
    time.sleep(2.5)
    assert len(set(attempts)) == 2  # a server that failed a test serves no other
"""
    )
    result = project.run("--reruns", "1", f"--gpuserve-dump-timeout={DUMP}")
    result.assert_outcomes(passed=1)
    assert not project.incidents()
    project.assert_nothing_left()


def test_a_process_that_holds_the_gil_is_no_obstacle(project):
    project.write(
        test_it=HEAD
        + """
import ctypes

@mark.timeout(2)
@well
def test_gil(server, record_property):
    record_property("begin", time.monotonic())
    ctypes.PyDLL(None).usleep(7_000_000)
    record_property("end", time.monotonic())
"""
    )
    result = project.run("--timeout-method=thread", "--gpuserve-dump-timeout=30", "--junitxml=junit.xml")
    result.assert_outcomes(failed=1)
    found = properties(project.junit()["test_gil"])
    deadline, moment = fired(project, "sim-tp1")
    (server,) = project.servers()
    dumped = next(e["monotonic"] for e in project.events(server) if e["event"] == "dumped")
    assert float(found["begin"]) < deadline <= moment < dumped < float(found["end"])
    assert project.incidents()
    project.assert_nothing_left()


def test_a_debugger_stops_the_clock_for_the_session(project):
    """As pytest-timeout does: a person is looking."""
    project.write(
        test_it=HEAD
        + """
@well
@mark.timeout(2)
def test_in_a_debugger(server, pytestconfig):
    pytestconfig.hook.pytest_enter_pdb(config=pytestconfig, pdb=None)
    time.sleep(3)

@well
@mark.timeout(2)
def test_after_it(server):
    time.sleep(3)
"""
    )
    project.run("--gpuserve-dump-timeout=4").assert_outcomes(passed=2)
    assert not project.incidents()


def test_without_pytest_timeout(project):
    project.write(test_it=HEAD + "@well\ndef test_it(server):\n    assert ask(server)\n")
    project.run("-p", "no:timeout", "-v").assert_outcomes(passed=1)
    project.assert_nothing_left()


def test_session_deadline_dumps_and_ends_and_nothing_is_started_after_it(project):
    project.write(
        test_it=HEAD
        + """
@sick()
def test_hang(server):
    ask(server)

@well
def test_after(server):
    pass

def test_plain(): pass
"""
    )
    result = project.run("--gpuserve-session-deadline=6", f"--gpuserve-dump-timeout={DUMP}")
    result.assert_outcomes(failed=1, errors=1, passed=1)
    result.stdout.fnmatch_lines(
        ["the session's deadline (--gpuserve-session-deadline) was reached: sim-tp2 was dumped*"]
    )
    result.stdout.fnmatch_lines(["not run: the session's deadline (--gpuserve-session-deadline) has passed."])
    assert len(project.servers()) == 1
    project.assert_nothing_left()


def test_soft_mode_kills_nothing_and_counts(project):
    project.write(
        test_it=HEAD
        + """
@mark.timeout(2)
@sick()
def test_hang(server):
    with pytest.raises(Exception) as caught:
        ask(server, timeout=4)
    assert server.exit_code() is None
"""
    )
    result = project.run("--gpuserve-mode=soft", f"--gpuserve-dump-timeout={DUMP}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*sim-tp2 was dumped and left alone (*); it would have been ended.*"])
    result.stdout.fnmatch_lines(["soft mode: 1 server would have been killed"])
    (server,) = project.servers()
    assert [e["why"] for e in project.events(server) if e["event"] == "killing"] == ["stop"]
    project.assert_nothing_left()
