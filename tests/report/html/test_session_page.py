"""The page of a session, and which pages are written when."""

from __future__ import annotations

import json
import os

import pytest

from pytest_gpuserve.cli import main
from pytest_gpuserve.report.html import PageError, refresh, write_incident_page, write_page, write_session_page

HOSTILE = '"><script>alert(1)</script>\u202e\x1b'


def cell(graph, spec, verdict, phase=None, id=None):
    values = {"spec_decode": spec, "cuda_graph": graph}
    return {"id": id or f"sim-{spec}-{graph}", "values": values, "verdict": verdict, "phase": phase}


def matrix(*cells, **more):
    statement = {"kind": "cause", "text": "hang in cuda_graph: fails in 2 of 2 cells with cuda_graph=on: cuda_graph."}
    return {"schema": "gpuserve.matrix/1", "cells": list(cells), "conclusion": [statement], "flaky": [], **more}


@pytest.fixture
def artifacts(scene, tmp_path):
    """Two incidents, an hour apart, and a matrix of four cells."""
    made = tmp_path / "artifacts"
    scene().write(made / "20261129T222908-sim-startup_budget")
    later = scene()
    later.incident |= {"time": later.incident["time"] + 3600, "verdict": "oom", "id": "later"}
    later.write(made / "20261129T232908-sim-exited")
    cells = [
        cell("on", "base", "hang", "cuda_graph"),
        cell("off", "base", "ready"),
        cell("on", "eagle3", "hang", "cuda_graph"),
        cell("off", "eagle3", "ready"),
        cell("off", "eagle3", "oom", "kv_cache"),
    ]
    incidents = {
        "sim-base-on": "20261129T222908-sim-startup_budget",
        "sim-eagle3-on": "../../../etc",
        "sim-eagle3-off": "gone",
    }
    (made / "matrix.json").write_text(json.dumps(matrix(*cells, incidents=incidents)))
    return made


OURS = {"schema": "gpuserve.results/1"}


def hour(path):
    return json.loads((path / "incident.json").read_text())["time"]


def test_cells_stand_in_a_grid_and_lead_to_their_incident(artifacts, read):
    write_incident_page(artifacts / "20261129T222908-sim-startup_budget")
    page = read(write_session_page(artifacts))
    page.assert_harmless()
    grids = page.all("div", class_="grid")
    assert [a["data-column"] for a in grids] == ["cuda_graph", "spec_decode"]
    assert ["later" in a["class"] for a in grids] == [False, True]
    cells = [a["class"].split()[1] for a in page.all("td", class_="cell")]
    assert cells == ["v-hang", "v-pass", "v-hang", "v-flaky", "v-hang", "v-hang", "v-pass", "v-flaky"]
    links = [a["href"] for a in page.all("a") if a.get("aria-label", "").startswith("sim-")]
    assert links == ["20261129T222908-sim-startup_budget/index.html"] * 2  # in both grids; no other has a page
    assert "1/2 oom kv_cache, 1/2 pass" in page.words("matrices")
    assert "fails in 2 of 2 cells" in page.words("matrix0")
    assert "2 hang" in page.words("matrix0")
    assert "1 flaky" in page.words("matrix0")


def test_incidents_of_earlier_sessions_are_told_apart(artifacts, read):
    since = hour(artifacts / "20261129T232908-sim-exited") - 60
    page = read(write_session_page(artifacts, since=since))
    said = page.words("incidents")
    assert said.index("later TP3") < said.index("1 of earlier sessions") < said.index("sglang-tp8 TP3")
    assert "1 incident " in page.words()
    assert page.all("header", class_="v-oom")
    nobody = read(write_session_page(artifacts, since=since + 7200))
    assert "None in this session." in nobody.words("incidents")
    assert "No incidents" in nobody.words()


