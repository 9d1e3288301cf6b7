"""Real llama.cpp behind its Python server: one start for all tests here. README.md says how to run it."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpuserve(
    engine="llama_cpp",
    model=Path(__file__).with_name("tiny.gguf"),
    args={"model_alias": "tiny", "n_ctx": 256, "n_threads": 1},
)


def complete(server, prompt, tokens=8):
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = server.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()


def test_greedy_completions_are_repeatable(server):
    first, second = (complete(server, "2+2=")["choices"][0]["text"] for _ in range(2))
    assert first == second


def test_tokens_are_counted(server):
    usage = complete(server, "Once upon a time", tokens=4)["usage"]
    assert 1 <= usage["completion_tokens"] <= 4


def test_one_process_is_the_only_rank(server):
    assert set(server.ranks()) == {"TP0"}
    assert server.phases["TP0"].phase in ("ready", "serving")


@pytest.mark.gpuserve_matrix(axes={"spec_decode": ["base", "ngram"], "attention_backend": ["auto", "flash_attn"]})
def test_every_cell_answers(server):
    assert complete(server, "aaaa", tokens=4)["usage"]["prompt_tokens"] > 4
