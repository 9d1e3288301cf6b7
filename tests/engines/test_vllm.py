"""vLLM's command lines by version, its processes and its ready probe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.engines.base import Launch, ProcessRole, Rank
from pytest_gpuserve.errors import EngineError, SpecError
from pytest_gpuserve.spec import AXES, ServerSpec

Installs = Callable[[str], Any]

ENGINE = get_engine("vllm")


def launch(fake: Any, **values: object) -> Launch:
    env = {**fake.env, **values.pop("env", {})}  # type: ignore[dict-item]
    spec = ServerSpec.from_mapping({"engine": "vllm", "model": "org/tiny", "env": env, **values})
    return ENGINE.launch(spec, host="127.0.0.1", port=8100, python=fake.python)


def rest(made: Launch) -> list[str]:
    """What comes after the flags that every launch has."""
    return list(made.argv[made.argv.index("--tensor-parallel-size") + 2 :])


def test_a_plain_launch_by_the_script(installs: ModuleType, tmp_path: Path) -> None:
    fake = installs.vllm(tmp_path)
    assert launch(fake, tp=2).key_variable == "VLLM_API_KEY"
    assert launch(fake, tp=2).argv == (
        *(fake.python, str(tmp_path / "bin" / "vllm"), "serve", "org/tiny", "--served-model-name", "org/tiny"),
        *("--host", "127.0.0.1", "--port", "8100", "--tensor-parallel-size", "2"),
    )


def test_a_plain_launch_by_the_module(installs: ModuleType, tmp_path: Path) -> None:
    fake = installs.vllm(tmp_path, script=False)
    assert launch(fake).argv[:5] == (fake.python, "-m", "vllm.entrypoints.cli.main", "serve", "org/tiny")


def test_a_folder_in_the_working_directory_does_not_hide_the_install(installs: ModuleType, tmp_path: Path) -> None:
    """Tests run in vLLM's own checkout, whose vllm/ is not built."""
    fake = installs.vllm(tmp_path)
    checkout = tmp_path / "checkout"
    (checkout / "vllm").mkdir(parents=True)
    (checkout / "vllm" / "__init__.py").write_text("raise ImportError('not built')")
    with pytest.raises(EngineError, match=r"Legal values of this install: flash_attn,"):
        launch(fake, cwd=str(checkout), attention_backend="nope")


def test_every_axis_is_known() -> None:
    assert tuple(ENGINE.axes) == AXES


@pytest.mark.parametrize("version", ["0.12.0", "0.16.0", "0.32.0"])
@pytest.mark.parametrize(
    ("value", "mode"),
    [("off", "NONE"), ("decode_only", "FULL_DECODE_ONLY"), ("piecewise", "PIECEWISE"), ("full", "FULL")],
)
def test_cuda_graph_is_the_mode_alone(vllm_of: Installs, version: str, value: str, mode: str) -> None:
    assert rest(launch(vllm_of(version), cuda_graph=value)) == [
        *("--compilation-config", json.dumps({"cudagraph_mode": mode}))
    ]


def test_cuda_graph_on_is_the_default(vllm_of: Installs) -> None:
    assert rest(launch(vllm_of("0.32.0"), cuda_graph="on")) == []


def test_cuda_graph_joins_the_users_own_compilation_config(vllm_of: Installs) -> None:
    fake = vllm_of("0.32.0")
    made = rest(launch(fake, cuda_graph="off", args={"-cc": '{"mode": 3}', "max-model-len": 256}))
    assert made == ["--compilation-config", '{"cudagraph_mode": "NONE", "mode": 3}', "--max-model-len", "256"]
    with pytest.raises(SpecError, match="args -cc must be JSON"):
        launch(fake, cuda_graph="off", args={"-cc": "mode=3"})


def test_cuda_graph_that_the_source_lacks(vllm_of: Installs) -> None:
    with pytest.raises(EngineError, match=r"'full_and_piecewise' .*: on, off, decode_only, piecewise, full\."):
        launch(vllm_of("0.32.0"), cuda_graph="full_and_piecewise")


def test_attention_backend_by_flag_and_by_variable(installs: ModuleType, tmp_path: Path) -> None:
    for number, version in enumerate(("0.12.0", "0.16.0", "0.32.0")):
        (tmp_path / str(number)).mkdir()
        made = launch(installs.vllm(tmp_path / str(number), version), attention_backend="triton")
        by_flag = version != "0.12.0"
        assert rest(made) == (["--attention-backend", "TRITON_ATTN"] if by_flag else [])
        assert made.env.get("VLLM_ATTENTION_BACKEND") == (None if by_flag else "TRITON_ATTN")


