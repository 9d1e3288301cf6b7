"""vLLM's engine core: a process between the front end and the workers, which it starts, feeds and watches.

Like the real one it does not notice when the front end is killed: it and its workers live on and hold what they hold.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import connection, get_context
from threading import Thread

from .batching import Batcher
from .collective import ring_links
from .config import Options
from .link import Link, PeerClosed, pair
from .process import leave_interrupts_to_the_front_end, set_title
from .script_vllm import VllmScript
from .worker import worker_main

TYPE_CHECKING = False
if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from typing import Any, NoReturn

    from .runner import Plan

WAITING = (
    "No available shared memory broadcast block found in {:g} seconds. This typically happens when some processes are "
    "hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization)."
)


class Terminated(Exception):
    """SIGTERM came."""


class EngineCore:
    """Batches requests, sends each step to every worker, takes the result from the first."""

    def __init__(self, options: Options, front: Link) -> None:
        self.options = options
        self.front = front
        self.script = VllmScript(0, options)
        self.script.process = "EngineCore"
        self.batcher = Batcher(options.max_running)
        self.workers: list[BaseProcess] = []
        self.links: list[Link] = []
        self.ready = False
        self.ending = False
        self.heartbeat = float(os.environ.get("VLLM_RINGBUFFER_WARNING_INTERVAL") or 60)

    def start_workers(self) -> None:
        o = self.options
        method = (
            f"SpeculativeConfig(method='{o.spec_decode}', model='{o.draft_model}', num_spec_tokens={o.draft_length})"
        )
        self.script.line(
            f"Initializing a V1 LLM engine (v0.24.0) with config: model='{o.model}', "
            f"speculative_config={method if o.speculative else None}, tokenizer='{o.model}', "
            f"max_seq_len={o.context_length}, tensor_parallel_size={o.tp}, enforce_eager=False, seed={o.seed or 0}, "
            f"served_model_name={o.served_model_name}, "
            f"cudagraph_mode={'FULL_AND_PIECEWISE' if o.cuda_graph else 'NONE'}",
            "core.py:114",
        )
        spawn = get_context("spawn")
        rings = ring_links(o.tp)
        for rank, ring in enumerate(rings):
            ours, theirs = pair()
            worker = spawn.Process(
                target=worker_main, args=(rank, o, ring, theirs), name=f"VllmWorker-{rank}", daemon=True
            )
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self.links.append(ours)
        for left, right in rings:
            for link in (left, right):
                if link:
                    link.close()
        self.front.send(("pids", [worker.pid for worker in self.workers]))
        Thread(target=self.monitor_workers, name="MultiprocWorkerMonitor", daemon=True).start()

    def wait_for_ready(self) -> None:
        began = time.monotonic()
        tokens = self.options.context_length
        self.gather("kv_cache")
        self.script.line("GPU KV cache size: 7,148,512 tokens", "kv_cache_utils.py:2146")
        self.script.line(
            f"Maximum concurrency for {tokens:,} tokens per request: {7148512 / tokens:.2f}x", "kv_cache_utils.py:2147"
        )
        for link in self.links:
            link.send(("kv_cache",))
        self.gather("ready")
        self.script.line(
            f"init engine (profile, create kv cache, warmup model) took {time.monotonic() - began:.2f} s "
            f"(compilation: {self.options.cold_compile:.2f} s)",
            "core.py:402",
        )
        self.ready = True
        self.front.send(("ready",))

    def gather(self, stage: str) -> None:
        """Until every worker says that it has come so far."""
        for link in self.links:
            while link.recv() != (stage,):
                pass

    def run_busy_loop(self) -> None:
        while True:
            self.process_input_queue()
            plan = self.batcher.plan()
            if self.batcher.fresh:
                self.report([], (0, []))
            _, result, *spec = self.execute_model(plan)
            self.report(self.batcher.absorb(result), spec)

    def process_input_queue(self) -> None:
        """Take what the front end sent; block while there is nothing to do."""
        while not self.batcher.busy or self.front.waiting():
            try:
                self.batcher.ingest(self.front.recv())
            except PeerClosed:
                self.wait_for_requests()
            if not self.batcher.busy:
                self.report([], (0, []))  # the last request was aborted

    def wait_for_requests(self) -> NoReturn:
        """Nobody is left who could send one."""
        while True:
            signal.pause()

    def execute_model(self, plan: Plan) -> Any:
        for link in self.links:
            link.send(plan)
        return self.get_response()

    def get_response(self) -> Any:
        """The first worker's reply; says now and then that it waits."""
        waited = 0.0
        limit = self.options.watchdog_timeout
        interval = min(self.heartbeat, limit or self.heartbeat)
        link = self.links[0]
        link.settimeout(interval)
        while True:
            try:
                return link.recv()
            except TimeoutError:
                waited += interval
                if limit and waited >= limit:
                    raise TimeoutError("RPC call to sample_tokens timed out.") from None
                self.script.line(WAITING.format(interval), "shm_broadcast.py:681")

    def report(self, outputs: list[Any], spec: Any) -> None:
        try:
            self.front.send(("out", outputs, self.batcher.stats(spec)))
        except PeerClosed:
            self.wait_for_requests()

    def monitor_workers(self) -> None:
        """End the engine when a worker does."""
        ended = connection.wait([worker.sentinel for worker in self.workers])
        time.sleep(0.1)  # perhaps somebody ends the whole tree, and our own signal is still on its way
        if self.ending:
            return
        dead = min((w for w in self.workers if w.sentinel in ended), key=lambda w: w.exitcode or 0)
        self.script.line(
            f"Worker proc {dead.name} died unexpectedly (exit code: {dead.exitcode}), shutting down executor.",
            "multiproc_executor.py:381",
            "ERROR",
        )
        self.fail(
            "WorkerProc initialization failed due to an exception in a background process. "
            "See stack trace for root cause."
        )

    def fail(self, why: str) -> NoReturn:
        """The end of a sick engine."""
        self.ending = True
        if self.ready:
            self.script.line("EngineCore encountered a fatal error.", "core.py:1100", "ERROR")
        else:
            self.script.line(f"EngineCore failed to start.\nException: {why}", "core.py:708", "ERROR")
        self.kill_workers()
        os._exit(1)

    def kill_workers(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join()

    def shut_down(self) -> None:
        """The end of a healthy engine: the workers end by themselves, or are made to."""
        self.ending = True
        self.script.line("[shutdown] EngineCore: trigger received signal=SIGTERM", "core.py:1454")
        end = time.monotonic() + self.options.shutdown_timeout
        if self.ready:
            for link in self.links:
                try:
                    link.send(None)
                except PeerClosed:
                    continue
            self.script.line(
                f"[shutdown] Executor: waiting for worker exit count={len(self.workers)}", "multiproc_executor.py:479"
            )
            for worker in self.workers:
                worker.join(max(0.0, end - time.monotonic()))
        left = sum(worker.is_alive() for worker in self.workers)
        if left:
            self.script.line(
                f"[shutdown] Executor: workers still running after SIGTERM; sending SIGKILL count={left}",
                "multiproc_executor.py:602",
                "WARNING",
            )
        self.kill_workers()


def run_engine_core(options: Options, front: Link) -> None:
    """Entry of the process."""
    leave_interrupts_to_the_front_end()
    set_title("VLLM::EngineCore")
    core = EngineCore(options, front)

    def terminate(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    try:
        if not options.ignore_term:
            signal.signal(signal.SIGTERM, terminate)
        try:
            core.start_workers()
            core.wait_for_ready()
            core.run_busy_loop()
        except TimeoutError as error:
            core.script.line(f"TimeoutError: {error}", "core.py:1100", "ERROR")
            core.fail(str(error))
        except PeerClosed:  # a worker is gone; the monitor says which and ends this process
            core.wait_for_requests()
    except Terminated:
        core.shut_down()
        os._exit(0)
