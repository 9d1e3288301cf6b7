"""What other programs put before a server's lines makes no difference."""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from pytest_gpuserve.diagnose.outer import strip
from pytest_gpuserve.diagnose.triage import explain

DATA = Path(__file__).parents[1] / "data"
_toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
CASES = _toml.loads((DATA / "triage" / "cases.toml").read_text())["case"]
TEXTS = {
    **{case["name"]: case["log"].lstrip("\n") for case in CASES[::4]},
    **{path.name: path.read_text() for path in sorted((DATA / "logs" / "reconstructed").glob("*.log"))[::5]},
}
PROGRAMS = {
    "crlf": lambda n, line: f"{line}\r",
    "colours": lambda n, line: f"\x1b[36m{line}\x1b[0m",
    "syslog": lambda n, line: f"Aug  7 18:42:{n % 60:02d} node-7 sglang[8052]: {line}",
    "journal": lambda n, line: f"2031-08-17T18:42:{n % 60:02d}+0200 node-7 vllm[8052]: {line}",
    "compose": lambda n, line: f"llm-worker-1  | {line}",
    "kubectl": lambda n, line: f"2031-03-11T17:57:{n % 60:02d}.372145579Z {line}",
    "cri": lambda n, line: f"2031-03-11T17:57:{n % 60:02d}.372145579Z stderr F {line}",
    "pod": lambda n, line: f"[pod/llm-0/server] {line}",
    "pod_and_time": lambda n, line: f"[pod/llm-0/server] 2031-03-11T17:57:{n % 60:02d}.372145579Z {line}",
    "docker": lambda n, line: json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2031-01-01T00:00:00Z"}),
    "srun": lambda n, line: f"0: {line}",
    "mpirun": lambda n, line: f"[1,0]<stderr>:{line}",
    "torchrun": lambda n, line: f"[default0]:{line}",
    "ray": lambda n, line: f"(ServeReplica:llm:LLMServer pid=77, ip=10.1.1.2) {line}",
    "numbers": lambda n, line: f"{n:6d}\t{line}",
    "quotation": lambda n, line: f"> {line}",
    "paste": lambda n, line: f"    {line}",
}


@pytest.fixture
def judged(tmp_path):
    def judged(text: str):
        path = tmp_path / "server.log"
        path.write_bytes(text.encode())
        found = explain([str(path)])
        cause = found.cause and (found.cause.number, found.cause.rank, found.cause.kind)
        return found.verdict, cause, {label: rank.phase for label, rank in found.ranks.items()}, found.engine

    return judged


@cache
def lines_of(name: str) -> tuple[str, ...]:
    return tuple(TEXTS[name].removesuffix("\n").split("\n"))


@pytest.mark.parametrize("name", TEXTS)
def test_lines_that_passed_through_another_program(name, judged):
    expected = judged(TEXTS[name])
    for program, line in PROGRAMS.items():
        text = "".join(f"{line(n, content)}\n" for n, content in enumerate(lines_of(name), 1))
        assert judged(text) == expected, program


@pytest.mark.parametrize(
    "text",
    [
        b"0: the only line\n",
        b'    File "x.py", line 1\n',
        b"> prompt\nanswer\n> prompt\nanswer\n",
        b"[2031-01-01 10:00:00] ready\n  a: 1\n  b: 2\n",
        b"llm-1 | a\nsomething else\nllm-1 | b\n",
        b'{"log": broken\n',
        b'{"log":' + b"[" * 20_000 + b"\n",
        b"\n\n",
        b"",
    ],
)
def test_what_stands_before_few_lines_is_part_of_them(text):
    assert strip(text) == text


def test_a_few_lines_may_come_from_elsewhere():
    lines = [b"llm-1 | line %d" % n for n in range(20)] + [b"Attaching to llm-1"]
    assert strip(b"\n".join(lines)) == b"\n".join([*(b"line %d" % n for n in range(20)), b"Attaching to llm-1"])


def test_a_program_that_we_do_not_know_keeps_its_times(judged):
    text = (
        "2031-03-11T17:00:02.1Z collected 40 items\n"
        "2031-03-11T17:00:09.1Z tests/test_router.py::test_two_workers\n"
        "2031-03-11T20:10:09.1Z ##[error]The operation was canceled.\n"
    )
    assert judged(text)[0] == "stalled"
    assert judged(text.replace("T20:10:09", "T17:00:12"))[0] == "undecided"


def test_replicas_of_one_ray_job(judged):
    text = "".join(
        f"(Engine pid={pid}) {line}\n"
        for number in range(3)
        for pid, line in (
            (11, f"[2031-02-11 10:00:0{number} TP0] Load weight begin. avail mem=92.10 GB"),
            (
                12,
                (
                    "[2031-02-11 10:00:44 TP1] Scheduler hit an exception: Traceback (most recent call last):",
                    '  File "/opt/x.py", line 431, in load_model',
                    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB.",
                )[number],
            ),
        )
    )
    verdict, cause, _, engine = judged(text)
    assert (verdict, cause, engine) == ("oom", (6, "TP1", "gpu_out_of_memory"), "sglang")