def test_a_search_is_a_table(artifacts, read):
    write_incident_page(artifacts / "20261129T222908-sim-startup_budget")
    runs = [
        {"number": 2, "stage": "search", "deltas": ["eagle3", "cuda_graph"], "purpose": "search", "outcome": "fail"},
        {"number": 1, "stage": "search", "deltas": [], "purpose": "calibrate", "outcome": "pass", "seconds": 34.2},
    ]
    runs[0] |= {"verdict": "hang", "phase": "cuda_graph", "text": "TP3 waits"}
    runs[0]["incident"] = str(artifacts / "20261129T222908-sim-startup_budget")
    raw = {
        "schema": "gpuserve.isolate/1",
        "command": "python -m x --api-key REDACTED",
        "target": {"verdict": "hang", "phase": "cuda_graph"},
        "runs": runs,
        "result": {"status": "found", "sets": [["eagle3", "cuda_graph"]], "confidence": 0.981, "repro_rate": 1.0},
    }
    (artifacts / "search").mkdir()
    (artifacts / "search" / "isolate.json").write_text(json.dumps(raw))
    page = read(write_session_page(artifacts))
    said = page.words("searches")
    assert "Sought: hang cuda_graph" in said
    assert "fails with eagle3 + cuda_graph" in said
    assert "confidence 98.1%" in said
    assert said.index("base alone calibrate pass 34 s") < said.index("eagle3, cuda_graph search fail hang cuda_graph")
    (link,) = [a["href"] for a in page.all("a") if a.get("aria-label") == "run 2"]
    assert link == "20261129T222908-sim-startup_budget/index.html"
    alone = read(write_page(artifacts / "search"))
    assert "eagle3 + cuda_graph" in alone.words("searches")


def test_results_are_listed_failures_first(artifacts, read):
    lines = [
        {**OURS, "session": "now", "nodeid": f"t.py::test_{n}", "outcome": "failed" if n == 3 else "passed"}
        for n in range(5)
    ]
    begun = [{**line, "outcome": "running"} for line in lines]
    earlier = {**OURS, "session": "before", "nodeid": "t.py::test_earlier", "outcome": "failed"}
    killed = {**OURS, "session": "now", "nodeid": "t.py::test_killed", "outcome": "running"}
    lines = [earlier, *begun, *lines, killed]
    torn = '{"nodeid": "t.py::test_torn", "outc'
    (artifacts / "results.jsonl").write_text("\n".join([*map(json.dumps, lines), torn]))
    page = read(write_session_page(artifacts))
    assert page.words("tests").index("test_3") < page.words("tests").index("test_0")
    assert "test_torn" not in page.words()
    assert "test_earlier" not in page.words()
    assert "did not end t.py::test_killed" in page.words("tests")
    assert "4 passed, 1 failed, 1 did not end" in page.words()


def test_results_that_had_to_give_way_are_read_too(artifacts, read):
    """Where ``results.jsonl`` is somebody else's, ours are beside it; the newest session may be in either."""

    def put(name, time, nodeid, **more):
        line = {**OURS, "time": time, "session": nodeid, "nodeid": nodeid, "outcome": "failed", **more}
        (artifacts / name).write_text(json.dumps(line) + "\n")

    put("results.jsonl", 9, "theirs", schema="else/1")
    put("results-2.jsonl", 1, "second")
    assert "failed second" in read(write_session_page(artifacts)).words("tests")
    put("results-11.jsonl", 2, "eleventh")
    put("results.jsonl", 3, "first")
    said = read(write_session_page(artifacts)).words("tests")
    assert "failed first" in said
    assert not {"second", "eleventh"} & set(said.split())
    put("results-2.jsonl", 4, "second")
    assert "failed second" in read(write_session_page(artifacts)).words("tests")


