"""The embedded engine: ``python -m pytest_gpuserve.sim``, which plays SGLang or vLLM without a GPU."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..errors import SpecError
from ..spec import AxisValue, Scalar, ServerSpec
from . import sglang, vllm
from .arguments import known_axes
from .base import Launch, LogGrammar, PhaseRule, ProcessRole, ReadyProbe
from .features import GENERIC, Feature, Features, Remedy
from .titles import common_role

MODULE: Final = "pytest_gpuserve.sim"
DEFAULT_MODEL: Final = "sim/toy-128"
KEY_VARIABLE: Final = "GPUSERVE_SIM_API_KEY"

_DETAILS = {
    "draft_model": "--draft-model-path",
    "num_steps": "--spec-steps",
    "topk": "--spec-topk",
    "num_draft_tokens": "--spec-draft-tokens",
    "accept_rate": "--accept-rate",
}
_STARTED = rb"INFO: +Application startup complete"


def _rules() -> tuple[PhaseRule, ...]:
    """Both engines' rules. Of uvicorn's lines vLLM's mean that it is ready: those without a time stamp before them."""
    both = (*vllm.GRAMMAR.rules, *sglang.GRAMMAR.rules)
    return tuple(replace(r, pattern=re.compile(b"^" + _STARTED)) if r.pattern.pattern == _STARTED else r for r in both)


GRAMMAR: Final = LogGrammar(
    rank=re.compile(
        rb"(?:\[20\d\d-\d\d-\d\d \d\d:\d\d:\d\d|\((?:(?P<worker>Worker)|EngineCore|APIServer))"
        rb"(?:[ _]TP(?P<tp>\d{1,4}))?(?:\]| pid=(?P<pid>\d{1,10})\))"
    ),
    clock=re.compile(
        rb"(?:\[(?P<year>20\d\d)-|(?:INFO|WARNING|ERROR) )(?P<month>\d\d)-(?P<day>\d\d) "
        rb"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"
    ),
    rules=_rules(),
    heartbeats=(*sglang.GRAMMAR.heartbeats, *vllm.GRAMMAR.heartbeats),
    anchors=(*sglang.GRAMMAR.anchors, *vllm.GRAMMAR.anchors),
)


FEATURES: Final = Features(
    base=(
        *("--model-path", "--served-model-name", "--tp", "--host", "--port", "--api-key", "--flavor", "--fault"),
        *("--shards", "--context-length", "--max-running-requests", "--seed"),
        *("--quiet", "--chatter", "--*-seconds", "--*-timeout"),
    ),
    base_env=GENERIC.base_env,
    model=("--model-path",),
    tp=("--tp",),
    features=(
        Feature(
            "spec_decode",
            flags=("--spec-*", "--draft-model-path", "--accept-rate"),
            core=("--spec-decode", "--draft-model-path"),
            weight=4,
        ),
        Feature("cuda_graph", flags=("--cuda-graph",), off=("--cuda-graph", "off"), weight=4),
        Feature("attention_backend", flags=("--attention-backend",), weight=3),
        Feature("custom_all_reduce", flags=("--custom-all-reduce",), parallel=True, weight=2),
        Feature("overlap", flags=("--overlap",), weight=1.5),
        Feature("nccl", flags=("--nccl-p2p",), env=("NCCL_*",), parallel=True),
        Feature("jit_cache", flags=("--jit-cache", "--cold-compile", "--cache-dir")),
    ),
    remedies=(
        Remedy("CUDA graphs off", ("--cuda-graph", "off"), helps=("cuda_graph", "spec_decode")),
        Remedy("custom all-reduce off", ("--custom-all-reduce", "off"), helps=("custom_all_reduce",), parallel=True),
        Remedy("attention backend triton", ("--attention-backend", "triton"), helps=("attention_backend",)),
    ),
)


