"""Files that somebody else wrote, or that are torn: one paragraph and the exit code of wrong usage, no traceback."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pytest_gpuserve import cli
from pytest_gpuserve.cli import bisect_state
from pytest_gpuserve.cli.git import Git
from pytest_gpuserve.cli.isolate_state import Run, State, open_state
from pytest_gpuserve.cli.parity import PROMPTS
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.isolation.judge import Report
from pytest_gpuserve.isolation.signature import Signature
from pytest_gpuserve.redaction.redact import Redactor
from pytest_gpuserve.report.failure import read_incident
from pytest_gpuserve.server.greedy import Greedy
from pytest_gpuserve.shape import Maybe, checked, parsed

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
DEEP = "[" * 200_000
SPEC = {"engine": "sim", "tp": 1, "axes": {"cuda_graph": "off"}, "args": {"shards": 1}, "env": {"A": "1"}}
MATRIX = {
    "schema": "gpuserve.matrix/1",
    "base": {"cuda_graph": "off", "args.x": "1"},
    "cells": [
        {"id": "a", "values": {"cuda_graph": "off", "args.x": "1"}, "verdict": "ready", "figures": {"throughput": 1.0}},
        {"id": "d", "values": {"cuda_graph": "on", "args.x": "2"}, "verdict": "crash", "phase": "cuda_graph"},
    ],
    "specs": {"a": SPEC, "d": {**SPEC, "axes": {"cuda_graph": {"on": {"max_bs": 4}}}, "args": {"x": 2}}},
}
STATE = {
    "schema": "gpuserve.isolate/1",
    "fingerprint": "f",
    "command": "python -m x",
    "target": {"verdict": "hang", "phase": "serving", "roots": ["x"]},
    "base": [Greedy(prompt, "a", ("a",), ({"a": -0.1},)).to_json() for prompt in PROMPTS],
    "runs": [
        {
            **dict.fromkeys(("phase", "incident", "log")),
            **{"number": 1, "stage": "search", "deltas": ["a"], "purpose": "calibrate", "outcome": "fail"},
            **{"verdict": "hang", "roots": [], "seconds": 1.5, "text": ""},
        }
    ],
    "result": None,
}


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can be replaced."""
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [path, *(inner for key, value in entries for inner in places(value, (*path, key)))]


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value there; ``...`` takes the key away."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return changed


def spoilt(document: Any) -> st.SearchStrategy[Any]:
    return st.builds(replaced, st.just(document), st.sampled_from(places(document)[1:]), st.just(...) | JSON)


def usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(words)
    out = capsys.readouterr()
    return code, out.out + out.err


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=spoilt(MATRIX).map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=20))
@example(text=json.dumps({**MATRIX, "base": ["x"]}))
@example(text=json.dumps({**MATRIX, "specs": {"a": None, "d": None}}))
@example(text=json.dumps({**MATRIX, "specs": [1]}))
@example(text=json.dumps({**MATRIX, "specs": {"a": "x", "d": 3}}))
@example(text=DEEP)
@example(text='{"schema": "gpuserve.matrix/1", "cells": [{"id": "d", "values": {"a.b": "1"}, "verdict": "crash"}]}')
@example(text='{"a": ' * 900 + "1" + "}" * 900)
def test_a_matrix_that_anybody_wrote(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is planned, or refused in a paragraph; the file is named."""
    path = tmp_path / "matrix.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    code, said = usage(["isolate", "--plan", "--from", str(path), "d"], capsys)
    assert code in (0, 2), said
    assert (code == 2) == ("gpuserve: " in said)
    assert len(said) < 5000


def test_what_is_wrong_with_a_matrix_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "matrix.json"

    def said(document: Any) -> str:
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        code, text = usage(["isolate", "--plan", "--from", str(path), "d"], capsys)
        assert code == 2
        return text

    assert "base is a list, not an object" in said({**MATRIX, "base": ["x"]})
    assert "specs.a is a text, not an object" in said({**MATRIX, "specs": {"a": "x"}})
    assert "does not say what its cells launched" in said({**MATRIX, "specs": {"a": None, "d": None}})
    assert "cells[1].verdict is a number, not a text" in said(replaced(MATRIX, ("cells", 1, "verdict"), 1.5))
    assert "cells[1] has no values" in said(replaced(MATRIX, ("cells", 1, "values"), ...))
    assert "schema is 'x', not 'gpuserve.matrix/1'" in said({**MATRIX, "schema": "x"})
    assert "nested too deeply" in said(DEEP)
    code, text = usage(["isolate", "--plan", "--from", str(tmp_path), "d"], capsys)
    assert (code, "s a directory" in text) == (2, True)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=spoilt(STATE).map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=20))
@example(text=DEEP)
@example(text=json.dumps({**STATE, "base": ["x"]}))
@example(text=json.dumps({**STATE, "target": {"verdict": "hang", "classes": [{"kind": "cause", "path": [[]]}]}}))
def test_a_state_of_isolate_that_anybody_wrote(text: str, tmp_path: Path) -> None:
    (tmp_path / "isolate.json").write_bytes(text.encode(errors="surrogatepass"))
    try:
        state = open_state(tmp_path, "f", "cmd", Redactor.of({}), fresh=False)
        found = state.launches("search", ["a"])
    except GpuserveError:
        return
    assert set(found) <= {frozenset(), frozenset({0})}
    state.save()
    again = open_state(tmp_path, "f", "cmd", Redactor.of({}), fresh=False)
    assert (again.runs, again.target, again.base) == (state.runs, state.target, state.base)


COMMIT = "0123456789" * 4
BISECTION = {
    "schema": "gpuserve.bisect/2",
    "fingerprint": "f",
    "command": "pytest",
    "bad": COMMIT,
    "good": [COMMIT],
    "start": {"commit": COMMIT, "branch": "main"},
    "at": [COMMIT],
    "repeat": 1,
    "again": [COMMIT],
    "verdicts": {COMMIT: {"code": 1, "reason": "x", "signature": {"verdict": "hang", "phase": None, "roots": []}}},
}


@pytest.fixture(scope="module")
def git(tmp_path_factory: pytest.TempPathFactory) -> Git:
    path = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q", str(path)], check=True)
    return Git(path)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=spoilt(BISECTION).map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=20))
@example(text=DEEP)
@example(text=json.dumps({**BISECTION, "verdicts": {"--output=x": {"code": 1, "reason": ""}}}))
@example(text=json.dumps({**BISECTION, "start": {"commit": COMMIT, "branch": "--orphan"}}))
@example(text=json.dumps({**BISECTION, "verdicts": {COMMIT: {"code": True, "reason": ""}}}))
def test_a_state_of_bisect_that_anybody_wrote(text: str, git: Git) -> None:
    (git.directory / bisect_state.NAME).write_bytes(text.encode(errors="surrogatepass"))
    try:
        state = bisect_state.load(git)
    except ValueError:
        return
    assert state is not None
    words = [state.bad, *state.good, state.start.commit, state.start.branch or "", *state.at, *state.verdicts]
    assert not [word for word in words if word.startswith("-")], "an option to git"
    state.save()
    assert bisect_state.load(git) == state


@settings(deadline=None, max_examples=200)
@given(JSON)
@example({"verdict": "hang", "classes": [{"role": "worker", "kind": "cause", "path": "x"}]})
@example({"verdict": "hang", "roots": "abc"})
def test_readers_of_small_things(value: Any) -> None:
    for read in (Signature.from_json, Report.from_json, Greedy.from_json, Run.from_json):
        with contextlib.suppress(ValueError):
            read(value)


@pytest.mark.parametrize("text", [DEEP, "[]", "{", '{"verdict": 5}', "\xff"])
def test_a_signature_that_anybody_wrote_is_never_bad(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "incident.json").write_text(text, encoding="latin-1")
    code, said = usage(["judge", "--signature", str(tmp_path), "--", "pytest"], capsys)
    assert (code, "holds no failure" in said) == (128, True)
    incident = read_incident(tmp_path)
    assert incident is None or isinstance(incident, dict)


def test_shapes() -> None:
    shape = {"a": int, "b": [str | None], "c": {str: bool}, "d": Maybe({"x": int}), "e": ("on", "off")}
    good = {"a": 1, "b": ["x", None], "c": {"k": True}, "e": "on", "more": 1}
    assert checked(good, shape) is good
    for key, value, said in (
        ("a", True, "a is true or false, not a whole number"),
        ("b", ["x", 1], r"b\[1\] is a whole number, not a text or null"),
        ("c", {"k": 0}, "c.k is a whole number, not true or false"),
        ("d", {"x": "1"}, "d.x is a text, not a whole number"),
        ("e", 1, "e is 1, not 'on' or 'off'"),
    ):
        with pytest.raises(ValueError, match=said):
            checked({**good, key: value}, shape)
    with pytest.raises(ValueError, match="the document has no a"):
        checked({}, shape)
    with pytest.raises(ValueError, match="the document is a list, not an object"):
        parsed("[]", shape)
    with pytest.raises(ValueError, match="too deeply"):
        parsed("[" * 60 + "]" * 60, [object])


def test_a_state_round_trips(tmp_path: Path) -> None:
    state = State(tmp_path, "f", "cmd", Redactor.of({}))
    state.base = tuple(Greedy(prompt, "a", ("a",), ({"a": float("-inf")},)) for prompt in PROMPTS)
    state.save()
    assert open_state(tmp_path, "f", "cmd", Redactor.of({}), fresh=False).base == state.base
