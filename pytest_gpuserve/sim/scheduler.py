"""SGLang's processes: one scheduler a rank, of which rank 0 leads, and the detokenizer."""

from __future__ import annotations

import os
import signal
import time
from threading import Thread

from .batching import Batcher
from .collective import Ring
from .config import Options
from .device import Device
from .link import Link, PeerClosed
from .model import detokenize
from .process import die_with_parent, leave_interrupts_to_the_front_end, set_title
from .runner import ModelRunner, Plan
from .script_sglang import SglangScript

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Ends = tuple[Link | None, Link | None]

DECODE_LOG_INTERVAL = 40
"""Steps between two ``Decode batch`` lines."""


class Scheduler:
    """One rank of the tensor-parallel group."""

    def __init__(
        self, rank: int, options: Options, device: Device, ring: Ends, requests: Link | None, out: Link | None
    ):
        self.rank = rank
        self.options = options
        self.device = device
        self.script = SglangScript(rank, options)
        self.ring = Ring(rank, options.tp, *ring)
        self.runner = ModelRunner(rank, options, device, self.ring, self.script)
        self.requests = requests
        self.out = out
        self.batcher = Batcher(options.max_running)
        self.turn = 0
        self.decoded = (0, time.monotonic())
        self.batch_since: float | None = None

    def init_model_worker(self) -> None:
        """All phases of start-up, in SGLang 0.5.12's order: the target's graphs before the draft model."""
        self.runner.init_distributed()
        self.runner.load_weights()
        self.runner.initialize_kv_cache()
        self.runner.compile_kernels()
        self.runner.autotune()
        self.runner.capture_model()
        self.runner.load_draft()
        self.runner.capture_draft_model()
        self.script.ready()
        if self.out:
            self.out.send(("ready",))
        self.runner.become_ready()

    def event_loop_normal(self) -> None:
        """Until the front end says that it is over."""
        while (plan := self.recv_requests()) is not None:
            self.batch_since = time.monotonic()
            result = self.runner.execute_model(plan)
            self.batch_since = None
            if self.out:
                self.process_batch_result(plan, result)
        self.runner.shut_down()

    def recv_requests(self) -> Plan | None:
        """What the next step runs: rank 0 asks the front end, the others rank 0. None at the end."""
        plan = self.get_next_batch() if self.requests else None
        self.turn += 1
        shared: Plan | None = self.ring.broadcast(("requests", self.turn), plan)
        return shared

    def get_next_batch(self) -> Plan | None:
        assert self.requests is not None
        while not self.batcher.busy or self.requests.waiting():
            message = self.requests.recv()
            if message[0] == "shutdown":
                return None
            if not self.device.loses_replies:
                self.batcher.ingest(message)
                if not self.batcher.busy:
                    self.report([])  # the last request was aborted
        plan = self.batcher.plan()
        if self.batcher.fresh:
            self.log_prefill()
            self.report([])
        return plan

    def process_batch_result(self, plan: Plan, result: list[tuple[int, list[int]]]) -> None:
        if self.device.loses_replies:
            self.batcher.forget()
            return
        self.report(self.batcher.absorb(result))
        if not plan[0] % DECODE_LOG_INTERVAL:
            self.log_decode()

    def report(self, outputs: list[Any]) -> None:
        assert self.out is not None
        spec = self.runner.verified, self.runner.accepted_at
        self.out.send(("out", outputs, self.batcher.stats(spec)))

    def watchdog(self, parent: int) -> None:
        """SGLang's own: a thread of the rank that ends the server when one batch takes too long."""
        limit = self.options.watchdog_timeout
        while True:
            time.sleep(limit / 2)
            since = self.batch_since
            if since is not None and time.monotonic() - since > limit:
                self.script.line(f"Scheduler watchdog timeout (self.watchdog_timeout={limit:g}, self.soft=False)")
                os.kill(parent, signal.SIGQUIT)
                return

    def log_prefill(self) -> None:
        if not self.options.quiet:
            fresh = self.batcher.fresh
            self.script.line(
                f"Prefill batch, #new-seq: {len(fresh)}, #new-token: {sum(r.prompt_tokens for r in fresh)}, "
                f"#cached-token: 0, token usage: 0.00, #running-req: {len(self.batcher.running) - len(fresh)}, "
                f"#queue-req: {len(self.batcher.waiting)}, #pending-token: 0, cuda graph: False, "
                f"input throughput (token/s): 0.00"
            )

    def log_decode(self) -> None:
        tokens, when = self.decoded
        self.decoded = self.device.tokens, time.monotonic()
        if self.options.quiet:
            return
        runner = self.runner
        spec = ""
        if runner.verified:
            rate = sum(runner.accepted_at) / runner.verified
            spec = f"accept len: {1 + rate:.2f}, accept rate: {rate / self.options.draft_length:.2f}, "
        pace = (self.decoded[0] - tokens) / max(self.decoded[1] - when, 1e-6)
        self.script.line(
            f"Decode batch, #running-req: {len(self.batcher.running)}, #token: {self.device.tokens}, "
            f"token usage: 0.00, {spec}cuda graph: {self.options.cuda_graph}, gen throughput (token/s): {pace:.2f}, "
            f"#queue-req: {len(self.batcher.waiting)}"
        )


def run_scheduler_process(
    rank: int, options: Options, parent: int, ring: Ends, requests: Link | None, out: Link | None
) -> None:
    """Entry of a rank. An exception is logged as SGLang logs it and told to the front end by SIGQUIT."""
    die_with_parent(parent)
    leave_interrupts_to_the_front_end()
    device = Device(rank, options)
    try:
        device.begin("spawn")
        device.launch(0.0)
        device.finish()
        set_title(f"sglang::scheduler_TP{rank}" if options.tp > 1 else "sglang::scheduler")
        scheduler = Scheduler(rank, options, device, ring, requests, out)
        if options.watchdog_timeout:
            Thread(target=scheduler.watchdog, args=(parent,), daemon=True).start()
        scheduler.init_model_worker()
        scheduler.event_loop_normal()
    except PeerClosed:  # the front end or the detokenizer is gone, and with it the reason to be here
        os._exit(1)
    except Exception:
        import traceback

        SglangScript(rank, options).line(f"Scheduler hit an exception: {traceback.format_exc()}")
        if os.getppid() == parent:
            os.kill(parent, signal.SIGQUIT)
        os._exit(1)


def run_detokenizer_process(options: Options, parent: int, inbox: Link, outbox: Link) -> None:
    """Turns rank 0's tokens into text for the front end."""
    die_with_parent(parent)
    leave_interrupts_to_the_front_end()
    set_title("sglang::detokenizer")
    try:
        while True:
            message = inbox.recv()
            if message[0] == "out":
                outputs = [(id, tokens, detokenize(tokens), ended) for id, tokens, ended in message[1]]
                message = ("out", outputs, message[2])
            outbox.send(message)
    except PeerClosed:
        os._exit(0)
