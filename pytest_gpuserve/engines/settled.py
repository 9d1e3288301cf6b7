"""What an engine made of the settings it was given, by its own log: a silent downgrade tests something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from ..spec import AxisValue, ServerSpec
from ..text import one_line
from .vllm import ATTENTION_BACKENDS
from .vllm_axes import MODES

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
}
_SAME: Final = ({"MTP", "NEXTN", "EAGLE"}, {"BF16", "BFLOAT16"}, {"FP8", "FP8_E4M3"}, {"NONE", "BASE", "OFF"})
_FREE: Final = frozenset({"auto", "default"})
_AROUND: Final = 110
"""Characters of a log line that are quoted on each side of what tells."""


def downgrades(spec: ServerSpec, log: bytes, env: Mapping[str, str | None] | None = None) -> list[str]:
    """One sentence for every setting of ``spec`` that the server did not run with, as far as its log tells.

    ``log`` is the beginning of the log (:data:`HEAD` bytes suffice), ``env`` the environment that we set for the
    launch. Each sentence names the setting, what runs instead, and quotes the line. Silence of the log proves nothing,
    and gives nothing. The engine is ``spec.engine``; of others than sglang and vllm nothing is known.
    """
    text = log[:HEAD].decode(errors="replace")
    axes = dict(spec.axes)
    if spec.engine == "sglang":
        return list(_sglang(axes, text))
    if spec.engine == "vllm":
        return list(_vllm(axes, text, {**dict(spec.env), **(env or {})}))
    return []


def _sglang(axes: Mapping[str, AxisValue], log: str) -> Iterator[str]:
    """``server_args=`` holds the arguments after SGLang has resolved them (0.5.1-0.5.19 as a call, then as a dict)."""
    line = found.group(1) if (found := re.search(r"\] server_args=([^\n]*)", log)) else ""

    def setting(name: str) -> re.Match[str] | None:
        return re.search(rf"\b{name}(?:=|': ?)(?:'(?P<text>[^']*)'|(?P<word>None|True|False))", line)

    for axis, name in _SGLANG.items():
        if axis in axes and (real := setting(name)):
            yield from _differs(axis, axes[axis].name, _value(real), real)
    if wanted := axes.get("attention_backend"):
        for phase, backend in wanted.details:
            own, whole = setting(f"{phase}_attention_backend"), setting("attention_backend")
            if real := (whole if own and _value(own) == "None" else own):
                yield from _differs(f"attention_backend ({phase})", str(backend), _value(real), real)
    for axis, name in _SGLANG_OFF.items():
        if (wanted := axes.get(axis)) and (real := setting(name)):
            yield from _differs(axis, wanted.name, "off" if _value(real) == "True" else "on", real)
    if (wanted := axes.get("cuda_graph")) and wanted.name in ("on", "off"):
        if wanted.name == "on" and (why := re.search(r"[Cc](?:uda|UDA) graph is disabled[^\n]*", log)):
            yield f"axis cuda_graph was to be on, the server runs with off ({_quote(why)})"
        elif real := _sglang_graphs(setting("disable_cuda_graph"), setting("cuda_graph_backend_decode"), line):
            yield from _differs(
                "cuda_graph", wanted.name, "off" if _value(real) in ("True", "disabled") else "on", real
            )


def _sglang_graphs(whole: re.Match[str] | None, flag: re.Match[str] | None, line: str) -> re.Match[str] | None:
    """What decides about decode graphs: from 0.5.14 on the resolved backend of the phase, before, one switch."""
    if whole and _value(whole) == "True":
        return whole
    resolved = re.search(r"cuda_graph_config\W[^\n]{0,20}?\bdecode\W{1,8}backend\W{1,5}(?P<text>\w+)", line)
    if resolved or (flag and _value(flag) != "None"):
        return resolved or flag
    return None if flag else whole  # a version with backends by phase, whose resolved form we cannot read


def _vllm(axes: Mapping[str, AxisValue], log: str, env: Mapping[str, str | None]) -> Iterator[str]:
    """Lines of the workers, and what the engine core prints of its configuration."""
    if (wanted := axes.get("attention_backend")) and wanted.name not in _FREE:
        target = log.partition("Loading drafter model")[0]  # a draft may have a backend of its own
        pattern = r"\] Using (?:AttentionBackendEnum\.)?(?P<text>[A-Z0-9_]+) (?:attention )?backend\b(?! for\b)"
        seen: dict[str, re.Match[str]] = {}
        for found in re.finditer(pattern, target):
            if found["text"] in ATTENTION_BACKENDS:
                seen.setdefault(found["text"].removesuffix("_ATTN"), found)
        seen.pop(wanted.name.upper().removesuffix("_ATTN"), None)
        for real in seen.values():
            yield from _differs("attention_backend", wanted.name, real["text"], real)
    if graph := axes.get("cuda_graph"):
        # the configuration as it was made; then what a worker made of it that its attention backend cannot capture
        modes = list(re.finditer(r"cudagraph_mode'?[:=] ?(?:<CUDAGraphMode\.)?(?P<text>[A-Z_]+)\b", log))
        changed = [mode for mode in modes if log.endswith("setting ", 0, mode.start())]
        if mode := (changed[-1] if changed else modes[0] if modes else None):
            wanted_mode, runs = MODES.get(graph.name), mode["text"]
            if runs != wanted_mode if wanted_mode else runs == "NONE":
                yield from _differs("cuda_graph", graph.name, runs, mode)
    if (decode := axes.get("spec_decode")) and (
        config := re.search(r"speculative_config=(?:None|\w+\(method='(?P<text>[\w-]+)')", log)
    ):
        yield from _differs("spec_decode", decode.name, config["text"] or "none", config)
    if (dtype := axes.get("kv_cache_dtype")) and (real_dtype := re.search(r"\bkv_cache_dtype=(?P<text>\w+)", log)):
        yield from _differs("kv_cache_dtype", dtype.name, real_dtype["text"], real_dtype)
    if (reduce := axes.get("custom_all_reduce")) and (
        off := re.search(r"\bdisable_custom_all_reduce=(?P<word>True|False)", log)
    ):
        yield from _differs("custom_all_reduce", reduce.name, "off" if off["word"] == "True" else "on", off)
    if (overlap := axes.get("overlap")) and (
        state := re.search(r"Asynchronous scheduling is (?P<text>enabled|disabled)", log)
    ):
        yield from _differs("overlap", overlap.name, "on" if state["text"] == "enabled" else "off", state)
    for unknown in re.finditer(r"Unknown vLLM environment variable detected: (?P<text>\w+)", log):
        if env.get(unknown["text"]) is not None:  # not those that somebody else's environment brought along
            yield f"vLLM does not know the environment variable {unknown['text']} and ignores it ({_quote(unknown)})"


def _value(found: re.Match[str]) -> str:
    return str(found["text"] if found["text"] is not None else found["word"])


def _differs(setting: str, wanted: str, real: str, found: re.Match[str]) -> Iterator[str]:
    pair = {wanted.upper(), re.sub(r".*_MTP$", "MTP", real.upper())}
    if wanted not in _FREE and len(pair) > 1 and not any(pair <= same for same in _SAME):
        yield f"axis {setting} was to be {wanted}, the server runs with {one_line(real, 60)} ({_quote(found)})"


def _quote(found: re.Match[str]) -> str:
    """The log's line, or what of it stands around the match."""
    text = found.string
    begin = max(text.rfind("\n", 0, found.start()) + 1, found.start() - _AROUND)
    end = text.find("\n", found.end())
    end = min(end if end >= 0 else len(text), found.end() + _AROUND)
    cut = "…" if begin > 0 and text[begin - 1] != "\n" else ""
    return f"its log: {cut}{one_line(text[begin:end].strip(), 300)}"
