"""A server's command line under construction, checked against what the installed engine takes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from .. import procfs
from ..errors import EngineError, SpecError
from ..home import expanded
from ..spec import AxisValue, Scalar, ServerSpec
from .flags import Install, cache_root

JIT_CACHES: Final[Mapping[str, str]] = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "TILELANG_CACHE_DIR": "tilelang",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",
}
"""Environment variables of kernel caches that engines share, and the directory each gets."""


class Arguments:
    """A command line under construction: flags by their canonical name, later ones replace, ``None`` removes."""

    def __init__(self, install: Install) -> None:
        self._install = install
        self._values: dict[str, tuple[str, ...]] = {}

    def set(self, name: str, value: Scalar | Sequence[str] = True) -> None:
        """Set a flag; True is a bare flag, False removes it."""
        known = self._install.flags.get(name)
        key = known.names[0] if known else name
        self._values.pop(key, None)
        if value is False:
            return
        if value is True or value is None:
            self._values[key] = (name,)
        elif isinstance(value, (str, int, float)):
            text = str(value)
            self._values[key] = (name, *(text.split() if known and known.many else (text,)))
        else:
            self._values[key] = (name, *value)

    def choose(self, axis: str, name: str, value: Scalar) -> None:
        """Set a flag for an axis, after asking whether this install has the flag and the value.

        Raises:
            EngineError: it has not; the message lists what it has.
        """
        install = self._install
        if not install.has(name):
            raise EngineError(
                f"{install.name} has no flag {name}, so axis {axis} cannot be {value!r} there. Take this axis out of "
                f"the mark or install a version that has it."
            )
        choices = install.choices(name)
        if choices and isinstance(value, str) and value not in choices:
            raise illegal(axis, value, choices, install)
        self.set(name, value)

    def merge(self, args: Sequence[tuple[str, Scalar]], source: str = "args") -> None:
        """Join ``spec.args``: what the user says wins.

        Raises:
            EngineError: a flag that argparse would take for an abbreviation of others.
        """
        for key, value in args:
            name = key if key.startswith("-") else "--" + key.replace("_", "-")
            check_abbreviation(name, self._install, source)
            self.set(name, value)

    def argv(self) -> tuple[str, ...]:
        return tuple(part for parts in self._values.values() for part in parts)

    def value(self, name: str) -> str | None:
        """First value of a flag as set so far, or None."""
        known = self._install.flags.get(name)
        parts = self._values.get(known.names[0] if known else name, ())
        return parts[1] if len(parts) > 1 else None


def illegal(axis: str, value: str, legal: Sequence[str], install: Install) -> EngineError:
    """The error for an axis value that this install cannot express."""
    return EngineError(
        f"axis {axis} cannot be {value!r} with {install.name}. Legal values of this install: {', '.join(legal)}. "
        f"Change the axis in the mark, or give the engine's own flag in args."
    )


def check_abbreviation(name: str, install: Install, source: str) -> None:
    """Refuse a flag that the install lacks and argparse would complete to another.

    Raises:
        EngineError: it would; the message lists the flags it would be taken for.
    """
    bare = name.partition("=")[0]
    if bare in install.flags or not bare.startswith("--") or "." in bare:
        return
    dashed = bare.replace("_", "-")
    if dashed in install.flags:
        return
    close = sorted({flag.names[0] for known, flag in install.flags.items() if known.startswith(dashed)})
    if close:
        raise EngineError(
            f"{install.name} has no flag {bare}: argparse would take it for an abbreviation of {', '.join(close)}. "
            f"Write the one you mean in {source}."
        )


def need_model(spec: ServerSpec) -> str:
    """The spec's model, with ``~`` resolved.

    Raises:
        SpecError: there is none, or it is a local path where nothing is.
    """
    if spec.model is None:
        raise SpecError(f'{spec.engine} needs a model: add model="…" (a path or a hub id) to the gpuserve mark.')
    return local_path(spec.model, "model", spec)


def local_path(value: str, key: str, spec: ServerSpec) -> str:
    """A model as the engine takes it: hub ids as they are, local paths checked.

    Raises:
        SpecError: it looks like a path (begins with ``/``, ``.`` or ``~``) and nothing is there.
    """
    if not value.startswith(("/", "./", "../", "~")) and value not in (".", ".."):
        return value
    path = expanded(value)
    if not (Path(spec.cwd or "") / path).exists():
        raise SpecError(f"{key} {value!r} does not exist on this machine. Correct {key} in the gpuserve mark.")
    return str(path) if value.startswith("~") else value


def known_axes(spec: ServerSpec, axes: Mapping[str, object], engine: str) -> None:
    """Refuse an axis that the engine does not have.

    Raises:
        EngineError: the spec has one; the message lists the engine's.
    """
    for axis, _ in spec.axes:
        if axis not in axes:
            raise EngineError(f"{engine} has no axis {axis}. Its axes: {', '.join(axes)}.")


def switch(axis: str, value: AxisValue, install: Install) -> bool:
    """An axis that is ``on`` or ``off``.

    Raises:
        EngineError: it is something else.
    """
    if value.name not in ("on", "off"):
        raise illegal(axis, value.name, ("on", "off"), install)
    return value.name == "on"


def log_level(value: AxisValue, install: Install) -> str:
    """A level of Python's logging, in small letters: the engines take anything, and die of it in their first line.

    Raises:
        EngineError: it is none.
    """
    legal = ("debug", "info", "warning", "error", "critical")
    if value.name.lower() not in legal:
        raise illegal("log_level", value.name, legal, install)
    return value.name.lower()


def jit_cache(value: AxisValue, spec: ServerSpec, install: Install, variables: Mapping[str, str]) -> dict[str, str]:
    """Private kernel caches for one configuration: ``warm`` ones are kept for its next run, ``cold`` ones begin empty.

    Raises:
        EngineError: the value is neither.
    """
    if value.name not in ("cold", "warm"):
        raise illegal("jit_cache", value.name, ("cold", "warm"), install)
    root = cache_root() / "jit"
    root.mkdir(mode=0o700, exist_ok=True)
    owner = procfs.process_id(os.getpid())
    assert owner is not None
    if value.name == "warm":
        directory = root / f"warm-{spec.engine}-{install.version}-{spec.key}"
    else:
        _sweep(root)
        directory = root / f"cold-{owner.pid}-{owner.start}-{spec.key}"
        shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    return {variable: str(directory / folder) for variable, folder in {**JIT_CACHES, **variables}.items()}


def _sweep(root: Path) -> None:
    """Remove cold caches whose pytest is gone."""
    for found in root.glob("cold-*-*-*"):
        with contextlib.suppress(ValueError, IndexError):
            _, pid, start, _ = found.name.split("-", 3)
            if not procfs.same(procfs.ProcessId(int(pid), int(start))):
                shutil.rmtree(found, ignore_errors=True)
