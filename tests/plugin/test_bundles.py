"""Where people look for an incident: results.jsonl, junit, pytest-html, GitHub; what others add; what is kept."""

from __future__ import annotations

import html
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.plugin import github
from pytest_gpuserve.report.bundle_check import check
from pytest_gpuserve.report.bundle_reader import open_bundles

SECRET = "hidden-value-4711"

CONFTEST = f"""
from pathlib import Path

def pytest_gpuserve_bundle(incident, add):
    add("../../evil", "text with {SECRET} from the environment\\x1b[2J")
    add("same", "one")
    add("same", b"two")
    add("mounts.txt", Path("/proc/mounts"))
    add("core", b"\\x7fELF\\0\\0")
"""

TESTS = """
import pytest

def ask(server):
    body = {"model": server.model, "prompt": "2+2=", "max_tokens": 4, "temperature": 0}
    return server.post("/v1/completions", json=body).json()["choices"][0]["text"]

def test_before(): pass

@pytest.mark.gpuserve(engine="sim", tp=1)
class TestHealthy:
    def test_one(self, server):
        assert ask(server)

    def test_fails(self, server):
        assert ask(server) == "five"

@pytest.mark.gpuserve(engine="sim", tp=1, startup_timeout=3, args={"fault": "stop@weight_load"})
def test_hang(server):
    ask(server)

def test_after():
    pytest.skip("not today")
"""


