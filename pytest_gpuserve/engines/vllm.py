"""vLLM 0.9 to 0.33: command line, log, process titles. Facts: the sources and recordings of real runs."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final

from ..spec import ServerSpec
from .arguments import Arguments, known_axes, need_model
from .base import PAGE_ASKED, Launch, LogGrammar, PhaseRule, ProcessRole, ReadyProbe
from .flags import installed
from .kernels import Kernels
from .titles import common_role, coordinates
from .vllm_axes import MODES, SAMPLERS, set_axis, with_compilation

ATTENTION_BACKENDS: Final = (
    *("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "TRITON_FLASH_ATTN", "FLASHINFER"),
    *("TRITON_FLASHINFER", "FLEX_ATTENTION", "TREE_ATTN", "FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA", "B12X"),
    *("FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_SM90"),
    *("TRITON_MLA", "CUTLASS_MLA", "TOKENSPEED_MLA", "TURBOQUANT", "ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_MLA"),
    *("ROCM_AITER_UNIFIED_ATTN", "TORCH_SDPA", "XFORMERS", "CPU_ATTN", "CPU_MLA", "AMX_MLA", "IPEX"),
)
"""Attention backends of 0.9 to 0.33 in general use; an install's own list is read from its registry."""

EXECUTE_TIMEOUT: Final = 300.0
"""Seconds: default of VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, after which a stuck step ends the engine and its stacks."""

_SOURCES = ("engine/arg_utils.py", "config/*.py", "entrypoints/openai/*.py", "entrypoints/cli/*.py")
_FA, _FLASHMLA = "vllm/vllm_flash_attn/_vllm_fa{}_C*", ("vllm/_flashmla_C*", "vllm/_flashmla_extension_C*")
KERNELS: Final = Kernels(
    own=("vllm/*.so", "vllm/vllm_flash_attn/*.so"),
    required={"torch": ("torch/lib/libtorch_cuda.so",), "vllm": ("vllm/_C.*", "vllm/_C_stable*")},
    backends={
        "flash_attn": (_FA.format(2), _FA.format(3)),
        "flash_attn_mla": (_FA.format(3),),
        "flashmla": _FLASHMLA,
        "flashmla_sparse": _FLASHMLA,
    },
)

_P = re.compile

