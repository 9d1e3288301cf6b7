"""vLLM's worker process: one a rank, told what to do by the engine core."""

from __future__ import annotations

import os

from .collective import Ring
from .config import Options
from .device import Device
from .link import Link, PeerClosed
from .process import leave_interrupts_to_the_front_end, set_title
from .runner import ModelRunner, Plan
from .script_vllm import VllmScript

Ends = tuple[Link | None, Link | None]


class Worker:
    """One rank of the tensor-parallel group. It is called ``Worker`` until the group exists, then ``Worker_TP3``."""

    def __init__(self, rank: int, options: Options, device: Device, ring: Ends, core: Link, script: VllmScript) -> None:
        self.rank = rank
        self.options = options
        self.device = device
        self.core = core
        self.script = script
        self.runner = ModelRunner(rank, options, device, Ring(rank, options.tp, *ring), script)

    def init_device(self) -> None:
        self.runner.init_distributed()
        if self.options.tp > 1:
            self.script.process = f"Worker_TP{self.rank}"
            set_title(f"VLLM::{self.script.process}")

    def load_model(self) -> None:
        self.runner.load_weights()
        self.runner.load_draft()

    def compile_or_warm_up_model(self) -> None:
        self.runner.compile_kernels()
        self.runner.initialize_kv_cache()
        self.core.send(("kv_cache",))
        self.core.recv()  # the engine core answers when it has heard of every rank
        self.runner.autotune()
        self.runner.capture_model()
        self.runner.capture_draft_model()
        self.runner.warm_up()
        self.core.send(("ready",))
        self.runner.become_ready()

    def worker_busy_loop(self) -> None:
        """Until the engine core says that it is over."""
        while (plan := self.dequeue()) is not None:
            result = self.runner.execute_model(plan)
            if not self.rank and not self.device.loses_replies:
                self.core.send(("done", result, self.runner.verified, self.runner.accepted_at))
        self.runner.shut_down()

    def dequeue(self) -> Plan | None:
        plan: Plan | None = self.acquire_read()
        return plan

    def acquire_read(self) -> Plan | None:
        plan: Plan | None = self.core.recv()
        return plan


def worker_main(rank: int, options: Options, ring: Ends, core: Link) -> None:
    """Entry of a rank."""
    leave_interrupts_to_the_front_end()
    device = Device(rank, options)
    script = VllmScript(rank, options)
    problem = "WorkerProc failed to start."
    try:
        device.begin("spawn")
        device.launch(0.0)
        device.finish()
        set_title("VLLM::Worker")
        worker = Worker(rank, options, device, ring, core, script)
        worker.init_device()
        worker.load_model()
        worker.compile_or_warm_up_model()
        problem = "WorkerProc hit an exception."
        worker.worker_busy_loop()
    except PeerClosed:
        script.line("Parent process exited, terminating worker queues", "multiproc_executor.py:843")
        os._exit(0)
    except Exception:
        import traceback

        script.line(f"{problem}\n{traceback.format_exc()}", "multiproc_executor.py:1057", "ERROR")
        os._exit(1)
