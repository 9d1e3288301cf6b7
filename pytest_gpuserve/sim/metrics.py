"""/metrics: Prometheus text under each engine's own names.

Counts come from what the scheduling process sends, so they stand still when it does, while /metrics goes on answering.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from .config import Options

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts by bucket; the bounds are in the unit of what is observed."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> list[str]:
        found, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}')
        return [*found, f"{name}_count{{{labels}}} {float(total)}", f"{name}_sum{{{labels}}} {self.sum}"]


class Metrics:
    """What the front end counts. All methods may be called from any thread."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.requests = dict.fromkeys(REASONS, 0)
        self.running = 0
        self.waiting = 0
        self.steps = 0
        self.drafts = 0
        self.accepted_at: list[int] = [0] * options.draft_length
        self.throughput = 0.0
        self._window = (time.monotonic(), 0)
        self.iteration = Histogram((1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0))
        self.first_token = Histogram(SECONDS)
        self.latency = Histogram(SECONDS)

    def engine_stats(self, stats: tuple[int, int, int, int, list[int]], generated: int) -> None:
        """After a step: what the scheduling process says, and how many tokens it made."""
        with self.lock:
            self.running, self.waiting, self.steps, drafts, accepted = stats
            if accepted:
                self.drafts, self.accepted_at = drafts, accepted
            self.generation_tokens += generated
            if generated:
                self.iteration.observe(float(generated))
            began, tokens = self._window
            now = time.monotonic()
            if now - began >= 1.0:
                self.throughput = (self.generation_tokens - tokens) / (now - began)
                self._window = now, self.generation_tokens

    def admitted(self, prompt_tokens: int) -> None:
        with self.lock:
            self.prompt_tokens += prompt_tokens

    def finished(self, reason: str, first: float | None, seconds: float) -> None:
        with self.lock:
            self.requests[reason] += 1
            self.latency.observe(seconds)
            if first is not None:
                self.first_token.observe(first)

    @property
    def drafted(self) -> int:
        return self.drafts * self.options.draft_length

    def spec(self) -> tuple[float, float]:
        """(mean accept length with the bonus token, accepted share of the drafted tokens)."""
        accepted = sum(self.accepted_at)
        return (1 + accepted / self.drafts, accepted / self.drafted) if self.drafts else (0.0, 0.0)

    def text(self) -> str:
        with self.lock:
            lines = self._vllm() if self.options.flavor == "vllm" else self._sglang()
            return "\n".join(lines) + "\n"

    def _vllm(self) -> list[str]:
        labels = f'engine="0",model_name="{_escape(self.options.served_model_name)}"'
        lines = [
            *_metric("vllm:num_requests_running", "gauge", labels, self.running),
            *_metric("vllm:num_requests_waiting", "gauge", labels, self.waiting),
            *_metric("vllm:kv_cache_usage_perc", "gauge", labels, 0.0),
            *_metric("vllm:prompt_tokens_total", "counter", labels, self.prompt_tokens),
            *_metric("vllm:generation_tokens_total", "counter", labels, self.generation_tokens),
            "# TYPE vllm:request_success_total counter",
            *(
                f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}'
                for reason, count in self.requests.items()
            ),
        ]
        if self.options.speculative:
            lines += _metric("vllm:spec_decode_num_drafts_total", "counter", labels, self.drafts)
            lines += _metric("vllm:spec_decode_num_draft_tokens_total", "counter", labels, self.drafted)
            lines += _metric("vllm:spec_decode_num_accepted_tokens_total", "counter", labels, sum(self.accepted_at))
            lines.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter")
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{n}"}} {float(count)}'
                for n, count in enumerate(self.accepted_at)
            ]
        for name, histogram in (
            ("vllm:iteration_tokens_total", self.iteration),
            ("vllm:time_to_first_token_seconds", self.first_token),
            ("vllm:e2e_request_latency_seconds", self.latency),
        ):
            lines += [f"# TYPE {name} histogram", *histogram.lines(name, labels)]
        return lines

    def _sglang(self) -> list[str]:
        model = f'model_name="{_escape(self.options.served_model_name)}"'
        labels = f'engine_type="unified",{model}'
        rank = f'engine_type="unified",{model},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        length, rate = self.spec()
        lines = [
            *_metric("sglang:num_running_reqs", "gauge", rank, self.running),
            *_metric("sglang:num_queue_reqs", "gauge", rank, self.waiting),
            *_metric("sglang:gen_throughput", "gauge", rank, self.throughput),
            *_metric("sglang:token_usage", "gauge", rank, 0.0),
            *_metric("sglang:cache_hit_rate", "gauge", rank, 0.0),
            *_metric("sglang:max_total_num_tokens", "gauge", rank, 16384),
            *_metric("sglang:prompt_tokens_total", "counter", labels, self.prompt_tokens),
            *_metric("sglang:generation_tokens_total", "counter", labels, self.generation_tokens),
            *_metric("sglang:num_requests_total", "counter", labels, sum(self.requests.values())),
            *_metric("sglang:num_aborted_requests_total", "counter", labels, self.requests["abort"]),
        ]
        if self.options.speculative:
            lines += _metric("sglang:spec_accept_length", "gauge", rank, length)
            lines += _metric("sglang:spec_accept_rate", "gauge", rank, rate)
            lines += _metric("sglang:spec_num_steps", "gauge", rank, self.options.spec_steps)
            lines += _metric("sglang:spec_num_draft_tokens", "gauge", rank, self.options.draft_length + 1)
            lines += _metric("sglang:spec_verify_calls_total", "counter", rank, self.drafts)
        for name, histogram in (
            ("sglang:time_to_first_token_seconds", self.first_token),
            ("sglang:e2e_request_latency_seconds", self.latency),
        ):
            lines += [f"# TYPE {name} histogram", *histogram.lines(name, labels)]
        return lines


def _metric(name: str, kind: str, labels: str, value: float) -> Iterable[str]:
    return f"# TYPE {name} {kind}", f"{name}{{{labels}}} {float(value)}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
