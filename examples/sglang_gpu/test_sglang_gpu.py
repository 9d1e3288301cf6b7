"""Real SGLang on two GPUs: base and EAGLE-3, CUDA graphs on and off. README.md says how to run it."""

import os
from pathlib import Path

import pytest

MODELS = Path(os.environ.get("TINY_MODELS", Path(__file__).parent))

pytestmark = [
    pytest.mark.gpuserve(
        engine="sglang",
        model=MODELS / "tiny",
        tp=2,
        sampling_backend="pytorch",
        args={
            "served-model-name": "tiny",
            "mem-fraction-static": 0.2,
            "max-running-requests": 16,
            "max-total-tokens": 16384,
            "context-length": 512,
            "grammar-backend": "none",
            "enable-metrics": True,
        },
        env={"HF_HUB_OFFLINE": "1"},
    ),
    pytest.mark.gpuserve_matrix(
        axes={
            "spec_decode": ["base", {"eagle3": {"draft_model": str(MODELS / "draft"), "num_steps": 3}}],
            "cuda_graph": ["on", "off"],
            "attention_backend": ["triton"],
        }
    ),
]


def complete(server, prompt, tokens=16):
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", json=body, timeout=300)  # the first one may compile
    answer.raise_for_status()
    return answer.json()


def test_greedy_completions_are_repeatable(server):
    first, second = (complete(server, "2+2=")["choices"][0]["text"] for _ in range(2))
    assert first == second


def test_the_answer_is_as_long_as_asked(server):
    assert complete(server, "Once upon a time", tokens=32)["usage"]["completion_tokens"] == 32
