"""Drafts that cannot fit their target are refused from the two config.json files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpuserve.engines.drafter import check_draft, check_draft_attention
from pytest_gpuserve.errors import SpecError
from pytest_gpuserve.spec import AxisValue, ServerSpec

TARGET = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "vocab_size": 128256}
EAGLE3 = {**TARGET, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}


@pytest.fixture
def spec(tmp_path: Path) -> ServerSpec:
    write(tmp_path / "target", TARGET)
    return ServerSpec("sglang", model=str(tmp_path / "target"))


def write(folder: Path, config: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("eagle3", EAGLE3),
        (
            "eagle3",
            {**EAGLE3, "architectures": ["Eagle3LlamaForCausalLM"], "hidden_size": 1024, "target_hidden_size": 4096},
        ),
        (
            "eagle3",  # the speculators library keeps the layer's own numbers one level down
            {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "draft_vocab_size": 32000,
                "transformer_layer_config": {"hidden_size": 4096, "vocab_size": 128256},
            },
        ),
        ("eagle", {**TARGET, "architectures": ["LlamaForCausalLMEagle"]}),
        ("draft_model", {**TARGET, "hidden_size": 512}),
        ("mtp", TARGET),
        ("eagle3", {"architectures": ["LlamaForCausalLMEagle3"]}),
    ],
)
def test_drafts_that_fit(spec: ServerSpec, tmp_path: Path, method: str, config: dict[str, object]) -> None:
    check_draft(spec, method, write(tmp_path / "draft", config))


@pytest.mark.parametrize(
    ("method", "config", "error"),
    [
        ("eagle3", {**EAGLE3, "hidden_size": 5120}, "hidden size of 5120, the target has 4096"),
        ("eagle3", {**EAGLE3, "vocab_size": 151936}, "vocabulary of 151936, the target has 128256"),
        ("draft_model", {**TARGET, "vocab_size": 151936}, "vocabulary of 151936"),
        ("eagle", EAGLE3, r"is an EAGLE-3 head .* says eagle\. Write eagle3"),
        ("eagle3", {**TARGET, "architectures": ["LlamaForCausalLMEagle"]}, r"is an EAGLE head .*Write eagle "),
        ("eagle3", TARGET, r"no EAGLE head: its config.json says \['LlamaForCausalLM'\]"),
        ("eagle3", ["a list"], "has no readable config.json"),
    ],
)
def test_drafts_that_cannot_fit(spec: ServerSpec, tmp_path: Path, method: str, config: object, error: str) -> None:
    with pytest.raises(SpecError, match=error):
        check_draft(spec, method, write(tmp_path / "draft", config))


def test_a_multimodal_target(tmp_path: Path) -> None:
    target = write(tmp_path / "target", {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": TARGET})
    spec = ServerSpec("sglang", model=target)
    check_draft(spec, "eagle3", write(tmp_path / "draft", EAGLE3))
    with pytest.raises(SpecError, match="hidden size"):
        check_draft(spec, "eagle3", write(tmp_path / "draft", {**EAGLE3, "hidden_size": 1}))


def test_a_folder_without_a_configuration(spec: ServerSpec, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    with pytest.raises(SpecError, match="it is no model"):
        check_draft(spec, "eagle3", str(tmp_path / "draft"))


def test_hub_ids_are_the_engines_business(spec: ServerSpec, tmp_path: Path) -> None:
    check_draft(spec, "eagle3", "org/draft")
    check_draft(ServerSpec("sglang", model="org/target"), "eagle3", write(tmp_path / "draft", TARGET))


def test_a_backend_that_the_draft_cannot_inherit(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft", EAGLE3)
    spec = ServerSpec("sglang", model="m", axes=(("attention_backend", AxisValue("trtllm_mla")),))
    with pytest.raises(SpecError, match=r"inherit attention_backend trtllm_mla.*draft_attention_backend"):
        check_draft_attention(spec, draft, None)
    check_draft_attention(spec, draft, "trtllm_mha")
    check_draft_attention(spec, write(tmp_path / "mla", {**EAGLE3, "kv_lora_rank": 512}), None)
    check_draft_attention(ServerSpec("sglang", model="m"), draft, None)
