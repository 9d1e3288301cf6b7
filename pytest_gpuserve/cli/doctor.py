"""``gpuserve doctor``: is this machine fit, and can the installed engines' kernels run on its GPUs?

Exit codes: 0 nothing wrong was found; 1 something is: of the machine, a library that does not load, or an engine that
has no code for a GPU; 2 a wrong option. Attention backends that cannot run are told, and are nothing wrong in
themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..diagnose.checkup import Check, checkup
from ..diagnose.loading import Loaded, try_loading
from ..engines import engine_names, get_engine
from ..engines.fatbin import Capability, parse_arch
from ..engines.flags import version_of
from ..engines.kernels import Kernels, Library, Purpose, find_libraries, kernels_of, purposes
from ..errors import EngineError, GpuserveError
from ..gpu import Reading, query, usable
from ..spec import ServerSpec
from ..text import escape

SCHEMA: Final = "gpuserve.doctor/1"
_CAVEAT: Final = (
    "Having code for a GPU is necessary, not sufficient: single kernels may lack it. Backends that compile at run time "
    "(triton, flashinfer, fa4) have nothing to look at here."
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", metavar="NAME", help="look at this engine (default: every one that is installed)")
    parser.add_argument("--python", metavar="P", default=sys.executable, help="the interpreter that runs the engine")
    parser.add_argument(
        "--arch", metavar="SM", action="append", help="judge for sm120, 12.0 ... (default: the GPUs of this machine)"
    )
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds that one library may take to load"
    )
    parser.add_argument("--no-load", action="store_true", help="do not try whether the libraries load")
    parser.add_argument("--json", action="store_true", help=f"print the {SCHEMA} object")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "exit codes:\n  0  nothing wrong was found\n  1  something is wrong\n  2  a wrong option"


@dataclass(frozen=True, slots=True)
class Examined:
    """One engine as installed. ``judged``: by architecture, what can be run there."""

    name: str
    version: str | None
    root: str | None
    libraries: tuple[Library, ...] = ()
    loaded: Mapping[str, Loaded] = field(default_factory=dict)
    before: tuple[Loaded, ...] = ()
    required: Mapping[Capability, tuple[Purpose, ...]] = field(default_factory=dict)
    backends: Mapping[Capability, tuple[Purpose, ...]] = field(default_factory=dict)

    @property
    def wrong(self) -> bool:
        failed = any(item.error for item in (*self.loaded.values(), *self.before))
        return failed or any(need.serves is False for needs in self.required.values() for need in needs)


def run(arguments: argparse.Namespace) -> int:
    if arguments.engine is not None and arguments.engine not in engine_names():
        raise GpuserveError(
            f"there is no engine called {arguments.engine!r}: --engine takes one of {', '.join(engine_names())}."
        )
    try:
        asked = [parse_arch(text) for text in arguments.arch or ()]
    except ValueError as error:
        raise GpuserveError(f"--arch: {error}.") from None
    reading = query(20.0)
    here = sorted({gpu.capability for gpu in usable(reading.gpus) if gpu.capability})
    machine = list(checkup(reading))
    names = [arguments.engine] if arguments.engine else [name for name in engine_names() if _table(name)]
    examined = [_examine(name, arguments, asked or here) for name in names]
    if arguments.json:
        print(json.dumps(_json(machine, reading, arguments.python, examined), indent=2))
    else:
        for line in _text(machine, reading, examined, arguments, asked or here):
            print(escape(line.replace("\n", " ")))  # it quotes libraries and loaders
    missing = arguments.engine and any(found.version is None and _table(found.name) for found in examined)
    return int(bool(missing) or any(check.ok is False for check in machine) or any(found.wrong for found in examined))


def _table(name: str) -> Kernels | None:
    try:
        return kernels_of(get_engine(name))
    except EngineError:  # somebody else's, and broken: that is told where it is used
        return None


def _examine(name: str, arguments: argparse.Namespace, archs: Sequence[Capability]) -> Examined:
    spec, python, kernels = ServerSpec(engine=name, python=arguments.python), arguments.python, _table(name)
    if kernels is None:
        return Examined(name, None, None)
    try:
        found = version_of(name, spec, python)
    except EngineError:
        raise GpuserveError(
            f"--python {python} cannot be run, or hangs. Name the interpreter that has the engine."
        ) from None
    if found is None:
        return Examined(name, None, None)
    libraries = find_libraries(kernels, spec, python)
    own = find_libraries(Kernels(own=kernels.own), spec, python)
    loaded: dict[str, Loaded] = {}
    if own and not arguments.no_load:
        tried = try_loading(python, [library.path for library in own], first=kernels.first, limit=arguments.limit)
        loaded = {item.name: item for item in tried}
    paths = {str(library.path) for library in libraries}
    return Examined(
        name,
        *found,
        libraries=libraries,
        loaded={path: item for path, item in loaded.items() if path in paths},
        before=tuple(item for path, item in loaded.items() if path not in paths),
        required={arch: tuple(purposes(kernels.required, libraries, arch)) for arch in archs},
        backends={arch: tuple(purposes(kernels.backends, libraries, arch)) for arch in archs},
    )


def _text(
    machine: Sequence[Check],
    reading: Reading,
    examined: Sequence[Examined],
    arguments: argparse.Namespace,
    archs: Sequence[Capability],
) -> Iterator[str]:
    words = {True: "ok", False: "WRONG", None: "-"}
    for check in machine:
        yield f"{words[check.ok]:6} {check.name:9} {check.text}"
    for gpu in usable(reading.gpus):
        memory = f", {(gpu.memory_used or 0) >> 20} of {gpu.memory_total >> 20} MiB used" if gpu.memory_total else ""
        yield f"       {gpu.label:9} {gpu.name}, {_sm(gpu.capability) if gpu.capability else 'unreadable'}{memory}"
    for found in examined:
        if found.version is None:
            if _table(found.name) is None:
                yield f"       {found.name} brings no compiled kernels that could be looked at"
            elif arguments.engine:
                yield f"WRONG  {found.name} is not installed for {arguments.python} (--python names another)"
            continue
        yield ""
        yield f"{found.name} {found.version} in {found.root}"
        for item in found.before:
            what = f"cannot be imported: {_failure(item)}" if item.error else f"{item.version} is imported first"
            yield f"{words[item.error is None]:6} {item.name} {what}"
        width = max((len(library.name) for library in found.libraries), default=0)
        for library in found.libraries:
            yield _library_line(library, found.loaded.get(str(library.path)), width)
        yield from _judgement(found, archs)
    if not any(found.version for found in examined) and not arguments.engine:
        yield f"       no engine with kernels of its own is installed for {arguments.python} (--python names another)"


def _library_line(library: Library, loaded: Loaded | None, width: int) -> str:
    code = " ".join(map(str, library.code.archs)) or library.problem or "no device code"
    more = " (damaged: there may be more)" if library.code.damaged else ""
    state = "" if loaded is None else "loads" if loaded.error is None else f"does not load: {_failure(loaded)}"
    return f"{'WRONG' if loaded and loaded.error else '-':6} {library.name:{width}}  {code}{more}  {state}".rstrip()


def _failure(item: Loaded) -> str:
    if item.error is None:
        return ""
    return f"{item.meaning} ({item.error})" if item.meaning else item.error


def _judgement(found: Examined, archs: Sequence[Capability]) -> Iterator[str]:
    judged = False
    for arch in archs:
        for need in found.required[arch] if found.required else ():
            if need.serves is False:
                yield f"WRONG  on {_sm(arch)} nothing runs: {need.text()}, which serves other GPUs only"
        for backend in found.backends[arch] if found.backends else ():
            judged |= backend.serves is not None
            if backend.serves is False:
                yield f"-      on {_sm(arch)} attention backend {backend.name} cannot run: {backend.text()}"
            elif backend.serves:
                yield f"-      on {_sm(arch)} attention backend {backend.name} has code"
    if judged:
        yield _CAVEAT
    elif found.libraries and not archs:
        yield "No GPU here to judge for: --arch sm120 names one."


def _sm(capability: Capability) -> str:
    return "sm_{}{}".format(*capability)


def _json(machine: Sequence[Check], reading: Reading, python: str, examined: Sequence[Examined]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "machine": [{"name": check.name, "ok": check.ok, "text": check.text} for check in machine],
        "driver": reading.driver,
        "gpus": [gpu.to_json() for gpu in reading.gpus],
        "python": python,
        "engines": [_engine_json(found) for found in examined],
        "note": _CAVEAT,
    }


def _engine_json(found: Examined) -> dict[str, Any]:
    def judged(table: Mapping[Capability, tuple[Purpose, ...]]) -> dict[str, dict[str, bool | None]]:
        return {_sm(arch): {need.name: need.serves for need in needs} for arch, needs in table.items()}

    def loads(item: Loaded | None) -> dict[str, Any]:
        if item is None:
            return {"loads": None, "error": None, "meaning": None}
        return {"loads": item.error is None, "error": item.error, "meaning": item.meaning}

    return {
        "engine": found.name,
        "version": found.version,
        "root": found.root,
        "imported_first": [{"module": item.name, "version": item.version, **loads(item)} for item in found.before],
        "libraries": [
            {
                "name": library.name,
                "path": str(library.path),
                "archs": [str(arch) for arch in library.code.archs],
                "damaged": library.code.damaged,
                "problem": library.problem,
                **loads(found.loaded.get(str(library.path))),
            }
            for library in found.libraries
        ],
        "required": judged(found.required),
        "attention_backends": judged(found.backends),
    }
