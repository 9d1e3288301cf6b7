"""Where a rank's work happens, unit by unit, and where faults strike it."""

from __future__ import annotations

import os
import time

from . import build, stalls
from .config import Fault, Options

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU {} has a total capacity of 94.97 GiB of which 1.21 GiB is "
    "free. Including non-PyTorch memory, this process has 93.75 GiB memory in use. Of the allocated memory 91.02 GiB "
    "is allocated by PyTorch, and 1.94 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


class OutOfMemoryError(RuntimeError):
    """Shown as ``torch.OutOfMemoryError``, as in the engines' logs."""


OutOfMemoryError.__module__ = "torch"


class Device:
    """One rank's pretended GPU."""

    def __init__(self, rank: int, options: Options) -> None:
        self.rank = rank
        self.options = options
        self.phase = "spawn"
        self.requests = 0
        self.tokens = 0
        self.skips_collective = False
        self.loses_replies = False
        self.bias = 0
        self._began = time.monotonic()
        self._pause = 0.0
        self._pending = [f for f in options.faults if rank in f.ranks]

    def begin(self, phase: str, units: int = 1) -> None:
        """The phase starts; its work comes in ``units`` launches."""
        self.phase = phase
        self._began = time.monotonic()
        self._pause = self.options.seconds(phase) / max(units, 1)
        for fault in self.options.faults:
            holder = (fault.ranks[0] + 1) % self.options.tp if fault.ranks else -1
            if fault.kind == "flock" and fault.phase == phase and self.rank == holder:
                stalls.hold_build_lock(self._file(f"{phase}.lock"))

    def launch(self, progress: float) -> None:
        """One unit of work; ``progress`` is the part of the phase that is done so far, 0.0 to 1.0."""
        for fault in list(self._pending):
            if fault.phase == self.phase and progress >= fault.at and self._due(fault):
                self._pending.remove(fault)
                self.execute(fault)
        if self._pause:
            time.sleep(self._pause)

    def finish(self) -> None:
        """The phase's units are done; what was to strike later in it does so now."""
        self._pause = 0.0
        for fault in self._pending:
            if fault.phase == self.phase and fault.after:
                time.sleep(max(0.0, self._began + fault.after - time.monotonic()))
        self.launch(1.0)

    def _due(self, fault: Fault) -> bool:
        if self.phase == "serving" and (self.requests <= fault.requests or self.tokens < fault.tokens):
            return False
        return time.monotonic() - self._began >= fault.after

    def _file(self, name: str) -> str:
        from pathlib import Path

        Path(self.options.cache).mkdir(mode=0o700, parents=True, exist_ok=True)
        return f"{self.options.cache}/{name}"

    def execute(self, fault: Fault) -> None:
        kind = fault.kind
        if kind == "sleep":
            stalls.synchronize()
        elif kind == "symmetric":
            stalls.wait_event()
        elif kind == "spin":
            (stalls.poll_stream if fault.how == "python" else stalls.spin_stream)()
        elif kind == "gil":
            stalls.launch_kernel()
        elif kind == "flock":
            stalls.acquire_build_lock(self._file(f"{fault.phase}.lock"))
        elif kind == "stale_lock":
            self._meet_stale_lock(fault)
        elif kind == "pipe":
            stalls.receive_handle()
        elif kind == "stop":
            stalls.suspend()
        elif kind == "die":
            stalls.vanish()
        elif kind == "exit":
            os._exit(fault.code)
        elif kind == "raise":
            raise RuntimeError(f"CUDA error: an illegal memory access was encountered (injected in {fault.phase})")
        elif kind == "oom":
            raise OutOfMemoryError(OUT_OF_MEMORY.format(self.rank))
        elif kind == "skip_collective":
            self.skips_collective = True
        elif kind == "garble":
            self.bias = 1
        elif kind == "wedge":
            self.loses_replies = True
        elif kind == "slow":
            self._be_slow(fault)

    def _meet_stale_lock(self, fault: Fault) -> None:
        """Come to a build whose builder is dead: a child takes the baton and ends without giving it back."""
        baton = build.BuildBaton(self._file(f"{fault.phase}.baton"))
        child = os.fork()
        if not child:
            baton.try_acquire()
            os._exit(0)
        os.waitpid(child, 0)
        baton.wait()

    def _be_slow(self, fault: Fault) -> None:
        if fault.how == "io":
            stalls.read_shards(self._file(f"shard.{self.rank}"), fault.seconds)
        elif fault.how == "compile":
            self._file("")
            build.run_compiler(self.options.cache, fault.seconds)
        else:
            stalls.repack_weights(fault.seconds)
