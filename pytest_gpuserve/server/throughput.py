"""A small closed-loop measure: so many clients, each of which asks again when it has its answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..errors import ServerError, SpecError
from .spec_decode import SpecDecode, ask

if TYPE_CHECKING:
    from .handle import Server

PROMPTS: Final = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List the first ten prime numbers and explain what makes them prime:",
    "def fibonacci(n):\n",
    "The main causes of the First World War were",
    "Once upon a time there was a",
    "Translate to German: The weather is nice today, and we are going to the sea.",
    "A recipe for bread needs flour, water, salt and",
)
"""Asked in turn: prose, lists and code, since drafts are accepted unlike often in them."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was measured after the warm-up.

    Attributes:
        tokens: generated ones. seconds: from the first request to the last answer. requests: answered ones.
        concurrency: clients. spec_decode: the server's figures over these seconds.
    """

    tokens: int
    seconds: float
    requests: int
    concurrency: int
    spec_decode: SpecDecode

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        figures = f"; {self.spec_decode}" if self.spec_decode.source != "none" else ""
        clients = f"{self.concurrency} client{'s' if self.concurrency != 1 else ''}"
        return f"{self.tokens_per_s:.0f} tok/s with {clients} ({self.tokens} tokens in {self.seconds:.1f} s){figures}"


def measure(
    server: Server,
    *,
    concurrency: int = 4,
    seconds: float = 2.0,
    max_tokens: int = 64,
    prompts: Sequence[str] = PROMPTS,
    warmup: int = 1,
    request_timeout: float = 300.0,
) -> Throughput:
    """Tokens a second at temperature 0 through ``/v1/completions``.

    Args:
        seconds: how long new requests are begun; those under way are waited for.
        max_tokens: length of every answer (``ignore_eos``, where the engine knows it).
        warmup: requests of each client before the clock starts: the first ones compile, and fill caches.
        request_timeout: seconds for one request, after which an incident is taken as in any request.

    Raises:
        SpecError: a number that cannot be.
        ServerError: the server hung, ended, or does not answer as the completion API should.
    """
    if concurrency < 1 or seconds <= 0 or max_tokens < 1 or warmup < 0 or not prompts:
        raise SpecError(
            f"throughput: concurrency, max_tokens and seconds must be above 0 and there must be prompts, not "
            f"concurrency={concurrency}, max_tokens={max_tokens}, seconds={seconds:g}, {len(prompts)} prompts."
        )
    client = _Client(server, max_tokens, prompts, request_timeout)
    client.complete()  # alone: what this may compile is compiled once, and a refused option is known
    _together(concurrency, lambda: [client.complete() for _ in range(warmup)])
    before = ask(server)
    begin = time.monotonic()
    counts: list[int] = []

    def loop() -> None:
        while not counts or time.monotonic() - begin < seconds:
            counts.append(client.complete())

    _together(concurrency, loop)
    spent = time.monotonic() - begin
    return Throughput(sum(counts), spent, len(counts), concurrency, ask(server) - before)


class _Client:
    """Asks one prompt after the other. Thread-safe."""

    def __init__(self, server: Server, max_tokens: int, prompts: Sequence[str], timeout: float) -> None:
        self._server = server
        self._prompts = itertools.cycle(prompts)
        self._timeout = timeout
        self._body: dict[str, Any] = {
            "model": server.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,  # not in the standard; SGLang and vLLM have it, so that every answer is as long
        }

    def complete(self) -> int:
        """One request; returns the number of tokens in its answer."""
        body = {**self._body, "prompt": next(self._prompts)}
        answer = self._post(body)
        if answer.status_code == 400 and self._body.pop("ignore_eos", None):
            del body["ignore_eos"]
            answer = self._post(body)
        if answer.status_code != 200:
            raise ServerError(
                f"{self._server.spec.id}: throughput cannot be measured: a completion was answered "
                f"{answer.status_code}: {self._server.record.shown(answer.text[:2000])[:300]}",
                verdict="crash" if answer.status_code >= 500 else "config",
            )
        try:
            return int(answer.json()["usage"]["completion_tokens"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(
                f"{self._server.spec.id}: throughput cannot be measured: its answers do not say how many tokens they "
                f"have (usage.completion_tokens).",
                verdict="config",
            ) from None

    def _post(self, body: dict[str, Any]) -> Any:
        return self._server.post("/v1/completions", json=body, timeout=(10.0, self._timeout))


def _together(count: int, work: Any) -> None:
    """Run ``work`` in threads and wait for all; the first error is raised. Daemons: an interrupt need not wait."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, name="gpuserve-client", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # a signal handler of the main thread runs in between
    if errors:
        raise errors[0]
