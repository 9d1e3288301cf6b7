"""What an engine made of the settings it was given, by its own log: a silent downgrade tests something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from ..spec import AxisValue, ServerSpec
from ..text import one_line

HEAD: Final = 1 << 20
"""Bytes of a log's beginning that hold all of this: the resolved settings are printed at start-up."""

_SGLANG: Final[Mapping[str, str]] = {
    "attention_backend": "attention_backend",
    "sampling_backend": "sampling_backend",
    "kv_cache_dtype": "kv_cache_dtype",
    "moe_runner": "moe_runner_backend",
    "spec_decode": "speculative_algorithm",
}
_SGLANG_OFF: Final[Mapping[str, str]] = {
    "overlap": "disable_overlap_schedule",
    "custom_all_reduce": "disable_custom_all_reduce",
    "cuda_graph": "disable_cuda_graph",
}
_SAME: Final = ({"MTP", "NEXTN", "EAGLE"}, {"BF16", "BFLOAT16"}, {"NONE", "BASE", "OFF"})
_FREE: Final = frozenset({"auto", "default"})


def downgrades(spec: ServerSpec, log: bytes) -> list[str]:
    """One sentence for every axis of ``spec`` that the server did not run with, as far as its log tells.

    ``log`` is the beginning of the log (:data:`HEAD` bytes suffice). Silence of the log proves nothing, and gives
    nothing. The engine is ``spec.engine``; of others than sglang and vllm nothing is known.
    """
    text = log[:HEAD].decode(errors="replace")
    read = {"sglang": _sglang, "vllm": _vllm}.get(spec.engine)
    return list(read(dict(spec.axes), text)) if read else []


def _sglang(axes: Mapping[str, AxisValue], log: str) -> Iterator[str]:
    """``server_args=`` holds the arguments after SGLang has resolved them (0.5.1-0.5.19 as a call, then as a dict)."""
    found = re.search(r"\] server_args=([^\n]*)", log)
    line = found.group(1) if found else ""

    def setting(name: str) -> str | None:
        value = re.search(rf"\b{name}(?:=|': ?)(?:'([^']*)'|(None|True|False))", line)
        return (value.group(1) or value.group(2)) if value else None

    for axis, name in _SGLANG.items():
        if axis in axes and (real := setting(name)) is not None:
            yield from _differs(axis, axes[axis].name, real)
    for axis, name in _SGLANG_OFF.items():
        wanted, real = axes.get(axis), setting(name)
        if wanted is None or real is None or (axis == "cuda_graph" and wanted.name not in ("on", "off")):
            continue
        if (
            axis == "cuda_graph"
            and wanted.name == "on"
            and (why := re.search(r"[Cc](?:uda|UDA) graph is disabled[^\n]*", log))
        ):
            yield f"axis cuda_graph was to be on: {one_line(why.group(), 200)}"
        elif (real == "True") != (wanted.name == "off"):
            yield from _differs(axis, wanted.name, "off" if real == "True" else "on")


def _vllm(axes: Mapping[str, AxisValue], log: str) -> Iterator[str]:
    """Lines of the workers, and what the engine core prints of its configuration."""
    if (wanted := axes.get("attention_backend")) and wanted.name not in _FREE:
        for real in dict.fromkeys(
            re.findall(r"\] Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) (?:attention )?backend", log)
        ):
            if real.removesuffix("_ATTN") != wanted.name.upper().removesuffix("_ATTN"):
                yield from _differs("attention_backend", wanted.name, real)
    if graph := axes.get("cuda_graph"):
        if changed := re.search(r"CUDAGraphMode\.\w+ is not supported with[^\n]*setting cudagraph_mode[^\n]*", log):
            yield f"axis cuda_graph was to be {graph.name}: {one_line(changed.group(), 300)}"
        mode = re.search(r"cudagraph_mode'?[:=] ?<CUDAGraphMode\.(\w+)", log)
        if mode and (graph.name == "off") != (mode.group(1) == "NONE"):
            yield from _differs("cuda_graph", graph.name, mode.group(1))
    if (decode := axes.get("spec_decode")) and (
        config := re.search(r"speculative_config=(None|\w+\(method='([\w-]+)')", log)
    ):
        yield from _differs("spec_decode", decode.name, config.group(2) or "none")
    for variable in dict.fromkeys(re.findall(r"Unknown vLLM environment variable detected: (\w+)", log)):
        yield f"vLLM does not know the environment variable {variable}, and went on without it"


def _differs(axis: str, wanted: str, real: str) -> Iterator[str]:
    pair = {wanted.upper(), real.upper()}
    if wanted not in _FREE and len(pair) > 1 and not any(pair <= same for same in _SAME):
        yield f"axis {axis} was to be {wanted}, the server runs with {one_line(real, 60)}"
