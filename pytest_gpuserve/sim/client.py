"""The front end's side of the engine: requests out, tokens in."""

from __future__ import annotations

import itertools
import threading
import time
from queue import Empty, SimpleQueue

from .config import Options
from .link import Link, PeerClosed
from .metrics import Metrics
from .model import detokenize
from .openai import Prompt, cut_at_stop

PROBE = Prompt(0, 1)


class EngineDead(Exception):
    """The processes that make tokens are gone."""


class Generation:
    """One sequence in flight. Tokens come in steps: (how many, text, why it ended or "")."""

    def __init__(self, client: EngineClient, id: int, counted: bool) -> None:
        self.client = client
        self.id = id
        self.counted = counted
        self.began = time.monotonic()
        self.first: float | None = None
        self.queue: SimpleQueue[tuple[int, str, str]] = SimpleQueue()

    def get(self, timeout: float) -> tuple[int, str, str] | None:
        """The next step, None when none came in time.

        Raises:
            EngineDead: none will come any more.
        """
        try:
            step = self.queue.get(timeout=timeout)
        except Empty:
            return None
        if step[2] == "error":
            raise EngineDead
        if self.first is None:
            self.first = time.monotonic() - self.began
        return step

    def close(self, reason: str) -> None:
        """Done with it, for this reason; one that still runs is aborted."""
        self.client.close(self, reason)


class Choice:
    """One choice of an answer as it grows. Text that may become a stop string is held back."""

    def __init__(self, generation: Generation, stop: tuple[str, ...]) -> None:
        self.generation = generation
        self.stop = stop
        self.text = ""
        self.reason = ""
        self.tokens = 0
        self._sent = 0
        self._closed = False

    def take(self, tokens: int, text: str, ended: str) -> str:
        """Add a step; returns what may be shown of it."""
        self.tokens += tokens
        self.text, stopped = cut_at_stop(self.text + text, self.stop)
        self.reason = "stop" if stopped else ended
        held = 0 if self.reason else max((len(word) - 1 for word in self.stop), default=0)
        end = max(self._sent, len(self.text) - held)
        shown, self._sent = self.text[self._sent : end], end
        return shown

    def close(self, metrics: Metrics) -> None:
        """Count it as finished, or aborted; once."""
        if self._closed:
            return
        self._closed = True
        reason = self.reason or "abort"
        self.generation.close(reason)
        metrics.finished(reason, self.generation.first, time.monotonic() - self.generation.began)


class EngineClient:
    """Talks to the scheduling process. Thread-safe."""

    def __init__(self, options: Options, metrics: Metrics, requests: Link, outputs: Link) -> None:
        self.options = options
        self.metrics = metrics
        self.requests = requests
        self.outputs = outputs
        self.dead = False
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Generation] = {}

    def start(self) -> None:
        threading.Thread(target=self.handle_outputs, name="handle_outputs", daemon=True).start()

    def submit(self, prompt: Prompt, max_tokens: int, *, counted: bool = True, phase: str = "serving") -> Generation:
        """Start a sequence. Uncounted ones are probes: no fault waits for them, no metric shows them as requests.

        Raises:
            EngineDead: nobody is left to make tokens.
        """
        generation = Generation(self, next(self._ids), counted)
        with self._lock:
            if self.dead:
                raise EngineDead
            self._open[generation.id] = generation
            self._send(("generate", generation.id, prompt.state, max_tokens, prompt.tokens, counted, phase))
        return generation

    def close(self, generation: Generation, reason: str) -> None:
        with self._lock:
            running = self._open.pop(generation.id, None)
            if running and not self.dead:
                self._send(("abort", generation.id))

    def handle_outputs(self) -> None:
        """The thread that hands each step's tokens to those who wait for them."""
        try:
            while True:
                _, outputs, stats = self.outputs.recv()
                probes = {id for id, generation in self._open.copy().items() if not generation.counted}
                self.metrics.engine_stats(stats, sum(len(tokens) for id, tokens, *_ in outputs if id not in probes))
                for id, tokens, *text, ended in outputs:
                    with self._lock:
                        generation = self._open.pop(id, None) if ended else self._open.get(id)
                    if generation:
                        generation.queue.put((len(tokens), text[0] if text else detokenize(tokens), ended))
        except PeerClosed:
            self.fail()

    def fail(self) -> None:
        """Tell all who wait that no token will come any more."""
        with self._lock:
            self.dead = True
            for generation in self._open.values():
                generation.queue.put((0, "", "error"))
            self._open.clear()

    def shut_down(self) -> None:
        with self._lock:
            self.dead = True
            self._send(("shutdown",))

    def _send(self, message: object) -> None:
        try:
            self.requests.send(message)
        except PeerClosed:
            self.dead = True
