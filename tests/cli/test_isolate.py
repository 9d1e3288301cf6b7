"""``gpuserve isolate`` on the embedded engine: found, verified, resumed; and what cannot be isolated."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_gpuserve.cli.isolate import recognise
from pytest_gpuserve.cli.isolate_state import Run, fingerprint, open_state
from pytest_gpuserve.cli.isolate_text import running
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.redaction.redact import Redactor

SIM = [sys.executable, "-m", "pytest_gpuserve.sim", "--tp", "2", "--shards", "1", "--quiet"]
FLAGS = [
    *("--spec-decode", "eagle3", "--spec-steps", "3", "--accept-rate", "0.7", "--cuda-graph", "on"),
    *("--attention-backend", "triton", "--custom-all-reduce", "on", "--overlap", "on", "--kv-cache-dtype", "fp8"),
    *("--moe-runner", "triton", "--sampling-backend", "x", "--log-level", "info", "--nccl-p2p", "on"),
    *("--context-length", "2048"),
]
CRASH = "exit@cuda_graph:rank=1:code=3:when=spec_decode=eagle3+cuda_graph=on"
QUICK = ["--stall-timeout", "5", "--grace", "2", "--gpus", "none"]


class Place:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.output = path / "out"

    def command(self, *arguments: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "pytest_gpuserve.cli",
            "isolate",
            "--output",
            str(self.output),
            *QUICK,
            *arguments,
        ]

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUSERVE")}
        (self.path / "state").mkdir(mode=0o700, exist_ok=True)
        return {**kept, "GPUSERVE_STATE": str(self.path / "state")}

    def run(self, *arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.path,
            env=self.environment,
        )
        print(done.stdout, done.stderr)
        return done

    @property
    def state(self) -> dict:
        return json.loads((self.output / "isolate.json").read_text())

    def servers(self) -> int:
        return len(list((self.path / "state" / "sessions").glob("*/*/server.json")))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_crash_of_two_deltas_is_found_and_verified_across_a_kill(place: Place) -> None:
    """14 flags, two to blame; SIGKILL in the middle; the second run repeats no launch that had ended."""
    words = ["--calibrate", "1", "--one", "--", *SIM, "--fault", CRASH, *FLAGS]
    first = subprocess.Popen(place.command(*words), stdout=subprocess.DEVNULL, cwd=place.path, env=place.environment)
    try:
        deadline = time.monotonic() + 100
        while not (place.output / "isolate.json").exists() or len(place.state["runs"]) < 3:
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait()
    before = place.state["runs"]
    done = place.run(*words)
    assert done.returncode == 0
    assert f"{len(before)} runs are known" in done.stdout
    after = place.state
    assert after["runs"][: len(before)] == before
    assert after["result"]["sets"] == [["spec_decode", "cuda_graph"]]
    assert after["result"]["status"] == "found"
    assert len(after["runs"]) <= place.servers() <= len(after["runs"]) + 1, "one was under way when it was killed"
    assert [run["deltas"] for run in after["runs"][:1]] == [[]], "the base alone comes first"
    assert after["result"]["refined"] == {"spec_decode": []}
    assert after["result"]["remedy"] == "CUDA graphs off"
    smallest = shlex.split(after["result"]["smallest"])
    assert {"--spec-decode", "--cuda-graph"} < set(smallest)
    assert not {"--spec-steps", "--overlap", "--attention-backend", "--kv-cache-dtype"} & set(smallest)
    assert "Smallest command that fails:" in done.stdout
    assert "Smallest remedy that passes" in done.stdout
    again = place.run(*words)
    assert again.returncode == 0
    assert place.state["runs"] == after["runs"], "a finished isolation starts nothing"
    assert not list((place.path / "state" / "sessions").glob("*/scratch-*")), "caches of the one that was killed"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def printed(out: str, heading: str) -> str:
    """The command line below a heading."""
    lines = out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(heading))
    return lines[at + 1].strip()


def run_as_pasted(place: Place, line: str) -> tuple[int, str]:
    """What a shell makes of a printed line: the server's exit code, or "ready" when it answers."""
    (place.path / "log").write_text("")
    with (place.path / "log").open("w") as log:
        process = subprocess.Popen(
            ["sh", "-c", line], stdout=log, stderr=log, cwd=place.path, env=place.environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and "The server is fired up" not in (place.path / "log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process.returncode, (place.path / "log").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_printed_command_lines_run_when_they_are_pasted(place: Place) -> None:
    """Variables and values with spaces, quotes and line feeds."""
    crash = "exit@cuda_graph:code=3:when=kv_cache_dtype=fp8"
    sim = [word for word in SIM if word != "--quiet"]
    words = ["SIM_NOTE=a  b\n$(exit 1)'", *sim, "--port", str(free_port()), "--model-path", "m  x", "--fault", crash]
    words += ["--kv-cache-dtype", "fp8", "--overlap", "on"]
    done = place.run("--calibrate", "1", "--one", "--keep=SIM_NOTE", "--", *words)
    assert done.returncode == 0
    fails = printed(done.stdout, "Smallest command that fails")
    assert fails.startswith("SIM_NOTE=")
    assert place.state["result"]["smallest"] == fails
    code, log = run_as_pasted(place, fails)
    assert code, log
    assert "Capture cuda graph begin" in log
    passes = printed(done.stdout, "Smallest remedy that passes")
    code, log = run_as_pasted(place, passes)
    assert code is None, log
    base = next(line for line in done.stdout.splitlines() if line.startswith("base: "))
    code, log = run_as_pasted(place, base.removeprefix("base: "))
    assert code is None, log


def test_a_hang_has_an_incident_and_a_signature(place: Place) -> None:
    fault = "sleep@cuda_graph:rank=1:when=cuda_graph=on"
    words = [*SIM, "--fault", fault, "--cuda-graph", "on"]
    done = place.run("--calibrate", "1", "--one", "--remedies", "0", "--", *words)
    assert done.returncode == 0
    state = place.state
    assert state["result"]["sets"] == [["cuda_graph"]]
    assert state["target"]["verdict"] == "hang"
    assert state["target"]["phase"] == "cuda_graph"
    hung = [run for run in state["runs"] if run["outcome"] == "fail"]
    assert hung
    for run in hung:
        assert (Path(run["incident"]) / "verdict.md").exists()
        assert run["incident"] in done.stdout


def test_an_axis_with_which_other_tokens_come_is_found(place: Place) -> None:
    """Nothing hangs and nothing dies: only the tokens are not those of the base, which was sure of its own."""
    fault = "garble@serving:when=kv_cache_dtype=fp8"
    words = [*SIM, "--fault", fault, "--kv-cache-dtype", "fp8", "--overlap", "on", "--cuda-graph", "on"]
    done = place.run("--calibrate", "1", "--one", "--remedies", "0", "--", *words)
    assert done.returncode == 0
    state = place.state
    assert state["result"]["sets"] == [["--kv-cache-dtype"]]
    assert state["target"] == {"verdict": "degraded", "phase": "serving", "roots": ["parity"]}
    assert "top-2 logprob gap" in next(run["text"] for run in state["runs"] if run["outcome"] == "fail")
    assert len(state["base"]) == 3


def test_the_base_fails_too(place: Place) -> None:
    done = place.run("--calibrate", "1", "--", *SIM, "--cuda-graph", "on", "--fault", "exit@weight_load:code=3")
    assert done.returncode == 1
    assert place.state["result"]["status"] == "base_fails"
    assert "The base fails too" in done.stdout


def test_a_command_that_is_no_server(place: Place) -> None:
    done = place.run("--calibrate", "1", "--", sys.executable, "-c", "print('hello')", "--flag")
    assert done.returncode == 1
    assert "The base fails too" in done.stdout
    assert "exit" in done.stdout
    assert "code 0" in done.stdout
    assert "so --port {port} is added: write {port} where" in done.stdout
    assert "hello" in done.stdout.partition("The base fails too")[2], "what it said"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--", "/no/such/program", "--x"], "cannot be started"),
        (["--"], "no command after --"),
        (["--", *SIM[:3], "--model-path", "m", "--cuda-graph", "off"], "nothing in this command can be taken away"),
        (["--from", "/no/such/matrix.json", "cell"], "cannot be read"),
        (["--probe", "python 'x", "--", "server", "--x"], "--probe python 'x is no command: No closing quotation"),
        (
            ["--probe", "/no/such/probe {url}", "--", "server", "--x"],
            "--probe: /no/such/probe cannot be run: there is no",
        ),
        (["--probe", "no-such-probe", "--", "server", "--x"], "--probe: no-such-probe cannot be run: there is no such"),
        (["--probe", "/tmp", "--", "server", "--x"], "it is a directory"),
        (["--probe", "/etc/passwd", "--", "server", "--x"], "it is not executable: chmod +x"),
        (["--probe", " ", "--", "server", "--x"], "--probe names no command"),
        (["--probe", "", "--", "server", "--x"], "--probe names no command"),
        (["--minutes", "0", "--", "server", "--x"], "--minutes must be above 0, not 0"),
        (["--grace", "-1", "--", "server", "--x"], "argument --grace: '-1' is no finite number from 0 on"),
        (["--calibrate", "0", "--", "server", "--x"], "--calibrate must be above 0"),
        (["--parallel", "-2", "--", "server", "--x"], "--parallel must be above 0"),
        (["--gpus", "virtual:x", "--", "server", "--x"], "gpuserve: --gpus=virtual:x: 'virtual:x' is no GPU"),
    ],
)
def test_mistakes_are_one_paragraph(place: Place, words: list[str], text: str) -> None:
    done = place.run(*words)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert text == "cannot be started" or not place.servers()


