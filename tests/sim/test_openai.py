"""Requests and answers of the completion API."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuserve.sim import openai


def parse(body: Any, **changes: Any) -> openai.Completion:
    given: dict[str, Any] = {
        "chat": False,
        "model": "path",
        "served": "toy",
        "known": None,
        "context_length": 64,
        "salt": 1,
        **changes,
    }
    return openai.parse(body, **given)


CHAT = [{"role": "user", "content": "hi there"}]


def test_defaults() -> None:
    request = parse({"prompt": "two words"})
    assert (request.max_tokens, request.stream, request.model, request.prompt_tokens) == (16, False, "toy", 2)


@pytest.mark.parametrize("prompt", ["text", ["text"], [1, 2], [[1, 2]]])
def test_kinds_of_prompts(prompt: object) -> None:
    assert len(parse({"prompt": prompt}).prompts) == 1


def test_greedy_depends_on_prompt_and_model_alone() -> None:
    def state(prompt: str = "a", **values: Any) -> int:
        model = values.pop("model", "path")
        salt = values.pop("salt", 1)
        return parse({"prompt": prompt, "temperature": 0, **values}, model=model, salt=salt).prompts[0].state

    assert state() == state(salt=2) == state(seed=3)
    assert len({state(), state("b"), state(model="other")}) == 3


def test_sampling_depends_on_the_seed_or_else_on_the_salt() -> None:
    def state(**values: Any) -> int:
        salt = values.pop("salt", 1)
        return parse({"prompt": "a", "temperature": 0.5, **values}, salt=salt).prompts[0].state

    assert state(seed=3) == state(seed=3, salt=2) != state(seed=4)
    assert state(salt=1) != state(salt=2)


def test_n_choices_of_every_prompt() -> None:
    request = parse({"prompt": ["a", "b"], "n": 3, "temperature": 1.0})
    assert len({prompt.state for prompt in request.prompts}) == 6
    assert request.prompt_tokens == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON object"),
        ({}, "prompt must be"),
        ({"prompt": 3}, "prompt must be"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": [[]]}, "prompt must be"),
        ({"prompt": [True]}, "prompt must be"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer, at least 1"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens must be"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be"),
        ({"prompt": "a", "n": 65}, "at most 64"),
        ({"prompt": "a", "temperature": -1}, "temperature must be"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature must be"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be"),
        ({"prompt": "a", "seed": "x"}, "seed must be"),
        ({"prompt": "a", "stream": "yes"}, "stream must be"),
        ({"prompt": "a", "stream_options": 1}, "stream_options must be"),
        ({"prompt": "a", "stop": 1}, "stop must be"),
        ({"prompt": "a", "stop": [""]}, "stop must be"),
        ({"prompt": "a", "model": 1}, "model must be"),
        ({"prompt": "a", "max_tokens": 64}, "maximum context length is 64 tokens"),
    ],
)
def test_mistakes(body: Any, words: str) -> None:
    with pytest.raises(openai.BadRequest, match=words) as error:
        parse(body)
    assert error.value.status == 400


@pytest.mark.parametrize("messages", [None, [], "hi", [1], [{"content": "no role"}], [{"role": "user", "content": 3}]])
def test_mistakes_of_a_chat(messages: Any) -> None:
    with pytest.raises(openai.BadRequest):
        parse({"messages": messages}, chat=True)


def test_chat_contents() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi there"}, {"type": "image_url"}]}]
    assert parse({"messages": parts, "temperature": 0}, chat=True).prompts == (
        parse({"messages": CHAT, "temperature": 0}, chat=True).prompts
    )
    assert parse({"messages": [{"role": "user", "content": None}]}, chat=True).prompt_tokens > 0


def test_an_unknown_model_is_not_found_where_names_are_checked() -> None:
    with pytest.raises(openai.BadRequest, match="The model `x` does not exist") as error:
        parse({"prompt": "a", "model": "x"}, known=("toy",))
    assert error.value.status == 404
    assert parse({"prompt": "a", "model": "x"}).model == "x"


def test_text_ends_before_the_first_stop_string() -> None:
    assert openai.cut_at_stop("one two three", ["three", "two"]) == ("one ", True)
    assert openai.cut_at_stop("one", ["four"]) == ("one", False)
