"""What every process of the server is told. Light: each rank imports it, so no dataclasses (8 ms an interpreter)."""

from __future__ import annotations

from typing import NamedTuple

PHASES = (
    "spawn",
    "distributed_init",
    "weight_load",
    "draft_load",
    "kv_cache",
    "compile",
    "autotune",
    "cuda_graph",
    "draft_cuda_graph",
    "warmup",
    "ready",
    "serving",
    "shutdown",
)
"""The package's vocabulary of phases, repeated because the engine imports nothing of the package."""

CAPTURE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32)
"""Batch sizes of which a graph is captured."""

MAX_TP = 64
"""As many ranks as the toy model has heads to share."""


class Fault(NamedTuple):
    """One thing that goes wrong, on which ranks, when.

    Attributes:
        kind, phase: what, and in which phase.
        ranks: the ranks it strikes, () for the front end.
        after: seconds from the beginning of the phase; serving begins with the first request.
        at: how much of the phase's work is done first, 0.0 to 1.0.
        requests, tokens: served before it strikes in phase serving.
        how: variant of the kind, "" for its usual one.
        seconds: how long ``slow`` lasts.
        code: exit code of ``exit``.
    """

    kind: str
    phase: str
    ranks: tuple[int, ...]
    after: float = 0.0
    at: float = 0.0
    requests: int = 0
    tokens: int = 0
    how: str = ""
    seconds: float = 30.0
    code: int = 1


class Options(NamedTuple):
    """The command line, checked. Times in seconds; ``cache`` is a directory that is made when it is first needed;
    ``chatter`` lines a second, of all ranks together."""

    flavor: str
    tp: int
    host: str
    port: int
    model: str
    served_model_name: str
    cache: str
    keep_cache: bool
    board: str = ""
    leak_shm: bool = False
    context_length: int = 4096
    max_running: int = 256
    shards: int = 4
    phase_seconds: tuple[tuple[str, float], ...] = ()
    step_seconds: float = 0.0
    cold_compile: float = 0.0
    spec_decode: str = "base"
    draft_model: str = ""
    spec_steps: int = 3
    spec_topk: int = 1
    spec_draft_tokens: int = 4
    accept_rate: float = 0.6
    cuda_graph: bool = True
    attention_backend: str = ""
    axes: tuple[tuple[str, str], ...] = ()
    api_key: str = ""
    seed: int | None = None
    faults: tuple[Fault, ...] = ()
    ignore_term: bool = False
    quiet: bool = False
    chatter: int = 0
    shutdown_timeout: float = 0.5
    watchdog_timeout: float = 0.0
    arguments: tuple[tuple[str, object], ...] = ()

    @property
    def speculative(self) -> bool:
        return self.spec_decode != "base"

    @property
    def has_draft(self) -> bool:
        """A draft model is loaded: all speculative methods but n-gram lookup."""
        return self.speculative and self.spec_decode != "ngram"

    @property
    def draft_length(self) -> int:
        """Tokens drafted a step and request. A chain of topk 1 drafts as many as it has steps."""
        if not self.speculative:
            return 0
        return self.spec_steps if self.spec_topk == 1 else self.spec_draft_tokens - 1

    @property
    def autotunes(self) -> bool:
        """Kernels are autotuned: always by vLLM, for the flashinfer backend by SGLang."""
        return self.flavor == "vllm" or self.attention_backend == "flashinfer"

    def seconds(self, phase: str) -> float:
        """How long the phase's work is stretched."""
        return dict(self.phase_seconds).get(phase, 0.0)
