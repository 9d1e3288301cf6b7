"""SGLang 0.5.1 to 0.5.23: command line, log, process titles. Facts: the wheels' sources and recordings of real runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Final

from ..errors import EngineError, SpecError
from ..spec import AxisValue, ServerSpec
from .arguments import Arguments, illegal, jit_cache, known_axes, local_path, log_level, need_model, switch
from .base import PAGE_ASKED, Launch, LogGrammar, PhaseRule, ProcessRole, Rank, ReadyProbe
from .drafter import check_draft, check_draft_attention, check_draft_class
from .flags import Install, installed
from .kernels import Kernels
from .titles import common_role, coordinates

ATTENTION_BACKENDS: Final = (
    *("triton", "torch_native", "flex_attention", "fa3", "fa4", "flashinfer", "flashmla", "cutlass_mla", "trtllm_mla"),
    *("cutedsl_mla", "tokenspeed_mla", "trtllm_mha", "dsa", "nsa", "qsa", "dsv4", "compressed", "hpc_ops"),
    *("llada2_cfg_flashinfer", "minicpm_flashattn", "minicpm_flashinfer", "dual_chunk_flash_attn"),
    *("aiter", "wave", "intel_amx", "intel_xpu", "ascend"),
)
"""Every ``--attention-backend`` of 0.5.1 to 0.5.23; an install's own list is asked of it."""

WATCHDOG: Final = 300.0
"""Seconds: default of ``--watchdog-timeout``, after which a stuck scheduler kills the server and its stacks."""

_SOURCES = ("launch_server.py", "srt/server_args.py", "srt/arg_groups/*.py", "srt/arg_groups/fields/*.py")
_CACHES = {
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang_jit",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
}
_ALGORITHMS = {"mtp": "NEXTN"}
_DRAFT = {
    "draft_model": "--speculative-draft-model-path",
    "num_steps": "--speculative-num-steps",
    "topk": "--speculative-eagle-topk",
    "num_draft_tokens": "--speculative-num-draft-tokens",
    "draft_attention_backend": "--speculative-draft-attention-backend",
    "draft_quantization": "--speculative-draft-model-quantization",
    "draft_load_format": "--speculative-draft-load-format",
    "draft_revision": "--speculative-draft-model-revision",
    "draft_kv_cache_dtype": "--speculative-draft-kv-cache-dtype",
    "draft_moe_runner": "--speculative-moe-runner-backend",
    "attention_mode": "--speculative-attention-mode",
    "token_map": "--speculative-token-map",
    "accept_threshold_single": "--speculative-accept-threshold-single",
    "accept_threshold_acc": "--speculative-accept-threshold-acc",
}

KERNELS: Final = Kernels(
    own=("sgl_kernel/*.so", "sgl_kernel/*/*.so", "flash_mla/*.so"),
    # sm90/ is loaded on 9.0 and sm100/ on everything else: the folder's name says nothing of what is in it
    required={
        "torch": ("torch/lib/libtorch_cuda.so",),
        "sgl_kernel": ("sgl_kernel/common_ops*", "sgl_kernel/*/common_ops*"),
    },
    # until 0.5.20 or so FlashMLA was in sgl_kernel, then in a wheel of its own
    backends={"fa3": ("sgl_kernel/flash_ops*",), "flashmla": ("sgl_kernel/flashmla_ops*", "flash_mla/*.so")},
)
"""Kernels of sgl_kernel 0.3.21 (SGLang 0.5.9) and 0.4.9 (0.5.23); fa4 and most others compile at run time."""

_P = re.compile
_GRAPH = rb"(?:cuda|CUDA|cpu|CPU|npu|NPU|xpu|XPU|hpu|HPU|musa|MUSA)[ -]graph"