GRAMMAR: Final = LogGrammar(
    rank=_P(
        rb"(?:\[rank(?=\d{1,5}\]:)|\((?:(?P<worker>(?:Ray|Vllm)?Worker(?:Process|Wrapper|Proc)?)|EngineCore|"
        rb"APIServer|ApiServer|DPCoordinator)(?:(?<=EngineCore)_(?:DP)?(?P<core>\d{1,4})|(?:_DP(?P<dp>\d{1,4}))?"
        rb"(?:_PP(?P<pp>\d{1,4}))?(?:_PCP\d+)?(?:_TP(?P<tp>\d{1,4}))?(?:_DCP\d+)?(?:_EP(?P<ep>\d{1,4}))?))"
        rb"(?:(?:-| rank=|(?<=\[rank))(?P<world>\d{1,5})|_\d+)?"
        rb"(?:\]:| pid=(?P<pid>\d{1,10})(?:, ip=[\w.:]+)?\))"
    ),
    clock=_P(
        rb"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<month>\d\d)-(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d) \["
    ),
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
                rb"Capturing (?:prefill|decode) CUDA graphs[^|\n]{0,200}: +\d+%\|[^|\n]{0,200}\| *"
                rb"(?P<done>\d{1,9})/(?P<total>\d{1,9}) \["
            ),
            "draft_cuda_graph",
            edge="progress",
        ),
        PhaseRule(
            _P(rb"Capturing [^|\n]{0,200}: +\d+%\|[^|\n]{0,200}\| *(?P<done>\d{1,9})/(?P<total>\d{1,9}) \["),
            "cuda_graph",
            edge="progress",
            again="draft_cuda_graph",
        ),
        PhaseRule(_P(rb"\] (?:non-default args:|.{0,80}vLLM (?:API )?server version )"), "spawn", scope="server"),
        PhaseRule(_P(rb"world_size=\d+ rank=(?P<world>\d{1,5}) local_rank="), "distributed_init"),
        PhaseRule(_P(rb"vLLM is using nccl=="), "distributed_init", edge="progress"),
        PhaseRule(_P(rb"rank (?P<world>\d{1,5}) in world size \d+ is assigned as"), "distributed_init", edge="leave"),
        PhaseRule(
            _P(rb"\] (?:Starting to load model |Loading model from scratch|Using V2 Model Runner)"), "weight_load"
        ),
        PhaseRule(_P(rb"\] Loading drafter model"), "draft_load", leader=True),
        PhaseRule(
            _P(rb"\] (?:Filesystem type for checkpoints|Using \S{1,60} (?:attention )?backend)"),
            "weight_load",
            edge="progress",
            again="draft_load",
        ),
        PhaseRule(_P(rb"\] Model loading took "), "weight_load", edge="leave", again="draft_load"),
        PhaseRule(
            _P(
                rb"\] (?:Starting torch\.compile|Using cache directory: [^\n]{1,400} for vLLM's torch\.compile|"
                rb"Dynamo bytecode transform|Cache the graph of |Compiling a graph for |Directly load )"
            ),
            "compile",
            leader=True,
        ),
        PhaseRule(_P(rb"\] torch\.compile t(?:akes|ook) "), "compile", edge="leave"),
        PhaseRule(_P(rb"\] (?:Available KV cache memory|Explicitly set \([\d./]+\) GiB for KV cache)"), "kv_cache"),
        PhaseRule(_P(rb"\] \w+ KV cache size: "), "kv_cache", scope="server"),
        PhaseRule(_P(rb"Running FlashInfer autotune|\[Auto[Tt]uner\]: Autotuning process starts"), "autotune"),
        PhaseRule(_P(rb"\[Auto[Tt]uner\]: Autotuning process ends"), "autotune", edge="leave"),
        PhaseRule(
            _P(rb"\] Registering \d+ cuda graph addresses"), "cuda_graph", edge="progress", again="draft_cuda_graph"
        ),
        PhaseRule(_P(rb"\] Graph capturing finished in "), "warmup"),
        PhaseRule(_P(rb"\] init engine \([^)\n]{0,200}\) took "), "warmup", scope="server"),
        PhaseRule(_P(rb"INFO: +Application startup complete"), "ready", scope="server"),
        PhaseRule(
            _P(rb'"POST /(?:v1/|generate|pooling|classify|score|embed)|\] Engine \d+: Avg prompt throughput'),
            "serving",
            scope="server",
            after="ready",
        ),
        PhaseRule(_P(rb"API server: shutdown triggered"), "shutdown", scope="server"),
    ),
    heartbeats=(
        _P(rb"No available (?:shared memory broadcast )?block found in \d+ second"),
        _P(rb"Waiting for \d+ (?:local, \d+ remote )?core engine proc"),
        PAGE_ASKED,
        _P(rb"Avg prompt throughput: 0\.0 tokens/s, Avg generation throughput: 0\.0 tokens/s"),
    ),
    anchors=(
        _P(rb"\] (?:non-default|vLLM |world_size|rank \d|Starting t|Loading |Using |Filesystem|Model load)"),
        _P(rb"\] (?:Dynamo|Cache the|Compiling a|Directly|torch\.comp|Avail|Explicitly|\w+ KV|Running Fl|\[Auto)"),
        _P(rb"\] (?:Registering|Graph cap|init engine|No avail|Waiting f|\[shutdown\] A|Engine \d+: Avg [^,]*: 0\.0 )"),
        _P(rb"vLLM (?:is using|API server|server ver)|\[Auto[Tt]uner\]"),
        _P(rb"% Completed \|"),
        _P(rb"\|[^|\n]{0,200}\| *\d+/\d+ \["),
        _P(rb"INFO: +Application startup c"),
        PAGE_ASKED,
        _P(rb"pid=\d+\)[ \t]*\n"),
    ),
)


