"""Real vLLM with two tensor-parallel ranks on the CPU: one server for all tests here. README.md says how to run it."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpuserve(
    engine="vllm",
    model=Path(__file__).with_name("tiny"),
    tp=2,
    args={"served-model-name": "tiny", "dtype": "float32", "max-model-len": 256, "enforce-eager": True},
    env={
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",  # rank 0 on core 0, rank 1 on core 1
        "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for a quarter of a minute
    },
)


def complete(server, prompt, tokens=8):
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()


def test_greedy_completions_are_repeatable(server):
    first, second = (complete(server, "2+2=")["choices"][0]["text"] for _ in range(2))
    assert first == second


def test_every_token_is_counted(server):
    before = server.metrics()
    assert complete(server, "Once upon a time", tokens=12)["usage"]["completion_tokens"] == 12
    grown = {name: value - before.get(name, 0) for name, value in server.metrics().items()}
    assert sum(value for name, value in grown.items() if name.startswith("vllm:generation_tokens_total")) == 12


def test_both_ranks_are_there(server):
    assert {"TP0", "TP1"} <= set(server.ranks())
    assert {phase.phase for phase in server.phases.values()} <= {"ready", "serving"}
