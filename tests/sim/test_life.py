"""Start, end and death: process trees, exit codes, what is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

FLAVORS = pytest.mark.parametrize("flavor", ["sglang", "vllm"])


@FLAVORS
def test_eight_ranks_are_up_in_a_moment(start: Any, flavor: str) -> None:
    """About 0.4 s on two idle cores."""
    best = 99.0
    for _ in range(4):
        server = start("--tp", "8", "--flavor", flavor).ready()
        best = min(best, time.monotonic() - server.started)
        assert server.terminate() == 0
        if best < 1.0:
            break
    assert best < 3.0


@FLAVORS
def test_processes_and_titles(start: Any, wait_until: Callable[..., Any], flavor: str) -> None:
    server = start("--tp", "3", "--flavor", flavor).ready()
    titles = {server.title(pid): pid for pid in server.pids()}
    main = next(pid for title, pid in titles.items() if "-m pytest_gpuserve.sim" in title)
    assert main == server.pid
    assert [title for title in titles if "multiprocessing.resource_tracker" in title]
    if flavor == "vllm":
        core = titles["VLLM::EngineCore"]
        expected = {f"VLLM::Worker_TP{n}": core for n in range(3)} | {"VLLM::EngineCore": main}
    else:
        expected = {f"sglang::scheduler_TP{n}": main for n in range(3)} | {"sglang::detokenizer": main}
    assert {title: _parent(titles[title]) for title in expected} == expected
    assert len(titles) == len(expected) + 2
    wait_until(lambda: _is_idle(server.pids()), "nobody uses a CPU once the start is over")


@FLAVORS
def test_one_rank_has_no_number(start: Any, flavor: str) -> None:
    server = start("--flavor", flavor).ready()
    assert len(server.titled("^(sglang::scheduler|VLLM::Worker)$")) == 1
    assert "TP0" not in server.log.replace("TP rank", "")


@pytest.mark.parametrize(
    ("flavor", "signum"),
    [("sglang", signal.SIGTERM), ("vllm", signal.SIGTERM), ("sglang", signal.SIGINT), ("vllm", signal.SIGHUP)],
)
def test_a_polite_signal_ends_everything(
    start: Any, wait_until: Callable[..., Any], tmp_path: Path, flavor: str, signum: int
) -> None:
    server = start(
        "--tp", "2", "--flavor", flavor, "--leak-shm", "--jit-cache", "cold", "--cold-compile", "0.1"
    ).ready()
    assert len(_boards(server.pid)) == 1
    assert list(tmp_path.glob("gpuserve-sim-*"))
    began = time.monotonic()
    assert server.terminate(signum) == 0
    assert time.monotonic() - began < 5
    wait_until(lambda: not server.pids(), "nothing is left")
    assert not _boards(server.pid)
    assert not list(tmp_path.glob("gpuserve-sim-*"))
    assert "Traceback" not in server.log


@FLAVORS
def test_sigterm_in_the_middle_of_a_start(start: Any, wait_until: Callable[..., Any], flavor: str) -> None:
    server = start("--tp", "4", "--flavor", flavor, "--load-seconds", "60", "--shards", "64")
    server.logged(r"1/64")
    assert server.terminate() == 0
    wait_until(lambda: not server.pids(), "nothing is left")


@FLAVORS
def test_sigterm_to_the_whole_tree_is_polite_too(start: Any, wait_until: Callable[..., Any], flavor: str) -> None:
    server = start("--tp", "3", "--flavor", flavor).ready()
    for pid in sorted(server.pids(), reverse=True):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert "died unexpectedly" not in server.log
    assert "crashed" not in server.log
    wait_until(lambda: not server.pids(), "nothing is left")


@FLAVORS
def test_sigterm_ends_stuck_ranks(start: Any, wait_until: Callable[..., Any], flavor: str) -> None:
    """A rank that holds the GIL handles no signal, a stopped one none but SIGKILL."""
    faults = "gil@serving:rank=0;stop@serving:rank=1"
    server = start("--tp", "3", "--flavor", flavor, "--fault", faults).ready()
    with pytest.raises(TimeoutError):
        server.complete(timeout=0.3)
    assert server.terminate() == 0
    wait_until(lambda: not server.pids(), "nothing is left")


@FLAVORS
def test_ignore_term(start: Any, flavor: str) -> None:
    server = start("--tp", "2", "--flavor", flavor, "--ignore-term").ready()
    before = sorted(server.pids())
    for pid in before:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, signum)
    time.sleep(0.5)
    assert [pid for pid in before if "resource_tracker" not in server.title(pid)] == [
        pid for pid in sorted(server.pids()) if "resource_tracker" not in server.title(pid)
    ]
    assert server.text()


@FLAVORS
def test_daemonize(start: Any, wait_until: Callable[..., Any], flavor: str) -> None:
    server = start("--tp", "2", "--flavor", flavor, "--daemonize", "--ignore-term")
    assert server.process.wait(20) == 0
    wait_until(lambda: re.search("(?m)fired up|^INFO:     Application startup complete", server.log), "ready")
    assert server.text()
    (main,) = server.titled("-m pytest_gpuserve.sim")
    assert main != server.pid
    assert os.getsid(main) not in (server.pid, main, os.getsid(0))
    assert _parent(main) not in (server.pid, os.getpid())


def test_daemonized_helper(start: Any, wait_until: Callable[..., Any]) -> None:
    server = start("--daemonize", "helper", "--ignore-term").ready()
    helper = next(pid for pid in server.titled("-m pytest_gpuserve.sim") if pid != server.pid)
    assert os.getsid(helper) != os.getsid(server.pid)
    os.kill(helper, signal.SIGTERM)
    assert server.terminate(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: server.pids() == [helper], "only the helper is left")


def test_port_in_use(start: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = start("--tp", "2", port=taken.getsockname()[1])
        assert server.process.wait(20) == 1
        assert "address already in use" in server.log.lower()
        assert "Traceback" not in server.log


def test_a_bad_command_line_exits_at_once(start: Any) -> None:
    server = start("--fault", "sleep@nowhere")
    assert server.process.wait(20) == 2
    assert "'nowhere' is no phase" in server.log


def test_api_key(start: Any) -> None:
    for flavor, open_paths in (("sglang", ("/health", "/metrics")), ("vllm", ("/health", "/metrics", "/version"))):
        server = start("--flavor", flavor, "--api-key", "s3cret").ready()
        assert [server.get(path).status for path in open_paths] == [200] * len(open_paths)
        for key in ("", "Bearer wrong", "s3cret", "Bearer \u00e9"):
            server.keys = {"Authorization": key.encode().decode("latin-1")}
            assert server.get("/v1/models").status == server.complete().status == 401
        server.keys = {"Authorization": "Bearer s3cret"}
        assert server.get("/v1/models").status == server.complete().status == 200
        assert "s3cret" not in server.get("/get_server_info").body.decode()


def test_quiet(start: Any) -> None:
    server = start("--quiet").ready()
    server.complete()
    assert "Prefill batch" not in server.log
    assert "POST /v1" not in server.log


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _is_idle(pids: list[int], seconds: float = 0.5) -> bool:
    """Each uses at most two ticks in that time."""
    before = {pid: _ticks(pid) for pid in pids}
    time.sleep(seconds)
    return all(_ticks(pid) - ticks <= 2 for pid, ticks in before.items())


def _boards(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"gpuserve_sim_loads_{pid}-*"))