GRAMMAR: Final = LogGrammar(
    rank=_P(
        rb"\[20\d\d-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?"
        rb"(?:(?=[^\]\n]{0,60} DP(?P<dp>\d{1,4})))?(?:(?=[^\]\n]{0,60} PP(?P<pp>\d{1,4})))?"
        rb"(?:(?=[^\]\n]{0,60} TP(?P<tp>\d{1,4})))?(?:(?=[^\]\n]{0,60} EP(?P<ep>\d{1,4})))?(?: [A-Z_]+\d+){0,6}\]"
        rb"|\[rank(?P<world>\d{1,5})\]:"
    ),
    clock=_P(rb"\[(?P<year>20\d\d)-(?P<month>\d\d)-(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:\.\d+)?)"),
    rules=(
        PhaseRule(
            _P(rb"[Ll]oading [\w -]{0,60}: +\d+% Completed \| (?P<done>\d{1,9})/(?P<total>\d{1,9}) "),
            "weight_load",
            edge="progress",
            again="draft_load",
        ),
        PhaseRule(
            _P(rb"\[Auto[Tt]uner\]: Tuning [^|\n]{0,200}\|[^|\n]{0,200}\| *(?P<done>\d{1,9})/(?P<total>\d{1,9}) \["),
            "autotune",
            edge="progress",
        ),
        PhaseRule(
            _P(
                rb"(?:Capturing|Compiling) [\w -]{0,40}\([^)\n]{0,200}\): +\d+%\|[^|\n]{0,200}\| *"
                rb"(?P<done>\d{1,9})/(?P<total>\d{1,9}) \["
            ),
            "cuda_graph",
            edge="progress",
            again="draft_cuda_graph",
        ),
        PhaseRule(_P(rb"\] server_args="), "spawn", scope="server"),
        # 0.5.1-0.5.13 build the draft worker last, from "Init torch distributed begin." on
        PhaseRule(_P(rb"Init (?:torch distributed|parallel) begin"), "distributed_init", again="draft_load"),
        PhaseRule(_P(rb"Init (?:torch distributed|parallel) ends"), "distributed_init", edge="leave"),
        PhaseRule(_P(rb"sglang is using nccl=="), "distributed_init", edge="progress"),
        PhaseRule(_P(rb"Load weight begin"), "weight_load", again="draft_load"),
        PhaseRule(_P(rb"Load weight end"), "weight_load", edge="leave", again="draft_load"),
        PhaseRule(_P(rb"KV Cache (?:is allocated|VA upper bound)|Using KV cache dtype"), "kv_cache"),
        PhaseRule(_P(rb"Memory pool end"), "kv_cache", edge="leave"),
        PhaseRule(_P(rb"Running FlashInfer autotune"), "autotune"),
        PhaseRule(_P(rb"FlashInfer autotune completed"), "autotune", edge="leave"),
        # 0.5.14 and later capture the draft's graphs with a message of the first rank alone
        PhaseRule(_P(rb"Capture draft[\w -]{0,40} " + _GRAPH + rb" begin"), "draft_cuda_graph", leader=True),
        PhaseRule(_P(rb"Capture draft[\w -]{0,40} " + _GRAPH + rb" end"), "draft_cuda_graph", edge="leave"),
        PhaseRule(_P(rb"Capture (?:[\w -]{0,40} )?" + _GRAPH + rb" begin"), "cuda_graph"),
        PhaseRule(_P(rb"Capture (?:[\w -]{0,40} )?" + _GRAPH + rb" end"), "cuda_graph", edge="leave"),
        PhaseRule(
            _P(rb"Registering \d+ cuda graph addresses"), "cuda_graph", edge="progress", again="draft_cuda_graph"
        ),
        PhaseRule(_P(rb"INFO: +Started server process \["), "warmup", scope="server"),
        PhaseRule(_P(rb"The server is fired up and ready to roll!"), "ready", scope="server"),
        PhaseRule(
            _P(rb'\] (?:Prefill|Decode) batch|"POST /(?:v1/|generate|encode|classify)'),
            "serving",
            scope="server",
            after="ready",
        ),
        PhaseRule(_P(rb"Gracefully exiting\.\.\. "), "shutdown", scope="server"),
    ),
    heartbeats=(
        PAGE_ASKED,
        _P(rb"Health check failed\. Server couldn't get a response from detokenizer"),
    ),
    anchors=(
        _P(rb"\] (?:server_args=|Init (?:torch|para)|sglang is using|Load weight|KV Cache|Using KV|Memory pool end)"),
        _P(rb"\] (?:Running Flash|FlashInfer auto|Capture |Registering \d|The server is f|Health check f|Gracefully)"),
        _P(rb"% Completed \|"),
        _P(rb"\|[^|\n]{0,200}\| *\d+/\d+ \["),
        _P(rb"INFO: +Started server"),
        PAGE_ASKED,
    ),
)