class VLLM:
    """The ``vllm`` engine."""

    name = "vllm"
    info_paths = ("/version", "/v1/models")  # static, answered while the ranks hang
    grammar = GRAMMAR
    kernels = KERNELS
    axes: Mapping[str, Collection[str]] = {
        "spec_decode": (),
        "cuda_graph": ("on", *MODES),
        "attention_backend": (),
        "custom_all_reduce": ("on", "off"),
        "overlap": ("on", "off"),
        "kv_cache_dtype": (),
        "moe_runner": (),
        "sampling_backend": tuple(SAMPLERS),
        "nccl_p2p": ("on", "off"),
        "log_level": (),
        "jit_cache": ("cold", "warm"),
    }

    def launch(self, spec: ServerSpec, *, host: str, port: int, python: str) -> Launch:
        """``vllm serve`` by the script beside ``python``, which no ``vllm`` folder in the working directory hides."""
        model = need_model(spec)
        known_axes(spec, self.axes, self.name)
        script = Path(python).parent / "vllm"
        start = (python, str(script)) if script.is_file() else (python, "-m", "vllm.entrypoints.cli.main")
        install = installed(
            self.name,
            spec,
            python,
            (*start, "serve", "--help=all"),
            sources=_SOURCES,
            must_have="--tensor-parallel-size",
            script=script.is_file(),
        )
        arguments = Arguments(install)
        arguments.set("--served-model-name", self.served_model(spec))
        arguments.set("--host", host)
        arguments.set("--port", port)
        arguments.set("--tensor-parallel-size", spec.tp)
        env: dict[str, str | None] = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        compilation: dict[str, object] = {}
        for axis, value in spec.axes:
            env.update(set_axis(axis, value, spec, arguments, compilation, install))
        arguments.merge(with_compilation(spec, compilation))
        argv = (*start, "serve", model, *arguments.argv())
        return Launch(argv, {**env, **dict(spec.env)}, key_variable="VLLM_API_KEY")

    def ready(self, spec: ServerSpec) -> ReadyProbe:
        """``/health`` is static: the first completion, which may compile, is what settles it."""
        args = {key.lstrip("-").replace("_", "-"): value for key, value in spec.args}
        pools = args.get("runner") == "pooling" or args.get("task", "generate") not in ("auto", "generate")
        body = {"model": self.served_model(spec), "prompt": "0", "max_tokens": 1, "temperature": 0}
        return ReadyProbe(spec.ready or "/health", generate=None if pools else body)

    def served_model(self, spec: ServerSpec) -> str:
        named = {key.lstrip("-").replace("_", "-"): value for key, value in spec.args}.get("served-model-name")
        return named.split()[0] if isinstance(named, str) and named.split() else spec.model or ""

    def process_role(self, cmdline: Sequence[str], comm: str) -> ProcessRole | None:
        """By title (``VLLM::Worker_DP0_TP1_EP1``; the prefix may be another); workers have numbers once initialised."""
        prefix, mark, kind = (cmdline[0] if cmdline else comm).partition("::")
        if mark and prefix and not prefix.startswith("sglang"):
            if kind.startswith(("Worker", "RayWorker")):
                return ProcessRole("worker", coordinates(kind))
            if kind.startswith("EngineCor"):  # comm holds 15 characters
                return ProcessRole("engine_core", coordinates(kind))
            if kind.lower().startswith("apiserver"):
                return ProcessRole("api")
            return ProcessRole("other")
        if common := common_role(cmdline, comm):
            return common
        words = cmdline[:8]
        served = any(PurePath(word).name == "vllm" for word in words[:3]) and "serve" in words
        if served or any(w.startswith(("vllm.entrypoints.cli", "vllm.entrypoints.openai")) for w in words):
            return ProcessRole("api")
        return None

    def own_timeout(self, launch: Launch) -> float | None:
        """VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS; one rank alone runs inside the engine core, which waits for ever."""
        sizes = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
        pairs = zip(launch.argv, launch.argv[1:], strict=False)
        if all(value == "1" for flag, value in pairs if flag in sizes) and "mp" not in launch.argv:
            return None
        value = {**os.environ, **launch.env}.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS") or ""
        return float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else EXECUTE_TIMEOUT


ENGINE: Final = VLLM()
