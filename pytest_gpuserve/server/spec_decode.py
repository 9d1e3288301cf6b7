"""Figures of speculative decoding from a server's own counters, whatever its engine and version call them.

vLLM V1 (0.9 and later) counts drafts, drafted and accepted tokens; vLLM V0 counts drafted, accepted and emitted tokens.
SGLang counts verifications, generated tokens and requests when a request ends (0.5.13 and later, only with
``--enable-metrics``); before that it has two gauges, means over the last interval of its log, and ``/server_info`` the
mean length since the start. A counter is exact over any window; a gauge says only what was so last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .handle import Server
    from .prometheus import Sample

Source = Literal["counters", "gauges", "server_info", "none"]


@dataclass(frozen=True, slots=True)
class SpecDecode:
    """What a server has drafted and accepted so far; ``later - earlier`` is the window between two of them.

    Attributes:
        source: where it comes from. ``none``: the server has no figures of speculative decoding.
        drafts: verifications of one sequence's draft. drafted, accepted: tokens. None: not told.
        generated: tokens generated in all.
        length, rate: the gauges of engines that have no counters.
    """

    source: Source = "none"
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    generated: float | None = None
    length: float | None = None
    rate: float | None = None

    @property
    def accept_rate(self) -> float | None:
        """Share of the drafted tokens that the target accepted, 0..1; None: not told, or nothing was drafted."""
        if self.source == "counters":
            return self.accepted / self.drafted if self.drafted and self.accepted is not None else None
        return self.rate

    @property
    def accept_length(self) -> float | None:
        """Tokens a verification gave, the target's own included: 1 when nothing was accepted; None: not told."""
        if self.source == "counters":
            return 1.0 + self.accepted / self.drafts if self.drafts and self.accepted is not None else None
        return self.length

    @property
    def useless(self) -> bool:
        """Tokens were drafted and not one was accepted."""
        if self.source == "counters":
            return bool(self.drafts or self.drafted) and not self.accepted
        return self.length is not None and self.length <= 1.0

    def __sub__(self, earlier: SpecDecode) -> SpecDecode:
        """The window since ``earlier``. Gauges have no window: theirs is the later value, if tokens were generated."""
        generated = _less(self.generated, earlier.generated)
        if self.source != "counters":
            idle = generated == 0.0
            length, rate = (None, None) if idle else (self.length, self.rate)
            return SpecDecode(self.source, generated=generated, length=length, rate=rate)
        drafts, drafted = _less(self.drafts, earlier.drafts), _less(self.drafted, earlier.drafted)
        return SpecDecode("counters", drafts, drafted, _less(self.accepted, earlier.accepted), generated)

    def __str__(self) -> str:
        if self.accept_rate is None and self.accept_length is None:
            return "no figures of speculative decoding"
        shown = [f"accept rate {self.accept_rate:.2f}"] if self.accept_rate is not None else []
        shown += [f"accept length {self.accept_length:.2f}"] if self.accept_length is not None else []
        if self.accepted is not None and self.drafted:
            shown.append(f"{self.accepted:.0f} of {self.drafted:.0f} drafted tokens accepted")
        return ", ".join(shown)


def read(samples: Iterable[Sample], width: int | None = None) -> SpecDecode:
    """From Prometheus text.

    Args:
        width: tokens that one draft has, for an engine that counts verifications and does not say (SGLang without the
            gauge ``spec_num_draft_tokens``).
    """
    sums: dict[str, float] = {}
    gauges: dict[str, list[float]] = {}
    for sample in samples:
        engine, _, name = sample.name.partition(":")
        if engine in ("vllm", "sglang") and sample.value == sample.value:
            key = f"{engine}:{name.removesuffix('_total')}"  # prometheus_client without OpenMetrics may leave it out
            sums[key] = sums.get(key, 0.0) + sample.value
            gauges.setdefault(key, []).append(sample.value)
    return _vllm(sums, gauges) or _sglang(sums, gauges, width) or SpecDecode()