class SGLang:
    """The ``sglang`` engine."""

    name = "sglang"
    info_paths = ("/model_info", "/v1/models")  # static; /server_info waits for the ranks
    grammar = GRAMMAR
    kernels = KERNELS
    axes: Mapping[str, Collection[str]] = {
        "spec_decode": (),
        "cuda_graph": ("on", "off", "decode_only", "piecewise", "full", "breakable"),
        "attention_backend": (),
        "custom_all_reduce": ("on", "off"),
        "overlap": ("on", "off"),
        "kv_cache_dtype": (),
        "moe_runner": (),
        "sampling_backend": (),
        "nccl_p2p": ("on", "off"),
        "log_level": (),
        "jit_cache": ("cold", "warm"),
    }

    def launch(self, spec: ServerSpec, *, host: str, port: int, python: str) -> Launch:
        """``python -m sglang.launch_server`` with the flags of the version that ``python`` has."""
        model = need_model(spec)
        known_axes(spec, self.axes, self.name)
        module = (python, "-m", "sglang.launch_server")
        install = installed(
            self.name, spec, python, (*module, "--help"), sources=_SOURCES, must_have="--speculative-algorithm"
        )
        arguments = Arguments(install)
        arguments.set("--model-path", model)
        arguments.set("--served-model-name", self.served_model(spec))
        arguments.set("--host", host)
        arguments.set("--port", port)
        arguments.set("--tp-size", spec.tp)
        env: dict[str, str | None] = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        for axis, value in spec.axes:
            env.update(_axis(axis, value, spec, arguments, install))
        arguments.merge(spec.args)
        own_file = not install.has("--config") or arguments.value("--config") is not None
        argv = (*module, *arguments.argv())
        return Launch(argv, {**env, **dict(spec.env)}, key_config=None if own_file else "--config")

    def ready(self, spec: ServerSpec) -> ReadyProbe:
        """``/health`` makes a token itself, but answers for any traffic: one completion of ours settles it."""
        args = {key.lstrip("-").replace("_", "-"): value for key, value in spec.args}
        body = {"model": self.served_model(spec), "prompt": "0", "max_tokens": 1, "temperature": 0}
        return ReadyProbe(spec.ready or "/health", generate=None if args.get("is-embedding") else body)

    def served_model(self, spec: ServerSpec) -> str:
        named = {key.lstrip("-").replace("_", "-"): value for key, value in spec.args}.get("served-model-name")
        return named if isinstance(named, str) else spec.model or ""

    def process_role(self, cmdline: Sequence[str], comm: str) -> ProcessRole | None:
        """By title (``sglang::scheduler_DP0_TP1_EP0``), which is set once a child has done its imports."""
        title = cmdline[0] if cmdline else comm
        if title.startswith("sglang::"):
            kind = title.removeprefix("sglang::")
            if kind.startswith("schedul"):  # comm holds 15 characters
                return ProcessRole("scheduler", coordinates(kind) or (Rank(tp=0) if kind == "scheduler" else None))
            if kind.startswith("detoken"):
                return ProcessRole("detokenizer")
            return ProcessRole("api" if kind.startswith("tokeniz") else "other")
        if common := common_role(cmdline, comm):
            return common
        words = cmdline[:8]
        served = any(PurePath(word).name == "sglang" for word in words) and "serve" in words
        if served or any("sglang.launch_server" in w or w.endswith("sglang/launch_server.py") for w in words):
            return ProcessRole("api")
        return None

    def own_timeout(self, launch: Launch) -> float | None:
        """``--watchdog-timeout``: after it the scheduler ends the server (seconds)."""
        text = "\0".join(launch.argv)
        found = re.search(r"(?:^|\0)--watchdog-timeout[=\0]([\d.]+)(?:\0|$)", text)
        return float(found.group(1)) if found else WATCHDOG


ENGINE: Final = SGLang()


def _axis(axis: str, value: AxisValue, spec: ServerSpec, args: Arguments, install: Install) -> dict[str, str | None]:
    """Set the flags of one axis; returns what it adds to the environment."""
    if axis == "spec_decode":
        _spec_decode(value, spec, args, install)
    elif axis == "cuda_graph":
        _cuda_graph(value.name, args, install)
    elif axis == "attention_backend":
        _attention(value, args, install)
    elif axis == "custom_all_reduce":
        if not switch(axis, value, install):
            args.choose(axis, "--disable-custom-all-reduce", True)
    elif axis == "overlap":
        if not switch(axis, value, install):
            args.choose(axis, "--disable-overlap-schedule", True)
    elif axis == "kv_cache_dtype":
        args.choose(axis, "--kv-cache-dtype", value.name)
    elif axis == "moe_runner":
        args.choose(axis, "--moe-runner-backend", value.name)
    elif axis == "sampling_backend":
        args.choose(axis, "--sampling-backend", value.name)
    elif axis == "log_level":
        args.choose(axis, "--log-level", log_level(value, install))
    elif axis == "nccl_p2p":
        return {"NCCL_P2P_DISABLE": "0" if switch(axis, value, install) else "1"}
    elif axis == "jit_cache":
        return dict(jit_cache(value, spec, install, _CACHES))
    return {}


