"""What of an engine's command line can be taken away to find a fault: data for isolation/deltas.py.

A flag or a variable that no feature claims and the base does not need is a feature of its own. An engine registered
from elsewhere may bring its own table as an attribute ``features``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import EngineError
from . import get_engine


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing that can be on or off.

    Attributes:
        flags, env: patterns (fnmatch) of the flags and variables that belong to it.
        off: words that switch it off; with them it is a feature also where the user says nothing, because the engine
            does it unasked.
        core: flags without which the rest of it means nothing; the others can be taken away one by one. For a flag
            with a JSON value, ``flag.key`` names one of its keys.
        parallel: it happens only with more than one GPU.
        weight: how often it was to blame in the issue trackers; only ratios matter.
    """

    name: str
    flags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    core: tuple[str, ...] = ()
    parallel: bool = False
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Remedy:
    """An escape hatch: words and variables that people add to get going. ``helps``: features whose faults it hides.

    A value ``{cold}`` becomes an empty directory.
    """

    name: str
    words: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    helps: tuple[str, ...] = ()
    parallel: bool = False


@dataclass(frozen=True, slots=True)
class Features:
    """One engine's table. ``base`` and ``base_env`` are what the model needs, and what nobody blames.

    Attributes:
        model, served, tp, host, port: spellings of these flags, the one to add first.
    """

    base: tuple[str, ...] = ()
    base_env: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    model: tuple[str, ...] = ("--model",)
    served: tuple[str, ...] = ("--served-model-name",)
    tp: tuple[str, ...] = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")
    host: tuple[str, ...] = ("--host",)
    port: tuple[str, ...] = ("--port",)


_ENV: Final = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "HOME", "TMPDIR", "TEMP", "LANG", "LC_*", "USER", "SHELL"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "NVIDIA_*", "HF_*", "HUGGING*", "TRANSFORMERS_*"),
    *("*_TOKEN", "*_API_KEY", "*_PROXY", "*_proxy", "GPUSERVE_*"),
)
_MODEL: Final = (
    *("--model", "--model-path", "--tokenizer*", "--served-model-name", "--host", "--port", "--api-key"),
    *("--trust-remote-code", "--revision", "--dtype", "--load-format", "--download-dir", "--max-model-len"),
    *("--context-length", "--chat-template", "--hf-*", "--tensor-parallel-size", "--tp-size", "--tp", "-tp"),
    *("--pipeline-parallel-size", "--pp-size", "-pp", "--data-parallel-size", "--dp-size", "--dp", "-dp"),
    *("--nnodes", "--node-rank", "--dist-init-addr", "--master-addr", "--master-port", "--quantization", "-q"),
)
_P2P: Final = Feature("nccl", env=("NCCL_*",), parallel=True)
_COLD: Final = Remedy(
    "cold caches",
    env=(
        ("TRITON_CACHE_DIR", "{cold}/triton"),
        ("TORCHINDUCTOR_CACHE_DIR", "{cold}/inductor"),
        ("TORCH_EXTENSIONS_DIR", "{cold}/extensions"),
        ("FLASHINFER_WORKSPACE_BASE", "{cold}/flashinfer"),
    ),
)
_NO_P2P: Final = Remedy(
    "NCCL_P2P_DISABLE=1", env=(("NCCL_P2P_DISABLE", "1"),), helps=("nccl", "custom_all_reduce"), parallel=True
)
_DEBUG: Final = Remedy("CUDA_LAUNCH_BLOCKING=1", env=(("CUDA_LAUNCH_BLOCKING", "1"),))

GENERIC: Final = Features(base=_MODEL, base_env=_ENV, features=(_P2P,), remedies=(_NO_P2P, _COLD, _DEBUG))
"""For an engine that nobody described: whole flags and variables."""

