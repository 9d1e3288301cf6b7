"""What vLLM 0.9 to 0.33 make of the axes of a spec: flags, variables, and two settings in JSON."""

from __future__ import annotations

import json
import re

from ..errors import EngineError, SpecError
from ..spec import AxisValue, ServerSpec
from .arguments import Arguments, illegal, jit_cache, local_path, log_level, switch
from .drafter import check_draft, check_draft_tokens
from .flags import Install

_REGISTRIES = ("v1/attention/backends/registry.py", "attention/backends/registry.py", "platforms/interface.py")
_CACHES = {"VLLM_CACHE_ROOT": "vllm", "FLYDSL_RUNTIME_CACHE_DIR": "flydsl"}
MODES = {"off": "NONE", "decode_only": "FULL_DECODE_ONLY", "piecewise": "PIECEWISE", "full": "FULL"}
MODES["full_and_piecewise"] = "FULL_AND_PIECEWISE"
_DRAFT = {
    "draft_model": "model",
    "draft_tp": "draft_tensor_parallel_size",
    "draft_attention_backend": "attention_backend",
    "draft_quantization": "quantization",
    "draft_revision": "revision",
}
SAMPLERS = {"flashinfer": "1", "pytorch": "0"}


def set_axis(
    axis: str, value: AxisValue, spec: ServerSpec, args: Arguments, compilation: dict[str, object], install: Install
) -> dict[str, str | None]:
    """Set the flags of one axis; returns what it adds to the environment."""
    if axis == "spec_decode":
        _spec_decode(value, spec, args, install)
    elif axis == "cuda_graph":
        _cuda_graph(value.name, compilation, install)
    elif axis == "attention_backend":
        return _attention(value, args, install)
    elif axis == "custom_all_reduce":
        if not switch(axis, value, install):
            args.choose(axis, "--disable-custom-all-reduce", True)
    elif axis == "overlap":
        args.choose(axis, "--async-scheduling" if switch(axis, value, install) else "--no-async-scheduling", True)
    elif axis == "kv_cache_dtype":
        args.choose(axis, "--kv-cache-dtype", value.name)
    elif axis == "moe_runner":
        args.choose(axis, "--moe-backend", value.name)
    elif axis == "sampling_backend":
        if value.name not in SAMPLERS:
            raise illegal(axis, value.name, tuple(SAMPLERS), install)
        return {"VLLM_USE_FLASHINFER_SAMPLER": SAMPLERS[value.name]}
    elif axis == "log_level":
        return {"VLLM_LOGGING_LEVEL": log_level(value, install).upper()}
    elif axis == "nccl_p2p":
        return {"NCCL_P2P_DISABLE": "0" if switch(axis, value, install) else "1"}
    elif axis == "jit_cache":
        return dict(jit_cache(value, spec, install, _CACHES))
    return {}


def _cuda_graph(name: str, compilation: dict[str, object], install: Install) -> None:
    """The graph mode alone: ``--enforce-eager`` would turn off torch.compile and autotuning too."""
    source = install.source("config/compilation.py")
    found = re.search(r"class CUDAGraphMode\b.*?(?=\nclass |\n@|\Z)", source, re.DOTALL)
    modes = set(re.findall(r"^    ([A-Z_]+) = ", found.group(), re.MULTILINE)) if found else set()
    legal = ("on", *(axis for axis, mode in MODES.items() if not modes or mode in modes))
    if name not in legal or not install.has("--compilation-config"):
        raise illegal("cuda_graph", name, legal, install)
    if name != "on":
        compilation["cudagraph_mode"] = MODES[name]


def _attention(value: AxisValue, args: Arguments, install: Install) -> dict[str, str | None]:
    """``--attention-backend`` from 0.13 on; before, VLLM_ATTENTION_BACKEND, which later versions ignore in silence."""
    if value.details:
        raise EngineError("attention_backend has no details with vllm: it uses one backend for prefill and decode.")
    if value.name in ("auto", "default"):
        return {}
    name = _backend("attention_backend", value.name, install)
    if not install.has("--attention-backend"):
        return {"VLLM_ATTENTION_BACKEND": name}
    args.choose("attention_backend", "--attention-backend", name)
    return {}