def test_plan_starts_nothing(place: Place) -> None:
    done = place.run("--plan", "--", "NCCL_DEBUG=INFO", *SIM, *FLAGS)
    assert done.returncode == 0
    assert "cost: 6 launches of both ends" in done.stdout
    assert "spec_decode: --spec-decode eagle3" in done.stdout
    assert not place.output.exists()
    assert not (place.path / "state" / "sessions").exists()


def test_what_is_to_be_kept_is_no_delta(place: Place) -> None:
    command = ["--", "NCCL_DEBUG=INFO", *SIM, *FLAGS]
    done = place.run("--plan", "--keep=--spec-decode*", "--keep=NCCL_DEBUG", *command)
    assert done.returncode == 0
    base, _, deltas = done.stdout.partition("deltas that can be taken away")
    assert all(kept in base and kept not in deltas for kept in ("NCCL_DEBUG=INFO", "--spec-decode eagle3"))
    assert "--kv-cache-dtype" in deltas
    done = place.run("--plan", "--keep=--no-such-flag", *command)
    assert (done.returncode, "--keep --no-such-flag: no flag" in done.stderr) == (2, True)


PROBE = """\
import os, sys, urllib.request
assert os.environ["GPUSERVE_URL"] == sys.argv[1]
text = urllib.request.urlopen(sys.argv[1] + "/get_server_info").read().decode()
print("no idea")
sys.exit({"fails": "fp8" in text, "lost": 125, "passes": 0}[sys.argv[2]])
"""


