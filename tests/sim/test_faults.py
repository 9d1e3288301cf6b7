"""Faults of start-up: the struck rank sits in the call it should, the others wait for it in the collective."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WAITING = ("recv", "recv", "all_reduce", "barrier", "capture_model", "init_model_worker", "run_scheduler_process")

SLEEPS = (35, 230, 23, 270)
"""nanosleep, clock_nanosleep; before Python 3.11 select or pselect6."""

BLOCKED = {
    # kind: functions of the struck rank from the leaf on, system calls (x86-64) it may be in
    "sleep": (("synchronize", "launch"), SLEEPS),
    "gil": (("launch_kernel", "launch"), (35, 230)),
    "flock": (("acquire_build_lock", "launch"), (73,)),
    "stale_lock": (("wait", "launch"), SLEEPS),
    "pipe": (("receive_handle", "launch"), (0,)),
    "stop": (("suspend", "launch"), ()),
    "symmetric": (("wait_event", "launch"), (202,)),
}


@pytest.mark.parametrize("kind", BLOCKED)
def test_blocked_in_start_up(start: Any, wait_until: Callable[..., Any], kind: str) -> None:
    functions, syscalls = BLOCKED[kind]
    port = _free_port()
    server = start("--tp", "3", "--fault", f"{kind}@cuda_graph" + ("" if kind == "symmetric" else ":rank=1"), port=port)
    struck = server.rank(1)
    server.stuck_in(struck, *functions, "capture_model", "run_scheduler_process")
    for number in (0, 2):
        server.stuck_in(server.rank(number), *(WAITING if kind != "symmetric" else functions))
    if syscalls and server.syscall(struck) is not None:
        wait_until(lambda: server.syscall(struck) in syscalls, f"{kind} in {syscalls}: {server.syscall(struck)}")
    wait_until(lambda: _state(struck) == ("T" if kind == "stop" else "S"), "the state of the struck rank")
    assert server.main_thread(struck)["owns_gil"] == (kind in ("gil", "stop"))
    with pytest.raises(ConnectionRefusedError):  # as with the engines, nothing listens before it is ready
        server.get("/health")
    assert re.search(r"TP1\] Capture cuda graph begin", server.log)
    assert "Capture cuda graph end" not in server.log
    began = time.monotonic()
    assert server.terminate() == 0
    assert time.monotonic() - began < 10
    wait_until(lambda: not server.pids(), "nothing is left")


@pytest.mark.parametrize(("how", "function"), [("c", "spin_stream"), ("python", "poll_stream")])
def test_spin(start: Any, wait_until: Callable[..., Any], how: str, function: str) -> None:
    server = start("--tp", "2", "--fault", f"spin@warmup:rank=1:how={how}")
    struck = server.rank(1)
    server.stuck_in(struck, function, "launch", "execute_model", "event_loop_normal")
    before = _ticks(struck)
    wait_until(lambda: _ticks(struck) > before + 20, "it burns CPU")
    server.stuck_in(server.rank(0), "recv", "recv", "all_reduce", "forward")
    assert server.get("/health").status == 503  # SGLang's, until its warm-up request is answered


def test_flock_is_held_by_a_rank_that_waits(start: Any) -> None:
    server = start("--tp", "3", "--fault", "flock@kv_cache:rank=1")
    server.stuck_in(server.rank(1), "acquire_build_lock")
    server.stuck_in(server.rank(2), "recv", "recv", "all_reduce", "barrier", "initialize_kv_cache")
    locks = Path("/proc/locks").read_text().splitlines()
    waiter = next(line for line in locks if "->" in line and f" {server.rank(1)} " in line)
    inode = re.search(r"\S+:\S+:\d+", waiter)
    assert inode
    holder = next(line for line in locks if "->" not in line and inode[0] in line)
    assert f" {server.rank(2)} " in holder


def test_skip_collective_in_start_up(start: Any) -> None:
    """The rank that went on waits in the next collective, the others in the one that it left out."""
    server = start("--tp", "3", "--fault", "skip_collective@weight_load:rank=2")
    server.stuck_in(server.rank(2), "recv", "recv", "all_reduce", "barrier", "initialize_kv_cache")
    for number in (0, 1):
        server.stuck_in(server.rank(number), "recv", "recv", "all_reduce", "barrier", "load_weights")


def test_deaf_from_the_start(start: Any, wait_until: Callable[..., Any]) -> None:
    server = start("--fault", "deaf@weight_load", port=_free_port())
    wait_until(lambda: _connects(server.port), "the port is open")
    with pytest.raises(TimeoutError):
        server.get("/health", timeout=0.5)
    assert server.terminate() == 0


@pytest.mark.parametrize("how", ["cpu", "io", "compile"])
def test_slow_is_alive_and_ends(start: Any, wait_until: Callable[..., Any], how: str) -> None:
    server = start("--tp", "2", "--fault", f"slow@weight_load:rank=1:for=1.5:how={how}")
    struck = server.rank(1)
    if how == "cpu":
        server.stuck_in(struck, "repack_weights", "launch", "load_weights")
        before = _ticks(struck)
        wait_until(lambda: _ticks(struck) > before, "CPU time")
    elif how == "io":
        server.stuck_in(struck, "read_shards", "launch", "load_weights")
        before = _read(struck)
        wait_until(lambda: _read(struck) > before + (1 << 20), "bytes read")
    else:
        found = [wait_until(lambda name=name: server.titled(rf"/{name} "), name)[0] for name in ("cicc", "ptxas")]
        assert Path(f"/proc/{found[1]}/comm").read_text().strip() == "ptxas"
        before = _ticks(found[1])
        wait_until(lambda: not Path(f"/proc/{found[1]}").exists() or _ticks(found[1]) > before, "the compiler works")
    server.ready()
    assert server.text()


def test_cold_compile_makes_the_others_wait_for_the_baton(start: Any, wait_until: Callable[..., Any]) -> None:
    server = start("--tp", "3", "--jit-cache", "cold", "--cold-compile", "1.5")
    (compiler,) = wait_until(lambda: server.titled("/cicc "), "a compiler")
    builder = int(Path(f"/proc/{compiler}/stat").read_text().rpartition(")")[2].split()[1])
    others = [server.rank(n) for n in range(3) if server.rank(n) != builder]
    assert len(others) == 2
    for other in others:
        server.stuck_in(other, "wait", "build_extension", "compile_kernels")
    server.stuck_in(builder, "run_compiler", "build_extension", "compile_kernels")
    server.ready()


def test_a_killed_build_leaves_a_lock_that_stops_the_next_start(
    start: Any, wait_until: Callable[..., Any], tmp_path: Path
) -> None:
    cache = ("--cache-dir", str(tmp_path / "cache"))
    first = start("--tp", "2", *cache, "--cold-compile", "20")
    wait_until(lambda: first.titled("/cicc "), "a compiler")
    first.destroy()
    second = start("--tp", "2", *cache, "--cold-compile", "20")
    for number in (0, 1):
        second.stuck_in(second.rank(number), "wait", "build_extension")
    (tmp_path / "cache" / "lock").unlink()
    second.destroy()


def test_a_warm_cache_compiles_nothing(start: Any, tmp_path: Path) -> None:
    cache, compiler = tmp_path / "cache", tmp_path / "cache" / "ptxas"
    for cold in (True, False):
        server = start("--cache-dir", str(cache), "--cold-compile", "0.4").ready()
        assert server.terminate() == 0
        assert (cache / "kernels.so").exists()
        assert compiler.is_symlink() == cold
        compiler.unlink(missing_ok=True)


def test_after_and_at(start: Any, wait_until: Callable[..., Any]) -> None:
    """``at=end``: all shards are there, and then nothing. ``after``: the phase lasts until then."""
    server = start("--tp", "2", "--shards", "8", "--fault", "sleep@weight_load:rank=all:at=end:after=0.6")
    server.logged(r"100% Completed \| 8/8")
    server.stuck_in(server.rank(0), "synchronize", "launch", "finish", "load_weights")
    assert "Load weight end" not in server.log
    half = start("--tp", "2", "--shards", "8", "--fault", "sleep@weight_load:rank=0:at=0.5")
    half.stuck_in(half.rank(0), "synchronize", "launch", "load_weights")
    assert re.findall(r"(\d)/8", half.log)[-1] == "4"


def test_a_phase_that_does_not_happen_has_no_fault(start: Any) -> None:
    faults = "sleep@cuda_graph;sleep@draft_load;sleep@draft_cuda_graph;sleep@autotune"
    server = start("--tp", "2", "--cuda-graph", "off", "--attention-backend", "triton", "--fault", faults).ready()
    assert server.text()
    assert "Capture" not in server.log
    assert "utotune" not in server.log


def test_a_fault_before_the_title_is_set(start: Any) -> None:
    """As in the engines, a rank that is stuck in its imports shows as a nameless child."""
    server = start("--tp", "2", "--fault", "sleep@spawn:rank=1")
    server.stuck_in(server.rank(0), "recv", "recv", "all_reduce", "barrier", "init_distributed")
    assert not server.titled("TP1")
    while len(found := server.titled("multiprocessing.spawn")) != 1:  # the others have theirs in a moment
        assert time.monotonic() - server.started < 30
    (nameless,) = found
    server.stuck_in(nameless, "synchronize", "launch", "run_scheduler_process")


@pytest.mark.parametrize("phase", ["distributed_init", "draft_load", "draft_cuda_graph", "warmup", "ready", "compile"])
@pytest.mark.parametrize("flavor", ["sglang", "vllm"])
def test_every_phase_can_be_struck(start: Any, flavor: str, phase: str) -> None:
    server = start("--tp", "2", "--flavor", flavor, "--spec-decode", "eagle3", "--fault", f"pipe@{phase}:rank=0")
    title = "^VLLM::Worker$" if (flavor, phase) == ("vllm", "distributed_init") else "TP0$"
    server.logged(r"TP0 pid=|\] world_size=|TP0\]")
    while not (found := [pid for pid in server.titled(title) if "receive_handle" in server.stack(pid)]):
        assert time.monotonic() - server.started < 30
    stack = server.stuck_in(found[0], "receive_handle", "launch")
    functions = {
        "distributed_init": "init_distributed",
        "draft_load": "load_draft",
        "draft_cuda_graph": "capture_draft_model",
        "warmup": "execute_model",
        "ready": "become_ready",
        "compile": "compile_kernels",
    }
    assert functions[phase] in stack


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _connects(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.connect()
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()
    return True


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _state(pid: int) -> str:
    return _fields(pid)[0]


def _ticks(pid: int) -> int:
    try:
        return int(_fields(pid)[11]) + int(_fields(pid)[12])
    except OSError:
        return 1 << 40


def _read(pid: int) -> int:
    return int(re.findall(r"rchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[0])
