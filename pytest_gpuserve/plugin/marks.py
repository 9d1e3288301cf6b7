"""The closed list of marks, registered in every session, so that ``-m`` with any of them passes --strict-markers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from ..spec import ServerSpec

ARCHITECTURES: Final = (70, 75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121)
"""Compute capabilities with a mark ``smNN``: 120 is 12.0."""

SPEC_DECODE: Final = (
    "eagle",
    "eagle3",
    "ngram",
    "mtp",
    "nextn",
    "standalone",
    "draft_model",
    "medusa",
    "mlp_speculator",
    "suffix",
    "dflash",
    "dspark",
    "uno",
)
"""Speculative decoding of SGLang 0.5.1-0.5.23 and vLLM 0.9-0.33; no speculation is ``spec_base``."""

ATTENTION: Final = tuple(
    sorted(
        {
            # SGLang 0.5.1-0.5.23, --attention-backend
            *("aiter", "ascend", "compressed", "cutedsl_mla", "cutlass_mla", "dsa", "dsv4", "dual_chunk_flash_attn"),
            *("fa3", "fa4", "flashinfer", "flashmla", "flex_attention", "hpc_ops", "intel_amx", "intel_xpu"),
            *("llada2_cfg_flashinfer", "minicpm_flashattn", "minicpm_flashinfer", "nsa", "qsa", "tokenspeed_mla"),
            *("torch_native", "triton", "trtllm_mha", "trtllm_mla", "wave"),
            # vLLM 0.9-0.33, v1/attention/backends/registry.py
            *("b12x", "cpu_attn", "flash_attn", "flash_attn_diffkv", "flash_attn_mla", "flashattn_mla"),
            *("flashinfer_mla", "flashinfer_mla_sparse", "flashinfer_mla_sparse_sm90", "flashinfer_mla_sparse_sm120"),
            *("flashmla_sparse", "rocm_aiter_fa", "rocm_aiter_mla", "rocm_aiter_unified_attn", "rocm_attn"),
            *("torch_sdpa", "tree_attn", "triton_attn", "triton_attn_diffkv", "triton_flash_attn"),
            *("triton_flashinfer", "triton_mla", "turboquant", "xformers"),
        }
    )
)
"""Attention backends with a mark ``attn_NAME``."""

TRAITS: Final = frozenset(
    {"spec_base", "cuda_graph_on", "cuda_graph_off", *SPEC_DECODE, *(f"attn_{name}" for name in ATTENTION)}
)
"""Bare marks that a test gets from its server's spec."""


_IN_FILE: pytest.StashKey[frozenset[str]] = pytest.StashKey()


def remember_file(config: pytest.Config) -> None:
    """What the configuration file declares, before any plugin adds to it: a name there is no meaning yet."""
    config.stash[_IN_FILE] = frozenset(config.getini("markers"))


def register(config: pytest.Config) -> None:
    """Declare every mark of the list."""
    for line in _lines():
        config.addinivalue_line("markers", line)


def _lines() -> list[str]:
    return [
        "gpuserve(name=None, engine=…, model=…, tp=…, args={…}, env={…}, …): the server this test wants",
        "gpuserve_matrix(axes={…}, exclude=[…], coverage='full'): one test per cell of these axes",
        "cell(engine=…, tp=…, spec_decode=…, cuda_graph=…, attention_backend=…): the server of this test (set by "
        "pytest-gpuserve; select with -m \"cell(spec_decode='eagle3')\")",
        "sm_min(N): needs GPUs of compute capability N or later (90 is 9.0)",
        "spec_base: the server runs without speculative decoding",
        "cuda_graph_on: the server runs with CUDA graphs",
        "cuda_graph_off: the server runs without CUDA graphs",
        *(f"sm{n}: needs GPUs of compute capability {n // 10}.{n % 10} exactly (several: any)" for n in ARCHITECTURES),
        *(f"{name}: the server runs speculative decoding {name}" for name in SPEC_DECODE),
        *(f"attn_{name}: the server runs attention backend {name}" for name in ATTENTION),
    ]


def add_to(item: pytest.Item, spec: ServerSpec) -> None:
    """Give a test the marks of its server: the bare traits and one ``cell``."""
    have = {mark.name for mark in item.iter_markers()}
    for trait in sorted((spec.traits & TRAITS) - have):
        item.add_marker(trait)
    axes = {axis: value.name for axis, value in spec.axes}
    cell: dict[str, object] = {"engine": spec.engine, "tp": spec.tp, "spec_decode": "base", **axes}
    if spec.model:
        cell["model"] = spec.model
    item.add_marker(pytest.mark.cell(**cell))


def names_an_architecture(item: pytest.Item) -> bool:
    """Whether a mark of the test asks for GPUs, and is ours: one of this name that another plugin, or a conftest,
    declares as well has their meaning in tests without a server of ours."""
    names = {mark.name for mark in item.iter_markers() if mark.name.startswith("sm")}
    names &= {"sm_min", *(f"sm{number}" for number in ARCHITECTURES)}
    return bool(names) and not names & _declared_by_others(item.config)


def _declared_by_others(config: pytest.Config) -> set[str]:
    known = {*config.stash.get(_IN_FILE, ()), *_lines()}
    return {re.split(r"[:(]", line)[0].strip() for line in config.getini("markers") if line not in known}


def capabilities(item: pytest.Item) -> tuple[frozenset[tuple[int, int]], tuple[int, int] | None]:
    """What the ``sm`` marks of a test ask for: exact capabilities, and the least one of ``sm_min``; any will do.

    Raises:
        pytest.UsageError: ``sm_min`` without a number.
    """
    known = {f"sm{number}": divmod(number, 10) for number in ARCHITECTURES}
    exact: set[tuple[int, int]] = set()
    least: tuple[int, int] | None = None
    for mark in item.iter_markers():
        if mark.name in known:
            exact.add(known[mark.name])
        elif mark.name == "sm_min":
            number = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else None
            if not isinstance(number, int) or number < 10:
                raise pytest.UsageError(
                    f"{item.nodeid}: sm_min takes one number such as 90 (compute capability 9.0), "
                    f"not {mark.args or mark.kwargs}."
                )
            wanted = divmod(number, 10)
            least = wanted if least is None else min(least, wanted)
    return frozenset(exact), least