def _vllm(sums: Mapping[str, float], gauges: Mapping[str, list[float]]) -> SpecDecode | None:
    prefix = "vllm:spec_decode_"
    accepted, drafted = sums.get(f"{prefix}num_accepted_tokens"), sums.get(f"{prefix}num_draft_tokens")
    if accepted is None:
        rate = _mean(gauges.get(f"{prefix}draft_acceptance_rate"))
        return None if rate is None else SpecDecode("gauges", generated=sums.get("vllm:generation_tokens"), rate=rate)
    drafts, emitted = sums.get(f"{prefix}num_drafts"), sums.get(f"{prefix}num_emitted_tokens")
    if drafts is None and emitted is not None:
        drafts = emitted - accepted  # V0: every verification emits what it accepts and one token more
    return SpecDecode("counters", drafts, drafted, accepted, sums.get("vllm:generation_tokens"))


def _sglang(sums: Mapping[str, float], gauges: Mapping[str, list[float]], width: int | None) -> SpecDecode | None:
    generated, verified = sums.get("sglang:generation_tokens"), sums.get("sglang:spec_verify_calls")
    requests = sums.get("sglang:e2e_request_latency_seconds_count", sums.get("sglang:num_requests"))
    if verified is not None and generated is not None and requests is not None:
        told = _mean(gauges.get("sglang:spec_num_draft_tokens"))  # the tree with its root, which is no draft
        width = round(told) - 1 if told and told > 1 else width
        # the first token of a request comes from its prompt, every other one from a verification
        accepted = max(0.0, generated - requests - verified)
        return SpecDecode("counters", verified, verified * width if width else None, accepted, generated)
    length, rate = (_mean(gauges.get(f"sglang:spec_accept_{name}")) for name in ("length", "rate"))
    if not length:
        return None  # without speculation the gauges are there, and 0
    return SpecDecode("gauges", generated=generated, length=length, rate=rate)


def from_server_info(info: object) -> SpecDecode:
    """From SGLang's ``/server_info``: the mean since the start, which is there without ``--enable-metrics``."""
    states = info.get("internal_states") if isinstance(info, Mapping) else None
    lengths = [
        float(state["avg_spec_accept_length"])
        for state in (states if isinstance(states, list) else ())
        if isinstance(state, Mapping) and isinstance(state.get("avg_spec_accept_length"), (int, float))
    ]
    length = _mean(lengths)
    if not length:
        return SpecDecode()
    assert isinstance(info, Mapping)
    tokens = info.get("speculative_num_draft_tokens")
    width = tokens - 1 if isinstance(tokens, int) and tokens > 1 else None
    return SpecDecode("server_info", length=length, rate=max(0.0, length - 1.0) / width if width else None)


def ask(server: Server) -> SpecDecode:
    """The figures of a running server so far.

    Raises:
        ServerError: it hung or ended.
    """
    import requests

    samples: list[Sample] = []
    with suppress(requests.RequestException):  # no /metrics (SGLang without --enable-metrics): asked otherwise
        samples = server.samples()
    found = read(samples, _width(server))
    if found.source != "none":
        return found
    for path in ("/server_info", "/get_server_info"):  # the second one until SGLang 0.5.6
        try:
            answer = server.get(path)
            if answer.status_code == 200:
                return from_server_info(answer.json())
        except (requests.RequestException, ValueError):
            continue
    return found


def _width(server: Server) -> int | None:
    """Drafted tokens a verification, as the spec says it; None: it does not."""
    axis = server.spec.axis("spec_decode")
    detail: Mapping[str, Any] = axis.detail if axis is not None else {}
    tokens, steps, topk = (detail.get(name) for name in ("num_draft_tokens", "num_steps", "topk"))
    if isinstance(steps, int) and topk in (1, None):
        return steps
    return tokens - 1 if isinstance(tokens, int) and tokens > 1 else None


def _less(later: float | None, earlier: float | None) -> float | None:
    """Growth of a counter, which an engine may not show before it first grows."""
    return None if later is None else max(0.0, later - (earlier or 0.0))


def _mean(values: list[float] | None) -> float | None:
    """Over the ranks that have one; 0 when all are 0."""
    some = [value for value in values or () if value > 0]
    return sum(some) / len(some) if some else (0.0 if values else None)
