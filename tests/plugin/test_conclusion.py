"""The end of a session with matrices."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpuserve.isolation.conclude import conclude, from_json
from pytest_gpuserve.plugin import conclusion
from pytest_gpuserve.plugin.ledger import Ledger

MODULE = """
from pytest import mark

@mark.gpuserve(engine="sim")
@mark.gpuserve_matrix(axes={"cuda_graph": ["on", "off"], "overlap": ["on", "off"]})
class TestCells:
    def test_first(self, server):
        pass

    def test_second(self, server):
        assert server.spec.axis("cuda_graph").name == "off", "wrong tokens"
"""


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_one_table_and_a_file_to_go_on_from(project: Any, workers: str) -> None:
    project.write(test_it=MODULE)
    result = project.run(workers, "--junitxml=junit.xml")
    result.assert_outcomes(passed=6, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*= gpuserve matrix =*",
            "cuda_graph  overlap=on    overlap=off",
            "on          test serving  test serving",
            "off         pass          pass",
            "* test_second fails: fails in 2 of 2 cells with cuda_graph=on, passes in 2 of 2 with off: *cuda_graph. *",
            "To go on: gpuserve isolate --from gpuserve-artifacts/matrix.json sim-tp1-cuda_graph_on-overlap_on",
        ]
    )
    result.stdout.fnmatch_lines(["page: gpuserve-artifacts/index.html"])
    raw = json.loads((project.path / "gpuserve-artifacts" / "matrix.json").read_text())
    assert raw["incidents"] == {}
    assert conclude(from_json(raw), raw["base"]).to_json()["conclusion"] == raw["conclusion"]
    assert raw["base"] == {"cuda_graph": "on", "overlap": "on"}
    assert raw["specs"]["sim-tp1-cuda_graph_off-overlap_on"]["axes"] == {"cuda_graph": "off", "overlap": "on"}
    assert "gpuserve_matrix_1" in (project.path / "junit.xml").read_text()


# ---- reports, as pytest makes them


def _report(nodeid: str, when: str, outcome: str = "passed", **more: Any) -> Any:
    properties = [(f"gpuserve_{key}", value) for key, value in more.pop("properties", {}).items()]
    skipped = outcome == "skipped"
    return SimpleNamespace(
        nodeid=nodeid, when=when, outcome=outcome, skipped=skipped, user_properties=properties, longrepr="", **more
    )


@pytest.fixture
def session(tmp_path: Any) -> Any:
    config = SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugins=list), invocation_params=SimpleNamespace(dir=tmp_path)
    )
    ledger = Ledger()
    state = SimpleNamespace(
        config=config,
        settings=SimpleNamespace(action="run", artifacts=tmp_path / "a"),
        ledger=ledger,
        troubles=ledger.troubles,
        counted=False,
    )
    found = conclusion.Conclusions(state)  # type: ignore[arg-type]
    cells = {
        f"t::test_{test}[{graph}]": {
            "id": f"sim-{graph}",
            "values": {"cuda_graph": graph},
            "base": graph == "on",
            "spec": json.dumps({"engine": "sim", "env": {"HF_TOKEN": "hf_abcdefghijklmnop"}}),
            "test": f"test_{test}",
        }
        for test in "ab"
        for graph in ("on", "off")
    }
    found.learn(cells)
    return SimpleNamespace(found=found, state=state, artifacts=tmp_path / "a")


def _run(session: Any, nodeid: str, call: str = "passed", **more: Any) -> None:
    for when, outcome in (("setup", "passed"), ("call", call), ("teardown", "passed")):
        session.found.pytest_runtest_logreport(_report(nodeid, when, outcome, **(more if when == "call" else {})))


def _cells(session: Any) -> list[tuple[str, str, str | None]]:
    session.found.pytest_sessionfinish()
    (said, _), *_ = session.found._said
    return [(r.id, r.verdict, r.phase) for r in said.results]


def test_the_worst_test_of_a_cell_counts_and_servers_are_blamed_first(session: Any) -> None:
    _run(session, "t::test_a[on]", "failed")
    _run(session, "t::test_b[on]", "failed", properties={"verdict": "hang", "phase": "cuda_graph"})
    _run(session, "t::test_a[off]")
    _run(session, "t::test_b[off]", "skipped")
    assert _cells(session) == [("sim-on", "hang", "cuda_graph"), ("sim-off", "ready", None)]


def test_reruns_are_runs(session: Any) -> None:
    _run(session, "t::test_a[on]", "rerun")
    _run(session, "t::test_a[on]")
    _run(session, "t::test_a[off]")
    assert _cells(session) == [("sim-on", "test", "serving"), ("sim-on", "ready", None), ("sim-off", "ready", None)]


def test_expected_failures_are_failures_and_unexpected_passes_passes(session: Any) -> None:
    _run(session, "t::test_a[on]", "skipped", wasxfail="known")
    report = _report("t::test_a[off]", "call", "failed")
    report.longrepr = "[XPASS(strict)] known"
    _run(session, "t::test_b[off]")
    session.found.pytest_runtest_logreport(_report("t::test_a[off]", "setup"))
    session.found.pytest_runtest_logreport(report)
    assert _cells(session) == [("sim-on", "test", "serving"), ("sim-off", "ready", None)]


def test_a_failure_that_talks_of_unexpected_passes_is_one(session: Any) -> None:
    """Mutation: ``"XPASS" in str(longrepr)``."""
    report = _report("t::test_a[on]", "call", "failed")
    report.longrepr = "E  AssertionError: no XPASS here: [XPASS(strict)]"
    session.found.pytest_runtest_logreport(_report("t::test_a[on]", "setup"))
    session.found.pytest_runtest_logreport(report)
    assert _cells(session) == [("sim-on", "test", "serving")]


def test_a_dead_worker_says_nothing_of_the_cell(session: Any) -> None:
    session.found.pytest_runtest_logreport(_report("t::test_a[on]", "???", "failed"))
    _run(session, "t::test_a[off]")
    assert _cells(session)[0] == ("sim-on", "infra", None)


def test_secrets_do_not_reach_the_file_and_a_full_disk_is_told(session: Any) -> None:
    _run(session, "t::test_a[on]")
    session.found.pytest_sessionfinish()
    text = (session.artifacts / "matrix.json").read_text()
    assert "HF_TOKEN" in text
    assert "hf_abcdefghijklmnop" not in text
    session.state.settings.artifacts = session.artifacts / "matrix.json" / "below a file"
    session.found.pytest_sessionfinish()
    assert "cannot be written" in session.state.troubles[0]


def test_nothing_is_said_when_nothing_ran(session: Any) -> None:
    _run(session, "t::test_a[on]", "skipped")
    session.found.pytest_sessionfinish()
    assert session.found._said == []
    assert not session.artifacts.exists()


@pytest.mark.parametrize("theirs", ['{"include": [{"os": "linux"}]}\n', None])
def test_a_matrix_of_somebody_else_stays(session: Any, theirs: str | None) -> None:
    session.artifacts.mkdir()
    if theirs is None:
        os.mkfifo(session.artifacts / "matrix.json")
    else:
        (session.artifacts / "matrix.json").write_text(theirs)
    for _ in range(2):  # a later session replaces ours
        session.found._written.clear()
        session.state.troubles.clear()
        _run(session, "t::test_a[on]", "failed")
        _run(session, "t::test_a[off]")
        _cells(session)
        assert session.state.troubles == [
            f"{session.artifacts}/matrix.json is not ours and stays as it is: see matrix-2.json"
        ]
    assert sorted(os.listdir(session.artifacts)) == ["matrix-2.json", "matrix.json"]
    assert json.loads((session.artifacts / "matrix-2.json").read_text())["schema"] == "gpuserve.matrix/1"
    if theirs is None:
        assert (session.artifacts / "matrix.json").is_fifo()
    else:
        assert (session.artifacts / "matrix.json").read_text() == theirs
