"""The wall clock is set, forwards and backwards, while everything runs: no limit of ours may hang on it."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.plugin.option_values import monotonic
from pytest_gpuserve.plugin.options import read_settings
from pytest_gpuserve.plugin.state import State
from pytest_gpuserve.plugin.xdist import Controller

SET = """
import time
_real, _local, _strftime = time.time, time.localtime, time.strftime

def now():
    return _real() + (-90_000, 0, 90_000)[int(time.monotonic() / 0.7) % 3]

def local(seconds=None):
    return _local(now() if seconds is None else seconds)

time.time = now
time.time_ns = lambda: int(now() * 1e9)
time.localtime = local
time.strftime = lambda form, when=None: _strftime(form, local() if when is None else when)
"""
"""A day and an hour to and fro, every 0.7 s, in every Python process that reads PYTHONPATH: all but supervisors."""


def test_a_clock_that_is_set_changes_no_verdict(project, tmp_path_factory, monkeypatch):
    """Mutation: session_deadline by time.time(): "not run", or a start budget of a second."""
    folder = tmp_path_factory.mktemp("clock")
    (folder / "sitecustomize.py").write_text(SET)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    project.write(
        test_it="""
        import time, pytest

        def ask(server):
            body = {"model": server.model, "prompt": "x", "max_tokens": 2}
            server.post("/v1/completions", json=body).raise_for_status()

        @pytest.mark.gpuserve(engine="sim", tp=2)
        def test_answers(server):
            end = time.monotonic() + 3
            while time.monotonic() < end:
                ask(server)

        @pytest.mark.timeout(4)
        @pytest.mark.gpuserve(engine="sim", tp=2, args={"fault": "sleep@serving:rank=1"})
        def test_hangs(server):
            ask(server)
        """
    )
    result = project.run("--gpuserve-session-deadline=600", timeout=240)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*TP1*"])
    (incident,) = project.incidents()
    assert json.loads((incident / "incident.json").read_text())["reason"] == "test_timeout"
    good, _ = project.servers()
    events = project.events(good)
    assert max(abs(b["time"] - a["time"]) for a, b in pairwise(events)) < 300  # the supervisor's are the machine's
    assert [event["event"] for event in events][-1] == "stopped"
    samples = [json.loads(line) for line in (good / "samples.jsonl").read_text().splitlines()]
    times = [entry["t"] for entry in samples if entry["kind"] == "sample"]
    assert len(times) >= 3
    assert max(times) - min(times) > 80_000  # the clock was set indeed, and each sample says what it showed
    project.assert_nothing_left()


def test_a_deadline_stays_where_it_is_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = monotonic(time.time() + 600)
    assert before is not None
    assert abs(before - time.monotonic() - 600) < 60
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 90_000)
    again = monotonic(time.time() + 600)
    assert again is not None
    assert abs(again - before) < 60
    assert monotonic(None) is None


@pytest.mark.parametrize("step", [-90_000, 0, 90_000])
def test_what_came_since_the_session_began_is_its_own_when_the_clock_is_set(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """Else a page calls the incidents of this very session earlier ones."""
    state = State(request.config, read_settings(request.config))
    before = time.time()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step)
    after = time.time()
    assert state.began <= min(before, after)
    assert state.began > min(before, after) - 60


def test_the_incidents_of_a_dead_worker_are_known_by_its_controller_whatever_the_clock_says(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSERVE_STATE", str(tmp_path))
    me = procfs.process_id(os.getpid())
    assert me
    for name, owner in (("ours", [me.pid, me.start]), ("theirs", [me.pid, me.start - 1]), ("nobody's", None)):
        directory = tmp_path / "sessions" / name / "1-sim"
        directory.mkdir(parents=True)
        if owner:
            (directory / "supervisor.json").write_text(json.dumps({"owners": [[1, 1], owner], "grace": 1}))
        entries = [{"test": "test_a.py::test_one", "text": name, "time": 0}, {"test": "test_a.py::test_two"}]
        lines = [json.dumps(entry) for entry in entries]
        (directory / "incidents.jsonl").write_text("\n".join([*lines, "[]", '{"test": "test_a.py::te']))
    controller = Controller(State(request.config, read_settings(request.config)))
    assert [entry["text"] for entry in controller._incidents("test_a.py::test_one")] == ["ours"]
