"""Greedy parity: does a server with speculative decoding say at temperature 0 what its base server says?

bfloat16 is not bit-stable between batch shapes, so two equally likely tokens may change places without a fault: a
difference counts only where the base was sure, by the logarithms of the probabilities at the first token that differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..errors import DegradedError, ServerError
from ..shape import NUMBER, checked
from ..text import escape

if TYPE_CHECKING:
    from .handle import Server

EPSILON: Final = 0.1
"""Gap in nats up to which two tokens may change places: bfloat16 has 8 bits, logits of 10 to 30 so many hundredths."""

_TOP: Final = 5
"""Most likely tokens asked for; the engines of before 2024 had at most 5."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """One prompt and what a server made of it.

    Attributes:
        tokens: text of every token. top: per token, text of the most likely ones to logprob; both empty when the
            server offers no logprobs.
    """

    prompt: str
    text: str
    tokens: tuple[str, ...] = ()
    top: tuple[Mapping[str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For a file: the base server need not run at the same time."""
        return {"prompt": self.prompt, "text": self.text, "tokens": [*self.tokens], "top": [dict(t) for t in self.top]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Greedy:
        """Raises ValueError for what :meth:`to_json` did not write."""
        checked(raw, {"prompt": str, "text": str, "tokens": [str], "top": [{str: NUMBER | None}]})
        if len(raw["tokens"]) != len(raw["top"]):
            raise ValueError(f"{len(raw['tokens'])} tokens and the logprobs of {len(raw['top'])}")
        top = ({token: -math.inf if p is None else float(p) for token, p in one.items()} for one in raw["top"])
        return cls(raw["prompt"], raw["text"], tuple(raw["tokens"]), tuple(top))


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that differs.

    Attributes:
        position: how many tokens are alike before it (characters where the base has no logprobs).
        expected, got: the base's token and what stands there instead ("": the text ends).
        gap: by how much the base preferred its own, in nats; None: it does not tell.
        tie: the gap is within epsilon, so nothing is proved.
    """

    prompt: str
    position: int
    expected: str
    got: str
    gap: float | None
    tie: bool

    def __str__(self) -> str:
        gap = "it has no logprobs to tell how sure it was" if self.gap is None else f"top-2 logprob gap {self.gap:.3f}"
        return (
            f"after {self.position} equal tokens of {escape(repr(self.prompt), 60)} the base says "
            f"{escape(repr(self.expected), 40)} ({gap}), this server {escape(repr(self.got), 40)}"
        )


def ask(
    server: Server, prompts: Iterable[str], max_tokens: int = 64, timeout: tuple[float, float] | None = None
) -> list[Greedy]:
    """Complete every prompt at temperature 0, with logprobs where the server has them.

    ``timeout``: seconds to connect and to read, of one request; None: the server's usual ones.

    Raises:
        ServerError: it hung, ended, or answered something else than a completion.
    """
    found = []
    extra: dict[str, Any] = {"logprobs": _TOP}
    limits = {} if timeout is None else {"timeout": timeout}
    for prompt in prompts:
        body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = server.post("/v1/completions", json={**body, **extra}, **limits)
        if not answer.ok and extra:  # some versions refuse logprobs beside speculative decoding, or fail at them
            extra = {}
            answer = server.post("/v1/completions", json=body, **limits)
        try:
            choice = answer.json()["choices"][0]
            found.append(_greedy(prompt, str(choice["text"]), choice.get("logprobs")))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ServerError(
                f"{server.spec.id}: a completion was answered {answer.status_code} without a text: "
                f"{server.record.shown(answer.text[:2000])[:300]}",
                verdict="crash" if answer.status_code >= 500 else "config",
            ) from None
    return found


def _greedy(prompt: str, text: str, logprobs: Mapping[str, Any] | None) -> Greedy:
    """SGLang and vLLM both answer in the old form: ``tokens`` and ``top_logprobs`` beside each other."""
    tokens = tuple(map(str, (logprobs or {}).get("tokens") or ()))
    top = tuple({str(k): float(v) for k, v in (t or {}).items()} for t in (logprobs or {}).get("top_logprobs") or ())
    whole = bool(tokens) and len(tokens) == len(top)
    return Greedy(prompt, text, tokens, top) if whole else Greedy(prompt, text)


def differences(base: Sequence[Greedy], other: Sequence[Greedy], epsilon: float = EPSILON) -> list[Difference]:
    """The first difference of every prompt whose text differs; the prompts must be the same, in the same order.

    Raises:
        ValueError: they are not.
    """
    if [one.prompt for one in base] != [one.prompt for one in other]:
        raise ValueError("the outputs to compare are not of the same prompts in the same order")
    return [_first(a, b, epsilon) for a, b in zip(base, other, strict=True) if a.text != b.text]


def _first(base: Greedy, other: Greedy, epsilon: float) -> Difference:
    begin = 0
    for position, (token, top) in enumerate(zip(base.tokens, base.top, strict=True)):
        rest = other.text[begin:]
        if base.text.startswith(token, begin) and not rest.startswith(token):
            got = _token_at(other, position, rest, top)
            gap = _gap(token, got, top)
            return Difference(base.prompt, position, token, got, gap, gap is not None and gap <= epsilon)
        begin += len(token)
    same = next((n for n, (a, b) in enumerate(zip(base.text, other.text, strict=False)) if a != b), None)
    same = min(len(base.text), len(other.text)) if same is None else same
    return Difference(base.prompt, same, base.text[same : same + 20], other.text[same : same + 20], None, False)


def _token_at(other: Greedy, position: int, rest: str, top: Mapping[str, float]) -> str:
    """The other server's token there: its own word for it, else the likely one that its text goes on with."""
    if position < len(other.tokens):
        return other.tokens[position]
    fitting = [token for token in top if token and rest.startswith(token)]
    return max(fitting, key=len, default=rest[:20])


def _gap(token: str, got: str, top: Mapping[str, float]) -> float | None:
    """How much less likely the base found ``got`` than its own token; if it lists that not at all, than the second."""
    if token not in top:
        return None
    rivals = [value for name, value in top.items() if name != token]
    nearest = top.get(got, max(rivals, default=None)) if got != token else max(rivals, default=None)
    return None if nearest is None else max(0.0, top[token] - nearest)


def check(base: Sequence[Greedy], other: Sequence[Greedy], who: str, epsilon: float = EPSILON) -> list[Difference]:
    """The differences that may be ties.

    Raises:
        DegradedError: one is none; the message says where, and how sure the base was.
        ValueError: the prompts are not the same.
    """
    found = differences(base, other, epsilon)
    wrong = [difference for difference in found if not difference.tie]
    if wrong:
        more = f" So do {len(wrong) - 1} more of {len(base)} prompts." if len(wrong) > 1 else ""
        raise DegradedError(
            f"{who} does not say what its base says at temperature 0 (epsilon {epsilon:g}): {wrong[0]}.{more}"
        )
    return found
