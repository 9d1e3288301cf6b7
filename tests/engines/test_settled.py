"""A server that runs with other settings than it was given is told by its own log."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpuserve.engines.settled import downgrades
from pytest_gpuserve.spec import ServerSpec

LOGS = Path(__file__).parent.parent / "data" / "logs" / "real"
SGLANG_CPU = "sglang-0.5.23-cpu-tp2_ok.log"
SGLANG_GPU = "sglang-0.5.12.post1-tp2-h200_eagle3_ok.log"
VLLM_CPU = "vllm-0.32.0-cpu-tp2_tp2-ngram.log"
VLLM_GPU = "vllm-0.24.0-tp2-h200_slow_jit_triton_warmup.log"


def found(log: str, **axes: object) -> list[str]:
    spec = ServerSpec.from_mapping({"engine": log.partition("-")[0], "model": "m", "axes": axes})
    return downgrades(spec, (LOGS / log).read_bytes())


@pytest.mark.parametrize(
    ("log", "axes"),
    [
        (SGLANG_CPU, {"attention_backend": "torch_native", "sampling_backend": "pytorch", "overlap": "off"}),
        (SGLANG_CPU, {"cuda_graph": "off", "spec_decode": "base", "kv_cache_dtype": "auto", "custom_all_reduce": "on"}),
        (SGLANG_GPU, {"attention_backend": "triton", "spec_decode": "eagle3", "cuda_graph": "on", "overlap": "on"}),
        (SGLANG_GPU, {"attention_backend": {"triton": {"decode": "triton"}}}),
        (VLLM_GPU, {"overlap": "on", "kv_cache_dtype": "auto", "custom_all_reduce": "off"}),
        (SGLANG_GPU, {"attention_backend": "auto", "moe_runner": "auto", "cuda_graph": "decode_only"}),
        (VLLM_CPU, {"spec_decode": "ngram", "cuda_graph": "off"}),
        (VLLM_GPU, {"attention_backend": "triton_attn", "cuda_graph": "on", "spec_decode": "base"}),
        (VLLM_GPU, {"attention_backend": "triton"}),
    ],
)
def test_settings_that_took_effect(log: str, axes: dict[str, object]) -> None:
    assert found(log, **axes) == []


@pytest.mark.parametrize(
    ("log", "axes", "told"),
    [
        (
            SGLANG_CPU,
            {"attention_backend": "triton"},
            "attention_backend was to be triton, the server runs with torch_native",
        ),
        (SGLANG_CPU, {"cuda_graph": "on"}, "Cuda graph is disabled because of using torch native attention backend"),
        (SGLANG_CPU, {"spec_decode": "eagle3"}, "spec_decode was to be eagle3, the server runs with None"),
        (SGLANG_GPU, {"overlap": "off"}, "overlap was to be off, the server runs with on"),
        (SGLANG_GPU, {"spec_decode": "base"}, "spec_decode was to be base, the server runs with EAGLE3"),
        (VLLM_GPU, {"attention_backend": "flash_attn"}, "was to be flash_attn, the server runs with TRITON_ATTN"),
        (VLLM_GPU, {"cuda_graph": "off"}, "cuda_graph was to be off, the server runs with FULL_AND_PIECEWISE"),
        (VLLM_CPU, {"cuda_graph": "on"}, "cuda_graph was to be on, the server runs with NONE"),
        (VLLM_GPU, {"overlap": "off"}, "overlap was to be off, the server runs with on (its log: (APIServer pid="),
        (VLLM_GPU, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype was to be fp8, the server runs with auto"),
        (VLLM_CPU, {"custom_all_reduce": "on"}, "custom_all_reduce was to be on, the server runs with off"),
        (VLLM_CPU, {"spec_decode": "base"}, "spec_decode was to be base, the server runs with ngram"),
    ],
)
def test_settings_that_did_not(log: str, axes: dict[str, object], told: str) -> None:
    (sentence,) = found(log, **axes)
    assert told in sentence


def test_a_mode_that_vllm_changed_and_a_variable_that_it_ignored() -> None:
    log = (
        b"(Worker_TP0 pid=1) WARNING 08-14 23:43:13 [compilation.py:1] CUDAGraphMode.FULL is not supported "
        b"with FLASHINFER backend (support: UNIFORM_BATCH); setting cudagraph_mode=FULL_AND_PIECEWISE\n"
        b"(APIServer pid=1) WARNING 08-14 23:43:13 [envs.py:1] Unknown vLLM environment variable detected: "
        b"VLLM_ATTENTION_BACKEND\n"
    )
    spec = ServerSpec.from_mapping({"engine": "vllm", "model": "m", "cuda_graph": "full"})
    first, second = downgrades(spec, log, {"VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    assert "was to be full, the server runs with FULL_AND_PIECEWISE (its log: …" in first
    assert "CUDAGraphMode.FULL is not supported with FLASHINFER" in first
    assert "VLLM_ATTENTION_BACKEND" in second
    assert len(downgrades(spec, log)) == 1, "a variable that somebody else set is not a setting of this server"
    assert len(downgrades(spec, log, {"VLLM_ATTENTION_BACKEND": None})) == 1


@pytest.mark.parametrize(
    ("wanted", "refused"),
    [("on", False), ("piecewise", False), ("full", True), ("full_and_piecewise", True), ("off", True)],
)
def test_a_lesser_mode_is_still_on(wanted: str, refused: bool) -> None:
    """vLLM lowers its own default to what a backend can capture: only somebody who asked for more is told."""
    log = (
        b"(EngineCore pid=1) INFO 08-14 23:43:13 [core.py:1] config: {'cudagraph_mode': "
        b"<CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>, 'x': 1}\n"
        b"(Worker_TP0 pid=1) WARNING 08-14 23:43:20 [compilation.py:1] CUDAGraphMode.FULL_AND_PIECEWISE "
        b"is not supported with TRITON backend (support: NEVER); setting cudagraph_mode=PIECEWISE\n"
    )
    spec = ServerSpec.from_mapping({"engine": "vllm", "model": "m", "cuda_graph": wanted})
    assert len(downgrades(spec, log)) == refused
    none = log.replace(b"mode=PIECEWISE", b"mode=NONE")
    assert len(downgrades(spec, none)) == (wanted != "off")


def test_backends_of_other_things_than_the_target_s_attention() -> None:
    """MoE and the draft print similar lines; the draft may have a backend of its own."""
    log = (
        b"(Worker_TP0 pid=1) INFO 08-14 23:43:13 [cuda.py:1] Using FLASHINFER attention backend out of potential\n"
        b"(Worker_TP0 pid=1) INFO 08-14 23:43:13 [fp8.py:1] Using TRITON backend for FP8 MoE\n"
        b"(Worker_TP0 pid=1) INFO 08-14 23:43:13 [fp8.py:1] Using DEEPGEMM backend\n"
        b"(Worker_TP0 pid=1) INFO 08-14 23:43:13 [nvfp4.py:1] Using FLASH_ATTN backend for NVFP4 GEMM\n"
        b"(Worker_TP0 pid=1) INFO 08-14 23:43:13 [gpu_model_runner.py:1] Loading drafter model...\n"
        b"(Worker_TP0 pid=1) INFO 08-14 23:43:13 [cuda.py:1] Using FLASH_ATTN attention backend out of potential\n"
    )
    spec = {"engine": "vllm", "model": "m"}
    assert downgrades(ServerSpec.from_mapping({**spec, "attention_backend": "flashinfer"}), log) == []
    (told,) = downgrades(ServerSpec.from_mapping({**spec, "attention_backend": "triton"}), log)
    assert "the server runs with FLASHINFER (its log: (Worker_TP0 pid=1) INFO 08-14 23:43:13 [cuda.py:1] Using" in told


@pytest.mark.parametrize(
    ("args", "runs"),
    [
        ("disable_cuda_graph=False, attention_backend='triton'", "on"),
        ("disable_cuda_graph=True, attention_backend='triton'", "off"),
        ("cuda_graph_backend_decode='disabled', disable_cuda_graph=False", "off"),
        ("cuda_graph_backend_decode='full', disable_cuda_graph=False", "on"),
        ("cuda_graph_backend_decode=None, disable_cuda_graph=False", None),  # its default may be either
        (
            "'cuda_graph_config': {'decode': {'backend': 'full', 'max_bs': 1}, 'prefill': {'backend': 'disabled'}}, "
            "'cuda_graph_backend_decode': None, 'disable_cuda_graph': False",
            "on",
        ),
        (
            "'cuda_graph_config': {'decode': {'backend': 'disabled', 'max_bs': 1}}, "
            "'cuda_graph_backend_decode': None, 'disable_cuda_graph': False",
            "off",
        ),
    ],
)
def test_graphs_of_sglang_by_version(args: str, runs: str | None) -> None:
    log = f"[2026-11-29 17:27:24] server_args=ServerArgs({args})\n".encode()
    for wanted in ("on", "off"):
        spec = ServerSpec.from_mapping({"engine": "sglang", "model": "m", "cuda_graph": wanted})
        assert len(downgrades(spec, log)) == (runs is not None and runs != wanted), (wanted, args)


def test_prefill_and_decode_have_backends_of_their_own() -> None:
    log = b"[x] server_args=ServerArgs(attention_backend='triton', decode_attention_backend='fa3', x=1)\n"
    spec = {"engine": "sglang", "model": "m"}
    kept = ServerSpec.from_mapping({**spec, "attention_backend": {"triton": {"decode": "fa3"}}})
    assert downgrades(kept, log) == []
    lost = ServerSpec.from_mapping({**spec, "attention_backend": {"triton": {"decode": "flashmla"}}})
    assert "attention_backend (decode) was to be flashmla, the server runs with fa3" in downgrades(lost, log)[0]


def test_no_healthy_server_is_refused() -> None:
    """Every real log against what its own command line asked for."""
    asked = {
        "sglang-0.5.12": {"attention_backend": "triton", "sampling_backend": "pytorch"},
        "sglang-0.5.23": {"attention_backend": "torch_native", "overlap": "off", "cuda_graph": "off"},
        "vllm-0.24": {"attention_backend": "triton_attn", "cuda_graph": "on", "custom_all_reduce": "off"},
        "vllm-0.32": {"cuda_graph": "off", "kv_cache_dtype": "auto"},
    }
    for log in sorted(path.name for path in LOGS.glob("*.log")):
        (axes,) = [axes for name, axes in asked.items() if log.startswith(name)]
        decode = next((name for name in ("eagle3", "ngram") if name in log), None)
        axes = {**axes, **({"spec_decode": decode} if decode else {})}
        environment = {"NCCL_DEBUG": "INFO", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
        spec = ServerSpec.from_mapping({"engine": log.partition("-")[0], "model": "m", "axes": axes})
        assert downgrades(spec, (LOGS / log).read_bytes(), environment) == [], log


def test_silence_proves_nothing() -> None:
    for engine in ("sglang", "vllm", "command"):
        spec = ServerSpec.from_mapping({"engine": engine, "model": "m", "cuda_graph": "off", "attention_backend": "x"})
        assert downgrades(spec, b"") == []
        assert downgrades(spec, b"\xff\x00 nothing of this\n" * 1000) == []
