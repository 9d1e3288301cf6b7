"""SGLang's log lines, as 0.5.12 on GPUs prints them."""

from __future__ import annotations

import time

from .config import CAPTURE_SIZES
from .script import Script, emit


class SglangScript(Script):
    """SGLang 0.5.12: ``[2026-01-01 10:00:00 TP3] text``. With one rank there is no tag."""

    def line(self, text: str, source: str = "") -> None:
        tag = f" TP{self.rank}" if self.options.tp > 1 else ""
        emit(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{tag}] {text}\n")

    def distributed_begin(self) -> None:
        self.start()
        self.line("Init torch distributed begin.")

    def distributed_joined(self) -> None:
        if not self.rank:
            self.line("sglang is using nccl==2.28.9")

    def distributed_end(self) -> None:
        self.line(f"Init torch distributed ends. elapsed={self.elapsed:.2f} s, mem usage=1.01 GB")

    def load_begin(self, *, draft: bool) -> None:
        if draft:
            self.line("SPECULATIVE_MOE_RUNNER_BACKEND is not initialized, using auto backend")
            self.line("Init torch distributed begin.")
            self.line("Init torch distributed ends. elapsed=0.00 s, mem usage=0.00 GB")
        self.start()
        self.line(f"Load weight begin. avail mem={self.memory:.2f} GB")

    def shards(self, done: int, total: int) -> None:
        text = self.bar.text("Multi-thread loading shards", done, total, completed=True)
        self.draw(f"\r{text}" + ("\n" if done == total else ""))

    def load_end(self, *, draft: bool) -> None:
        kind = "LlamaForCausalLMEagle3" if draft else "LlamaForCausalLM"
        usage = 2.0 if draft else 61.7
        self.memory -= usage
        self.line(
            f"Load weight end. elapsed={self.elapsed:.2f} s, type={kind}, avail mem={self.memory:.2f} GB, "
            f"mem usage={usage:.2f} GB."
        )
        if draft:
            self.kv_begin()
            self.kv_end()

    def kv_begin(self) -> None:
        if not self.rank:
            self.line("Using KV cache dtype: torch.bfloat16")

    def kv_end(self) -> None:
        self.memory -= 0.1
        self.line("KV Cache is allocated. #tokens: 16384, K size: 0.03 GB, V size: 0.03 GB")
        self.line(f"Memory pool end. avail mem={self.memory:.2f} GB")

    def compile_begin(self) -> None:
        if self.options.cold_compile:
            milliseconds = int(time.time() * 1000) % 1000
            self.raw(
                f"{time.strftime('%Y-%m-%d %H:%M:%S')},{milliseconds:03d} - INFO - flashinfer.jit: Loading JIT ops: "
                f"batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_head_dim_qk_128\n"
            )

    def autotune_begin(self) -> None:
        self.line("Running FlashInfer autotune...")

    def autotune_end(self) -> None:
        self.line("FlashInfer autotune completed.")

    def capture_begin(self, *, draft: bool) -> None:
        self.start()
        self.drafting = draft
        if draft and self.rank:
            return
        what = "draft cuda graph" if draft else "cuda graph"
        self.line(f"Capture {what} begin. This can take up to several minutes. avail mem={self.memory:.2f} GB")
        if not self.rank and not draft:
            self.line(f"Capture cuda graph bs {list(CAPTURE_SIZES)}")

    def captures(self, done: int, total: int) -> None:
        size = CAPTURE_SIZES[max(total - 1 - done, 0)]
        if not done:
            self.draw(f"\r{self.bar.text('', 0, total)}")
        text = self.bar.text(f"Capturing batches (bs={size} avail_mem={self.memory:.2f} GB): ", done, total)
        self.draw(f"\r{text}" + ("\n" if done == total else ""))

    def capture_error(self, error: Exception) -> Exception:
        return Exception(
            f"Capture cuda graph failed: {error}\n"
            f"Possible solutions:\n"
            f"1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
            f"2. set --cuda-graph-max-bs to a smaller value (e.g., 16)\n"
            f"3. disable torch compile by not using --enable-torch-compile\n"
            f"4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)\n"
            f"Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose \n"
        )

    def capture_end(self, *, draft: bool) -> None:
        if draft and self.rank:
            return
        self.memory -= 0.04
        self.line("Registering 0 cuda graph addresses")
        what = "draft cuda graph" if draft else "cuda graph"
        self.line(
            f"Capture {what} end. Time elapsed: {self.elapsed:.2f} s. mem usage=0.04 GB. "
            f"avail mem={self.memory:.2f} GB."
        )

    def ready(self) -> None:
        if not self.rank:
            o = self.options
            self.line(
                f"max_total_num_tokens=16384, chunked_prefill_size=8192, max_prefill_tokens=16384, "
                f"max_running_requests={o.max_running}, context_len={o.context_length}, "
                f"available_gpu_mem={self.memory:.2f} GB"
            )
