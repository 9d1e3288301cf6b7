"""Real SGLang with two tensor-parallel ranks on the CPU: one server for all tests here. README.md tells how."""

import os
from pathlib import Path

import pytest

VENV = Path(os.environ.get("SGLANG_VENV", Path.home() / "venvs" / "sglang-cpu"))

pytestmark = pytest.mark.gpuserve(
    engine="sglang",
    model=Path(__file__).with_name("tiny"),
    tp=2,
    python=VENV / "bin" / "python",
    attention_backend="torch_native",
    sampling_backend="pytorch",
    cuda_graph="off",
    overlap="off",
    args={
        "served-model-name": "tiny",
        "device": "cpu",
        "dtype": "float32",
        "context-length": 256,
        "max-total-tokens": 4096,
        "max-running-requests": 8,
        "enable-metrics": True,
    },
    env={
        "HF_HUB_OFFLINE": "1",
        "LD_LIBRARY_PATH": str(VENV / "driver"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # rank 0 on core 0, rank 1 on core 1
        "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",  # the ranks talk through gloo
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


def test_the_answer_is_as_long_as_asked(server):
    assert complete(server, "Once upon a time", tokens=12)["usage"]["completion_tokens"] == 12


def test_both_ranks_are_there(server):
    assert {"TP0", "TP1"} <= set(server.ranks())
    assert {phase.phase for phase in server.phases.values()} <= {"ready", "serving"}