SGLANG: Final = Features(
    base=(
        *_MODEL,
        *("--mem-fraction-static", "--base-gpu-id", "--gpu-id-step", "--is-embedding", "--watchdog-timeout"),
        *("--dist-timeout", "--skip-server-warmup", "--max-running-requests", "--max-total-tokens", "--model-impl"),
        *("--ep-size", "--ep", "--expert-parallel-size", "--random-seed"),
    ),
    base_env=_ENV,
    model=("--model-path", "--model"),
    tp=("--tp-size", "--tp", "--tensor-parallel-size"),
    features=(
        Feature(
            "spec_decode",
            flags=("--speculative-*",),
            env=("SGLANG_ENABLE_SPEC_V2",),
            core=("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-draft-model"),
            weight=4,
        ),
        Feature(
            "cuda_graph",
            flags=("--cuda-graph-*", "--disable-cuda-graph*", "--enable-*cuda-graph*", "--disable-*cuda-graph*"),
            off=("--disable-cuda-graph",),
            weight=4,
        ),
        Feature(
            "attention_backend",
            flags=("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"),
            core=("--attention-backend",),
            weight=3,
        ),
        Feature(
            "custom_all_reduce",
            flags=("--disable-custom-all-reduce", "--enable-*all-reduce*", "--enable-*allreduce*", "--enable-mscclpp"),
            off=("--disable-custom-all-reduce",),
            parallel=True,
            weight=2,
        ),
        Feature("overlap", flags=("--disable-overlap-schedule",), off=("--disable-overlap-schedule",), weight=1.5),
        Feature("kv_cache_dtype", flags=("--kv-cache-dtype", "--quantization-param-path"), weight=1.5),
        Feature("moe_runner", flags=("--moe-*", "--*flashinfer-*moe*", "--deepep-*"), weight=1.5),
        Feature("sampling_backend", flags=("--sampling-backend",)),
        Feature("grammar_backend", flags=("--grammar-backend", "--reasoning-parser", "--tool-call-parser"), weight=0.3),
        Feature(
            "torch_compile", flags=("--enable-torch-compile", "--torch-compile-*"), core=("--enable-torch-compile",)
        ),
        Feature("two_batch_overlap", flags=("--enable-two-batch-overlap", "--tbo-*", "--enable-single-batch-overlap")),
        Feature(
            "radix_cache", flags=("--disable-radix-cache", "--radix-*", "--enable-hierarchical-cache", "--hicache-*")
        ),
        Feature("chunked_prefill", flags=("--chunked-prefill-size", "--enable-mixed-chunk", "--max-prefill-tokens")),
        Feature("lora", flags=("--*lora*",)),
        Feature("metrics and logs", flags=("--log-*", "--enable-metrics*", "--decode-log-*", "--show-*"), weight=0.1),
        _P2P,
    ),
    remedies=(
        Remedy("CUDA graphs off", ("--disable-cuda-graph",), helps=("cuda_graph", "spec_decode")),
        Remedy(
            "custom all-reduce off",
            ("--disable-custom-all-reduce",),
            helps=("custom_all_reduce", "cuda_graph"),
            parallel=True,
        ),
        Remedy("overlap schedule off", ("--disable-overlap-schedule",), helps=("overlap", "spec_decode")),
        Remedy(
            "attention backend triton", ("--attention-backend", "triton"), helps=("attention_backend", "spec_decode")
        ),
        _NO_P2P,
        _COLD,
        _DEBUG,
    ),
)

VLLM: Final = Features(
    base=(
        *_MODEL,
        *("--gpu-memory-utilization", "--seed", "--runner", "--task", "--convert"),
        *("--distributed-executor-backend", "--max-num-seqs", "--enable-expert-parallel", "-ep", "--limit-mm-*"),
    ),
    base_env=_ENV,
    features=(
        Feature(
            "spec_decode",
            flags=("--speculative-*", "--spec-*", "--num-speculative-tokens"),
            core=(
                "--speculative-config.method",
                "--speculative-config.model",
                "--speculative-config.num_speculative_tokens",
                "--speculative-config.draft_tensor_parallel_size",
            ),
            weight=4,
        ),
        Feature(
            "cuda_graph",
            flags=("--enforce-eager", "--compilation-config", "-cc*", "-O*", "--cudagraph-*", "--optimization-level"),
            off=("--enforce-eager",),
            weight=4,
        ),
        Feature("attention_backend", flags=("--attention-*", "-ac*"), env=("VLLM_ATTENTION_BACKEND",), weight=3),
        Feature(
            "custom_all_reduce",
            flags=("--disable-custom-all-reduce",),
            env=("VLLM_ALLREDUCE_*", "VLLM_DISABLE_PYNCCL"),
            off=("--disable-custom-all-reduce",),
            parallel=True,
            weight=2,
        ),
        Feature("overlap", flags=("--async-scheduling", "--no-async-scheduling"), weight=1.5),
        Feature("kv_cache_dtype", flags=("--kv-cache-dtype*", "--calculate-kv-scales"), weight=1.5),
        Feature("moe_runner", flags=("--moe-backend", "--all2all-backend"), env=("VLLM_*MOE*",), weight=1.5),
        Feature("sampling_backend", env=("VLLM_USE_FLASHINFER_SAMPLER",)),
        Feature("prefix_caching", flags=("--*prefix-caching*", "--kv-transfer-config")),
        Feature("chunked_prefill", flags=("--*chunked-prefill*", "--max-num-batched-tokens")),
        Feature("parsers", flags=("--*-parser", "--enable-auto-tool-choice"), weight=0.3),
        Feature("lora", flags=("--*lora*",)),
        Feature("logs", flags=("--*log-*", "--disable-log-*", "--enable-log-*"), env=("VLLM_LOGGING_*",), weight=0.1),
        _P2P,
    ),
    remedies=(
        # captures nothing and compiles as before (vLLM 0.10.2 and newer); an older one refuses it
        Remedy(
            "CUDA graphs off",
            ("--compilation-config.cudagraph_mode", "NONE"),
            helps=("cuda_graph", "spec_decode"),
        ),
        Remedy("graphs and compilation off", ("--enforce-eager",), helps=("cuda_graph", "spec_decode")),
        Remedy(
            "custom all-reduce off",
            ("--disable-custom-all-reduce",),
            helps=("custom_all_reduce", "cuda_graph"),
            parallel=True,
        ),
        _NO_P2P,
        _COLD,
        _DEBUG,
    ),
)


def features_of(engine: str) -> Features:
    """The table of an engine; :data:`GENERIC` for one that has none."""
    built_in = {"sglang": SGLANG, "vllm": VLLM, "command": GENERIC}
    if engine in built_in:
        return built_in[engine]
    try:
        own = getattr(get_engine(engine), "features", GENERIC)
    except EngineError:
        return GENERIC
    return own if isinstance(own, Features) else GENERIC
