"""OpenAI's completion API: requests checked, answers built. Pure: no socket, no process."""

from __future__ import annotations

import hashlib
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .model import VOCABULARY, WORDS, advance, gap_of

MASK = (1 << 64) - 1
DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 64
MAX_LOGPROBS = 20
_GENERATED = re.compile(r" \S+")
_TOKEN = re.compile(r"\w+|[^\w\s]")


class BadRequest(Exception):
    """The client's mistake; ``status`` is the HTTP status to answer with."""

    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sequence to continue: where the toy model starts, and how many tokens that is."""

    state: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A checked request. ``prompts`` has one entry a choice."""

    chat: bool
    model: str
    prompts: tuple[Prompt, ...]
    max_tokens: int
    stop: tuple[str, ...]
    stream: bool
    usage_in_stream: bool
    prompt_tokens: int
    logprobs: int | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


def parse(
    body: object, *, chat: bool, model: str, served: str, known: Sequence[str] | None, context_length: int, salt: int
) -> Completion:
    """Check the JSON body of a request.

    Args:
        model: path of the model; two models do not continue a text alike.
        served: name to answer with.
        known: names that the request may carry; None accepts any (SGLang).
        salt: makes requests without a seed differ where temperature is not 0.

    Raises:
        BadRequest: with the sentence to send back.
    """
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    name = body.get("model", served)
    if not isinstance(name, str):
        raise BadRequest("model must be a string")
    if known is not None and name not in known:
        raise BadRequest(f"The model `{name}` does not exist.", 404, "NotFoundError")
    key = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = _integer(body, key, DEFAULT_MAX_TOKENS, 1)
    choices = _integer(body, "n", 1, 1, MAX_CHOICES)
    temperature = _number(body, "temperature", 1.0)
    seed = body.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise BadRequest("seed must be an integer")
    texts = [_chat_text(body.get("messages"))] if chat else _prompts(body.get("prompt"))
    prompts = []
    for index, (text, tokens) in enumerate(texts):
        if tokens + max_tokens > context_length:
            raise BadRequest(
                f"This model's maximum context length is {context_length} tokens. However, you requested "
                f"{tokens + max_tokens} tokens ({tokens} in the messages, {max_tokens} in the completion)."
            )
        for choice in range(choices):
            random = "" if temperature == 0 else f"{seed if seed is not None else salt}:{index}:{choice}:{temperature}"
            prompts.append(Prompt(_state(model, text, random), tokens))
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise BadRequest("stream_options must be an object")
    return Completion(
        chat=chat,
        model=name,
        prompts=tuple(prompts),
        max_tokens=max_tokens,
        stop=_stop(body.get("stop")),
        stream=_flag(body, "stream"),
        usage_in_stream=bool(options and options.get("include_usage")),
        prompt_tokens=sum(tokens for _, tokens in texts),
        logprobs=None if chat or body.get("logprobs") is None else _integer(body, "logprobs", 0, 0, MAX_LOGPROBS),
    )


def usage(request: Completion, generated: int) -> dict[str, int]:
    prompt = request.prompt_tokens
    return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}


def answer(request: Completion, texts: Sequence[tuple[str, str]], generated: int) -> dict[str, Any]:
    """The whole answer: (text, finish reason) of every choice, tokens generated in all."""
    choices: list[dict[str, Any]] = []
    for index, (text, reason) in enumerate(texts):
        content: dict[str, Any] = {"text": text}
        if request.chat:
            content = {"message": {"role": "assistant", "content": text, "tool_calls": None}}
        told = None if request.logprobs is None else logprobs(request.prompts[index].state, text, request.logprobs)
        choices.append({"index": index, **content, "logprobs": told, "finish_reason": reason})
    return {
        "id": ("chatcmpl-" if request.chat else "cmpl-") + request.id,
        "object": "chat.completion" if request.chat else "text_completion",
        "created": request.created,
        "model": request.model,
        "choices": choices,
        "usage": usage(request, generated),
    }


def logprobs(state: int, text: str, count: int) -> dict[str, Any]:
    """The completion API's object for a text that continues ``state``, in the form of both engines: of every token the
    ``count`` most likely. The toy model always takes the first; how close the second comes depends on the state."""
    tokens = _GENERATED.findall(text)
    offsets, offset = [], 0
    top: list[dict[str, float]] = []
    for token in tokens:
        gap = gap_of(state)
        best = -math.log1p(math.exp(-gap))
        first = WORDS.index(token.strip())
        others = (" " + WORDS[(first + 1 + n) % VOCABULARY] for n in range(max(0, count - 1)))
        top.append({token: best, **{other: best - gap * (n + 1) - n for n, other in enumerate(others)}})
        offsets.append(offset)
        offset += len(token)
        state = advance(state, first)
    return {
        "text_offset": offsets,
        "token_logprobs": [entry[token] for token, entry in zip(tokens, top, strict=True)],
        "tokens": tokens,
        "top_logprobs": top,
    }


def chunk(
    request: Completion, index: int, text: str | None, reason: str | None, *, role: bool = False
) -> dict[str, Any]:
    """One event of a stream. ``role`` opens a chat message."""
    content: dict[str, Any] = {"text": text or ""}
    if request.chat:
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if role else {}
        if text:
            delta["content"] = text
        content = {"delta": delta}
    return {
        "id": ("chatcmpl-" if request.chat else "cmpl-") + request.id,
        "object": "chat.completion.chunk" if request.chat else "text_completion",
        "created": request.created,
        "model": request.model,
        "choices": [{"index": index, **content, "logprobs": None, "finish_reason": reason}],
    }


def count_tokens(text: str) -> int:
    """Words and punctuation marks; an empty text is one token, as a begin mark would be."""
    return len(_TOKEN.findall(text)) or 1


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text up to the first stop string, and whether there was one."""
    places = [place for word in stop if (place := text.find(word)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def _state(model: str, text: str, random: str) -> int:
    digest = hashlib.blake2b(f"{model}\0{text}\0{random}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _prompts(prompt: object) -> list[tuple[str, int]]:
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return [(prompt, count_tokens(prompt))]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(p, str) for p in prompt):
            return [(p, count_tokens(p)) for p in prompt]
        if _token_ids(prompt):
            return [(repr(prompt), len(prompt))]
        if all(isinstance(p, list) and p and _token_ids(p) for p in prompt):
            return [(repr(p), len(p)) for p in prompt]
    raise BadRequest("prompt must be a string, a list of strings, or a list of token ids")


def _token_ids(values: list[object]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)


def _chat_text(messages: object) -> tuple[str, int]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty")
    lines = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRequest("every message must be an object with a role")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, Mapping)]
            content = " ".join(part for part in parts if isinstance(part, str))
        if content is not None and not isinstance(content, str):
            raise BadRequest("the content of a message must be a string or a list of parts")
        lines.append(f"{message['role']}: {content or ''}")
    text = "\n".join(lines) + "\nassistant:"
    return text, count_tokens(text)


def _stop(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise BadRequest("stop must be a string or a list of strings")
    return tuple(words)


def _integer(body: Mapping[str, Any], key: str, default: int, least: int, most: int | None = None) -> int:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise BadRequest(f"{key} must be an integer, at least {least}" + (f" and at most {most}" if most else ""))
    return value


def _number(body: Mapping[str, Any], key: str, default: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
        raise BadRequest(f"{key} must be a number, 0 or more")
    return float(value)


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false")
    return bool(value)
