"""Readers of what others wrote: whatever it is, they return, they do not hang, and what is shown of it is text."""

from __future__ import annotations

import json
import time
import unicodedata
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gpuserve.cli import main
from pytest_gpuserve.diagnose import parse, ras
from pytest_gpuserve.diagnose.merge import merge
from pytest_gpuserve.diagnose.triage_reader import Reader
from pytest_gpuserve.diagnose.triage_rules import load
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.phases.reader import PhaseReader
from pytest_gpuserve.redaction.redact import Redactor
from pytest_gpuserve.report.again import judge_again, written_again
from pytest_gpuserve.report.bundle_check import check
from pytest_gpuserve.report.bundle_reader import Bundle, open_bundles
from pytest_gpuserve.report.html import PageError, write_bundle_page, write_session_page
from pytest_gpuserve.report.issue import issue
from pytest_gpuserve.report.pages import verdict_page
from pytest_gpuserve.report.repro import script

DATA = Path(__file__).parent / "data"
DUMPS = [path.read_text(errors="replace") for path in sorted((DATA / "stacks").glob("*.txt"))]
LINES = sorted({line for dump in DUMPS for line in dump.splitlines()})

WEIRD = st.sampled_from(
    ["\x1b[2J", "\u202e", "\0", "\x9b", "::error::x", "{", "[", '"', "(", ":1)", "\r", "\ud800", "Thread 0x", "#0  0x"]
)
calm = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
stirred = st.lists(st.sampled_from(LINES) | st.text(max_size=30) | WEIRD, max_size=30).map("\n".join)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | WEIRD


def harmless(text: str) -> None:
    assert not {hex(ord(c)) for c in text if c not in "\n\t" and unicodedata.category(c)[0] == "C"}


@calm
@given(stirred)
def test_dumps_in_any_order(text: str) -> None:
    dumps = parse.read_dumps(text, source="fh.1.2.txt")
    for dump in dumps:
        json.dumps(parse.to_json(dump))
    merge(parse.as_rounds(dumps)).text()
    parse.text_threads(text, 1)
    ras.parse(text)


def changed(value: Any, path: list[int], new: Any) -> Any:
    """A JSON value with another one somewhere in it."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = changed(value[key], path[1:], new)
    return copy


class Altered:
    """The files of a bundle, one of which is another now."""

    def __init__(self, bundle: Bundle, name: str, data: bytes) -> None:
        self._bundle, self._name, self._data = bundle, name, data
        self.names = {**bundle.files.names, name: len(data)}
        self.odd: dict[str, str] = {}

    def read(self, name: str, limit: int = 1 << 26) -> bytes:
        return self._data[:limit] if name == self._name else self._bundle.files.read(name, limit)


(FLOCK,) = open_bundles(DATA / "bundles" / "flock.zip")
JSON = [name for name in sorted(FLOCK.files.names) if name.endswith(".json") and "pytest." not in name]


@calm
@given(
    name=st.sampled_from(JSON),
    path=st.lists(st.integers(0, 99), max_size=6),
    new=st.recursive(scalars, st.lists, max_leaves=4),
)
def test_bundles_with_another_value_somewhere(name: str, path: list[int], new: Any, tmp_path_factory: Any) -> None:
    data = json.dumps(changed(json.loads(FLOCK.files.read(name)), path, new)).encode()
    bundle = Bundle(FLOCK.name, Altered(FLOCK, name, data))
    list(check(bundle).lines())
    judge_again(bundle)
    again = written_again(bundle)
    for text in (issue(again), verdict_page(again.json("incident.json")), issue(bundle)):
        harmless(text)
    harmless(script(bundle.json("server.json"), bundle.json("incident.json")))
    page = tmp_path_factory.getbasetemp() / "page.html"
    harmless(write_bundle_page(again, page).read_text())


KEYS = (
    "nodeid",
    "outcome",
    "t",
    "verdict",
    "session",
    "worker",
    "incident",
    "kind",
    "phase",
    "cells",
    "values",
    "axes",
)
objects = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@calm
@given(lines=st.lists(st.dictionaries(st.sampled_from(KEYS), objects), max_size=8))
def test_sessions_of_any_shape(lines: list[Any], tmp_path_factory: Any) -> None:
    place = tmp_path_factory.getbasetemp() / "artifacts"
    place.mkdir(exist_ok=True)
    (place / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("matrix.json", "isolate.json"):
        (place / name).write_text(json.dumps(lines[0] if lines else lines))
    with suppress(PageError):  # there is nothing to show
        harmless(write_session_page(place, place / "page.html").read_text())


@calm
@given(stirred)
def test_logs_of_any_content(text: str) -> None:
    data = text.encode(errors="surrogatepass")
    Reader(load(), 0).read([data])
    for name in ("sglang", "vllm", "llama_cpp", "sim"):
        reader = PhaseReader(get_engine(name).grammar)
        reader.feed(data, 0.0)
        reader.finish(0.0)


@calm
@given(text=stirred)
def test_explain_prints_text(text: str, tmp_path_factory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "some.log"
    path.write_bytes(text.encode(errors="surrogatepass"))
    for options in ([], ["--json"]):
        assert main(["explain", str(path), *options]) in range(6)
        harmless(capsys.readouterr().out)


def phases(text: str) -> None:
    for name in ("sglang", "vllm", "sim"):
        PhaseReader(get_engine(name).grammar).feed(text.encode(), 0.0)


READERS: dict[str, Callable[[str], object]] = {
    "dumps": parse.read_dumps,
    "redaction": Redactor(["a-known-value"], home="/home/alice", hosts=["a-host"]).redact,
    "phases": phases,
    "triage": lambda text: Reader(load(), 0).read([text.encode()]),
}
REPEATED = (
    *(" ", "\n", "\r", "\t", ".", "(", "[", "`", "\\", '"', "1", "a", "\n[ ", '\n{"', "\n[ 1,", "\n#0  0x1 in f ("),
    *("a.b.", "key=", "http://", "fe80::", "/home/", '"prompt": "', "100%|#| 1/2 [", "TID 1:\n#0  0x1 f\n", "_ZN"),
    'Process 1: x\n\nThread 1 (active): "a"\n    f (a.py:1)\n',
    '  File "x", line 1, in f\n',
)


@pytest.mark.parametrize("reader", READERS)
def test_no_text_takes_more_time_than_its_length(reader: str) -> None:
    """CPU seconds of a quarter of a MiB, as the machine may be busy: the slowest takes one, more than linear five."""
    READERS[reader](DUMPS[0])  # rules are read once
    for piece in REPEATED:
        text = (piece * (1 << 18))[: 1 << 18]
        begun = time.process_time()
        READERS[reader](text)
        assert time.process_time() - begun < 4, piece


def test_a_zip_with_any_entries(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in ("a/incident.json", "a/\x1b[2J\u202e.json", f"a/{'n' * 900}"):
            archive.writestr(name, "{}")
    for bundle in open_bundles(tmp_path / "x.zip"):
        list(check(bundle).lines())
