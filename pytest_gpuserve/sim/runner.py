"""One rank: its phases in order, then forward passes, each closed by a collective over all ranks."""

from __future__ import annotations

import time

from . import board, build, chatter
from .config import CAPTURE_SIZES
from .device import Device
from .model import Shard, advance, token_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .collective import Ring
    from .config import Options
    from .script import Script

Plan = tuple[int, list[tuple[int, int, bool]], list[int], str]
"""One step: its number, new requests (id, hidden state, counts as served), ended ids, phase (warmup or serving)."""


class ModelRunner:
    """What a rank does between its first and its last breath."""

    def __init__(self, rank: int, options: Options, device: Device, ring: Ring, script: Script) -> None:
        self.rank = rank
        self.options = options
        self.device = device
        self.ring = ring
        self.script = script
        self.shard = Shard(rank, options.tp)
        self.board = board.attach(options.board)
        self.states: dict[int, int] = {}
        self.verified = 0
        self.drafts = 0
        self.accepted_at = [0] * options.draft_length
        if options.chatter:
            chatter.begin(script, options.chatter / options.tp)

    # -- start-up -----------------------------------------------------------------------------------------------------

    def init_distributed(self) -> None:
        self.script.distributed_begin()
        self.run_kernels("distributed_init")
        self.script.distributed_joined()
        self.barrier("distributed_init")
        self.script.distributed_end()

    def load_weights(self) -> None:
        self.script.load_begin(draft=False)
        self.run_kernels("weight_load", self.options.shards, self.script.shards)
        self.script.load_end(draft=False)
        self.barrier("weight_load")

    def load_draft(self) -> None:
        if self.options.has_draft:
            self.script.load_begin(draft=True)
            self.run_kernels("draft_load", 1, self.script.shards)
            self.script.load_end(draft=True)
            self.barrier("draft_load")

    def initialize_kv_cache(self) -> None:
        self.script.kv_begin()
        self.run_kernels("kv_cache")
        self.script.kv_end()
        self.barrier("kv_cache")

    def compile_kernels(self) -> None:
        """JIT compilation: one rank builds, the others wait for its lock. Nothing to do on a warm cache."""
        self.script.compile_begin()
        self.run_kernels("compile")
        if self.options.cold_compile or self.options.keep_cache:
            build.build_extension(self.options.cache, self.options.cold_compile)
        self.script.compile_end()
        self.barrier("compile")

    def autotune(self) -> None:
        if self.options.autotunes:
            self.script.autotune_begin()
            self.run_kernels("autotune")
            self.script.autotune_end()
            self.barrier("autotune")

    def capture_model(self) -> None:
        if self.options.cuda_graph:
            self._capture_cudagraphs("cuda_graph", draft=False)

    def capture_draft_model(self) -> None:
        if self.options.cuda_graph and self.options.has_draft:
            self._capture_cudagraphs("draft_cuda_graph", draft=True)

    def _capture_cudagraphs(self, phase: str, *, draft: bool) -> None:
        self.script.capture_begin(draft=draft)
        try:
            self.run_kernels(phase, len(CAPTURE_SIZES), self.script.captures)
            self.barrier(phase)
        except RuntimeError as error:
            raise self.script.capture_error(error) from error
        self.script.capture_end(draft=draft)

    def warm_up(self) -> None:
        """A forward pass of a made-up batch, before anybody may ask (vLLM; SGLang warms up through its front end)."""
        self.script.warmup_begin()
        self.execute_model((-2, [(-1, 0, False)], [], "warmup"))
        self.states.clear()

    def become_ready(self) -> None:
        self.run_kernels("ready")

    def shut_down(self) -> None:
        self.run_kernels("shutdown")
        self.barrier("shutdown")

    def run_kernels(self, phase: str, units: int = 1, report: Callable[[int, int], None] | None = None) -> None:
        """Launch the phase's units of work one by one; ``report(done, units)`` before, between and after."""
        self.device.begin(phase, units)
        for done in range(units):
            if report:
                report(done, units)
            self.device.launch(done / units)
        if report:
            report(units, units)
        self.device.finish()

    def barrier(self, name: str) -> None:
        if self.device.skips_collective:
            self.device.skips_collective = False
            return
        self.ring.barrier(name)

    # -- serving ------------------------------------------------------------------------------------------------------

    def execute_model(self, plan: Plan) -> list[tuple[int, list[int]]]:
        """One step of the running batch: (request, its new tokens), the same on every rank."""
        step, new, ended, phase = plan
        for request in ended:
            self.states.pop(request, None)
        counted = sum(counts for _, _, counts in new)
        if phase != self.device.phase and (phase == "warmup" or counted):
            self.device.begin(phase)
        self.device.requests += counted
        fresh = {request for request, _, _ in new}
        self.states.update((request, state) for request, state, _ in new)
        if not self.states:
            return []
        self.device.launch(0.0)
        if self.options.step_seconds:
            time.sleep(self.options.step_seconds)
        if self.board is not None:
            board.put(self.board, self.rank, max(step, 0))
        result = self.forward(step, fresh)
        self.device.tokens += sum(len(tokens) for _, tokens in result)
        if phase == "warmup":
            self.device.finish()
        return result

    def forward(self, step: int, fresh: set[int]) -> list[tuple[int, list[int]]]:
        """Draft, compute this rank's share of every position's logit, sum over the ranks, accept what matches."""
        drafts: list[list[int]] = []
        shares: list[int] = []
        for request, first in self.states.items():
            proposed = [] if request in fresh else self.draft(first)
            drafts.append(proposed)
            shares.append(self.shard.partial(first))
            state = first
            for token in proposed:
                state = advance(state, token)
                shares.append(self.shard.partial(state))
        if self.device.skips_collective:
            self.device.skips_collective = False
            logits = iter(shares)
        else:
            logits = iter(self.ring.all_reduce(("logits", step), [share + self.device.bias for share in shares]))
        result = []
        for request, proposed in zip(list(self.states), drafts, strict=True):
            true = [token_of(next(logits)) for _ in range(len(proposed) + 1)]
            tokens = true[: 1 + self.accept(proposed, true)]
            for token in tokens:
                self.states[request] = advance(self.states[request], token)
            result.append((request, tokens))
        return result

    def draft(self, state: int) -> list[int]:
        """As many right tokens as keep the accepted share of all drafted ones at the rate asked for."""
        length = self.options.draft_length
        if not length:
            return []
        wanted = length * self.options.accept_rate
        right = int((self.drafts + 1) * wanted + 1e-9) - int(self.drafts * wanted + 1e-9)
        self.drafts += 1
        return self.shard.draft(state, length, right)

    def accept(self, proposed: list[int], true: list[int]) -> int:
        """How many drafted tokens the target agrees with, from the first on."""
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == true[accepted]:
            self.accepted_at[accepted] += 1
            accepted += 1
        self.verified += bool(proposed)
        return accepted
