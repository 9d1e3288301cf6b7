"""llama-cpp-python's server: command lines by its own help, its log, its process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.engines.base import Launch, ProcessRole, Rank
from pytest_gpuserve.errors import EngineError, SpecError
from pytest_gpuserve.phases.reader import read_log
from pytest_gpuserve.spec import ServerSpec

DATA = Path(__file__).parent.parent / "data" / "engines"
ENGINE = get_engine("llama_cpp")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an interpreter finds a llama_cpp that prints the help of 0.3.36."""
    folder = tmp_path_factory.mktemp("llama")
    package = folder / "llama_cpp" / "server"
    package.mkdir(parents=True)
    (folder / "llama_cpp" / "__init__.py").touch()
    (package / "__init__.py").touch()
    text = DATA / "help" / "llama_cpp-0.3.36.txt"
    (package / "__main__.py").write_text(
        f"import sys\nsys.stdout.write(open({str(text)!r}, encoding='utf-8').read())\n"
    )
    info = folder / "llama_cpp_python-0.3.36.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.36\n")
    (info / "top_level.txt").write_text("llama_cpp\n")
    return folder


def spec_of(**values: object) -> ServerSpec:
    return ServerSpec.from_mapping({"engine": "llama_cpp", "model": "tiny.gguf", **values})


def launch(site: Path, **values: object) -> Launch:
    spec = spec_of(env={"PYTHONPATH": str(site), "PYTHONUTF8": "1"}, **values)
    return ENGINE.launch(spec, host="127.0.0.1", port=8100, python=sys.executable)


def test_a_plain_launch(site: Path) -> None:
    assert launch(site).argv == (
        *(sys.executable, "-m", "llama_cpp.server", "--model", "tiny.gguf", "--model_alias", "tiny.gguf"),
        *("--host", "127.0.0.1", "--port", "8100"),
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"spec_decode": "base", "attention_backend": "auto"}, ""),
        ({"spec_decode": "ngram"}, "--draft_model prompt-lookup-decoding"),
        (
            {"spec_decode": {"ngram": {"num_draft_tokens": 4}}},
            "--draft_model prompt-lookup-decoding --draft_model_num_pred_tokens 4",
        ),
        ({"attention_backend": "flash_attn"}, "--flash_attn True"),
        ({"kv_cache_dtype": "f32"}, "--type_k 0 --type_v 0"),
        (
            {"kv_cache_dtype": "q8_0", "attention_backend": "flash_attn"},
            "--flash_attn True --type_k 8 --type_v 8",
        ),
        ({"args": {"n_ctx": 256, "--n-gpu-layers": -1, "use_mmap": False, "verbose": None}}, "--n_ctx 256 "),
        ({"args": {"use_mmap": False}}, "--use_mmap False"),
        ({"attention_backend": "flash_attn", "args": {"flash-attn": False}}, "--flash_attn False"),
    ],
)
def test_axes_and_flags(site: Path, values: dict[str, object], words: str) -> None:
    argv = launch(site, **values).argv
    rest = " ".join(argv[argv.index("8100") + 1 :])
    assert sorted(words.split()) == sorted(rest.split()) if not words.endswith(" ") else words in rest + " "
    if words.endswith(" "):
        assert "--n_gpu_layers -1" in rest
        assert "--verbose True" in rest


def test_graphs_and_names(site: Path) -> None:
    assert launch(site, cuda_graph="off").env["GGML_CUDA_DISABLE_GRAPHS"] == "1"
    assert launch(site, cuda_graph="on").env["GGML_CUDA_DISABLE_GRAPHS"] is None
    assert ENGINE.served_model(spec_of(args={"model-alias": "tiny"})) == "tiny"
    assert ENGINE.served_model(spec_of()) == "tiny.gguf"
    assert launch(site, args={"model_alias": "tiny"}).argv.count("--model_alias") == 1


@pytest.mark.parametrize(
    ("values", "error", "told"),
    [
        ({"args": {"n_ct": 1}}, EngineError, "llama_cpp 0.3.36 has no flag --n_ct. Did you mean --n_ctx"),
        ({"spec_decode": "eagle3"}, EngineError, "spec_decode cannot be 'eagle3' with llama_cpp 0.3.36. Legal values"),
        ({"spec_decode": {"ngram": {"topk": 1}}}, SpecError, "no detail 'topk' with llama_cpp"),
        ({"kv_cache_dtype": "fp8"}, EngineError, "f32, f16, q4_0"),
        ({"kv_cache_dtype": "q8_0"}, SpecError, "only with flash attention"),
        ({"overlap": "on"}, EngineError, "llama_cpp has no axis overlap"),
        ({"cuda_graph": "full"}, EngineError, "Legal values of this install: on, off"),
        ({"model": "./none.gguf"}, SpecError, "does not exist on this machine"),
    ],
)
def test_what_it_cannot_do(site: Path, values: dict[str, object], error: type[Exception], told: str) -> None:
    with pytest.raises(error) as caught:
        launch(site, **values)
    assert told in str(caught.value)


def test_ready_is_the_list_of_models_and_one_token() -> None:
    probe = ENGINE.ready(spec_of())
    assert (probe.path, probe.generate_path) == ("/v1/models", "/v1/completions")
    assert probe.generate is not None
    assert probe.generate["max_tokens"] == 1
    assert ENGINE.ready(spec_of(args={"embedding": True})).generate is None
    assert ENGINE.ready(spec_of(ready="/docs")).path == "/docs"


def test_its_process() -> None:
    role = ENGINE.process_role(["/venv/bin/python", "-m", "llama_cpp.server", "--model", "m"], "python")
    assert role == ProcessRole("worker", Rank(tp=0))
    assert ENGINE.process_role(["/usr/bin/ninja"], "ninja") == ProcessRole("compiler")
    assert ENGINE.process_role(["python", "-m", "http.server"], "python") is None


def test_a_real_log() -> None:
    log = read_log(DATA / "llama_cpp-0.3.36.log", ENGINE.grammar)
    assert list(log.ranks()) == ["TP0"]
    phases = [phase for phase, _, _ in log.ranks()["TP0"].history] + [log.ranks()["TP0"].phase]
    assert phases == ["spawn", "weight_load", "kv_cache", "warmup", "ready", "serving", "shutdown"]
    assert log.heartbeats == 3
