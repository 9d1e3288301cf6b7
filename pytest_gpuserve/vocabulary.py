"""The words used alike in code, reports and JSON."""

from __future__ import annotations

from typing import Final, Literal, get_args

Phase = Literal[
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
]
"""Where a rank is in its life. Engines may repeat or skip phases; the order here is the usual one."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

Verdict = Literal[
    "ready",
    "degraded",
    "slow",
    "hang",
    "stalled",
    "crash",
    "oom",
    "config",
    "unsupported_arch",
    "port",
    "leak",
    "infra",
    "undecided",
]
"""What we say of a server. ``stalled`` is for a log alone, which cannot tell slow from hung."""

VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)

RoleName = Literal["api", "scheduler", "engine_core", "worker", "detokenizer", "compiler", "helper", "other"]
"""What a process of a server is for. Stacks are compared inside one role only.

api: HTTP front end (SGLang main process, vLLM ``vllm serve``). scheduler: SGLang TP rank. worker: vLLM TP rank.
engine_core: vLLM's scheduler process. compiler: nvcc, ptxas, ninja, inductor or triton worker.
helper: resource tracker, multiprocessing fork server, py-spy.
"""

LOG_LIMIT: Final = "log_limit"
"""The alarm, and the reason of the incident, of a server whose log has reached its limit."""

RESULTS: Final = "GPUSERVE_RESULTS"
"""Variable with the file where the plugin writes one JSON line a test, for ``gpuserve judge`` and ``isolate``."""

COLLECTION: Final = "collection"
"""There, as ``error`` of a line: a module or a directory could not be collected, so its tests are not known."""

LOST_PROCESS: Final = "lost process"
"""Likewise: the process that ran the test (a worker of pytest-xdist, a child of pytest-forked) died under it."""

STARTED: Final = {"started": True}
"""The first line of a session in that file; a command may run several sessions, one after the other."""

FINISHED: Final = {"finished": True}
"""The last line of a session that nothing cut short."""
