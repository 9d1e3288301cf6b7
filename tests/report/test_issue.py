"""issue.md, repro.sh and verdict.md of any bundle: complete for real ones, harmless for hostile ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve import shell
from pytest_gpuserve.cli import main
from pytest_gpuserve.report import repro
from pytest_gpuserve.report.again import judge_again, render, written_again
from pytest_gpuserve.report.bundle_reader import Bundle, Directory
from pytest_gpuserve.report.files import Store
from pytest_gpuserve.report.issue import MOST, issue
from pytest_gpuserve.report.markdown import plain
from pytest_gpuserve.report.pages import verdict_page
from pytest_gpuserve.text import escape

HOSTILE = "\x1b[2J\u202e<script>alert(1)</script> `id` $(id) | ![x](http://evil) ```\n# h\r\n'\"\\ " + "x" * 5000


class Memory:
    """The files of a bundle, in memory."""

    def __init__(self, files: dict[str, Any]) -> None:
        self._files = {name: json.dumps(value).encode() for name, value in files.items()}
        self.names = {name: len(data) for name, data in self._files.items()}
        self.odd: dict[str, str] = {}

    def read(self, name: str, limit: int = 1 << 20) -> bytes:
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name][:limit]


def bundle(incident: Any = None, server: Any = None, versions: Any = None, **more: Any) -> Bundle:
    files = {"incident.json": incident, "server.json": server, "versions.json": versions, **more}
    return Bundle("b", Memory({name: value for name, value in files.items() if value is not None}))


INCIDENT = {
    "engine": "sglang",
    "id": "sglang-tp8-eagle3",
    "verdict": "hang",
    "phase": "cuda_graph",
    "culprits": ["TP3"],
    "missing": [],
    "text": "hang in cuda_graph: TP3 waits for a lock.",
    "cause": "TP3 waits for a lock",
    "advice": "Remove the lock.",
    "known": ["https://github.com/sgl-project/sglang/issues/11275"],
    "facts": [{"claim": "nothing moved for 60 s", "witness": "watcher"}],
    "ruled_out": [{"what": "out of memory", "by": "33 of 449 GB resident"}],
    "sections": {"Stacks": ["7x TP0-2,4-7  waits"], "Last lines of the log": ["[TP3] Capture begin"]},
    "reason": "no_progress",
    "test": "test_x.py::test_y",
    "argv": ["python", "-m", "sglang.launch_server"],
}
SERVER = {
    "argv": [
        "python3",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "~/my models/k2",
        "--tp",
        "8",
        "--api-key",
        "<secret-1>",
    ],
    "environment": {"NCCL_DEBUG": "INFO", "PATH": "/usr/bin", "GPUSERVE_MARKERS": "/x", "SGLANG_X": "a b"},
    "url": "http://127.0.0.1:3000",
    "ready": "/health",
    "request": {"path": "/v1/completions", "body": {"model": "m", "prompt": "it's", "max_tokens": 1}},
}
VERSIONS = {
    "python": "3.12.3",
    "packages": {"torch": "2.9.1", "sglang": "0.5.6"},
    "commits": {"sglang": "abc123"},
    "torch": {"cuda": "12.8"},
    "machine": {"kernel": "6.8.0", "driver": "580.65", "memory": 449 << 30, "cpus": 64},
    "gpus": [{"name": "RTX PRO 6000", "capability": [12, 0], "memory": 95 << 30}] * 8,
    "topology": "GPU0 GPU1\nX PIX",
    "problems": ["nvidia-smi gave no answer within 5 s"],
}


def test_everything_a_maintainer_asks_for() -> None:
    text = issue(bundle(INCIDENT, SERVER, VERSIONS))
    headings = re.findall(r"(?m)^### (.+)$", text)
    assert headings == ["Describe the bug", "Reproduction", "Environment"]
    for words in (
        "**Title:** [Bug] hang in cuda_graph, TP3 (sglang 0.5.6, sglang-tp8-eagle3)",
        "| phase | cuda_graph |",
        "| rank | TP3 |",
        "| cause | TP3 waits for a lock |",
        "| what helps | Remove the lock. |",
        "https://github.com/sgl-project/sglang/issues/11275",
        "- out of memory: 33 of 449 GB resident",
        "7x TP0-2,4-7  waits",
        "[TP3] Capture begin",
        "GPU: 8 x RTX PRO 6000 (sm_120, 95.0 GiB)",
        "CUDA of torch: 12.8",
        "sglang from commit abc123",
        "driver: 580.65",
        "X PIX",
        "NCCL_DEBUG=INFO",
        "not known: nvidia-smi gave no answer",
        "test_x.py::test_y",
    ):
        assert words in text, words
    assert "/usr/bin" not in text
    assert text.index("sglang 0.5.6\n") < text.index("torch 2.9.1")


def test_vllms_form_has_its_own_order() -> None:
    text = issue(bundle({**INCIDENT, "engine": "vllm"}, SERVER, VERSIONS))
    assert re.findall(r"(?m)^### (.+)$", text)[0] == "Your current environment"


def test_a_long_one_can_still_be_posted() -> None:
    sections = {"Stacks": [f"frame {n} {'x' * 150}" for n in range(5000)], "Machine": ["y" * 900] * 300}
    text = issue(bundle({**INCIDENT, "sections": sections, "text": "t" * 30_000}, SERVER, VERSIONS))
    assert len(text) <= MOST
    assert "### Environment" in text


def test_the_script_starts_it_again() -> None:
    text = repro.script(SERVER, {**INCIDENT, "phase": "serving"})
    assert "export NCCL_DEBUG=INFO\n" in text
    assert "export SGLANG_X='a b'\n" in text
    assert "PATH=" not in text
    assert "GPUSERVE" not in text
    assert "--model-path \"$HOME\"'/my models/k2'" in text
    assert "--api-key '<secret-1>'" in text
    assert "curl -sS -m 300 http://127.0.0.1:3000/v1/completions" in text
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0
    start_up = repro.script(SERVER, INCIDENT)
    assert "curl" not in start_up
    assert "exec python3" in start_up


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40))
def test_one_word_stays_one_word(text: str) -> None:
    word = shell.word(text)
    assert word.isprintable()
    assert escape(word) == word
    assert len(shlex.split(word)) == 1
    command = ["sh", "-c", f"printf '%s|' {word}"]
    home = {"HOME": "~", "PATH": os.environ["PATH"]}  # what redaction left is put back
    ran = subprocess.run(command, env=home, capture_output=True, check=True)
    assert ran.stdout.decode() == text.rstrip("\n") + "|"


def test_hostile_words_reach_the_program_and_nothing_else(tmp_path: Path) -> None:
    words = ["printf", "%s|", "$(touch evil)", "`touch evil`", "; touch evil", "a'b", '"', "-n\ntouch evil", "\\"]
    server = {"argv": words, "environment": {"NCCL_X": "$(touch evil)", "a;touch evil": "x"}}
    script = repro.script(server, {"verdict": "x\ntouch evil", "id": "\ntouch evil", "test": "'\ntouch evil"})
    assert not re.search("(?m)^touch evil", script)
    ran = subprocess.run(["sh"], input=script, text=True, cwd=tmp_path, capture_output=True, check=True)
    assert ran.stdout == "$(touch evil)|`touch evil`|; touch evil|a'b|\"|-n\ntouch evil|\\|"
    assert not list(tmp_path.iterdir())


def outside_of_code(text: str) -> str:
    inside, kept = None, []
    for line in text.splitlines():
        fence = re.fullmatch(r"(`{3,})(text|sh)?", line)
        if inside is None and fence and fence[2]:
            inside = fence[1]
        elif inside is not None and line == inside:
            inside = None
        elif inside is None:
            kept.append(line)
    assert inside is None
    return "\n".join(kept)


def every(value: Any, text: str) -> Any:
    """``value`` with every string replaced, keys that we know kept."""
    if isinstance(value, dict):
        return {key: every(inner, text) for key, inner in value.items()}
    if isinstance(value, list):
        return [every(inner, text) for inner in value]
    return text if isinstance(value, str) else value


def test_hostile_text_is_no_markup_in_any_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    incident, server, versions = (every(found, HOSTILE) for found in (INCIDENT, SERVER, VERSIONS))
    found = bundle(incident, server, versions)
    for text in (issue(found), verdict_page(incident)):
        assert "\x1b" not in text
        assert "\u202e" not in text
        plain = outside_of_code(text)
        assert "<script" not in plain
        assert "![x](" not in plain
        assert not re.search(r"(?m)^# h", plain)
    store = Store(tmp_path, None, 0o644)
    for name, value in (("incident.json", incident), ("server.json", server), ("bundle.json", {HOSTILE: HOSTILE})):
        store.write_json(name, value)
    for options in ([], ["--check"], ["--issue"], ["--json"]):
        main(["explain", str(tmp_path), *options])
        out, err = capsys.readouterr()
        assert out
        assert not err
        assert "\x1b" not in out
        assert "\u202e" not in out


ODD = (
    None,
    True,
    5,
    -1.5,
    10**30,
    "x",
    [],
    [5],
    [[]],
    [{"x": 5}],
    {},
    {"a": 5},
    {"a": [5]},
    {"a": {"b": 5}},
    ["5", "x"],
)
SCALAR = st.sampled_from(ODD[:6])
JSON = st.sampled_from(ODD) | st.lists(SCALAR, max_size=3) | st.dictionaries(st.text(max_size=6), SCALAR, max_size=2)


def some(names: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(names)), JSON, max_size=6)


EVIDENCE = (
    "reason",
    "expected",
    "gpu_busy",
    "labels",
    "phases",
    "log",
    "memory",
    "gpus",
    "locks",
    "witnesses",
    "progress",
)
WELL = {"schema": "gpuserve.evidence/1", "expected": [], "gpu_busy": [], "labels": {}, "phases": {}, "log": [],
        "memory": None, "gpus": [], "locks": [], "witnesses": [], "progress": None}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(some(INCIDENT), some(SERVER), some(VERSIONS), some(EVIDENCE), st.lists(JSON, max_size=2))
def test_pages_of_any_json(
    tmp_path_factory: Any, incident: Any, server: Any, versions: Any, evidence: Any, stacks: Any
) -> None:
    more = {"evidence.json": {**WELL, **evidence}, "stacks/TP0.7.json": {"rounds": stacks}}
    found = bundle({**INCIDENT, **incident}, {**SERVER, **server}, {**VERSIONS, **versions}, **more)
    judge_again(found)
    render(written_again(found), Store(tmp_path_factory.getbasetemp(), None, 0o600))


@pytest.mark.parametrize("file", ["incident", "server", "versions"])
def test_any_value_of_any_key(file: str) -> None:
    whole = {"incident": INCIDENT, "server": SERVER, "versions": VERSIONS}
    for key in whole[file]:
        for value in ODD:
            files = {**whole, file: {**whole[file], key: value}}
            for found in (bundle(**files), bundle(**{**files, "incident": {**files["incident"], "phase": "serving"}})):
                incident = found.json("incident.json")
                assert issue(found), (key, value)
                assert verdict_page(incident), (key, value)


def test_any_value_of_any_key_of_the_evidence() -> None:
    for key in EVIDENCE:
        for value in ODD:
            judge_again(bundle(INCIDENT, **{"evidence.json": {**WELL, key: value}}))


def test_a_bundle_without_anything(tmp_path: Path) -> None:
    assert "unknown" in issue(Bundle("b", Directory(tmp_path)))
    assert verdict_page({})


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("ask @octocat, @org/team", "ask @<!-- -->octocat, @<!-- -->org/team"),
        ("as in #123 or owner/repo#1; GH-7", "as in #<!-- -->123 or owner/repo#<!-- -->1; GH-<!-- -->7"),
        ("flock@serving # 1 a@b.example #x <@", "flock@serving # 1 a@b.example #x &lt;@"),
    ],
)
def test_a_pasted_report_mentions_nobody(raw: str, shown: str) -> None:
    assert plain(raw) == shown