def test_hostile_names_and_values(artifacts, read):
    raw = matrix(
        *(cell(HOSTILE + str(n), HOSTILE, HOSTILE, HOSTILE, id=HOSTILE + str(n)) for n in range(3)),
        incidents={HOSTILE: HOSTILE},
        flaky=[{"id": HOSTILE, "failed": HOSTILE, "runs": None}],
    )
    raw["conclusion"][0] = {"kind": HOSTILE, "text": HOSTILE}
    (artifacts / "matrix.json").write_text(json.dumps(raw))
    (artifacts / "20261129T222908-sim-startup_budget").rename(artifacts / "javascript:alert(1)")
    (artifacts / "20261129T232908-sim-exited").rename(artifacts / 'a"><b onclick=x>')
    write_incident_page(artifacts / "javascript:alert(1)")
    search = {"command": HOSTILE, "runs": [{"number": HOSTILE, "deltas": [HOSTILE], "outcome": HOSTILE}], "result": []}
    (artifacts / "isolate.json").write_text(json.dumps(search))
    line = {**OURS, "nodeid": HOSTILE, "outcome": HOSTILE, "incident": HOSTILE}
    (artifacts / "results.jsonl").write_text(json.dumps(line))
    page = read(write_session_page(artifacts))
    page.assert_harmless()
    assert "javascript%3Aalert%281%29/index.html" in {a["href"] for a in page.all("a")}
    assert "alert(1)" in page.words("matrices")


def test_pages_that_are_missing_are_written_the_newest_first(artifacts, read):
    old, new = sorted(path for path in artifacts.iterdir() if path.is_dir())
    first = refresh(artifacts, since=0, limit=-1)
    assert (first.pages, first.left, first.problems) == (0, 2, ())
    assert not (new / "index.html").exists()
    second = refresh(artifacts, since=0, limit=60)
    assert (second.page, second.pages, second.left) == (artifacts / "index.html", 2, 0)
    links = [a["href"] for a in read(second.page).all("a") if a["href"].endswith("budget/index.html")]
    assert links
    assert "all incidents" in read(new / "index.html").words()
    stamp = (old / "index.html").stat().st_mtime_ns
    assert refresh(artifacts, since=0, limit=60).pages == 0
    assert (old / "index.html").stat().st_mtime_ns == stamp
    newer = (old / "index.html").stat().st_mtime + 5
    os.utime(old / "incident.json", (newer, newer))  # an incident that was completed since
    assert refresh(artifacts, since=0, limit=60).pages == 1


def test_what_goes_wrong_is_told_and_costs_nothing_else(artifacts):
    (artifacts / "20261129T222908-sim-startup_budget" / "index.html").write_text("mine")
    os.utime(artifacts / "20261129T222908-sim-startup_budget" / "index.html", (1, 1))
    done = refresh(artifacts, since=0, limit=60)
    assert done.pages == 1
    assert len(done.problems) == 1
    assert "not a page of ours" in done.problems[0]
    assert "--gpuserve-artifacts" in done.problems[0]
    assert done.page is not None


def test_tests_that_pass_are_no_news(tmp_path):
    (tmp_path / "results.jsonl").write_text(json.dumps({**OURS, "nodeid": "t.py::test_it", "outcome": "passed"}))
    assert refresh(tmp_path, since=0, limit=60).page is None
    assert "test_it" in write_page(tmp_path).read_text()  # who asks gets it


def test_a_directory_with_nothing_of_ours(tmp_path):
    assert refresh(tmp_path, since=0, limit=60) == (refresh(tmp_path / "gone", since=0, limit=60).__class__)(
        None, 0, 0, ()
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PageError, match="there is nothing to show"):
        write_page(tmp_path)


def test_the_command(artifacts, tmp_path, capsys):
    assert main(["page", str(artifacts)]) == 0
    assert capsys.readouterr().out == f"{artifacts / 'index.html'}\n"
    assert main(["page", str(artifacts / "20261129T222908-sim-startup_budget"), "-o", str(tmp_path / "x.html")]) == 0
    assert "TP3 waits for its GPU" in (tmp_path / "x.html").read_text()
    assert not (artifacts / "20261129T222908-sim-startup_budget" / "index.html").exists()
    assert main(["page", str(tmp_path / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert main(["page", str(artifacts), "-o", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