def _backend(axis: str, given: str, install: Install) -> str:
    """A backend as this install calls it: ``triton`` is TRITON_ATTN."""
    legal, name = attention_backends(install), given.upper()
    name = name if name in legal or f"{name}_ATTN" not in legal else f"{name}_ATTN"
    if legal and name not in legal:
        raise illegal(axis, given, [backend.lower() for backend in legal], install)
    return name


def attention_backends(install: Install) -> tuple[str, ...]:
    """Members of the backend enumeration in this install's source; empty when it is not where it used to be."""
    for file in _REGISTRIES:
        found = re.search(
            r"class (?:AttentionBackendEnum|_Backend)\b.*?(?=\nclass |\n@|\Z)", install.source(file), re.DOTALL
        )
        if found:
            return tuple(dict.fromkeys(re.findall(r"^    ([A-Z][A-Z0-9_]*) = ", found.group(), re.MULTILINE)))
    return ()


def _spec_decode(value: AxisValue, spec: ServerSpec, args: Arguments, install: Install) -> None:
    """``--speculative-config``; details that are not ours go in as they are, for the engine to judge."""
    if value.name in ("base", "none", "off"):
        return
    legal = install.choices("--spec-method")
    if legal and value.name not in legal:
        raise illegal(
            "spec_decode", value.name, ["base", *(m for m in legal if m not in ("None", "custom_class"))], install
        )
    detail = dict(value.details)
    if detail.pop("topk", 1) not in (1, "1"):
        raise EngineError("vLLM drafts no trees: topk must be 1 or left out of spec_decode.")
    steps, tokens = detail.pop("num_steps", None), detail.pop("num_draft_tokens", None)
    config: dict[str, object] = {"method": value.name}
    if steps is not None or tokens is not None:
        config["num_speculative_tokens"] = int(steps) if steps is not None else int(tokens or 0) - 1
    config.update((_DRAFT.get(key, key), setting) for key, setting in detail.items())
    if value.name == "ngram":
        config = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, **config}
    if value.name in ("eagle", "eagle3", "medusa", "draft_model") and not config.get("model"):
        raise SpecError(f'spec_decode {value.name} needs a draft: write {{"{value.name}": {{"draft_model": "…"}}}}.')
    if isinstance(model := config.get("model"), str):
        config["model"] = local_path(model, "draft_model", spec)
        check_draft(spec, value.name, model)
        if value.name == "eagle3":
            check_draft_tokens(spec, model, install, "model_executor/models/llama_eagle3.py")
    if backend := config.get("attention_backend"):
        source = install.source("config/speculative.py")
        if source and not re.search(r"^    attention_backend\b", source, re.MULTILINE):
            raise EngineError(
                f"{install.name} has no attention backend of the draft's own: take draft_attention_backend out of "
                f"spec_decode; the draft then gets attention_backend."
            )
        config["attention_backend"] = _backend("spec_decode (draft_attention_backend)", str(backend), install)
    if config.get("draft_tensor_parallel_size", 1) not in (1, spec.tp):
        raise EngineError(f"vLLM runs a draft on one rank or on all: draft_tp must be 1 or {spec.tp} (tp).")
    args.choose("spec_decode", "--speculative-config", json.dumps(config))


def with_compilation(
    spec: ServerSpec, compilation: dict[str, object]
) -> list[tuple[str, str | int | float | bool | None]]:
    """``spec.args``, with the axes' compilation settings under what the user's own JSON says."""
    args = dict(spec.args)
    names = ("--compilation-config", "-cc", "compilation-config", "compilation_config", "cc")
    own = next((key for key in names if key in args), None)
    if not compilation or (own and args[own] is False):
        return list(args.items())
    if own:
        try:
            mine = json.loads(str(args.pop(own)))
        except ValueError:
            raise SpecError(f"args {own} must be JSON for vLLM: correct it in the gpuserve mark.") from None
        compilation = {**compilation, **mine}
    return [("--compilation-config", json.dumps(compilation)), *args.items()]
