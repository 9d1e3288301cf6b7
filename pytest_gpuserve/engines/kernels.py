"""Which GPUs can an installed engine's compiled kernels serve? Asked before a launch: seconds instead of a load.

That a library has code for a GPU is necessary, not sufficient: one kernel of it may lack what the others have, and
bodies can be compiled out (TensorRT-LLM issue 12795). So an answer here is "cannot", or nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, cast

from ..errors import EngineError
from ..spec import ServerSpec
from .base import Engine
from .fatbin import Arch, Capability, DeviceCode, read
from .flags import ask, cache_root, last_json

_LIMIT: Final = 60.0
_WHERE: Final = r"""
import importlib.util, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    found[name] = [str(part) for part in spec.submodule_search_locations or ()] if spec else []
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Where an engine's compiled kernels are, as an engine's attribute ``kernels`` says it.

    A pattern is ``package/glob``: shared libraries below the folder of a top-level package. Several patterns of one
    purpose are alternatives: one library that serves a GPU is enough. A purpose that no library of the install matches,
    or only libraries without device code (CPU builds), is not judged.

    Attributes:
        own: the libraries of the engine itself, which ``gpuserve doctor`` lists and loads.
        required: what every server on a GPU needs, by a name for messages.
        first: modules that the engine has imported by the time it loads its own libraries.
        backends: attention backends (small letters) that are nothing without these libraries. Those that compile at run
            time (triton, flashinfer) are not here.
    """

    own: tuple[str, ...] = ()
    required: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    first: tuple[str, ...] = ("torch",)

    @property
    def patterns(self) -> tuple[str, ...]:
        named = (*self.required.values(), *self.backends.values())
        return tuple(dict.fromkeys((*self.own, *(pattern for group in named for pattern in group))))


@dataclass(frozen=True, slots=True)
class Library:
    """A library of an install. ``name`` begins with its package: ``sgl_kernel/flash_ops.abi3.so``."""

    name: str
    path: Path
    code: DeviceCode
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Purpose:
    """Whether a GPU can be served for one purpose. ``serves``: None when nothing is there to judge by."""

    name: str
    libraries: tuple[Library, ...]
    serves: bool | None

    def text(self) -> str:
        """What its libraries carry: ``sgl_kernel/flash_ops.abi3.so carries sm_80 sm_86 sm_90a``."""
        return "; ".join(
            f"{library.name} carries {' '.join(map(str, library.code.archs))}"
            for library in self.libraries
            if library.code.archs
        )


def kernels_of(engine: Engine) -> Kernels | None:
    """The engine's own table; None for engines that bring none."""
    return cast("Kernels | None", getattr(engine, "kernels", None))


def find_libraries(kernels: Kernels, spec: ServerSpec, python: str) -> tuple[Library, ...]:
    """Every library of the install for ``python`` (in the spec's environment and directory) that a pattern names.

    Raises:
        EngineError: the interpreter cannot be run.
    """
    packages = sorted({pattern.partition("/")[0] for pattern in kernels.patterns})
    folders = _folders(python, tuple(packages), spec.env, spec.cwd, spec.engine, os.environ.get("PYTHONPATH"))
    found: dict[Path, Library] = {}
    for pattern in kernels.patterns:
        package, _, rest = pattern.partition("/")
        for folder in map(Path, folders.get(package, ())):
            for path in sorted(folder.glob(rest)):
                if path not in found and path.is_file() and not path.is_symlink():
                    found[path] = _library(f"{package}/{path.relative_to(folder)}", path)
    return tuple(found.values())


@lru_cache(maxsize=64)
def _folders(
    python: str, packages: Sequence[str], env: Sequence[tuple[str, str]], cwd: str | None, engine: str, path: str | None
) -> Mapping[str, Sequence[str]]:
    """Where an interpreter finds packages; asked once a process (``path``: PYTHONPATH, which decides it too)."""
    output = ask([python, "-c", _WHERE, *packages], {**os.environ, **dict(env)}, cwd, _LIMIT, engine, python)
    found = last_json(output, python)
    return found if isinstance(found, dict) else {}


