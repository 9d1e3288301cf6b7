"""Whether a draft model fits its target, from the two config.json files: a second instead of a load of minutes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .. import foreign
from ..errors import EngineError, SpecError
from ..home import expanded
from ..spec import ServerSpec
from .flags import Install

MLA_BACKENDS: Final = frozenset({"trtllm_mla", "cutlass_mla", "flashmla", "cutedsl_mla", "tokenspeed_mla"})
"""SGLang attention backends that serve only models with latent attention (``kv_lora_rank``)."""

_HEADS = ("eagle", "eagle3")
_HEADER: Final = 100_000_000
"""Bytes of the longest header that the safetensors library accepts."""


def check_draft(spec: ServerSpec, method: str, draft: str) -> None:
    """Compare the configurations of ``spec.model`` and its draft, where both are local folders.

    ``method`` is the algorithm in small letters. Hub ids are left to the engine: nothing is downloaded.

    Raises:
        SpecError: they cannot work together, or the draft has no readable configuration.
    """
    base = Path(spec.cwd or "")
    target_folder, draft_folder = base / expanded(spec.model or ""), base / expanded(draft)
    if not spec.model or not (target_folder / "config.json").is_file() or not draft_folder.is_dir():
        return
    target, outer = _config(target_folder), _config(draft_folder)
    config = {**outer, **outer.get("transformer_layer_config", {})}  # the format of the speculators library
    _same(method, "vocabulary", target.get("vocab_size"), outer.get("target_vocab_size") or config.get("vocab_size"))
    if method not in _HEADS:
        return
    names = " ".join(map(str, outer.get("architectures") or ())).lower()
    third = "eagle3" in names or "draft_vocab_size" in outer
    if "eagle" in names or "speculators_model_type" in outer:
        if third != (method == "eagle3"):
            kind = "EAGLE-3" if third else "EAGLE"
            raise SpecError(
                f"draft_model is an {kind} head ({outer.get('architectures')}), but spec_decode says {method}. Write "
                f"{'eagle3' if third else 'eagle'} in the mark, or name another draft."
            )
    elif not third:
        raise SpecError(
            f"draft_model is no EAGLE head: its config.json says {outer.get('architectures')}. Name a head that was "
            f"trained for this target, or use another spec_decode."
        )
    width = outer.get("target_hidden_size") or config.get("target_hidden_size") or config.get("hidden_size")
    _same(method, "hidden size", target.get("hidden_size"), width)


def check_draft_attention(spec: ServerSpec, draft: str, own: object) -> None:
    """A draft that names no backend of its own (``own``) runs on the target's, which may serve only latent attention.

    SGLang issue 23490: AttributeError ``kv_lora_rank`` after the target has been loaded.

    Raises:
        SpecError: the draft has no latent attention and the target's backend serves nothing else.
    """
    axis = spec.axis("attention_backend")
    folder = Path(spec.cwd or "") / expanded(draft)
    if own or axis is None or axis.name not in MLA_BACKENDS or not folder.is_dir():
        return
    if not _config(folder).get("kv_lora_rank"):
        raise SpecError(
            f"the draft would inherit attention_backend {axis.name}, which serves only models with latent attention "
            f"(MLA); this draft has none. Give it its own: draft_attention_backend in the details of spec_decode."
        )


def check_draft_class(spec: ServerSpec, draft: str, install: Install, models: str) -> None:
    """A head needs a class of its own in the engine: SGLang has one for heads with latent attention only in newer
    versions (issue 25673), and otherwise fails after the target has been loaded.

    ``models`` is the folder of the model classes, below the package.

    Raises:
        EngineError: this install has none for the draft's architecture.
    """
    folder = Path(spec.cwd or "") / expanded(draft)
    external = {**os.environ, **dict(spec.env)}.get("SGLANG_EXTERNAL_MODEL_PACKAGE")
    if external or not folder.is_dir():
        return
    wanted = [str(name) for name in _config(folder).get("architectures") or ()]
    classes: set[str] = set()
    for file in (Path(install.root) / models).glob("*.py"):
        with contextlib.suppress(OSError):
            classes |= set(re.findall(r"^class (\w+)", foreign.whole(file).decode(errors="replace"), re.MULTILINE))
    heads = sorted(name for name in classes if "Eagle" in name and "ForCausalLM" in name)
    if wanted and heads and not classes.intersection(wanted):
        raise EngineError(
            f"{install.name} has no model class for the draft's architecture {wanted[0]}. Its heads: "
            f"{', '.join(heads)}. Name another draft_model, or install a version that knows it."
        )


def check_draft_tokens(spec: ServerSpec, draft: str, install: Install, models: str) -> None:
    """A head that carries a map of its own tokens (``d2t``) where its vocabulary is as large as the target's: SGLang
    reads the map, vLLM 0.32 has no parameter for it and fails once the target has been loaded.

    ``models`` is the file of the head's class, below the package: the install itself says whether it drops the map.

    Raises:
        EngineError: this install cannot load that head.
    """
    base = Path(spec.cwd or "")
    target_folder, folder = base / expanded(spec.model or ""), base / expanded(draft)
    if not folder.is_dir() or not (target_folder / "config.json").is_file():
        return
    if "self.draft_id_to_target_id = None" not in (install.source(models) or ""):
        return
    vocabulary = _config(target_folder).get("vocab_size")
    size = _config(folder).get("draft_vocab_size") or vocabulary
    if size == vocabulary and any(name in ("d2t", "draft_id_to_target_id") for name in _tensors(folder)):
        raise EngineError(
            f"the draft carries a map of its tokens (d2t) although its vocabulary is as large as the target's "
            f"({size}): {install.name} has no place for it and fails after the target has been loaded. Remove the "
            f"tensor d2t from the draft's weights, or name another draft_model."
        )


def _tensors(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files, from their headers (8 bytes of length, then JSON)."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError, ValueError, AttributeError), foreign.opened(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length <= _HEADER:
                names |= json.loads(file.read(length)).keys()
    return names


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads(foreign.whole(folder / "config.json"))
        if not isinstance(config, dict):
            raise TypeError
    except (OSError, ValueError, TypeError):
        raise SpecError(
            f"{folder} has no readable config.json: it is no model. Correct the path in the mark."
        ) from None
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def _same(method: str, what: str, target: object, draft: object) -> None:
    if isinstance(target, int) and isinstance(draft, int) and target != draft:
        raise SpecError(
            f"the draft of spec_decode {method} was made for a {what} of {draft}, the target has {target}: they cannot "
            f"work together. Name a draft that was trained for this target."
        )
