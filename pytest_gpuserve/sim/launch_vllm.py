"""vLLM's launcher: one child, the engine core, which starts the workers. Killed, it leaves them all behind."""

from __future__ import annotations

import os
import signal
import time
import traceback
from contextlib import suppress
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import TYPE_CHECKING, Any

from .config import Options
from .engine_core import run_engine_core
from .launch import Server
from .link import Link, pair
from .script import emit
from .script_vllm import VllmScript

if TYPE_CHECKING:
    from .frontend import FrontEnd
    from .metrics import Metrics

LOGO = """
       █     █     █▄   ▄█
 ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.24.0
   █▄█▀ █     █     █     █  model   {}
    ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀
"""
ROUTES = (
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/v1/models", "GET"),
    ("/version", "GET"),
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
)


class VllmServer(Server):
    """``vllm serve``."""

    def __init__(self, options: Options, bound: Any) -> None:
        super().__init__(options, bound)
        self.script = VllmScript(0, options)
        self.script.process = "APIServer"
        self.workers: list[int] = []

    def start(self) -> tuple[Link, Link]:
        o = self.options
        self.script.line(LOGO.format(o.model), "api_utils.py:339")
        self.script.line(f"non-default args: {non_default_args(o)}", "api_utils.py:273")
        self.script.line("Resolved architecture: LlamaForCausalLM", "model.py:598")
        self.script.line(f"Using max model len {o.context_length}", "model.py:1725")
        self.script.line("Chunked prefill is enabled with max_num_batched_tokens=8192.", "scheduler.py:252")
        self.script.line("Asynchronous scheduling is enabled.", "vllm.py:1006")
        ours, theirs = pair()
        self.spawn(run_engine_core, o, theirs, name="EngineCore")
        theirs.close()
        return ours, ours

    def message(self, message: Any) -> None:
        """The workers' pids: kept as descriptors, so that a pid that was reused is never killed."""
        if message[0] == "pids":
            for pid in message[1]:
                with suppress(OSError):
                    self.workers.append(os.pidfd_open(pid))

    def open(self, front: FrontEnd) -> None:
        self.script.line("Supported tasks: ['generate']", "entry.py:136")
        self.script.line(f"Starting vLLM server on {self.address}", "entry.py:140")
        self.script.line("Available routes are:", "launcher.py:186")
        for path, method in ROUTES:
            self.script.line(f"Route: {path}, Methods: {method}", "launcher.py:195")
        emit(f"INFO:     Started server process [{os.getpid()}]\nINFO:     Waiting for application startup.\n")
        front.up = True
        self.serve(front)
        emit("INFO:     Application startup complete.\n")
        if not self.options.quiet:
            Thread(target=self.log_stats, args=(front.metrics,), name="log_stats", daemon=True).start()

    def log_stats(self, metrics: Metrics) -> None:
        """Every ten seconds in which tokens moved, and once more: silence is no proof of idleness."""
        interval = float(os.environ.get("VLLM_LOG_STATS_INTERVAL") or 10)
        seen, idle = (0, 0), False
        while True:
            time.sleep(interval)
            now = metrics.prompt_tokens, metrics.generation_tokens
            if now == seen and idle:
                continue
            idle = now == seen
            prompt, generation = ((new - old) / interval for new, old in zip(now, seen, strict=True))
            seen = now
            self.script.line(
                f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: "
                f"{generation:.1f} tokens/s, Running: {metrics.running} reqs, Waiting: {metrics.waiting} reqs, "
                f"GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%",
                "loggers.py:335",
            )
            if metrics.drafts:
                length, rate = metrics.spec()
                positions = ", ".join(f"{count / metrics.drafts:.3f}" for count in metrics.accepted_at)
                self.script.line(
                    f"SpecDecoding metrics: Mean acceptance length: {length:.2f}, Accepted: {sum(metrics.accepted_at)} "
                    f"tokens, Drafted: {metrics.drafted} tokens, Per-position acceptance rate: {positions}, "
                    f"Avg Draft acceptance rate: {100 * rate:.1f}%",
                    "metrics.py:120",
                )

    def stop(self) -> None:
        emit("INFO:     Shutting down\nINFO:     Waiting for application shutdown.\n")
        if self.ready:
            for core in self.children:
                core.terminate()
                core.join(self.options.shutdown_timeout + 1.0)
        self.kill_children()
        emit(f"INFO:     Application shutdown complete.\nINFO:     Finished server process [{os.getpid()}]\n")

    def kill_children(self) -> None:
        """The workers too: of a core that was killed or is stuck, somebody must."""
        super().kill_children()
        for worker in self.workers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)

    def fail(self, child: BaseProcess | None) -> int:
        code = child.exitcode if child else None
        self.kill_children()
        if self.ready:  # vLLM's exit code after a worker's death is 0
            self.script.line(
                "AsyncLLM output_handler failed.\n"
                "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
                "See stack trace (above) for the root cause.",
                "async_llm.py:708",
                "ERROR",
            )
            self.stop()
            return 0
        try:
            raise RuntimeError(
                f"Engine core initialization failed. See root cause above. "
                f"Failed core proc(s): {{'EngineCore': {code}}}"
            ) from None
        except RuntimeError:
            emit(traceback.format_exc())
        return 1


def non_default_args(o: Options) -> dict[str, object]:
    """The arguments under vLLM's names."""
    args: dict[str, object] = {
        "model_tag": o.model,
        "host": o.host,
        "port": o.port,
        "model": o.model,
        "max_model_len": o.context_length,
        "served_model_name": [o.served_model_name],
        "attention_backend": o.attention_backend,
        "tensor_parallel_size": o.tp,
        **dict(o.axes),
    }
    if o.api_key:
        args["api_key"] = [o.api_key]
    if o.speculative:
        config = {"method": o.spec_decode, "model": o.draft_model, "num_speculative_tokens": o.draft_length}
        args["speculative_config"] = config
    if not o.cuda_graph:
        args["compilation_config"] = {"cudagraph_mode": "NONE"}
    return args