@pytest.mark.parametrize(("kind", "status"), [("fails", "found"), ("passes", "not_reproduced"), ("lost", "undecided")])
def test_a_probe_of_the_users(place: Place, kind: str, status: str) -> None:
    (place.path / "probe.py").write_text(PROBE)
    probe = shlex.join([sys.executable, "probe.py", "{url}", kind])
    words = [*SIM, "--kv-cache-dtype", "fp8", "--overlap", "on", "--cuda-graph", "off"]
    done = place.run("--calibrate", "1", "--one", "--remedies", "0", "--probe", probe, "--", *words)
    assert place.state["result"]["status"] == status
    if status == "undecided":
        assert place.servers() == 2, "after the calibration it is clear"
        assert "none told whether it fails: --probe cannot tell (exit code 125): no idea." in done.stdout
    if status == "found":
        assert place.state["result"]["sets"] == [["--kv-cache-dtype"]]
        assert place.state["target"] == {"verdict": "probe", "phase": None, "roots": ["exit 1"]}


def test_a_probe_that_hangs_has_failed(place: Place) -> None:
    probe = shlex.join([sys.executable, "-c", "import signal; signal.pause()"])
    options = ["--calibrate", "1", "--one", "--remedies", "0"]
    done = place.run(*options, "--probe", probe, "--probe-timeout", "1", "--", *SIM, "--overlap", "on")
    assert "[1] FAILS: hang in serving" in done.stdout
    assert "The base fails too" in done.stdout


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("test_it.py -k nothing", "no test was selected"),
        ("no_such_file.py", "pytest ended with exit code 4 (wrong usage)"),
        ("test_broken.py", "test_broken.py could not be collected: ModuleNotFoundError: No module named 'no_such'"),
    ],
)
def test_pytest_that_can_never_tell(place: Place, test: str, said: str) -> None:
    (place.path / "test_it.py").write_text("def test_it(): pass\n")
    (place.path / "test_broken.py").write_text("import no_such\n")
    probe = f"{sys.executable} -m pytest -p no:randomly {test}"
    done = place.run("--calibrate", "1", "--probe", probe, "--", *SIM, "--overlap", "on")
    assert done.returncode == 1
    assert f"Undecided: 1 launches of the whole command, and none told whether it fails: {said}" in done.stdout
    assert len(place.state["runs"]) == 2


