"""Deaths: of the front end, of a rank, of vLLM's engine core; exit codes and logs are those of the engines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest


def test_sigkill_takes_sglangs_ranks_along(start: Any, wait_until: Callable[..., Any]) -> None:
    server = start("--tp", "3", "--leak-shm", "--fault", "gil@serving:rank=1").ready()
    with pytest.raises(TimeoutError):
        server.complete(timeout=0.3)
    assert server.terminate(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not server.pids(), "nothing is left")
    (left,) = _boards(server.pid)
    left.unlink()


def test_sigkill_leaves_vllms_engine_behind(start: Any, wait_until: Callable[..., Any]) -> None:
    server = start("--tp", "2", "--flavor", "vllm").ready()
    (core,) = server.titled("^VLLM::EngineCore$")
    workers = [server.rank(0), server.rank(1)]
    assert server.terminate(signal.SIGKILL) == -signal.SIGKILL
    server.stuck_in(core, "wait_for_requests")
    wait_until(lambda: _parent(core) != server.pid, "reparented")
    assert set(server.titled("^VLLM::")) == {core, *workers}
    assert {_parent(worker) for worker in workers} == {core}
    os.kill(core, signal.SIGTERM)
    wait_until(lambda: not server.pids(), "the engine ends its workers")


def test_workers_notice_the_death_of_the_core(start: Any, wait_until: Callable[..., Any]) -> None:
    server = start("--tp", "2", "--flavor", "vllm").ready()
    server.process.send_signal(signal.SIGSTOP)  # the front end, which would kill them
    os.kill(server.titled("^VLLM::EngineCore$")[0], signal.SIGKILL)
    wait_until(lambda: not server.titled("Worker"), "the workers are gone")
    assert "Parent process exited, terminating worker queues" in server.log
    server.process.send_signal(signal.SIGCONT)
    assert server.process.wait(20) == 0


@pytest.mark.parametrize(
    ("flavor", "phase", "kind"),
    [
        ("sglang", "cuda_graph", "die"),
        ("vllm", "cuda_graph", "die"),
        ("sglang", "serving", "die"),
        ("vllm", "serving", "die"),
        ("sglang", "warmup", "exit"),
        ("vllm", "weight_load", "exit"),
        ("sglang", "serving", "raise"),
        ("vllm", "kv_cache", "raise"),
        ("sglang", "weight_load", "oom"),
        ("vllm", "serving", "oom"),
    ],
)
def test_death_of_a_rank(start: Any, wait_until: Callable[..., Any], flavor: str, phase: str, kind: str) -> None:
    server = start("--tp", "3", "--flavor", flavor, "--fault", f"{kind}@{phase}:rank=1")
    if phase == "serving":
        server.ready()
        with suppress(ConnectionError):
            assert server.complete().status == 500
    code = server.process.wait(20)
    assert code == (-9 if flavor == "sglang" else 0 if phase == "serving" else 1)
    wait_until(lambda: not server.pids(), "nothing is left")
    log = server.log
    if kind == "raise":
        assert re.search(r"RuntimeError: CUDA error: an illegal memory access", log)
    if kind == "oom":
        assert re.search(r"torch\.OutOfMemoryError: CUDA out of memory\. Tried to allocate 2\.00 GiB\. GPU 1 ", log)
    if kind in ("raise", "oom"):
        tag = (
            r"\[.* TP1\] Scheduler hit an exception: " if flavor == "sglang" else r"\(Worker_TP1 pid=\d+\) ERROR .*\] "
        )
        assert re.search(tag + "Traceback", log)
        assert "stalls.py" not in log
        assert "device.py" in log
    if flavor == "vllm":
        assert ("EngineDeadError" if phase == "serving" else "Engine core initialization failed") in log
    if flavor == "sglang" and kind != "die":
        assert "kill_process_tree called" in log


def test_sglang_wraps_what_goes_wrong_in_a_capture(start: Any) -> None:
    server = start("--tp", "2", "--fault", "raise@cuda_graph:rank=1")
    assert server.process.wait(20) == -9
    assert "Exception: Capture cuda graph failed: CUDA error" in server.log
    assert "1. set --mem-fraction-static to a smaller value" in server.log


def test_the_engines_own_watchdog(start: Any) -> None:
    server = start("--tp", "2", "--watchdog-timeout", "0.5", "--fault", "sleep@serving:rank=1").ready()
    with suppress(ConnectionError):
        assert server.complete(timeout=20).status == 500
    assert server.process.wait(20) == -9
    assert "Scheduler watchdog timeout (self.watchdog_timeout=0.5, self.soft=False)" in server.log
    server = start(
        *("--tp", "2", "--flavor", "vllm", "--watchdog-timeout", "1", "--fault", "sleep@serving:rank=1"),
        environ={"VLLM_RINGBUFFER_WARNING_INTERVAL": "0.3"},
    ).ready()
    assert server.complete(timeout=20).status == 500
    assert server.process.wait(20) == 0
    assert "RPC call to sample_tokens timed out." in server.log
    assert "No available shared memory broadcast block found in 0.3 seconds" in server.log


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _boards(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"gpuserve_sim_loads_{pid}-*"))


def test_the_next_server_removes_the_files_of_a_killed_one(
    start: Any, wait_until: Callable[..., Any], tmp_path: Path
) -> None:
    killed = start("--tp", "2", "--fault", "flock@serving:rank=1").ready()
    with pytest.raises(TimeoutError):
        killed.complete(timeout=0.3)
    (left,) = tmp_path.glob(f"gpuserve-sim-{killed.pid}-*")
    running = start("--tp", "2", "--fault", "flock@weight_load:rank=1")
    running.stuck_in(running.rank(1), "acquire_build_lock")
    assert left.exists()
    killed.destroy()
    assert left.exists()
    start().ready()
    assert not left.exists()
    assert list(tmp_path.glob(f"gpuserve-sim-{running.pid}-*"))