class Sim:
    """``args={"flavor": "vllm"}`` makes it play vLLM, ``args={"fault": "sleep@cuda_graph:rank=3"}`` makes it sick."""

    name = "sim"
    uses_gpus = False
    grammar = GRAMMAR
    features = FEATURES
    axes: Mapping[str, Collection[str]] = {
        "spec_decode": ("base", "eagle", "eagle3", "mtp", "ngram"),
        "cuda_graph": ("on", "off"),
        "attention_backend": (),
        "custom_all_reduce": ("on", "off"),
        "overlap": ("on", "off"),
        "kv_cache_dtype": (),
        "moe_runner": (),
        "sampling_backend": (),
        "nccl_p2p": ("on", "off"),
        "log_level": (),
        "jit_cache": ("cold", "warm"),
    }

    def launch(self, spec: ServerSpec, *, host: str, port: int, python: str) -> Launch:
        """The spec as command line of the embedded engine; ``spec.args`` wins over what the rest of the spec says."""
        known_axes(spec, self.axes, self.name)
        flags: dict[str, Scalar] = {
            "--tp": spec.tp,
            "--host": host,
            "--port": port,
            "--model-path": spec.model or DEFAULT_MODEL,
            "--served-model-name": self.served_model(spec),
        }
        for axis, value in spec.axes:
            flags.update(self._axis(axis, value))
        for key, given in spec.args:
            flags[_flag(key)] = True if given is None else given
        argv = [python, "-m", MODULE]
        for flag, setting in flags.items():
            if setting is not False:
                argv += [flag] if setting is True else [f"{flag}={setting}"]
        env: dict[str, str | None] = {"PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", **dict(spec.env)}
        if path := _python_path(python, env.get("PYTHONPATH") or os.environ.get("PYTHONPATH") or ""):
            env["PYTHONPATH"] = path
        return Launch(tuple(argv), env, key_variable=KEY_VARIABLE)

    def _axis(self, axis: str, value: AxisValue) -> dict[str, Scalar]:
        name = "base" if axis == "spec_decode" and value.name in ("off", "none") else value.name
        legal = self.axes[axis]
        if legal and name not in legal:
            raise SpecError(
                f"axis {axis} cannot be {value.name!r} with the sim engine. Legal values: {', '.join(legal)}."
            )
        flags: dict[str, Scalar] = {"--" + axis.replace("_", "-"): name}
        for detail, setting in value.details:
            if axis != "spec_decode" or detail not in _DETAILS:
                known = ", ".join(_DETAILS) if axis == "spec_decode" else "none"
                raise SpecError(f"axis {axis} has no detail {detail!r} with the sim engine. Known details: {known}.")
            flags[_DETAILS[detail]] = setting
        return flags

    def ready(self, spec: ServerSpec) -> ReadyProbe:
        """``/health_generate`` makes one token, which no fault of phase ``serving`` counts as a request."""
        return ReadyProbe(spec.ready or "/health_generate")

    def served_model(self, spec: ServerSpec) -> str:
        args = {_flag(key): value for key, value in spec.args}
        for flag in ("--served-model-name", "--model-path"):
            if isinstance(named := args.get(flag), str):
                return named
        return spec.model or DEFAULT_MODEL

    def process_role(self, cmdline: Sequence[str], comm: str) -> ProcessRole | None:
        """Titles are those of the engine that is played; the front end keeps its command line, as theirs does."""
        if MODULE in cmdline:
            return ProcessRole("api")
        title = cmdline[0] if cmdline else comm
        if title.startswith("sglang::"):
            return sglang.ENGINE.process_role(cmdline, comm)
        if title.startswith("VLLM::"):
            return vllm.ENGINE.process_role(cmdline, comm)
        return common_role(cmdline, comm)

    def own_timeout(self, launch: Launch) -> float | None:
        """``--watchdog-timeout`` in seconds; without it the engine waits for ever."""
        for word, following in zip(launch.argv, (*launch.argv[1:], ""), strict=True):
            flag, glued, value = word.partition("=")
            if flag == "--watchdog-timeout":
                try:
                    return float(value if glued else following) or None
                except ValueError:
                    return None
        return None


ENGINE: Final = Sim()


def _flag(key: str) -> str:
    """``fault``, ``load_seconds`` and ``--load-seconds`` are all right."""
    return "--" + key.lstrip("-").replace("_", "-")


def _python_path(python: str, inherited: str) -> str | None:
    """PYTHONPATH under which ``python`` finds this package; None when it does so by itself.

    pytest may know the package from a path that only it has (``pythonpath`` in its configuration, a changed sys.path).
    """
    parent = str(Path(__file__).resolve().parents[2])
    if python == sys.executable and parent in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return None
    return os.pathsep.join([parent, *([inherited] if inherited else [])])
