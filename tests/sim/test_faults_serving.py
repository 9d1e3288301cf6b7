"""Faults of serving: /health goes on, tokens stand still, and the stacks say why."""

from __future__ import annotations

import signal
from typing import Any

import pytest


@pytest.mark.parametrize("flavor", ["sglang", "vllm"])
def test_a_rank_stuck_while_serving(start: Any, flavor: str) -> None:
    """Health says 200, counters stand still, the client waits."""
    server = start("--tp", "3", "--flavor", flavor, "--fault", "sleep@serving:rank=1:requests=1").ready()
    assert server.get("/health_generate").status == 200
    assert server.text()
    before = server.metrics()
    with pytest.raises(TimeoutError):
        server.complete(timeout=1.0)
    server.stuck_in(server.rank(1), "synchronize", "launch", "execute_model")
    for number in (0, 2):
        server.stuck_in(server.rank(number), "recv", "recv", "all_reduce", "forward", "execute_model")
    if flavor == "vllm":
        (core,) = server.titled("^VLLM::EngineCore$")
        server.stuck_in(core, "recv", "get_response", "execute_model", "run_busy_loop")
    after = server.metrics()
    assert server.get("/health").status == 200
    assert server.get("/v1/models").status == 200
    assert after[f"{flavor}:generation_tokens_total"] == before[f"{flavor}:generation_tokens_total"]


@pytest.mark.parametrize("flavor", ["sglang", "vllm"])
def test_wedge(start: Any, flavor: str) -> None:
    """A lost reply: nobody waits for anybody in a collective, and yet no token comes."""
    server = start("--tp", "2", "--flavor", flavor, "--fault", "wedge@serving").ready()
    steps = []
    for _ in range(2):
        with pytest.raises(TimeoutError):
            server.complete(timeout=0.5)
        steps.append([rank["forward_ct"] for rank in server.get("/get_server_info").json()["internal_states"]])
    assert steps[0] == steps[1]
    assert server.get("/health").status == 200
    if flavor == "vllm":
        for number in (0, 1):
            server.stuck_in(server.rank(number), "recv", "acquire_read", "dequeue", "worker_busy_loop")
        (core,) = server.titled("^VLLM::EngineCore$")
        server.stuck_in(core, "recv", "get_response")
    else:
        server.stuck_in(server.rank(0), "recv", "get_next_batch", "recv_requests", "event_loop_normal")
        server.stuck_in(server.rank(1), "recv", "recv", "broadcast", "recv_requests", "event_loop_normal")


def test_skip_collective_while_serving(start: Any) -> None:
    server = start("--tp", "3", "--fault", "skip_collective@serving:rank=2").ready()
    with pytest.raises(TimeoutError):
        server.complete(timeout=0.5)
    server.stuck_in(server.rank(2), "recv", "recv", "broadcast", "recv_requests")
    for number in (0, 1):
        server.stuck_in(server.rank(number), "recv", "recv", "all_reduce", "forward")


def test_garble_changes_the_tokens_and_nothing_else(start: Any) -> None:
    server = start("--tp", "2", "--fault", "garble@serving:tokens=40:rank=0").ready()
    first = server.text(max_tokens=16)
    assert server.text(max_tokens=16) == first
    server.text(max_tokens=16)
    assert server.text(max_tokens=16) != first
    assert server.get("/health").status == 200


def test_deaf_after_some_requests(start: Any) -> None:
    server = start("--fault", "deaf@serving:requests=2").ready()
    assert server.text() == server.text()
    assert server.get("/health").status == 200
    for path in ("/v1/completions", "/health"):
        with pytest.raises(TimeoutError):
            server.request(
                "POST" if "v1" in path else "GET", path, {"prompt": "a"} if "v1" in path else None, timeout=0.5
            )
    assert server.terminate() == 0


def test_tokens(start: Any) -> None:
    """Only long answers hang."""
    server = start("--tp", "2", "--fault", "sleep@serving:tokens=50").ready()
    for _ in range(3):
        assert server.text(max_tokens=10)
    with pytest.raises(TimeoutError):
        server.complete(max_tokens=200, timeout=1.0)


def test_a_fault_of_the_shutdown(start: Any) -> None:
    server = start("--tp", "2", "--fault", "sleep@shutdown:rank=1", "--shutdown-timeout", "60").ready()
    struck = server.rank(1)
    server.process.send_signal(signal.SIGTERM)
    server.stuck_in(struck, "synchronize", "launch", "shut_down")
    assert server.process.poll() is None
