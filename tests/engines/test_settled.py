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
    first, second = downgrades(spec, log)
    assert "was to be full: CUDAGraphMode.FULL is not supported" in first
    assert "VLLM_ATTENTION_BACKEND" in second


def test_silence_proves_nothing() -> None:
    for engine in ("sglang", "vllm", "command"):
        spec = ServerSpec.from_mapping({"engine": engine, "model": "m", "cuda_graph": "off", "attention_backend": "x"})
        assert downgrades(spec, b"") == []
        assert downgrades(spec, b"\xff\x00 nothing of this\n" * 1000) == []
