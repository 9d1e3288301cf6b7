"""Which requests run: continuous batching, first come first served."""

from __future__ import annotations

from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .runner import Plan

    Output = tuple[int, list[int], str]
    """Request, its new tokens, why it ended ("" while it runs)."""


class Request:
    """One sequence. Probes of health are served like others but not counted."""

    __slots__ = ("counted", "id", "phase", "prompt_tokens", "remaining", "state")

    def __init__(self, id: int, state: int, max_tokens: int, prompt_tokens: int, counted: bool, phase: str) -> None:
        self.id = id
        self.state = state
        self.remaining = max_tokens
        self.prompt_tokens = prompt_tokens
        self.counted = counted
        self.phase = phase


class Batcher:
    """Requests wait, run and end here, in the process that leads: SGLang's rank 0, vLLM's engine core."""

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.steps = 0
        self.fresh: list[Request] = []
        self._ended: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def ingest(self, message: Any) -> None:
        """``("generate", id, state, max_tokens, prompt_tokens, counted, phase)`` or ``("abort", id)``."""
        if message[0] == "generate":
            self.waiting.append(Request(*message[1:]))
        elif message[0] == "abort":
            self.waiting = deque(r for r in self.waiting if r.id != message[1])
            if self.running.pop(message[1], None):
                self._ended.append(message[1])

    def plan(self) -> Plan:
        """The next step, with what waits admitted as far as there is room."""
        self.fresh = []
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.popleft()
            self.running[request.id] = request
            self.fresh.append(request)
        phase = "warmup" if any(r.phase == "warmup" for r in self.fresh) else "serving"
        ended, self._ended = self._ended, []
        self.steps += 1
        return self.steps, [(r.id, r.state, r.counted) for r in self.fresh], ended, phase

    def absorb(self, result: list[tuple[int, list[int]]]) -> list[Output]:
        """The step's tokens, cut at each request's end."""
        outputs: list[Output] = []
        for id, made in result:
            request = self.running.get(id)
            if request is None:
                continue
            tokens = made[: request.remaining]
            request.remaining -= len(tokens)
            if not request.remaining:
                del self.running[id]
                self._ended.append(id)
            outputs.append((id, tokens, "" if request.remaining else "length"))
        return outputs

    def forget(self) -> None:
        """Lose everything, silently."""
        self._ended += self.running
        self.running.clear()
        self.waiting.clear()

    def stats(self, spec: Any) -> Any:
        """What the front end's metrics show: (running, waiting, steps, verify steps, accepted by position)."""
        return len(self.running), len(self.waiting), self.steps, *spec