def test_a_probe_that_its_shell_does_not_find(place: Place) -> None:
    done = place.run("--calibrate", "1", "--probe", "sh -c 'no-such-program'", "--", *SIM, "--overlap", "on")
    assert done.returncode == 2
    assert "--probe cannot be run (exit code 127): " in done.stderr
    assert "no-such-program" in done.stderr
    assert place.servers() == 1


def test_pytest_as_probe_starts_the_server_itself(place: Place) -> None:
    (place.path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.gpuserve(engine='sim', args={'--kv-cache-dtype': 'fp8'})\n"
        "def test_it(server):\n    assert __import__('os').environ['A'] == '1'\n"
        "    assert 'fp8' not in server.get('/get_server_info').text\n"
    )
    probe = shlex.join(["A=1", sys.executable, "-B", "-m", "pytest", "-p", "no:randomly", "test_it.py::test_it"])
    words = [*SIM, "--kv-cache-dtype", "fp8", "--overlap", "on", "--cuda-graph", "off"]
    done = place.run("--calibrate", "1", "--one", "--remedies", "0", "--probe", probe, "--", *words)
    assert done.returncode == 0
    assert place.state["result"]["sets"] == [["--kv-cache-dtype"]]
    assert place.state["target"] == {"verdict": "test", "phase": None, "roots": ["AssertionError"]}


def test_a_matrix_that_is_finished_saves_launches(place: Place) -> None:
    def cell(id: str, decode: str, graph: str, verdict: str) -> dict:
        phase = "cuda_graph" if verdict != "ready" else None
        values = {"spec_decode": decode, "cuda_graph": graph}
        return {"id": id, "values": values, "verdict": verdict, "phase": phase}

    def spec(decode: str, graph: str) -> dict:
        axes = {"spec_decode": decode, "cuda_graph": graph}
        return {"engine": "sim", "tp": 2, "axes": axes, "args": {"fault": CRASH, "shards": 1}}

    matrix = {
        "schema": "gpuserve.matrix/1",
        "base": {"spec_decode": "base", "cuda_graph": "off"},
        "cells": [
            cell("a", "base", "off", "ready"),
            cell("d", "eagle3", "on", "crash"),
            cell("b", "eagle3", "off", "ready"),
        ],
        "specs": {"a": spec("base", "off"), "d": spec("eagle3", "on")},
    }
    (place.path / "matrix.json").write_text(json.dumps(matrix))
    done = place.run("--calibrate", "1", "--one", "--from", "matrix.json", "d")
    assert done.returncode == 0
    assert place.state["result"]["sets"] == [["spec_decode", "cuda_graph"]]
    asked = [run["deltas"] for run in place.state["runs"]]
    assert [] not in asked, "the matrix ran the base already"
    assert len(asked) <= 8


def matrix_of_one_axis(place: Place, fault: str) -> None:
    def spec(graph: str) -> dict:
        return {"engine": "sim", "tp": 1, "axes": {"cuda_graph": graph}, "args": {"fault": fault, "shards": 1}}

    cells = [
        {"id": "a", "values": {"cuda_graph": "off"}, "verdict": "ready", "phase": None},
        {"id": "d", "values": {"cuda_graph": "on"}, "verdict": "crash", "phase": "cuda_graph"},
    ]
    specs = {"a": spec("off"), "d": spec("on")}
    matrix = {"schema": "gpuserve.matrix/1", "base": {"cuda_graph": "off"}, "cells": cells, "specs": specs}
    (place.path / "matrix.json").write_text(json.dumps(matrix))