def purposes(
    wanted: Mapping[str, Sequence[str]], libraries: Sequence[Library], capability: Capability
) -> Iterator[Purpose]:
    """Judge every purpose (name to patterns) by the libraries that match it."""
    for name, patterns in wanted.items():
        matching = tuple(lib for lib in libraries if any(_matches(lib.name, pattern) for pattern in patterns))
        answers = {library.code.serves(capability) for library in matching}
        doubt = any(library.code.damaged for library in matching) and True not in answers
        yield Purpose(name, matching, None if doubt or answers <= {None} else True in answers)


def unsupported(spec: ServerSpec, engine: Engine, *, python: str, capabilities: Sequence[Capability]) -> str | None:
    """Why a server of ``spec`` cannot run on GPUs of these compute capabilities; None when nothing speaks against it.

    The first launch costs one start of the interpreter; what a library carries is kept from one session to the next.
    """
    kernels = kernels_of(engine)
    device = {key.lstrip("-"): value for key, value in spec.args}.get("device", "cuda")
    if kernels is None or not capabilities or not str(device).startswith(("cuda", "auto")):
        return None
    backends = {name: kernels.backends[name] for name in _backends(spec) if name in kernels.backends}
    try:
        libraries = find_libraries(Kernels(required={**kernels.required, **backends}), spec, python)
    except EngineError:
        return None  # the launch tells it better
    for capability in dict.fromkeys(capabilities):
        sm = "sm_{}{}".format(*capability)
        for purpose in purposes(backends, libraries, capability):
            if purpose.serves is False:
                return (
                    f"attention backend {purpose.name} cannot run on {sm}: {purpose.text()}, and nothing for this GPU. "
                    f"Choose another attention_backend, or install a build that has it."
                )
        for purpose in purposes(kernels.required, libraries, capability):
            if purpose.serves is False:
                return (
                    f"this install cannot run on {sm}: {purpose.text()}, and nothing for this GPU. Install a build of "
                    f"{purpose.name} for it, or leave this GPU out (--gpuserve-gpus, CUDA_VISIBLE_DEVICES)."
                )
    return None


def _backends(spec: ServerSpec) -> list[str]:
    """Attention backends that a spec names: as axis, in its details, for the draft, or as the engine's own flags."""
    named: list[object] = []
    if axis := spec.axis("attention_backend"):
        named += [axis.name, *(setting for _, setting in axis.details)]
    if decode := spec.axis("spec_decode"):
        named.append(decode.detail.get("draft_attention_backend"))
    named += [value for key, value in spec.args if key.replace("_", "-").endswith("attention-backend")]
    lower = [name.lower() for name in named if isinstance(name, str)]
    return list(dict.fromkeys((*lower, *(f"{name}_attn" for name in lower))))


def _matches(name: str, pattern: str) -> bool:
    """``*`` in a pattern stays inside one folder, as in Path.glob."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^/]*"), name) is not None


def _library(name: str, path: Path) -> Library:
    try:
        return Library(name, path, device_code(path))
    except (OSError, ValueError) as error:
        return Library(name, path, DeviceCode(), str(error))


def device_code(path: Path) -> DeviceCode:
    """:func:`fatbin.read`, kept per user of a machine until the file's size or time of change is another.

    Raises:
        OSError, ValueError: as there.
    """
    state = path.stat()
    key = [1, os.path.realpath(path), state.st_size, state.st_mtime_ns, state.st_ino]
    kept: Path | None = None
    with contextlib.suppress(EngineError, OSError):
        folder = cache_root() / "libraries"
        folder.mkdir(mode=0o700, exist_ok=True)
        kept = folder / f"{hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:24]}.json"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(kept.read_text())
            if entry["key"] == key:
                return DeviceCode(tuple(map(Arch.parse, entry["archs"])), bool(entry["damaged"]))
    code = read(path)
    if kept is not None:
        with contextlib.suppress(OSError):
            entry = {"key": key, "archs": list(map(str, code.archs)), "damaged": code.damaged}
            with tempfile.NamedTemporaryFile("w", dir=kept.parent, prefix=".", delete=False) as file:
                json.dump(entry, file)
            Path(file.name).replace(kept)
    return code
