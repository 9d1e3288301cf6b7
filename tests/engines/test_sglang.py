"""SGLang's command lines by version, its processes and its ready probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.engines.base import Launch, ProcessRole, Rank
from pytest_gpuserve.engines.sglang import ATTENTION_BACKENDS
from pytest_gpuserve.errors import EngineError, SpecError
from pytest_gpuserve.spec import AXES, ServerSpec

Installs = Callable[[str], Any]

ENGINE = get_engine("sglang")


def launch(fake: Any, **values: object) -> Launch:
    env = {**fake.env, **values.pop("env", {})}  # type: ignore[dict-item]
    spec = ServerSpec.from_mapping({"engine": "sglang", "model": "org/tiny", "env": env, **values})
    return ENGINE.launch(spec, host="127.0.0.1", port=8100, python=fake.python)


def flags(argv: tuple[str, ...]) -> dict[str, str | None]:
    """Flags and their values after the five that every launch has."""
    rest = list(argv[argv.index("--tp-size") + 2 :])
    found: dict[str, str | None] = {}
    while rest:
        name = rest.pop(0)
        assert name.startswith("--")
        found[name] = rest.pop(0) if rest and not rest[0].startswith("--") else None
    return found


def test_a_plain_launch(sglang_of: Installs) -> None:
    fake = sglang_of("0.5.23")
    made = launch(fake, tp=8, env={"NCCL_DEBUG": "INFO"})
    assert made.argv == (
        *(fake.python, "-m", "sglang.launch_server", "--model-path", "org/tiny", "--served-model-name", "org/tiny"),
        *("--host", "127.0.0.1", "--port", "8100", "--tp-size", "8"),
    )
    assert made.env["PYTHONUNBUFFERED"] == "1"
    assert made.env["NCCL_DEBUG"] == "INFO"
    assert (made.key_variable, made.key_config) == (
        None,
        "--config",
    )  # an option, so in a file of them
    assert launch(fake, args={"config": "mine.yaml"}).key_config is None  # it takes one file


def test_every_axis_is_known() -> None:
    assert tuple(ENGINE.axes) == AXES


@pytest.mark.parametrize(
    ("version", "value", "expected"),
    [
        ("0.5.9", "on", {}),
        ("0.5.9", "off", {"--disable-cuda-graph": None}),
        ("0.5.9", "decode_only", {}),
        ("0.5.9", "piecewise", {"--enable-piecewise-cuda-graph": None}),
        ("0.5.12", "on", {}),
        ("0.5.12", "off", {"--disable-cuda-graph": None, "--disable-piecewise-cuda-graph": None}),
        ("0.5.12", "decode_only", {"--disable-piecewise-cuda-graph": None}),
        ("0.5.12", "piecewise", {}),
        ("0.5.14", "off", {"--cuda-graph-backend-decode": "disabled", "--cuda-graph-backend-prefill": "disabled"}),
        ("0.5.14", "piecewise", {"--cuda-graph-backend-prefill": "tc_piecewise"}),
        ("0.5.20", "decode_only", {"--cuda-graph-backend-prefill": "disabled"}),
        ("0.5.20", "full", {"--cuda-graph-backend-decode": "full", "--cuda-graph-backend-prefill": "full"}),
        ("0.5.23", "on", {}),
        ("0.5.23", "off", {"--cuda-graph-backend-decode": "disabled", "--cuda-graph-backend-prefill": "disabled"}),
        (
            "0.5.23",
            "breakable",
            {"--cuda-graph-backend-decode": "breakable", "--cuda-graph-backend-prefill": "breakable"},
        ),
    ],
)
def test_cuda_graph(sglang_of: Installs, version: str, value: str, expected: Mapping[str, str | None]) -> None:
    assert flags(launch(sglang_of(version), cuda_graph=value).argv) == expected


@pytest.mark.parametrize(
    ("version", "value", "legal"),
    [
        ("0.5.9", "full", "on, off, decode_only, piecewise"),
        ("0.5.23", "piecewise", "on, off, decode_only, full, breakable"),
    ],
)
def test_cuda_graph_that_a_version_lacks(sglang_of: Installs, version: str, value: str, legal: str) -> None:
    with pytest.raises(EngineError, match=f"cuda_graph cannot be '{value}' with sglang {version}.*install: {legal}\\."):
        launch(sglang_of(version), cuda_graph=value)


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"attention_backend": "triton"}, {"--attention-backend": "triton"}),
        ({"attention_backend": "auto"}, {}),
        (
            {"attention_backend": {"fa3": {"prefill": "fa3", "decode": "flashinfer"}}},
            {
                "--attention-backend": "fa3",
                "--prefill-attention-backend": "fa3",
                "--decode-attention-backend": "flashinfer",
            },
        ),
        ({"custom_all_reduce": False}, {"--disable-custom-all-reduce": None}),
        ({"custom_all_reduce": "on", "overlap": "on"}, {}),
        ({"overlap": "off"}, {"--disable-overlap-schedule": None}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"--kv-cache-dtype": "fp8_e4m3"}),
        ({"moe_runner": "triton"}, {"--moe-runner-backend": "triton"}),
        ({"sampling_backend": "pytorch"}, {"--sampling-backend": "pytorch"}),
        ({"log_level": "DEBUG"}, {"--log-level": "debug"}),
        ({"spec_decode": "base"}, {}),
        ({"spec_decode": "mtp"}, {"--speculative-algorithm": "NEXTN"}),
        (
            {"spec_decode": {"eagle3": {"draft_model": "org/draft", "num_steps": 3}}},
            {
                "--speculative-algorithm": "EAGLE3",
                "--speculative-draft-model-path": "org/draft",
                "--speculative-num-steps": "3",
                "--speculative-eagle-topk": "1",
                "--speculative-num-draft-tokens": "4",
            },
        ),
        (
            {"spec_decode": {"eagle": {"num_draft_tokens": 64, "topk": 8, "num_steps": 5, "draft_tp": 1}}},
            {
                "--speculative-algorithm": "EAGLE",
                "--speculative-num-steps": "5",
                "--speculative-eagle-topk": "8",
                "--speculative-num-draft-tokens": "64",
            },
        ),
        (
            {"spec_decode": {"eagle": {"num_draft_tokens": 4, "draft_attention_backend": "fa3"}}},
            {
                "--speculative-algorithm": "EAGLE",
                "--speculative-num-steps": "3",
                "--speculative-eagle-topk": "1",
                "--speculative-num-draft-tokens": "4",
                "--speculative-draft-attention-backend": "fa3",
            },
        ),
        (
            {"spec_decode": {"nextn": {"draft_kv_cache_dtype": "bf16", "draft_moe_runner": "triton"}}},
            {
                "--speculative-algorithm": "NEXTN",
                "--speculative-draft-kv-cache-dtype": "bf16",
                "--speculative-moe-runner-backend": "triton",
            },
        ),
    ],
)
def test_axes(sglang_of: Installs, axes: dict[str, object], expected: dict[str, str | None]) -> None:
    assert flags(launch(sglang_of("0.5.23"), axes=axes).argv) == expected


def test_axes_of_the_environment(sglang_of: Installs, cache_home: Path) -> None:
    fake = sglang_of("0.5.23")
    assert launch(fake, nccl_p2p="off").env["NCCL_P2P_DISABLE"] == "1"
    assert launch(fake, nccl_p2p="on").env["NCCL_P2P_DISABLE"] == "0"
    assert launch(fake, nccl_p2p="off", env={"NCCL_P2P_DISABLE": "0"}).env["NCCL_P2P_DISABLE"] == "0"
    assert str(launch(fake, jit_cache="cold").env["SGLANG_CACHE_DIR"]).startswith(str(cache_home))


@pytest.mark.parametrize(
    ("version", "axes", "error"),
    [
        ("0.5.23", {"attention_backend": "cutlass_mla"}, r"attention_backend cannot be 'cutlass_mla' .*flashinfer"),
        ("0.5.23", {"attention_backend": {"fa3": {"draft": "x"}}}, "no detail 'draft'.*prefill, decode"),
        ("0.5.9", {"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype cannot be 'nvfp4' with sglang 0.5.9"),
        ("0.5.9", {"spec_decode": "dflash"}, "spec_decode cannot be 'dflash' .*: base, eagle, eagle3, nextn"),
        ("0.5.23", {"spec_decode": "eagel"}, "spec_decode cannot be 'eagel' .*eagle3"),
        ("0.5.23", {"spec_decode": {"eagle": {"steps": 3}}}, "no detail 'steps' .*num_steps"),
        ("0.5.23", {"spec_decode": {"eagle3": {"draft_model": "a/b", "draft_tp": 2}}}, r"draft_tp must be 1 \(tp\)"),
        (
            "0.5.9",
            {"spec_decode": {"nextn": {"draft_kv_cache_dtype": "bf16"}}},
            "has no flag --speculative-draft-kv-cac",
        ),
        ("0.5.23", {"log_level": "verbose"}, "log_level cannot be 'verbose' .*: debug, info, warning, error, critical"),
        ("0.5.23", {"overlap": "maybe"}, "overlap cannot be 'maybe' .*: on, off"),
        ("0.5.23", {"colour": "red"}, "sglang has no axis colour. Its axes: spec_decode, cuda_graph"),
    ],
)
def test_axes_that_cannot_be(sglang_of: Installs, version: str, axes: dict[str, object], error: str) -> None:
    with pytest.raises(EngineError, match=error):
        launch(sglang_of(version), axes=axes)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"model": None}, "sglang needs a model: add model="),
        ({"model": "/no/such/model"}, r"model '/no/such/model' does not exist on this machine"),
        ({"model": "./nothing"}, "does not exist"),
        ({"model": "~/nothing-here"}, "does not exist"),
        ({"spec_decode": "eagle3"}, "eagle3 needs a draft"),
        ({"spec_decode": {"eagle3": {"draft_model": "/no/draft"}}}, "draft_model '/no/draft' does not exist"),
        ({"spec_decode": {"eagle": {"topk": 8, "num_steps": 5}}}, "needs num_steps and num_draft_tokens"),
    ],
)
def test_specs_that_cannot_be(sglang_of: Installs, values: dict[str, object], error: str) -> None:
    with pytest.raises(SpecError, match=error):
        launch(sglang_of("0.5.23"), **values)


def test_a_local_model(sglang_of: Installs, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    fake = sglang_of("0.5.23")
    assert str(tmp_path / "models") in launch(fake, model=str(tmp_path / "models")).argv
    assert "./models" in launch(fake, model="./models", cwd=str(tmp_path)).argv


def test_a_head_without_a_class_is_refused_before_the_launch(installs: ModuleType, tmp_path: Path) -> None:
    fake = installs.sglang(tmp_path, "0.5.9")
    models = tmp_path / "site" / "sglang" / "srt" / "models"
    models.mkdir()
    (models / "llama_eagle3.py").write_text("class LlamaForCausalLMEagle3:\n    pass\n")
    draft = tmp_path / "draft"
    draft.mkdir()
    for head, error in (("LlamaForCausalLMEagle3", None), ("Eagle3DeepseekV2ForCausalLM", "no model class")):
        (draft / "config.json").write_text(f'{{"architectures": ["{head}"]}}')
        with pytest.raises(EngineError, match=error) if error else nullcontext():
            launch(fake, spec_decode={"eagle3": {"draft_model": str(draft), "num_steps": 3}})


def test_args_win_over_axes(sglang_of: Installs) -> None:
    made = launch(
        sglang_of("0.5.23"),
        attention_backend="triton",
        overlap="off",
        args={"attention-backend": "fa3", "--disable-overlap-schedule": False, "enable_metrics": True, "port": None},
    )
    assert flags(made.argv) == {"--attention-backend": "fa3", "--enable-metrics": None, "--port": None}


def test_the_served_name() -> None:
    spec = ServerSpec.from_mapping({"engine": "sglang", "model": "/m/x", "args": {"served_model_name": "tiny"}})
    assert ENGINE.served_model(spec) == "tiny"
    assert ENGINE.ready(spec).generate == {"model": "tiny", "prompt": "0", "max_tokens": 1, "temperature": 0}
    assert ENGINE.served_model(ServerSpec("sglang", model="/m/x")) == "/m/x"


def test_ready() -> None:
    assert ENGINE.ready(ServerSpec("sglang", model="m")).path == "/health"
    assert ENGINE.ready(ServerSpec("sglang", model="m", ready="/ready")).path == "/ready"
    embeds = ServerSpec("sglang", model="m", args=(("--is-embedding", True),))
    assert ENGINE.ready(embeds).generate is None


def test_own_timeout() -> None:
    assert ENGINE.own_timeout(Launch(("python", "-m", "sglang.launch_server"))) == 300.0
    assert ENGINE.own_timeout(Launch(("python", "--watchdog-timeout", "60", "--x"))) == 60.0
    assert ENGINE.own_timeout(Launch(("python", "--watchdog-timeout=90"))) == 90.0


@pytest.mark.parametrize(
    ("cmdline", "comm", "role"),
    [
        (["sglang::scheduler_TP6"], "sglang::schedul", ProcessRole("scheduler", Rank(tp=6))),
        (["sglang::scheduler_DP0_TP1_EP0"], "", ProcessRole("scheduler", Rank(tp=1, dp=0, ep=0))),
        (["sglang::scheduler_PP2_TP1"], "", ProcessRole("scheduler", Rank(tp=1, pp=2))),
        (["sglang::scheduler_DP3_PP1_ATTN_CP0_MOE_DP0_TP2_EP2"], "", ProcessRole("scheduler", Rank(2, 1, 3, 2))),
        (["sglang::scheduler"], "", ProcessRole("scheduler", Rank(tp=0))),
        ([], "sglang::schedul", ProcessRole("scheduler")),
        (["sglang::detokenizer"], "", ProcessRole("detokenizer")),
        (["sglang::data_parallel_controller"], "", ProcessRole("other")),
        (["sglang::tokenizer_worker:77"], "", ProcessRole("api")),
        (["/v/bin/python", "-m", "sglang.launch_server", "--model-path", "m"], "python", ProcessRole("api")),
        (["/v/bin/python", "/v/bin/sglang", "serve", "m"], "python", ProcessRole("api")),
        (
            ["python", "-c", "from multiprocessing.resource_tracker import main;main(7)"],
            "python",
            ProcessRole("helper"),
        ),
        (
            ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--multiprocessing-fork"],
            "python",
            ProcessRole("other"),
        ),
        (["/usr/local/cuda/bin/nvcc", "-c"], "nvcc", ProcessRole("compiler")),
        (["ptxas"], "ptxas", ProcessRole("compiler")),
        (["/usr/lib/gcc/x86_64-linux-gnu/12/cc1plus"], "cc1plus", ProcessRole("compiler")),
        (["ninja", "-v"], "ninja", ProcessRole("compiler")),
        (
            ["python", "/v/lib/site-packages/torch/_inductor/compile_worker/__main__.py", "--pickler"],
            "python",
            ProcessRole("compiler"),
        ),
        (["/v/bin/py-spy", "dump"], "py-spy", ProcessRole("helper")),
        (["/usr/bin/nginx"], "nginx", None),
        (["python", "train.py"], "python", None),
        ([], "", None),
    ],
)
def test_roles(cmdline: list[str], comm: str, role: ProcessRole | None) -> None:
    assert ENGINE.process_role(cmdline, comm) == role


def test_the_known_backends_hold_those_of_every_recorded_version(installs: ModuleType) -> None:
    from pytest_gpuserve.engines.flags import parse_help

    for path in installs.HELP.glob("sglang-*.txt"):
        assert set(parse_help(path.read_text())["--attention-backend"].choices) <= set(ATTENTION_BACKENDS)
