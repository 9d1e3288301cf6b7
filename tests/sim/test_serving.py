"""Answers: endpoints, determinism, streams, metrics, speculative decoding. Both flavors, on shared servers."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

SPEC = ("--spec-decode", "eagle3", "--accept-rate", "0.5", "--spec-steps", "3")


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def flavor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(start_shared: Any, flavor: str) -> Any:
    """Two ranks, plain decoding."""
    return start_shared("--tp", "2", "--flavor", flavor, "--served-model-name", "toy").ready()


@pytest.fixture(scope="module")
def spec_server(start_shared: Any, flavor: str) -> Any:
    """Three ranks, speculative decoding, the same model."""
    return start_shared("--tp", "3", "--flavor", flavor, "--served-model-name", "toy", *SPEC).ready()


def events(body: bytes) -> list[Any]:
    """The objects of a stream; checks its frame."""
    parts = body.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_health(server: Any) -> None:
    assert server.get("/health").status == 200
    assert server.get("/health_generate").status == 200


def test_models(server: Any, flavor: str) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("toy", flavor, 4096)


def test_completion(server: Any) -> None:
    answer = server.complete("2+2=", model="toy", max_tokens=5).json()
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["text"].split()) == 5


def test_chat(server: Any) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = server.request("POST", "/v1/chat/completions", body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert len(answer["choices"][0]["message"]["content"].split()) == 4


def test_greedy_is_deterministic(server: Any) -> None:
    texts = {server.text("the same", max_tokens=40) for _ in range(5)}
    assert len(texts) == 1
    assert server.text("another", max_tokens=40) not in texts


def test_a_longer_answer_begins_with_the_shorter(server: Any) -> None:
    assert server.text("go on", max_tokens=30).startswith(server.text("go on", max_tokens=10))


def test_sampling_differs_and_repeats_with_a_seed(server: Any) -> None:
    assert len({server.text("vary", temperature=1.0, max_tokens=20) for _ in range(4)}) == 4
    assert len({server.text("vary", temperature=1.0, seed=5, max_tokens=20) for _ in range(3)}) == 1


def test_speculation_and_the_number_of_ranks_change_no_token(server: Any, spec_server: Any) -> None:
    for length in (1, 2, 3, 33):
        assert server.text("parity", max_tokens=length) == spec_server.text("parity", max_tokens=length)


def test_stream_is_the_answer_in_pieces(spec_server: Any) -> None:
    whole = spec_server.text("flow", max_tokens=25)
    reply = spec_server.complete("flow", max_tokens=25, stream=True, stream_options={"include_usage": True})
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    *chunks, usage = events(reply.body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 5
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 25


def test_chat_stream(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
    whole = server.request("POST", "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    opening, *chunks = events(server.request("POST", "/v1/chat/completions", {**body, "stream": True}).body)
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole


def test_stop_strings(server: Any) -> None:
    words = server.text("halt", max_tokens=20).split()
    word = next(w for n, w in enumerate(words) if n > 3 and w not in words[:n])
    answer = server.complete("halt", max_tokens=20, stop=[f" {word}"]).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"].split() == words[: words.index(word)]
    chunks = events(server.complete("halt", max_tokens=20, stop=f" {word}", stream=True).body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["choices"][0]["text"]


def test_a_stop_string_over_two_tokens_is_held_back_in_a_stream(server: Any) -> None:
    words = server.text("halt", max_tokens=20).split()
    chunks = events(server.complete("halt", max_tokens=20, stop=f"{words[5]} {words[6]}", stream=True).body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).split() == words[:5]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_several_prompts_and_choices(server: Any) -> None:
    answer = server.complete(["one", "two"], n=2, max_tokens=3).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts == [server.text("one", max_tokens=3)] * 2 + [server.text("two", max_tokens=3)] * 2
    assert answer["usage"]["completion_tokens"] == 12
    chunks = events(server.complete(["one", "two"], max_tokens=3, stream=True).body)
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}


def test_many_at_once(server: Any) -> None:
    expected = {n: server.text(f"prompt {n}", max_tokens=30) for n in range(16)}
    got: dict[int, str] = {}

    def ask(n: int) -> None:
        got[n] = server.text(f"prompt {n}", max_tokens=30)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == expected


@pytest.mark.parametrize(
    ("path", "raw", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"\xff\xfe", 400),
        ("/v1/completions", b"[" * 100_000, 400),
        ("/v1/completions", b"[]", 400),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}', 400),
        ("/v1/chat/completions", b'{"messages": []}', 400),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 5000}', 400),
        ("/nowhere", b"{}", 404),
        ("/health", b"{}", 405),
    ],
)
def test_bad_requests_get_json(server: Any, path: str, raw: bytes, status: int) -> None:
    reply = server.request("POST", path, raw=raw)
    assert reply.status == status
    assert reply.json()
    assert server.get("/v1/completions").status == 405


def test_errors_have_the_engines_shape(server: Any, flavor: str) -> None:
    answer = server.request("POST", "/v1/completions", {"prompt": 1}).json()
    error = answer["error"] if flavor == "vllm" else answer
    assert error["code"] == 400
    assert error["type"] == "BadRequestError"
    assert "prompt must be" in error["message"]
    assert server.complete(model="other").status == (404 if flavor == "vllm" else 200)


def test_garbage_on_the_wire(server: Any) -> None:
    for data in (
        b"GARBAGE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"\x00" * 100 + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(data)
            assert b"400" in connection.recv(4096)
    huge = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(huge)
        assert b"413" in connection.recv(4096)
    assert server.get("/health").status == 200


def test_one_connection_serves_many_requests(server: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for path in ("/health", "/v1/models", "/nowhere", "/metrics", "/health"):
        connection.request("GET", path)
        connection.getresponse().read()
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True})
    for _ in range(2):
        connection.request("POST", "/v1/completions", body)
        assert connection.getresponse().read().endswith(b"[DONE]\n\n")
    assert connection.sock is not None
    connection.close()


def test_metrics_count(server: Any, flavor: str) -> None:
    before = server.metrics()
    server.complete("three words here", max_tokens=7)
    server.complete("three words here", max_tokens=7, stream=True)
    after = server.metrics()

    def grown(name: str) -> float:
        return after[f"{flavor}:{name}"] - before[f"{flavor}:{name}"]

    assert grown("generation_tokens_total") == 14
    assert grown("prompt_tokens_total") == 6
    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 2
    assert after[f"{flavor}:num_{'requests_running' if flavor == 'vllm' else 'running_reqs'}"] == 0
    if flavor == "vllm":
        assert grown("request_success_total") == 2
        assert grown("iteration_tokens_total_count") == 14
    assert not [name for name in after if "spec" in name]


def test_speculation_has_numbers(spec_server: Any, flavor: str) -> None:
    before = spec_server.metrics()
    spec_server.complete("numbers", max_tokens=400)
    after = spec_server.metrics()
    if flavor == "vllm":
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
        drafts, drafted, accepted, by_position = (
            after[f"vllm:spec_decode_{name}_total"] - before[f"vllm:spec_decode_{name}_total"] for name in names
        )
        assert drafted == 3 * drafts
        assert accepted == by_position
        assert accepted / drafted == pytest.approx(0.5, abs=0.01)
        # every step gives the accepted tokens and one more; the first token comes from the prompt, the last may be cut
        assert accepted + drafts == pytest.approx(400, abs=4)
    else:
        assert after["sglang:spec_accept_rate"] == pytest.approx(0.5, abs=0.02)
        assert after["sglang:spec_accept_length"] == pytest.approx(2.5, abs=0.06)
        assert after["sglang:spec_verify_calls_total"] > before["sglang:spec_verify_calls_total"]
        state = spec_server.get("/get_server_info").json()["internal_states"][0]
        assert state["avg_spec_accept_length"] == pytest.approx(2.5, abs=0.06)


def test_server_info(spec_server: Any) -> None:
    info = spec_server.get("/get_server_info").json()
    assert (info["tp"], info["spec_decode"], info["accept_rate"]) == (3, "eagle3", 0.5)
    before = [state["forward_ct"] for state in info["internal_states"]]
    spec_server.complete("count", max_tokens=9)
    after = [state["forward_ct"] for state in spec_server.get("/get_server_info").json()["internal_states"]]
    assert len(after) == 3
    assert all(new > old for old, new in zip(before, after, strict=True))
    assert len(set(after)) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(
    start: Any, wait_until: Callable[..., Any], flavor: str, stream: bool
) -> None:
    """The answer would take four minutes."""
    server = start("--flavor", flavor, "--step-seconds", "0.06", "--quiet").ready()
    running = f"{flavor}:num_{'requests_running' if flavor == 'vllm' else 'running_reqs'}"
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 4000, "stream": stream}))
    wait_until(lambda: server.metrics()[running] == 1, "the request runs")
    connection.close()
    wait_until(lambda: server.metrics()[running] == 0, "no request runs")
    assert server.text("still there", max_tokens=1)
    assert "Traceback" not in server.log


def test_throughput(server: Any) -> None:
    """Far above this on an idle machine (thousands): serving must never be what a test waits for."""
    best = 0.0
    for _ in range(5):
        began = time.monotonic()
        server.complete("quick", max_tokens=500)
        best = max(best, 500 / (time.monotonic() - began))
    assert best >= 500
