"""Drafts that cannot fit their target are refused from the two config.json files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpuserve.engines.drafter import check_draft, check_draft_attention, check_draft_class, check_draft_tokens
from pytest_gpuserve.engines.flags import Install
from pytest_gpuserve.errors import EngineError, SpecError
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


def test_a_head_that_this_version_has_no_class_for(
    spec: ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang issue 25673: Kimi's head with latent attention on a version before it."""
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (models / "llama_eagle3.py").write_text("class LlamaForCausalLMEagle3(Llama):\n    pass\n")
    (models / "llama.py").write_text("class Llama:\n    pass\n")
    install = Install("sglang", "0.5.9", str(tmp_path / "sglang"), {})
    llama = write(tmp_path / "llama", EAGLE3)
    kimi = write(tmp_path / "kimi", {**EAGLE3, "architectures": ["Eagle3DeepseekV2ForCausalLM"]})
    check_draft_class(spec, llama, install, "srt/models")
    check_draft_class(spec, "org/on-the-hub", install, "srt/models")
    with pytest.raises(
        EngineError, match=r"sglang 0.5.9 has no model class for .* Eagle3DeepseekV2.*: LlamaForCausalLME"
    ):
        check_draft_class(spec, kimi, install, "srt/models")
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "mine")
    check_draft_class(spec, kimi, install, "srt/models")
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE")
    (models / "kimi_eagle3.py").write_text("class Eagle3DeepseekV2ForCausalLM(nn.Module):\n    pass\n")
    check_draft_class(spec, kimi, install, "srt/models")
    check_draft_class(spec, kimi, install, "another/place")


def test_a_map_of_tokens_that_the_engine_has_no_place_for(tmp_path, spec):
    """vLLM 0.32: "no module or parameter named 'draft_id_to_target_id'", once the target has been loaded."""
    models = tmp_path / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    install = Install("vllm", "0.32.0", str(tmp_path / "vllm"), {})
    where = "model_executor/models/llama_eagle3.py"

    def head(name: str, tensors: dict, **config) -> str:
        folder = write(tmp_path / name, {**EAGLE3, **config})
        header = json.dumps(tensors).encode()
        Path(folder, "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        return folder

    whole = head("whole", {"fc.weight": {}, "d2t": {}}, draft_vocab_size=TARGET["vocab_size"])
    check_draft_tokens(spec, whole, install, where)  # a class without the special case
    (models / "llama_eagle3.py").write_text("        else:\n            self.draft_id_to_target_id = None\n")
    with pytest.raises(EngineError, match=r"carries a map of its tokens \(d2t\).*vllm 0.32.0 has no place for it"):
        check_draft_tokens(spec, whole, install, where)
    with pytest.raises(EngineError, match="d2t"):  # left out: as large as the target's
        check_draft_tokens(spec, head("silent", {"d2t": {}}, draft_vocab_size=None), install, where)
    check_draft_tokens(spec, head("reduced", {"d2t": {}}), install, where)
    check_draft_tokens(spec, head("bare", {"fc.weight": {}}, draft_vocab_size=TARGET["vocab_size"]), install, where)
    check_draft_tokens(spec, "org/on-the-hub", install, where)
    Path(whole, "model.safetensors").write_bytes(b"\xff" * 64)
    check_draft_tokens(spec, whole, install, where)
