"""The adapter: a spec becomes a command line that the embedded engine takes, and its processes are told apart."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.engines.base import Launch, ProcessRole, Rank
from pytest_gpuserve.engines.sim import DEFAULT_MODEL
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.sim import faults, options
from pytest_gpuserve.spec import AXES, ServerSpec

ENGINE = get_engine("sim")


def launch(**values: Any) -> Launch:
    spec = ServerSpec.from_mapping({"engine": "sim", **values})
    return ENGINE.launch(spec, host="127.0.0.1", port=4711, python=sys.executable)


def understood(**values: Any) -> Any:
    """The options that the engine makes of the adapter's command line."""
    argv = launch(**values).argv
    assert argv[:3] == (sys.executable, "-m", "pytest_gpuserve.sim")
    return options.parse(argv[3:], {})[0]


def test_a_plain_spec() -> None:
    o = understood(tp=4, model="/models/m")
    assert (o.tp, o.model, o.served_model_name, o.host, o.port) == (4, "/models/m", "/models/m", "127.0.0.1", 4711)
    assert understood().model == DEFAULT_MODEL


def test_axes() -> None:
    detail = {"draft_model": "d", "num_steps": 5, "topk": 2, "num_draft_tokens": 8, "accept_rate": 0.25}
    o = understood(spec_decode={"eagle3": detail}, cuda_graph="off", attention_backend="triton", overlap=False)
    assert (o.spec_decode, o.draft_model, o.spec_steps, o.spec_topk) == ("eagle3", "d", 5, 2)
    assert (o.spec_draft_tokens, o.accept_rate) == (8, 0.25)
    assert (o.cuda_graph, o.attention_backend, o.axes) == (False, "triton", (("overlap", "off"),))
    assert understood(jit_cache="cold").cold_compile == options.COLD_COMPILE
    assert understood(spec_decode=False).spec_decode == "base"


def test_its_axes_are_those_of_the_command_line() -> None:
    assert tuple(ENGINE.axes) == AXES
    assert ENGINE.axes["spec_decode"] == options.SPEC_METHODS
    assert {axis: tuple(ENGINE.axes[axis]) for axis in faults.AXES} == faults.AXES
    for axis in AXES:
        for value in ENGINE.axes[axis] or ("anything",):
            understood(**{axis: value})


def test_args_win_and_false_removes() -> None:
    o = understood(tp=2, args={"flavor": "vllm", "--load-seconds": 1.5, "ignore_term": True, "quiet": None})
    assert (o.flavor, o.phase_seconds, o.ignore_term, o.quiet) == ("vllm", (("weight_load", 1.5),), True, True)
    assert understood(cuda_graph="off", args={"cuda_graph": False}).cuda_graph
    assert understood(args={"model_path": "other"}).served_model_name == "other"
    assert [f.kind for f in understood(args={"fault": "sleep@ready;gil@serving"}).faults] == ["sleep", "gil"]
    assert understood(args={"api-key": "-dashed"}).api_key == "-dashed"


def test_environment() -> None:
    env = launch(env={"GPUSERVE_SIM_FAULT": "sleep@ready", "PYTHONPATH": "/mine"}).env
    assert env["GPUSERVE_SIM_FAULT"] == "sleep@ready"
    assert "/mine" in str(env["PYTHONPATH"]).split(os.pathsep)
    assert env["SPT_NOENV"] == "1"  # titles must not overwrite the cookie in /proc/PID/environ


def test_mistakes() -> None:
    for values, words in (
        ({"cuda_graph": "piecewise"}, "Legal values: on, off"),
        ({"spec_decode": "medusa"}, "axis spec_decode cannot be 'medusa'"),
        ({"spec_decode": {"eagle3": {"depth": 3}}}, "no detail 'depth'"),
        ({"attention_backend": {"triton": {"prefill": "fa3"}}}, "Known details: none"),
        ({"axes": {"colour": "red"}}, "no axis colour"),
    ):
        with pytest.raises(GpuserveError, match=words):
            launch(**values)


def test_probe_and_model() -> None:
    spec = ServerSpec.from_mapping({"engine": "sim", "args": {"served_model_name": "toy"}})
    assert (ENGINE.ready(spec).path, ENGINE.ready(spec).generate) == ("/health_generate", None)
    assert ENGINE.served_model(spec) == "toy"
    assert ENGINE.ready(ServerSpec.from_mapping({"engine": "sim", "ready": "/health"})).path == "/health"


@pytest.mark.parametrize(
    ("argv", "seconds"),
    [
        ((), None),
        (("--watchdog-timeout=30",), 30.0),
        (("--watchdog-timeout", "2.5"), 2.5),
        (("--watchdog-timeout=0",), None),
    ],
)
def test_own_timeout(argv: tuple[str, ...], seconds: float | None) -> None:
    assert ENGINE.own_timeout(Launch(("python", "-m", "pytest_gpuserve.sim", *argv))) == seconds


@pytest.mark.parametrize("flavor", ["sglang", "vllm"])
def test_roles_of_a_running_server(start: Any, flavor: str) -> None:
    server = start("--tp", "2", "--flavor", flavor).ready()
    roles = []
    for pid in server.pids():
        cmdline = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").decode().split("\0")
        roles.append(ENGINE.process_role(cmdline, Path(f"/proc/{pid}/comm").read_text().strip()))
    ranks = [ProcessRole("worker" if flavor == "vllm" else "scheduler", Rank(tp=n)) for n in (0, 1)]
    fourth = ProcessRole("engine_core" if flavor == "vllm" else "detokenizer")
    expected = [ProcessRole("api"), ProcessRole("helper"), fourth, *ranks]
    assert sorted(map(repr, roles)) == sorted(map(repr, expected))


def test_roles_of_strangers() -> None:
    assert ENGINE.process_role(["/tmp/x/ptxas", "-S"], "ptxas") == ProcessRole("compiler")
    assert ENGINE.process_role(["VLLM::Worker"], "VLLM::Worker") == ProcessRole("worker")
    assert ENGINE.process_role(["/usr/bin/sleep", "1"], "sleep") is None


def test_it_starts_where_only_pytest_knows_the_package(tmp_path: Path) -> None:
    """No site-packages, another directory: PYTHONPATH alone finds it. Without setproctitle it is untitled but works."""
    made = ENGINE.launch(ServerSpec("sim", tp=2), host="127.0.0.1", port=_free_port(), python=sys.executable)
    env = {**os.environ, **{k: v for k, v in made.env.items() if v is not None}}
    command = [made.argv[0], "-S", *made.argv[1:]]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd="/", env=env, stdout=log, stderr=log)
    try:
        port = options.parse(made.argv[3:], {})[0].port
        end = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health_generate", timeout=5) as reply:
                    assert reply.status == 200
                break
            except (OSError, urllib.error.URLError):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < end
                time.sleep(0.05)
    finally:
        process.terminate()
        assert process.wait(20) == 0


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
