"""Triage of whole logs: cases after public reports, cases of our own, and every recorded and reconstructed log."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from pytest_gpuserve.diagnose.triage import Triage, explain
from pytest_gpuserve.diagnose.triage_rules import load
from pytest_gpuserve.vocabulary import PHASES, VERDICTS

DATA = Path(__file__).parents[1] / "data"
REPORTED = json.loads((DATA / "cases" / "cases.json").read_text())
CAUSES = json.loads((DATA / "cases" / "causes.json").read_text())
EXCEPTIONS = json.loads((DATA / "triage" / "exceptions.json").read_text())
LOGS = json.loads((DATA / "triage" / "logs.json").read_text())
_toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
OWN = _toml.loads((DATA / "triage" / "cases.toml").read_text())["case"]
HELD_OUT = _toml.loads((DATA / "triage" / "held_out.toml").read_text())["case"]

MISSED = {
    "19": "the log is empty but for a remark of the reporter",
    "50": "unittest said OK and nothing else: any program's log",
}
"""Reported cases that a log cannot decide."""


@cache
def read(text: str) -> Triage:
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        file.write(text.encode())
        file.flush()
        return explain([file.name])


@cache
def recorded(name: str) -> Triage:
    return explain([str(DATA / "logs" / name)])


def wanted(case: dict) -> set[str]:
    """The class of a reported case in our words: what its details name goes before the strict verdict."""
    expected = case["expected"]
    said = f"{expected['verdict_text']} {expected['detail']}".lower()
    for verdict, word in (
        ("unsupported_arch", "unsupported-arch"),
        ("leak", "leak"),
        ("port", "port conflict"),
        ("degraded", "degraded:"),
    ):
        if word in said:
            return {verdict}
    return {"stalled" if verdict in ("hang", "slow-but-alive") else verdict for verdict in expected["verdicts"]}


@pytest.mark.parametrize("case", REPORTED, ids=lambda case: case["id"])
def test_reported_case(case):
    found = read(case["log"])
    if case["id"] in MISSED:
        assert found.verdict == "undecided"  # never a guess
        return
    assert found.verdict in wanted(case)
    if case["id"] in CAUSES:
        assert found.cause is not None
        assert CAUSES[case["id"]] in found.cause.line


def test_reported_cases_are_right_as_often_as_promised():
    right = 0
    by_class: dict[str, list[bool]] = defaultdict(list)
    for case in REPORTED:
        verdict = read(case["log"]).verdict
        hit = verdict in wanted(case)
        right += hit
        for each in wanted(case) if not hit else {verdict}:
            by_class[each].append(hit)
    assert right / len(REPORTED) >= 0.95
    recall = {name: sum(hits) / len(hits) for name, hits in by_class.items()}
    assert min(recall.values()) >= 0.9, recall


@pytest.mark.parametrize("case", [*OWN, *HELD_OUT], ids=lambda case: case["name"])
def test_own_case(case):
    found = read(case["log"].lstrip("\n"))
    assert found.verdict in (case["verdict"], *case.get("either", ())), found
    if not case["cause"]:
        assert found.cause is None
        return
    assert found.cause is not None
    assert any(text in found.cause.line for text in (case["cause"], *case.get("also", ())))
    assert found.cause.rank == case.get("rank", found.cause.rank)
    lines = case["log"].lstrip("\n").splitlines()
    line = lines[found.cause.number - 1]
    assert found.cause.line[:60] in line or found.cause.line.startswith(line.strip())  # a message that goes on below


SGLANG = """\
[2031-01-05 03:00:11] server_args=ServerArgs(model_path='/m', tp_size=1)
[2031-01-05 03:00:41 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/srt/managers/scheduler.py", line 2015, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args)
  File "/opt/x/y.py", line 3, in f
    g()
{}

[2031-01-05 03:00:41] Received sigquit from a child process. It usually means the child failed.
"""
CORE = "(EngineCore_DP0 pid=22) ERROR 03-02 10:01:00 [core.py:843] "
VLLM = f"""\
(APIServer pid=11) INFO 03-02 10:00:00 [api_server.py:1839] vLLM API server version 0.12.0
{CORE}EngineCore failed to start.
{CORE}Traceback (most recent call last):
{CORE}  File "/opt/vllm/v1/engine/core.py", line 834, in run_engine_core
{CORE}    x()
{CORE}{{}}
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{{{}}}}
"""


@pytest.mark.parametrize(
    ("verdict", "text"),
    [(verdict, text) for verdict, texts in EXCEPTIONS.items() for text in texts],
    ids=lambda value: value.split(":")[0],
)
def test_exception_of_a_rank(verdict, text):
    for log in (SGLANG.format(text), VLLM.format(text)):
        found = read(log)
        assert found.verdict == verdict, found.cause
        assert text[:80] in found.cause.line


def test_own_cases_cover_every_verdict_of_a_log():
    assert {case["verdict"] for case in OWN} == set(VERDICTS) - {"slow", "hang"}


@pytest.mark.parametrize("name", LOGS)
def test_recorded_log(name):
    expected = LOGS[name]
    found = recorded(name)
    assert found.verdict == expected["verdict"]
    assert found.engine in (None, name.split("/")[1].split("_")[0].split("-")[0])
    assert list(found.lagging) == expected.get("lagging", [])
    assert found.version == expected.get("version", found.version)
    assert found.phase == expected.get("phase", found.phase)
    assert (found.cause is None) == ("cause" not in expected)
    if found.cause is not None:
        assert expected["cause"] in found.cause.line
        assert found.cause.rank == expected.get("rank")
        line = (DATA / "logs" / name).read_bytes().split(b"\n")[found.cause.number - 1]
        assert found.cause.line[:80].encode() in line
    assert any(expected.get("hint", "") in hint for hint in (*found.hints, ""))
    assert any(expected.get("degraded", "") in text for text in (*found.degraded, ""))


def test_every_log_there_is_has_an_expectation():
    assert set(LOGS) == {str(path.relative_to(DATA / "logs")) for path in (DATA / "logs").rglob("*.log")}


def test_benign_lines_are_never_the_cause():
    rules = load()
    for found in (*(read(case["log"].lstrip("\n")) for case in (*OWN, *HELD_OUT)), *map(recorded, LOGS)):
        if found.cause is not None:
            assert rules.noise_in(found.cause.line) is None


def test_json_has_the_schema_and_nothing_else():
    for triage in (*(read(case["log"]) for case in REPORTED), *map(recorded, LOGS)):
        found = triage.to_json()
        assert list(found) == [
            *("schema", "engine", "version", "verdict", "phase", "ranks", "lagging", "cause", "benign", "degraded"),
            "hints",
        ]
        assert found["schema"] == "gpuserve.triage/1"
        assert found["verdict"] in VERDICTS
        assert found["phase"] in (None, *PHASES)
        assert set(found["lagging"]) <= set(found["ranks"])
        for rank in found["ranks"].values():
            assert list(rank) == ["phase", "last_line", "last_time"]
        if found["cause"] is not None:
            assert list(found["cause"]) == ["line", "lineno", "rank", "class"]
        json.dumps(found)