def test_what_a_matrix_tells_of_both_ends_is_launched_once_before_it_is_said_to_be_found(place: Place) -> None:
    """Mutation: ``Isolation._verify`` not called: found after no launch."""
    matrix_of_one_axis(place, "exit@cuda_graph:code=3:when=cuda_graph=on")
    done = place.run("--calibrate", "1", "--one", "--remedies", "0", "--from", "matrix.json", "d")
    assert done.returncode == 0, done.stdout
    assert place.state["result"]["sets"] == [["cuda_graph"]]
    assert [(run["deltas"], run["outcome"]) for run in place.state["runs"]] == [(["cuda_graph"], "fail"), ([], "pass")]


def test_what_a_matrix_tells_and_no_launch_confirms_is_not_found(place: Place) -> None:
    matrix_of_one_axis(place, "exit@cuda_graph:code=3:when=overlap=on")
    done = place.run("--calibrate", "1", "--one", "--remedies", "0", "--from", "matrix.json", "d")
    assert done.returncode == 1, done.stdout
    assert "Undecided: by the matrix everything fails, but here: pass in " in done.stdout
    assert "Smallest command that fails" not in done.stdout
    assert place.state["result"]["status"] == "undecided"


def test_a_launch_that_refines_a_delta_says_what_is_on() -> None:
    """Mutation: ``what`` for every stage: base alone."""
    assert running(7, "refine eagle3", (), ("steps", "topk"), "calibrate", None) == (
        "[7] eagle3: its core alone (calibrate) …"
    )
    assert "eagle3: its core, topk (" in running(8, "refine eagle3", ("topk",), ("steps", "topk"), "search", None)
    assert "base alone" in running(9, "search", (), ("eagle3",), "calibrate", None)


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        ("python -m sglang.launch_server --model-path m", "sglang"),
        ("A=1 env B=2 /opt/venv/bin/python3 -m sglang.launch_server", "sglang"),
        ("vllm serve m", "vllm"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "vllm"),
        ("python -m pytest_gpuserve.sim --tp 2", "sim"),
        ("./my_server --port 1", "command"),
        ("", "command"),
    ],
)
def test_the_engine_is_told_by_the_command(words: str, engine: str) -> None:
    assert recognise(words.split()) == engine


def test_the_state_belongs_to_one_command(tmp_path: Path) -> None:
    state = open_state(tmp_path, fingerprint("a"), "cmd SECRET", Redactor.of({"API_KEY": "SECRET"}), fresh=False)
    run = Run(1, "search", ("a",), "calibrate", "fail", "hang", "serving", ("x",), 1.5, "key SECRET")
    state.add(run)
    text = (tmp_path / "isolate.json").read_text()
    assert "hang" in text
    assert "SECRET" not in text
    back = open_state(tmp_path, fingerprint("a"), "cmd", Redactor.of({}), fresh=False)
    assert back.launches("search", ["b", "a"]) == {frozenset({1}): ["fail"]}
    assert back.launches("remedy x", ["a"]) == {}
    with pytest.raises(GpuserveError, match="about another command"):
        open_state(tmp_path, fingerprint("b"), "cmd", Redactor.of({}), fresh=False)
    assert open_state(tmp_path, fingerprint("b"), "cmd", Redactor.of({}), fresh=True).runs == []
    (tmp_path / "isolate.json").write_text("{")
    with pytest.raises(GpuserveError, match="cannot be read"):
        open_state(tmp_path, fingerprint("a"), "cmd", Redactor.of({}), fresh=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("probe", ["", "pytest"])
def test_interrupted_it_says_how_to_go_on(place: Place, number: signal.Signals, probe: str) -> None:
    """Servers that are coming up are ended, not waited for; no launch that was cut short counts."""
    (place.path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.gpuserve(engine='sim')\ndef test_it(server): pass\n"
    )
    words = ["--stall-timeout", "400", "--", *SIM, "--phase-seconds", "weight_load=400", "--overlap", "on"]
    if probe:
        words = ["--probe", f"{sys.executable} -m pytest -p no:randomly test_it.py", *words]
    process = subprocess.Popen(
        place.command(*words), stdout=subprocess.PIPE, text=True, cwd=place.path, env=place.environment
    )
    try:
        deadline = time.monotonic() + 60
        while not place.servers():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "the same command goes on from there" in out
    assert not (place.output / "isolate.json").exists()
