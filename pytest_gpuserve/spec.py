"""ServerSpec: which server a test wants. A frozen value; two equal keys are one server."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import SpecError

Scalar = str | int | float | bool | None

SPEC_KEYS = ("engine", "model", "tp", "axes", "args", "env", "command", "ready", "python", "cwd", "uses_gpus")
"""What a mark, a named spec or ``--gpuserve-set`` may say; the axes of AXES are accepted at the top level too."""

AXES = (
    "spec_decode",
    "cuda_graph",
    "attention_backend",
    "custom_all_reduce",
    "overlap",
    "kv_cache_dtype",
    "moe_runner",
    "sampling_backend",
    "nccl_p2p",
    "log_level",
    "jit_cache",
)
"""Axes of an isolation matrix, in the order of ids. What each engine makes of them is engines/'s business."""

_UNSAFE = re.compile(r"[^a-z0-9._]+")


@dataclass(frozen=True, slots=True, order=True)
class AxisValue:
    """One value of one axis: ``eagle3``, or ``eagle3`` with details such as draft_model and num_steps."""

    name: str
    details: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def parse(cls, axis: str, value: object) -> AxisValue:
        """From what a user writes: ``"eagle3"``, ``False`` (off), or ``{"eagle3": {"num_steps": 3}}``.

        Raises:
            SpecError: the value is none of these.
        """
        if isinstance(value, AxisValue):
            return value
        if isinstance(value, bool):
            return cls("on" if value else "off")
        if isinstance(value, (str, int, os.PathLike)):
            return cls(str(value))
        if isinstance(value, Mapping) and len(value) == 1:
            ((name, details),) = value.items()
            if isinstance(details, Mapping):
                plain = {str(k): str(v) if isinstance(v, os.PathLike) else v for k, v in details.items()}
                if all(isinstance(v, Scalar) for v in plain.values()):
                    return cls(str(name), tuple(sorted(plain.items())))
        raise SpecError(
            f'axis {axis!r} cannot be {value!r}: write a name ("eagle3") or one name with its details '
            f'({{"eagle3": {{"num_steps": 3}}}}).'
        )

    @property
    def detail(self) -> dict[str, Scalar]:
        return dict(self.details)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Everything that decides what is launched, and nothing else (budgets and limits live elsewhere).

    Attributes:
        engine: name of an adapter in engines/.
        model: path or hub id, as the engine takes it; None for engines that need none.
        tp: tensor-parallel size = number of GPUs.
        axes: (axis, value) sorted as in AXES.
        args: (flag, value) added to the engine's argv; None or True is a bare flag, False removes the flag.
        env: (name, value) added to the server's environment.
        command: argv template for the ``command`` engine, with ``{port}``, ``{host}``, ``{model}``, ``{tp}``.
        ready: URL path that answers 200 when the server is ready; None is the engine's own.
        python: interpreter that runs the engine; None is the one that runs pytest.
        cwd: working directory of the server; None is pytest's.
        uses_gpus: whether GPUs are leased for it; None: what the engine says.
    """

    engine: str
    model: str | None = None
    tp: int = 1
    axes: tuple[tuple[str, AxisValue], ...] = ()
    args: tuple[tuple[str, Scalar], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
    ready: str | None = None
    python: str | None = None
    cwd: str | None = None
    uses_gpus: bool | None = None

    @property
    def key(self) -> str:
        """Equal for two specs exactly when one server serves both. 16 hex digits, stable between runs."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def id(self) -> str:
        """Readable and stable: ``sglang-tp8-eagle3-cuda_graph_off-triton``; characters a-z 0-9 . _ -.

        Of the ``command`` engine its program and four digits of what it is called with: ``command-tp1-my_server-3f2a``.
        """
        parts = [self.engine, f"tp{self.tp}"]
        for axis, value in self.axes:
            bare = axis in ("spec_decode", "attention_backend")
            parts.append(value.name if bare else f"{axis}_{value.name}")
        if self.engine == "command" and self.command:
            told = json.dumps([self.command, self.args])
            parts += [program(self.command), hashlib.sha256(told.encode()).hexdigest()[:4]]
        return "-".join(_UNSAFE.sub("_", part.lower()) for part in parts)

    @property
    def traits(self) -> frozenset[str]:
        """Bare marks of this spec (closed list, plugin/marks.py): ``eagle3``, ``cuda_graph_off``, ``attn_triton``."""
        values = {axis: value.name for axis, value in self.axes}
        found: set[str] = set()
        decode = values.get("spec_decode", "base")
        found.add("spec_base" if decode in ("base", "off", "none") else decode)
        if graph := values.get("cuda_graph"):
            found.add("cuda_graph_off" if graph == "off" else "cuda_graph_on")
        if backend := values.get("attention_backend"):
            found.add("attn_" + _UNSAFE.sub("_", backend.lower()))
        return frozenset(found)

    def axis(self, name: str) -> AxisValue | None:
        return dict(self.axes).get(name)

    def with_axes(self, changes: Mapping[str, AxisValue]) -> ServerSpec:
        """A copy with some axes set."""
        return replace(self, axes=_sort_axes({**dict(self.axes), **changes}))

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_mapping` reads back to an equal spec."""
        found = {
            "engine": self.engine,
            "model": self.model,
            "tp": self.tp,
            "axes": {axis: ({v.name: v.detail} if v.details else v.name) for axis, v in self.axes},
            "args": dict(self.args),
            "env": dict(self.env),
            "command": list(self.command),
            "ready": self.ready,
            "python": self.python,
            "cwd": self.cwd,
        }
        return found if self.uses_gpus is None else {**found, "uses_gpus": self.uses_gpus}

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, object], *, source: str = "the gpuserve mark", beside: Sequence[str] = ()
    ) -> ServerSpec:
        """Build a spec from what a mark, a named spec or JSON says; ``source`` is named in errors, and so is what it
        may say ``beside`` a spec's own keys (taken out of ``values`` already).

        Raises:
            SpecError: an unknown key, a wrong type, or no engine.
        """
        values = dict(values)
        axes_in = values.pop("axes", None) or {}
        if not isinstance(axes_in, Mapping):
            raise SpecError(f"{source}: axes must be a mapping of axis to value, not {axes_in!r}.")
        axes = {str(k): AxisValue.parse(str(k), v) for k, v in axes_in.items()}
        for axis in AXES:
            if values.get(axis) is not None:
                axes[axis] = AxisValue.parse(axis, values.pop(axis))
            else:
                values.pop(axis, None)
        if unknown := sorted(set(values) - set(SPEC_KEYS)):
            raise SpecError(
                f"{source}: unknown option {', '.join(map(repr, unknown))}. "
                f"Known: {', '.join((*SPEC_KEYS, *beside))}; axes: {', '.join(AXES)}."
            )
        engine = values.get("engine")
        if engine is not None and (not isinstance(engine, str) or not engine):
            raise SpecError(f'{source}: engine must be a name such as "sglang", not {engine!r}.')
        if engine is None:
            raise SpecError(
                f'{source} names no engine: add engine="sglang" (or vllm, sim, command ...) to '
                f"@pytest.mark.gpuserve, or set gpuserve_engine in the pytest configuration."
            )
        tp = values.get("tp", 1)
        if isinstance(tp, str) and tp.isdigit():
            tp = int(tp)
        if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
            raise SpecError(f"{source}: tp must be a whole number of GPUs, 1 or more, not {tp!r}.")
        uses_gpus = values.get("uses_gpus")
        if uses_gpus is not None and not isinstance(uses_gpus, bool):
            raise SpecError(f"{source}: uses_gpus must be True or False, not {uses_gpus!r}.")
        command = values.get("command") or ()
        if isinstance(command, str) or not isinstance(command, Sequence):
            raise SpecError(f"{source}: command must be a list of arguments (no shell), not {command!r}.")
        args, env = _scalars(values.get("args"), "args", source), _scalars(values.get("env"), "env", source)
        if port := next((k for k in args if k.lstrip("-") == "port" and args[k] and engine != "command"), None):
            raise SpecError(
                f"{source}: args sets {port!r}, and a server elsewhere than at the port that is held for it would be "
                f"waited for in vain. Take it out: a free port is chosen, and server.port says which."
            )
        if (bad := next((k for k in env if not k or "=" in k), None)) is not None:
            raise SpecError(f"{source}: env has the name {bad!r}, which no variable can have.")
        texts = {key: _text(values.get(key), key, source) for key in ("model", "ready", "python", "cwd")}
        lists = (("command", command), ("args", (*args, *args.values())), ("env", (*env, *env.values())))
        for key, words in (*lists, *((key, (text or "",)) for key, text in texts.items())):
            if (bad := next((word for word in map(str, words) if not _can_be_passed(word)), None)) is not None:
                raise SpecError(
                    f"{source}: {key} has {bad!r}: NUL, and what this machine's encoding cannot say, is in no "
                    f"argument and no variable of a program."
                )
        return cls(
            engine=engine,
            model=texts["model"],
            tp=tp,
            axes=_sort_axes(axes),
            args=tuple(sorted(args.items())),
            env=tuple(sorted((k, "" if v is None else str(v)) for k, v in env.items())),
            command=tuple(map(str, command)),
            ready=texts["ready"],
            python=texts["python"],
            cwd=texts["cwd"],
            uses_gpus=uses_gpus,
        )


def program(command: Sequence[str]) -> str:
    """What a command line runs, in a word: ``-m PACKAGE.MODULE``, a script or an executable, less its interpreter."""
    words = list(command)
    while words and ("=" in words[0] or _stem(words[0]) == "env"):
        words.pop(0)
    name = words[0] if words else "none"
    if re.fullmatch(r"\{python\}|(?:python|pypy|uv|bash|sh)[\d.]*", _stem(name)) and len(words) > 1:
        if words[1] == "-m" and len(words) > 2:
            name = words[2]
        elif not words[1].startswith("-"):
            name = words[1]
    return _stem(name).strip("{}")[:24] or "none"


def _stem(word: str) -> str:
    return word.rstrip("/").rpartition("/")[2].removesuffix(".py").removesuffix(".sh")


def merge(*layers: Mapping[str, object]) -> dict[str, object]:
    """Join layers, later ones stronger: scalars replace, ``args``, ``env`` and ``axes`` merge by key."""
    result: dict[str, object] = {}
    for layer in layers:
        for key, value in layer.items():
            old = result.get(key)
            if key in ("args", "env", "axes") and isinstance(value, Mapping) and isinstance(old, Mapping):
                result[key] = {**old, **value}
            else:
                result[key] = value
    return result


def _sort_axes(axes: Mapping[str, AxisValue]) -> tuple[tuple[str, AxisValue], ...]:
    order = {axis: n for n, axis in enumerate(AXES)}
    return tuple(sorted(axes.items(), key=lambda pair: (order.get(pair[0], len(AXES)), pair[0])))


def _text(value: object, key: str, source: str) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    if hasattr(value, "__fspath__"):
        return str(value)
    raise SpecError(f"{source}: {key} must be text, not {value!r}.")


def _can_be_passed(word: str) -> bool:
    """Whether the kernel takes it in argv or an environment (bytes that are no UTF-8 it does, as surrogates)."""
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


def _scalars(value: object, key: str, source: str) -> dict[str, Scalar]:
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(isinstance(v, Scalar) for v in value.values()):
        return {str(k): v for k, v in value.items()}
    raise SpecError(f"{source}: {key} must map names to plain values, not {value!r}.")
