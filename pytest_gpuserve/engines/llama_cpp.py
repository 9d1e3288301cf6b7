"""llama-cpp-python's server (0.3): one process, no /health, GGUF models. Facts: real runs of 0.3.36 on a CPU."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Final

from ..errors import EngineError, SpecError
from ..spec import AxisValue, Scalar, ServerSpec
from .arguments import illegal, known_axes, need_model, switch
from .base import PAGE_ASKED, Launch, LogGrammar, PhaseRule, ProcessRole, Rank, ReadyProbe
from .flags import Install, installed
from .kernels import Kernels
from .titles import common_role

MODULE: Final = "llama_cpp.server"
_SOURCES = ("server/__main__.py", "server/cli.py", "server/settings.py")
_KV_TYPES: Final[Mapping[str, int]] = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}
"""``ggml_type`` numbers, which --type_k and --type_v take."""

_P = re.compile

GRAMMAR: Final = LogGrammar(
    rank=_P(rb"(?!)"),  # one process, no tags: it is TP0
    rules=(
        PhaseRule(_P(rb"^llama_model_loader: loaded meta data"), "weight_load"),
        PhaseRule(_P(rb"^(?:create_tensor: loading tensor |load_tensors: )"), "weight_load", edge="progress"),
        PhaseRule(_P(rb"^llama_(?:new_)?context(?:_with_model)?: (?:constructing|n_seq_max|n_ctx )"), "kv_cache"),
        PhaseRule(_P(rb"^llama_kv_cache"), "kv_cache", edge="progress"),
        PhaseRule(_P(rb"^(?:sched_reserve: reserv|graph_reserve: )"), "warmup"),
        PhaseRule(_P(rb"INFO: +Application startup complete"), "ready", scope="server"),
        PhaseRule(_P(rb'"POST /v1/'), "serving", scope="server", after="ready"),
        PhaseRule(_P(rb"INFO: +Shutting down"), "shutdown", scope="server"),
    ),
    heartbeats=(PAGE_ASKED,),
)


class LlamaCpp:
    """The ``llama_cpp`` engine. Every flag takes a value: ``args={"n_gpu_layers": -1, "use_mmap": False}``.

    Its usual build needs no GPU, so none is leased; with one for CUDA say ``uses_gpus=True`` in the mark. ``tp`` is
    the number of GPUs: llama.cpp splits a model over all that it sees.
    """

    name = "llama_cpp"
    uses_gpus = False
    grammar = GRAMMAR
    kernels = Kernels(
        own=("llama_cpp/lib/*.so",), required={"llama_cpp": ("llama_cpp/lib/libggml-cuda.so",)}, first=("llama_cpp",)
    )
    axes: Mapping[str, Sequence[str]] = {
        "spec_decode": ("base", "ngram"),
        "cuda_graph": ("on", "off"),
        "attention_backend": ("auto", "flash_attn"),
        "kv_cache_dtype": tuple(_KV_TYPES),
    }

    def launch(self, spec: ServerSpec, *, host: str, port: int, python: str) -> Launch:
        model = need_model(spec)
        known_axes(spec, self.axes, self.name)
        module = (python, "-m", MODULE)
        install = installed(self.name, spec, python, (*module, "--help"), sources=_SOURCES, must_have="--n_ctx")
        flags: dict[str, Scalar] = {
            "--model": model,
            "--model_alias": self.served_model(spec),
            "--host": host,
            "--port": port,
        }
        env: dict[str, str | None] = {"PYTHONUNBUFFERED": "1"}
        for axis, value in spec.axes:
            if axis == "cuda_graph":
                env["GGML_CUDA_DISABLE_GRAPHS"] = None if switch(axis, value, install) else "1"
            else:
                flags.update(self._axis(axis, value, install))
        for key, given in spec.args:
            flags["--" + key.lstrip("-").replace("-", "_")] = True if given is None else given
        for flag in flags:
            _check(flag, install)
        if str(flags.get("--type_v", 1)) not in ("0", "1") and str(flags.get("--flash_attn")) not in ("True", "1"):
            raise SpecError(
                'llama.cpp keeps V quantized only with flash attention: add attention_backend="flash_attn" to the '
                "mark, or choose kv_cache_dtype f16 or f32."
            )
        words = (word for flag, setting in flags.items() for word in (flag, str(setting)))
        return Launch((*module, *words), {**env, **dict(spec.env)})

    def _axis(self, axis: str, value: AxisValue, install: Install) -> dict[str, Scalar]:
        if value.name not in self.axes[axis]:
            raise illegal(axis, value.name, self.axes[axis], install)
        if axis == "kv_cache_dtype":
            return {"--type_k": _KV_TYPES[value.name], "--type_v": _KV_TYPES[value.name]}
        if axis == "attention_backend":
            return {"--flash_attn": True} if value.name == "flash_attn" else {}
        if unknown := sorted(set(value.detail) - {"num_draft_tokens"}):
            raise SpecError(f"spec_decode has no detail {unknown[0]!r} with llama_cpp. Known: num_draft_tokens.")
        if value.name == "base":
            return {}
        draft: dict[str, Scalar] = {"--draft_model": "prompt-lookup-decoding"}
        if tokens := value.detail.get("num_draft_tokens"):
            draft["--draft_model_num_pred_tokens"] = tokens
        return draft

    def ready(self, spec: ServerSpec) -> ReadyProbe:
        """The list of models answers once the model is loaded, since that happens before the port is open."""
        body = {"prompt": "0", "max_tokens": 1, "temperature": 0}
        embeds = {key.lstrip("-"): value for key, value in spec.args}.get("embedding")
        return ReadyProbe(spec.ready or "/v1/models", generate=None if embeds else body)

    def served_model(self, spec: ServerSpec) -> str:
        named = {key.lstrip("-").replace("-", "_"): value for key, value in spec.args}.get("model_alias")
        return named if isinstance(named, str) else spec.model or ""

    def process_role(self, cmdline: Sequence[str], comm: str) -> ProcessRole | None:
        """One process does everything: it is the only rank."""
        if MODULE in cmdline[:8]:
            return ProcessRole("worker", Rank(tp=0))
        return common_role(cmdline, comm)

    def own_timeout(self, launch: Launch) -> float | None:
        return None


ENGINE: Final = LlamaCpp()


def _check(flag: str, install: Install) -> None:
    """argparse would take the beginning of a flag for the flag; what it does not know ends the server after a second.

    Raises:
        EngineError: the install has no such flag.
    """
    if not install.has(flag):
        close = difflib.get_close_matches(flag, install.flags, 3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise EngineError(f"{install.name} has no flag {flag}.{hint} Correct args in the gpuserve mark.")
