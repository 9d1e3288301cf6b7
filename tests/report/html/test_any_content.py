"""Whatever stands in the files, there is a page, it is small and it is harmless."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gpuserve.report.html import PageError, axis, wording, write_incident_page, write_session_page
from pytest_gpuserve.report.html.tree import runs

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
names = st.sampled_from(["t", "kind", "rank", "phase", "end", "cpu", "gpus", "still", "text", "TP0", "ranks", "path"])
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | st.text(max_size=8), inner, max_size=6),
    max_leaves=12,
)


def shaped(*keys):
    """Objects that have some of our keys, with whatever values."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(keys, anything))


incidents = shaped(
    *("verdict", "culprits", "missing", "time", "classes", "ranks", "gpus", "facts", "ruled_out", "confidence", "argv"),
    *("environment", "memory", "problems", "text", "reason", "spec", "kill", "why", "seconds", "engine", "schema"),
)
classes = shaped("role", "group", "ranks", "kind", "path", "signature", "moving")
moments = st.integers(-10, 10**10) | st.floats(-1e20, 1e20)
lines = st.fixed_dictionaries(
    {"t": moments, "kind": st.sampled_from(["phase", "sample", "event", "?"])},
    optional=dict.fromkeys(("rank", "phase", "end", "cpu", "gpus", "rss", "still", "state", "text", "done"), anything),
)
calm = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


def check(read, path):
    assert path.stat().st_size < 3_000_000
    read(path).assert_harmless()


@calm
@given(incident=incidents, found=st.lists(classes, max_size=6), timeline=st.lists(lines, max_size=12), log=st.text())
def test_any_incident(read, incident, found, timeline, log):
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "incident.json").write_text(json.dumps({**incident, **({"classes": found} if found else {})}))
        (directory / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timeline))
        (directory / "log_tail.txt").write_bytes(log.encode(errors="surrogatepass"))
        (directory / "stacks").mkdir()
        (directory / "stacks" / "TP0.1.json").write_text(json.dumps(incident))
        check(read, write_incident_page(directory))


cells = st.fixed_dictionaries(
    {"id": st.text(max_size=9)}, optional=dict.fromkeys(("values", "verdict", "phase"), anything)
)


@calm
@given(
    matrix=shaped("conclusion", "flaky", "incidents", "axes"),
    found=st.lists(cells | anything, max_size=6),
    search=shaped("command", "target", "runs", "result"),
    results=st.lists(anything, max_size=5),
)
def test_any_session(read, matrix, found, search, results):
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "matrix.json").write_text(json.dumps({**matrix, "cells": found}))
        (directory / "isolate.json").write_text(json.dumps(search))
        lines = ['{"schema": "gpuserve.results/1"}', *map(json.dumps, results)]  # the first says that it is ours
        (directory / "results.jsonl").write_text("".join(f"{line}\n" for line in lines))
        try:
            check(read, write_session_page(directory))
        except PageError as error:
            if "nothing to show" not in str(error):
                raise


@given(span=st.floats(0.001, 1e8))
def test_an_axis_has_a_few_round_ticks(span):
    ticks = axis.Axis(1e9, 1e9 + span, 1e9).ticks()
    assert 1 <= len(ticks) <= 9
    assert ticks[0].text.startswith("0 ")
    places = [float(tick.x[:-1]) for tick in ticks]
    assert places == sorted(places)
    assert places[-1] <= 100


def test_figures_in_words():
    assert [wording.seconds(s) for s in (0.04, 9.9, 34.2, 119.6, 252, 7500)] == [
        *("0.0 s", "9.9 s", "34 s", "2 min 00 s", "4 min 12 s", "2 h 05 min"),
    ]
    assert [wording.size(s) for s in (0, 999, 1024, 150 << 20, 76.4 * 2**30)] == [
        *("0 B", "999 B", "1.0 KiB", "150 MiB", "76.4 GiB"),
    ]
    assert wording.moment(1_795_990_000) == "2026-11-29 22:06:40 UTC"
    assert wording.moment(1e30) == ""


@pytest.mark.parametrize(
    ("labels", "chips"),
    [
        (["TP0", "TP1", "TP2", "TP5"], ("TP0-2", "TP5")),
        (["DP0 TP0", "DP0 TP1", "DP1 TP0"], ("DP0 TP0-1", "DP1 TP0")),
        (["api"], ("api",)),
        (["TP10", "TP9"], ("TP9-10",)),
    ],
)
def test_chips_are_runs_of_ranks(labels, chips):
    assert runs(labels) == chips