def _cuda_graph(name: str, args: Arguments, install: Install) -> None:
    """Graphs of both phases. From 0.5.14 each phase has a backend; before, graphs are decode's, prefill's piecewise."""
    decode, prefill = "--cuda-graph-backend-decode", "--cuda-graph-backend-prefill"
    by_phase = install.has(decode, prefill)
    default_piecewise = install.has("--disable-piecewise-cuda-graph") and not by_phase  # 0.5.10-0.5.13
    legal = ["on", "off", "decode_only"]
    if by_phase:
        legal += [b for b in ("full", "breakable") if b in install.choices(decode) and b in install.choices(prefill)]
        legal += ["piecewise"] if "tc_piecewise" in install.choices(prefill) else []
    elif default_piecewise or install.has("--enable-piecewise-cuda-graph"):
        legal += ["piecewise"]
    if name not in legal:
        raise illegal("cuda_graph", name, legal, install)
    if by_phase:
        backends = {
            "off": ("disabled", "disabled"),
            "decode_only": (None, "disabled"),
            "piecewise": (None, "tc_piecewise"),
        }
        for flag, backend in zip((decode, prefill), backends.get(name, (name, name)), strict=True):
            if name != "on" and backend is not None:
                args.choose("cuda_graph", flag, backend)
        return
    if name == "off":
        args.choose("cuda_graph", "--disable-cuda-graph", True)
    if name in ("off", "decode_only") and default_piecewise:
        args.set("--disable-piecewise-cuda-graph")
    if name == "piecewise" and not default_piecewise:
        args.set("--enable-piecewise-cuda-graph")


def _attention(value: AxisValue, args: Arguments, install: Install) -> None:
    """The backend, and others for prefill or decode in the details."""
    if value.name not in ("auto", "default"):
        args.choose("attention_backend", "--attention-backend", value.name)
    for phase, backend in value.details:
        if phase not in ("prefill", "decode"):
            raise EngineError(f"attention_backend has no detail {phase!r} with sglang. Known: prefill, decode.")
        args.choose("attention_backend", f"--{phase}-attention-backend", backend)


def _spec_decode(value: AxisValue, spec: ServerSpec, args: Arguments, install: Install) -> None:
    """Algorithm and draft. With topk 1 the numbers of steps and of draft tokens follow from each other."""
    if value.name in ("base", "none", "off"):
        return
    flag = "--speculative-algorithm"
    listed = re.search(r"Builtins: ([A-Z0-9_, ]+)\.", install.flags[flag].text)
    legal = install.choices(flag) or tuple(listed.group(1).split(", ") if listed else ())
    algorithm = _ALGORITHMS.get(value.name, value.name.upper())
    if legal and algorithm not in legal:
        raise illegal("spec_decode", value.name, ["base", *(name.lower() for name in legal)], install)
    detail = dict(value.details)
    if algorithm in ("EAGLE3", "STANDALONE") and not detail.get("draft_model"):
        raise SpecError(
            f"spec_decode {value.name} needs a draft: write "
            f'{{"{value.name}": {{"draft_model": "…"}}}}. Without one SGLang loads the target as its own draft.'
        )
    if detail.pop("draft_tp", spec.tp) not in (spec.tp, str(spec.tp)):
        raise EngineError(f"SGLang runs the draft on all ranks: draft_tp must be {spec.tp} (tp) or left out.")
    if unknown := sorted(set(detail) - set(_DRAFT)):
        raise EngineError(
            f"spec_decode has no detail {unknown[0]!r} with sglang. Known: {', '.join(_DRAFT)}, draft_tp."
        )
    if isinstance(model := detail.get("draft_model"), str):
        detail["draft_model"] = local_path(model, "draft_model", spec)
        check_draft(spec, value.name, model)
        if algorithm in ("EAGLE", "EAGLE3"):
            check_draft_class(spec, model, install, "srt/models")
        check_draft_attention(spec, model, detail.get("draft_attention_backend"))
    _complete(detail)
    args.set(flag, algorithm)
    for name, setting in detail.items():
        args.choose("spec_decode", _DRAFT[name], setting)


def _complete(detail: dict[str, str | int | float | bool | None]) -> None:
    """SGLang takes all three numbers or none."""
    steps, topk, tokens = (detail.get(key) for key in ("num_steps", "topk", "num_draft_tokens"))
    if steps is None and topk is None and tokens is None:
        return
    topk = detail.setdefault("topk", 1)
    if topk in (1, "1"):
        if steps is None and tokens is not None:
            detail["num_steps"] = int(tokens) - 1
        elif tokens is None and steps is not None:
            detail["num_draft_tokens"] = int(steps) + 1
    if any(detail.get(key) is None for key in ("num_steps", "num_draft_tokens")):
        raise SpecError(
            "spec_decode needs num_steps and num_draft_tokens when topk is more than 1: add both to the mark."
        )
