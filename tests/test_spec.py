"""ServerSpec: what makes two servers the same, ids, traits, and what a mark may say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pytest_gpuserve.errors import SpecError
from pytest_gpuserve.spec import AxisValue, ServerSpec, merge

EAGLE3 = {"eagle3": {"draft_model": "/models/draft", "num_steps": 3}}


def test_a_spec_survives_json() -> None:
    spec = ServerSpec.from_mapping(
        {
            "engine": "sglang",
            "model": "/models/m",
            "tp": 8,
            "spec_decode": EAGLE3,
            "cuda_graph": False,
            "args": {"--trust-remote-code": True, "--mem-fraction-static": 0.8},
            "env": {"NCCL_DEBUG": "INFO"},
        }
    )
    again = ServerSpec.from_mapping(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.key == spec.key


def test_id_and_traits() -> None:
    spec = ServerSpec.from_mapping(
        {
            "engine": "sglang",
            "tp": 8,
            "axes": {"attention_backend": "triton", "spec_decode": EAGLE3, "cuda_graph": "off"},
        }
    )
    assert spec.id == "sglang-tp8-eagle3-cuda_graph_off-triton"
    assert spec.traits == {"eagle3", "cuda_graph_off", "attn_triton"}
    assert ServerSpec("vllm").traits == {"spec_base"}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("python3", "-m", "my.server", "--port", "{port}"), "my.server"),
        (("{python}", "/srv/serve_it.py", "{port}"), "serve_it"),
        (("env", "A=/b/c", "./bin/llama-server", "--port={port}"), "llama_server"),
        (("/usr/bin/python3.12", "-c", "import x", "{port}"), "python3.12"),
        (("B=1", "bash", "run.sh", "{port}"), "run"),
    ],
)
def test_a_command_is_told_by_its_program_and_how_it_is_called(words: tuple[str, ...], name: str) -> None:
    spec = ServerSpec("command", command=words)
    assert re.fullmatch(rf"command-tp1-{re.escape(name)}-[0-9a-f]{{4}}", spec.id)
    assert spec.id == ServerSpec("command", command=words).id
    others = [ServerSpec("command", command=(*words, "--more")), ServerSpec("command", command=words, args=(("a", 1),))]
    assert len({spec.id, *(other.id for other in others)}) == 3
    assert ServerSpec("sim", tp=2, command=words).id == "sim-tp2"  # a known engine says it


def test_order_of_axes_and_of_keys_makes_no_other_server() -> None:
    one = {"engine": "sim", "axes": {"cuda_graph": "on", "spec_decode": "base"}, "args": {"a": 1, "b": 2}}
    two = {"args": {"b": 2, "a": 1}, "spec_decode": "base", "cuda_graph": True, "engine": "sim"}
    assert ServerSpec.from_mapping(one).key == ServerSpec.from_mapping(two).key


@pytest.mark.parametrize(
    "change",
    [{"tp": 2}, {"model": "m"}, {"env": {"A": "1"}}, {"args": {"x": None}}, {"ready": "/r"}, {"uses_gpus": True}],
)
def test_whatever_is_launched_makes_another_server(change: dict[str, object]) -> None:
    assert ServerSpec.from_mapping({"engine": "sim", **change}).key != ServerSpec("sim").key


def test_paths_are_taken_as_text(tmp_path: Path) -> None:
    value = AxisValue.parse("spec_decode", {"eagle3": {"draft_model": tmp_path}})
    assert value.detail["draft_model"] == str(tmp_path)
    assert AxisValue.parse("model", tmp_path).name == str(tmp_path)
    assert ServerSpec.from_mapping({"engine": "sim", "model": tmp_path}).model == str(tmp_path)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"engine": "sim", "atention_backend": "triton"}, "atention_backend"),
        ({}, "engine"),
        ({"engine": "sim", "tp": 0}, "tp"),
        ({"engine": "sim", "tp": True}, "tp"),
        ({"engine": "sim", "command": "run me"}, "command"),
        ({"engine": "sim", "args": ["--x"]}, "args"),
        ({"engine": "sglang", "args": {"--port": 30000}}, "'--port'.*server.port"),
        ({"engine": "vllm", "args": {"port": "8000"}}, "'port'.*Take it out"),
        ({"engine": "sim", "env": {"A=B": "1"}}, "'A=B'"),
        ({"engine": "sim", "env": {"A": "b\0c"}}, "NUL"),
        ({"engine": "command", "command": ["run", "a\0"]}, "NUL"),
        ({"engine": "sim", "args": {"log-level": "a\0"}}, r"args has 'a\\x00': NUL"),
        ({"engine": "sim", "args": {"log-level": "\ud800"}}, r"args has '\\ud800'"),
        ({"engine": "sim", "python": "py\0"}, "python has"),
        ({"engine": "sim", "model": "\ud800"}, "model has"),
        ({"engine": "sim", "env": {"": "1"}}, "env has the name ''"),
        ({"engine": "sim", "cuda_graph": 1.5}, "cuda_graph"),
        ({"engine": "sim", "axes": ["cuda_graph"]}, "axes"),
    ],
)
def test_what_cannot_be_is_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        ServerSpec.from_mapping(values)


def test_layers_replace_scalars_and_merge_mappings() -> None:
    merged = merge({"tp": 8, "env": {"A": "1", "B": "1"}}, {"tp": 4, "env": {"B": "2"}})
    assert merged == {"tp": 4, "env": {"A": "1", "B": "2"}}
