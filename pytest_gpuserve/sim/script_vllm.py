"""vLLM's log lines, as 0.24 on GPUs prints them."""

from __future__ import annotations

import os
import time

from .script import Bar, Script, emit


class VllmScript(Script):
    """vLLM 0.24: ``(Worker_TP3 pid=123) INFO 01-01 10:00:00 [file.py:123] text``; ``process`` is the name."""

    process = "Worker"

    def line(self, text: str, source: str = "", level: str = "INFO") -> None:
        stamp = f"({self.process} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [{source}]"
        emit("".join(f"{stamp} {part}\n" for part in text.split("\n")))

    def jit(self, text: str) -> None:
        """A line of flashinfer's own logger."""
        stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S')},{int(time.time() * 1000) % 1000:03d}"
        emit(f"({self.process} pid={os.getpid()}) {stamp} - INFO - autotuner.py:622 - flashinfer.jit: {text}\n")

    def first(self, text: str, source: str) -> None:
        """What only local rank 0 says."""
        if not self.rank:
            self.line(text, source)

    def distributed_begin(self) -> None:
        tp, rank = self.options.tp, self.rank
        self.line(
            f"world_size={tp} rank={rank} local_rank={rank} distributed_init_method=tcp://127.0.0.1:48169 backend=nccl",
            "parallel_state.py:1588",
        )

    def distributed_joined(self) -> None:
        self.first("vLLM is using nccl==2.28.9", "pynccl.py:113")

    def distributed_end(self) -> None:
        self.first(
            f"rank {self.rank} in world size {self.options.tp} is assigned as DP rank 0, PP rank 0, PCP rank 0, "
            f"TP rank {self.rank}, EP rank N/A, EPLB rank N/A",
            "parallel_state.py:1923",
        )

    def load_begin(self, *, draft: bool) -> None:
        if draft:
            self.line("Loading drafter model...", "gpu_model_runner.py:5010")
        else:
            self.start()
            self.line(f"Starting to load model {self.options.model}...", "gpu_model_runner.py:4979")
            self.line(f"Using AttentionBackendEnum.{self.options.attention_backend} backend.", "cuda.py:420")
        self.bar = Bar()

    def shards(self, done: int, total: int) -> None:
        text = self.bar.text("Loading safetensors checkpoint shards", done, total, completed=True)
        self.draw(f"\r{text}\n" + ("\n" if done == total else ""))

    def load_end(self, *, draft: bool) -> None:
        self.first(f"Loading weights took {self.elapsed:.2f} seconds", "default_loader.py:501")
        if draft or not self.options.has_draft:
            self.line(f"Model loading took 7.52 GiB and {self.elapsed:.6f} seconds", "model_runner.py:302")

    def compile_begin(self) -> None:
        self.start()
        self.first(
            f"Using cache directory: {self.options.cache}/rank_0_0/backbone for vLLM's torch.compile",
            "backends.py:1089",
        )
        self.first("Dynamo bytecode transform time: 0.01 s", "backends.py:1148")

    def compile_end(self) -> None:
        self.first(f"torch.compile took {self.elapsed:.2f} s in total", "monitor.py:53")

    def kv_end(self) -> None:
        self.first("Available KV cache memory: 27.27 GiB", "gpu_worker.py:508")

    def autotune_begin(self) -> None:
        self.first(
            "Running FlashInfer autotune with 8192 tokens and token buckets (1, 2, 4, 8, 16, 8192).",
            "kernel_warmup.py:356",
        )
        self.jit("[Autotuner]: Autotuning process starts ...")

    def autotune_end(self) -> None:
        self.jit("[Autotuner]: Autotuning process ends")

    def capture_begin(self, *, draft: bool) -> None:
        self.start()
        self.drafting = draft
        self.draw(f"({self.process} pid={os.getpid()}) ")

    def captures(self, done: int, total: int) -> None:
        what = "decode CUDA graphs (FULL)" if self.drafting else "CUDA graphs (PIECEWISE)"
        self.draw(f"\r{self.bar.text(f'Capturing {what}: ', done, total)}" + ("\n" if done == total else ""))

    def capture_end(self, *, draft: bool) -> None:
        if not draft:
            self.line("Registering 0 cuda graph addresses", "custom_all_reduce.py:216")
        if draft or not self.options.has_draft:
            self.line(f"Graph capturing finished in {self.elapsed:.0f} secs, took 0.10 GiB", "model_runner.py:726")

    def warmup_begin(self) -> None:
        self.first("Warming up the sampler with 256 dummy requests.", "gpu_worker.py:1001")