def test_attention_backend_that_the_install_lacks(vllm_of: Installs) -> None:
    error = r"'flashmla' with vllm 0\.32\.0\. .*: flash_attn, triton_attn, flashinfer, cpu_attn\."
    with pytest.raises(EngineError, match=error):
        launch(vllm_of("0.32.0"), attention_backend="flashmla")


def test_attention_backend_has_no_split(vllm_of: Installs) -> None:
    with pytest.raises(EngineError, match="no details with vllm"):
        launch(vllm_of("0.32.0"), attention_backend={"flash_attn": {"decode": "triton_attn"}})


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"custom_all_reduce": "off"}, ["--disable-custom-all-reduce"]),
        ({"overlap": "off"}, ["--no-async-scheduling"]),
        ({"overlap": "on", "custom_all_reduce": "on"}, ["--async-scheduling"]),
        ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype", "fp8"]),
        ({"moe_runner": "triton"}, ["--moe-backend", "triton"]),
        ({"attention_backend": "auto", "spec_decode": "base"}, []),
    ],
)
def test_axes(vllm_of: Installs, axes: dict[str, object], expected: list[str]) -> None:
    assert rest(launch(vllm_of("0.32.0"), axes=axes)) == expected


def test_axes_of_the_environment(vllm_of: Installs, cache_home: Path) -> None:
    axes = {"nccl_p2p": "off", "log_level": "debug", "sampling_backend": "pytorch", "jit_cache": "warm"}
    env = launch(vllm_of("0.32.0"), axes=axes).env
    assert env["NCCL_P2P_DISABLE"] == "1"
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert str(env["VLLM_CACHE_ROOT"]).startswith(str(cache_home / "gpuserve" / "jit" / "warm-vllm-0.32.0-"))


@pytest.mark.parametrize(
    ("value", "config"),
    [
        ("ngram", {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "method": "ngram"}),
        (
            {"ngram": {"num_steps": 5, "prompt_lookup_max": 2}},
            {"num_speculative_tokens": 5, "prompt_lookup_max": 2, "method": "ngram"},
        ),
        (
            {"eagle3": {"draft_model": "org/draft", "num_steps": 3, "topk": 1, "num_draft_tokens": 4, "draft_tp": 2}},
            {"method": "eagle3", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2, "model": "org/draft"},
        ),
        (
            {"eagle": {"draft_model": "org/draft", "num_draft_tokens": 4, "draft_attention_backend": "triton"}},
            {"method": "eagle", "num_speculative_tokens": 3, "attention_backend": "TRITON_ATTN", "model": "org/draft"},
        ),
        (
            {"mtp": {"num_speculative_tokens": 1, "enforce_eager": True}},
            {"method": "mtp", "enforce_eager": True, "num_speculative_tokens": 1},
        ),
    ],
)
def test_spec_decode(vllm_of: Installs, value: object, config: dict[str, object]) -> None:
    flag, text = rest(launch(vllm_of("0.32.0"), tp=2, spec_decode=value))
    assert flag == "--speculative-config"
    assert json.loads(text) == config


@pytest.mark.parametrize(
    ("version", "values", "error"),
    [
        ("0.32.0", {"spec_decode": "eagel"}, "spec_decode cannot be 'eagel' with vllm 0.32.0.*eagle3"),
        ("0.32.0", {"spec_decode": {"eagle3": {"draft_model": "a/b", "topk": 4}}}, "topk must be 1"),
        (
            "0.32.0",
            {"spec_decode": {"eagle3": {"draft_model": "a/b", "draft_tp": 2}}, "tp": 4},
            r"must be 1 or 4 \(tp\)",
        ),
        ("0.16.0", {"moe_runner": "triton"}, "vllm 0.16.0 has no flag --moe-backend, so axis moe_runner cannot be"),
        ("0.32.0", {"sampling_backend": "cudnn"}, "sampling_backend cannot be 'cudnn' .*: flashinfer, pytorch"),
        (
            "0.32.0",
            {"log_level": "trace"},
            "log_level cannot be 'trace' with vllm 0.32.0.*: debug, info, warning, error",
        ),
        (
            "0.32.0",
            {"spec_decode": {"eagle": {"draft_model": "a/b", "draft_attention_backend": "fa3"}}},
            r"draft_attention_backend\) cannot be 'fa3' .*: flash_attn, triton_attn",
        ),
        ("0.32.0", {"args": {"max-model": 4}}, "no flag --max-model: .*--max-model-len"),
    ],
)
def test_what_this_install_cannot_express(
    vllm_of: Installs, version: str, values: dict[str, object], error: str
) -> None:
    with pytest.raises(EngineError, match=error):
        launch(vllm_of(version), **values)