@pytest.fixture(scope="module")
def run(new_project: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run under pytest-xdist, as on GitHub, with everything switched on."""
    project = new_project()
    project.write(conftest=CONFTEST, test_it=TESTS)
    for day in range(1, 7):
        old = project.path / "gpuserve-artifacts" / f"2025010{day}T000000-sim-tp1-manual"
        old.mkdir(parents=True)
        (old / ".gpuserve").write_text("gpuserve\n")
        os.utime(old, (1e9, 1e9))
    summary = tmp_path_factory.mktemp("github") / "summary.md"
    github_environment = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "MY_API_KEY": SECRET}
    os.environ.update(github_environment)
    try:
        result = project.run(
            "-n1", "-p", "no:randomly", "--junitxml=junit.xml", "--html=report.html", "--gpuserve-retain=always",
            "--gpuserve-dump-timeout=12", "--gpuserve-keep-incidents=5",
            timeout=200,
        )  # fmt: skip
    finally:
        for name in github_environment:
            del os.environ[name]
    result.assert_outcomes(passed=2, failed=1, errors=1, skipped=1)
    return project, result, summary


def incident_of(project: Any, reason: str) -> Path:
    (found,) = [path for path in project.incidents() if reason in path.name]
    return found


def test_results_are_there_as_the_tests_end(run: Any) -> None:
    project, _, _ = run
    lines = [json.loads(line) for line in (project.path / "gpuserve-artifacts/results.jsonl").read_text().splitlines()]
    ended = {line["nodeid"].partition("::")[2]: line for line in lines if line["outcome"] != "running"}
    assert {name: line["outcome"] for name, line in ended.items()} == {
        "test_before": "passed",
        "TestHealthy::test_one": "passed",
        "TestHealthy::test_fails": "failed",
        "test_hang": "failed",
        "test_after": "skipped",
    }
    assert "five" in ended["TestHealthy::test_fails"]["reason"]
    assert (ended["test_hang"]["verdict"], ended["test_hang"]["phase"]) == ("hang", "weight_load")
    assert ended["test_hang"]["incident"].endswith(incident_of(project, "startup_budget").name)
    assert len({line["session"] for line in lines}) == 1
    assert {line["worker"] for line in lines} == {"gw0"}
    running = [line["nodeid"] for line in lines if line["outcome"] == "running"]
    assert "test_it.py::test_hang" in running


def test_the_incident_has_the_session_so_far(run: Any) -> None:
    project, _, _ = run
    text = (incident_of(project, "startup_budget") / "results.jsonl").read_text()
    last = json.loads(text.splitlines()[-1])
    assert (last["nodeid"], last["outcome"]) == ("test_it.py::test_hang", "running")


def test_what_others_add_is_redacted_and_listed(run: Any) -> None:
    project, result, _ = run
    path = incident_of(project, "startup_budget")
    extra = {file.name: file.read_text() for file in (path / "extra").iterdir()}
    assert set(extra) == {"_.._evil", "same", "2-same", "mounts.txt"} or set(extra) == {
        "_evil",
        "same",
        "2-same",
        "mounts.txt",
    }
    assert (extra["same"], extra["2-same"]) == ("one", "two")
    evil = next(text for name, text in extra.items() if "evil" in name)
    assert SECRET not in evil
    assert "\x1b" not in evil
    (found,) = open_bundles(path)
    assert check(found).whole, list(check(found).lines())
    assert "extra/same" in found.json("bundle.json")["files"]
    result.stdout.fnmatch_lines(["*pytest_gpuserve_bundle, for *: GpuserveError: core cannot be added: it is no text*"])


def test_a_seeded_secret_is_nowhere(run: Any) -> None:
    project, _, summary = run
    for file in [*project.path.rglob("gpuserve-artifacts/**/*"), summary]:
        if file.is_file():
            assert SECRET not in file.read_text(errors="replace"), file


def test_only_so_many_incidents_stay(run: Any) -> None:
    project, _, _ = run
    found = sorted(path.name for path in project.path.glob("gpuserve-artifacts/*") if path.is_dir())
    assert len(found) == 5
    assert "20250106T000000-sim-tp1-manual" in found
    assert "20250101T000000-sim-tp1-manual" not in found


def test_a_healthy_server_leaves_a_bundle_where_all_are_retained(run: Any) -> None:
    project, _, _ = run
    ends = [path for path in project.incidents() if path.name.endswith("-end")]
    assert ends
    for path in ends:
        (found,) = open_bundles(path)
        assert check(found).whole
        assert found.json("incident.json")["verdict"] == "ready"
        assert '"phase":"weight_load"' in (found.text("timeline.jsonl") or "")


def test_junit_and_pytest_html_name_the_bundle(run: Any) -> None:
    project, _, _ = run
    path = incident_of(project, "startup_budget")
    found = {e.get("name"): e.get("value") for e in project.junit()["test_hang"].iter("property")}
    assert found["gpuserve_verdict"] == "hang"
    assert found["gpuserve_phase"] == "weight_load"
    assert Path(found["gpuserve_incident"]) == path
    page = html.unescape((project.path / "report.html").read_text())
    assert path.as_uri() in page
    assert f"gpuserve {path.name}" in page


def test_github_gets_an_annotation_and_a_summary(run: Any) -> None:
    project, result, summary = run
    (line,) = [line for line in result.stdout.lines if line.startswith("::error")]
    assert line.startswith("::error file=test_it.py,title=hang%3A sim-tp1::test_it.py::test_hang: hang in weight_load")
    assert incident_of(project, "startup_budget").name in line
    rows = summary.read_text().splitlines()
    assert rows[0].startswith("### gpuserve")
    assert rows.count(rows[0]) == 1  # xdist's workers have a terminal reporter, too
    assert rows[4].startswith("| hang | sim-tp1 | test_it.py::test_hang | hang in weight_load")


HOSTILE = "x,line=1\r\n::error::owned\n50% <script>|` ##[group]\x1b[2J\u202e"


def test_hostile_text_is_no_command_of_githubs(tmp_path: Path) -> None:
    (tmp_path / "incident.json").write_text(json.dumps({"text": HOSTILE}))
    entry = {"verdict": HOSTILE, "id": HOSTILE, "test": HOSTILE, "incident": str(tmp_path)}
    line = github.annotation(entry)
    assert "\n" not in line
    assert "\r" not in line
    assert line.count("::error ") == 1
    properties = line[len("::error ") :].partition("::")[0]
    assert re.fullmatch(r"file=[^,:]*,title=[^,:]*", properties)
    assert "50%25" in line
    assert "\x1b" not in line
    table = github.summary([entry])
    assert "<script" not in table
    assert len(table.rstrip().splitlines()) == 5


def test_a_killed_pytest_leaves_its_results_and_says_in_which_test(project: Any) -> None:
    project.write(
        test_it=TESTS.replace("def test_after", "def test_stays(): import time; time.sleep(600)\n\ndef test_after")
    )
    process = project.start("-k", "one or stays", "-p", "no:randomly")
    results = project.path / "gpuserve-artifacts" / "results.jsonl"
    project.wait_for(lambda: results.exists() and "test_stays" in results.read_text(), "test in progress")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    last = {line["nodeid"].rpartition("::")[2]: line["outcome"] for line in lines}
    assert last == {"test_one": "passed", "test_stays": "running"}
    project.assert_nothing_left()


@pytest.mark.parametrize("what", ["file", "pipe", "link"])
def test_results_that_cannot_be_written_cost_no_test(project, what):
    """A test that ended before the first server once made an endless loop of it."""
    artifacts = project.path / "gpuserve-artifacts"
    if what == "file":
        artifacts.write_text("")
    else:
        artifacts.mkdir()
        where = artifacts / "results.jsonl"
        os.mkfifo(where) if what == "pipe" else where.symlink_to(project.path / "elsewhere")
    project.write(
        test_it="""
        import pytest

        def test_plain():
            pass

        @pytest.mark.gpuserve(engine="sim", tp=1)
        def test_served(server):
            assert server.get("/health").status_code == 200
        """
    )
    result = project.run("-p", "no:randomly", timeout=60)
    result.assert_outcomes(passed=2)
    told = "cannot be written" if what == "file" else "is not ours and stays as it is: see results-2.jsonl"
    assert f"results.jsonl {told}" in result.stdout.str()
    assert what == "file" or "test_served" in (artifacts / "results-2.jsonl").read_text()
    assert not (project.path / "elsewhere").exists()


def test_a_dead_worker_is_told_where_the_results_had_to_go(project: Any) -> None:
    artifacts = project.path / "gpuserve-artifacts"
    artifacts.mkdir()
    (artifacts / "results.jsonl").write_text('{"theirs": 1}\n')
    project.write(
        test_it="""
        import os, pytest

        @pytest.mark.gpuserve(engine="sim", tp=1)
        def test_dies(server):
            os._exit(1)
        """
    )
    project.run("-n1", "-p", "no:randomly").assert_outcomes(failed=1)
    lines = [json.loads(line) for line in (artifacts / "results-2.jsonl").read_text().splitlines()]
    assert lines[-1]["outcome"] == "failed"
    assert "crashed while running" in lines[-1]["reason"]
    assert (artifacts / "results.jsonl").read_text() == '{"theirs": 1}\n'