def test_a_draft_s_own_attention_needs_a_version_that_has_it(installs: ModuleType, tmp_path: Path) -> None:
    fake = installs.vllm(tmp_path, "0.32.0")
    draft = {"eagle": {"draft_model": "a/b", "num_steps": 3, "draft_attention_backend": "triton"}}
    source = tmp_path / "site" / "vllm" / "config" / "speculative.py"
    source.write_text(
        "class SpeculativeConfig:\n    method: str | None = None\n    attention_backend: Backend | None = None\n"
    )
    assert '"attention_backend": "TRITON_ATTN"' in rest(launch(fake, spec_decode=draft))[1]
    source.write_text("class SpeculativeConfig:\n    method: str | None = None\n")
    with pytest.raises(EngineError, match="has no attention backend of the draft's own: take draft_attention_backend"):
        launch(fake, spec_decode=draft)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"model": None}, "vllm needs a model"),
        ({"model": "/no/such"}, "model '/no/such' does not exist"),
        ({"spec_decode": "eagle3"}, "eagle3 needs a draft"),
        ({"spec_decode": {"eagle": {"draft_model": "./none"}}}, "draft_model './none' does not exist"),
    ],
)
def test_specs_that_cannot_be(vllm_of: Installs, values: dict[str, object], error: str) -> None:
    with pytest.raises(SpecError, match=error):
        launch(vllm_of("0.32.0"), **values)


def test_ready_and_the_served_name() -> None:
    spec = ServerSpec.from_mapping({"engine": "vllm", "model": "/m/x", "args": {"--served-model-name": "tiny other"}})
    assert ENGINE.served_model(spec) == "tiny"
    probe = ENGINE.ready(spec)
    assert (probe.path, probe.generate_path) == ("/health", "/v1/completions")
    assert probe.generate == {"model": "tiny", "prompt": "0", "max_tokens": 1, "temperature": 0}
    assert ENGINE.ready(ServerSpec("vllm", model="m", args=(("--runner", "pooling"),))).generate is None


def test_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ("python", "vllm", "serve", "m", "--tensor-parallel-size", "2")
    assert ENGINE.own_timeout(Launch(two)) == 300.0
    assert ENGINE.own_timeout(Launch(two, {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60"})) == 60.0
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "90")
    assert ENGINE.own_timeout(Launch(two)) == 90.0
    assert ENGINE.own_timeout(Launch((*two[:-1], "1"))) is None


@pytest.mark.parametrize(
    ("cmdline", "comm", "role"),
    [
        (["VLLM::EngineCore"], "VLLM::EngineCor", ProcessRole("engine_core")),
        (["VLLM::EngineCore_DP0"], "", ProcessRole("engine_core", Rank(dp=0))),
        (["VLLM::Worker"], "", ProcessRole("worker")),
        (["VLLM::Worker_TP1"], "VLLM::Worker_TP", ProcessRole("worker", Rank(tp=1))),
        (["VLLM::Worker_DP0_TP1_EP1"], "", ProcessRole("worker", Rank(tp=1, dp=0, ep=1))),
        (["VLLM::Worker_PP1_PCP0_TP0_DCP1_EP3"], "", ProcessRole("worker", Rank(0, 1, None, 3))),
        (["CELL7::Worker_TP3"], "", ProcessRole("worker", Rank(tp=3))),
        (["VLLM::APIServer_1"], "", ProcessRole("api")),
        (["VLLM::DPCoordinator"], "", ProcessRole("other")),
        ([], "VLLM::EngineCor", ProcessRole("engine_core")),
        ([], "VLLM::Worker_TP", ProcessRole("worker")),
        (["/v/bin/python", "/v/bin/vllm", "serve", "m"], "python", ProcessRole("api")),
        (["python", "-m", "vllm.entrypoints.cli.main", "serve", "m"], "python", ProcessRole("api")),
        (["python", "-m", "vllm.entrypoints.openai.api_server"], "python", ProcessRole("api")),
        (["python", "-c", "from multiprocessing.resource_tracker import main;main(31)"], "", ProcessRole("helper")),
        (["python", "-c", "from multiprocessing.forkserver import main; main()"], "", ProcessRole("helper")),
        (["cicc"], "cicc", ProcessRole("compiler")),
        (["sglang::scheduler_TP0"], "", None),
        (["python", "vllm/benchmark.py"], "python", None),
    ],
)
def test_roles(cmdline: list[str], comm: str, role: ProcessRole | None) -> None:
    assert ENGINE.process_role(cmdline, comm) == role
