"""Does a compiled library load at all? Tried in a process of its own, after torch, as the engine does it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .. import foreign

_TRY: Final = r"""
import ctypes, importlib, json, os, sys
out, first, paths = int(sys.argv[1]), sys.argv[2].split(), sys.argv[3:]
def say(**what):
    os.write(out, (json.dumps(what) + "\n").encode())
for name in first:
    say(begin=name)
    try:
        say(done=name, version=str(getattr(importlib.import_module(name), "__version__", "")))
    except BaseException as error:
        say(done=name, error=str(error) or type(error).__name__)
        os._exit(0)
for path in paths:
    say(begin=path)
    try:
        ctypes.CDLL(path)
        say(done=path)
    except OSError as error:
        say(done=path, error=str(error))
os._exit(0)
"""

_HINTS: Final = {
    "libcuda.so": "it comes with the NVIDIA driver, which is not here (in a container: start it with GPU access)",
    "libnuma.so": "install the system's libnuma (Debian and Ubuntu: libnuma1)",
    "libnvidia-": "it comes with the NVIDIA driver",
    "libcudart.so": "a CUDA runtime of another version than that of the installed torch",
    "libnvrtc.so": "a CUDA runtime of another version than that of the installed torch",
    "libcublas": "a CUDA runtime of another version than that of the installed torch",
    "libibverbs.so": "install rdma-core's libibverbs",
    "libc10": "it comes with torch",
    "libtorch": "it comes with torch",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of one library, or of a module that comes before them. ``error`` (foreign text) is None when it
    loaded; ``meaning`` says what the error means, where that is known."""

    name: str
    error: str | None = None
    meaning: str | None = None
    version: str = ""


def try_loading(
    python: str,
    libraries: Sequence[Path],
    *,
    first: Sequence[str] = ("torch",),
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    limit: float = 120.0,
) -> list[Loaded]:
    """Import ``first``, then load every library. One that kills or blocks the process costs itself alone.

    Nothing is tried after a module of ``first`` that cannot be imported. One that ends the process is tried again
    before all others: builds for different processors (vLLM's ``_C_AVX2``) abort when the same operators are there.
    ``limit``: seconds without any news.
    """
    left = [str(path) for path in libraries]
    found: dict[str, Loaded] = {}
    while True:
        news, end = _one_process(python, left, first, {**os.environ, **(env or {})}, cwd, limit)
        begun: str | None = None
        version = next((item.version for item in found.values() if item.version), "")
        for entry in news:
            begun = entry.get("begin", None if entry.get("done") == begun else begun)
            if "done" in entry:
                version = version or entry.get("version", "")
                error = entry.get("error")
                name, told = entry["done"], entry.get("version", "")
                bound = not error or name in first or names_torch(Path(name))
                found[name] = Loaded(name, error, meaning(error, version, bound) if error else None, told)
        if begun in left[1:]:
            left = [begun, *(path for path in left if path not in found and path != begun)]
            continue
        if begun is not None:
            found[begun] = Loaded(begun, f"loading it {end}")
        left = [path for path in left if path not in found]
        if not news and not found:
            return [Loaded(python, end)]
        if begun is None or begun in first or not left:
            return list(found.values())


def names_torch(library: Path) -> bool:
    """It says itself which of torch's libraries it needs (DT_NEEDED), so that the loader looks for its symbols there;
    True also where that cannot be seen."""
    try:
        with foreign.opened(library) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return re.search(rb"\0lib(?:c10|torch|aoti)\w*\.so", data) is not None
    except (OSError, ValueError):
        return True


def meaning(error: str, torch: str = "", bound: bool = True) -> str | None:
    """What a loader's message means; None when it is not one that we know. ``torch``: version of the installed one.
    ``bound``: the library names those of torch that it needs; else a symbol that is missing proves nothing."""
    if found := re.search(r"undefined symbol: (\S+)", error):
        symbol = found[1].rstrip(",")
        if re.match(r"_ZN?[KO0-9A-Zr]*\d+(c10|at|torch|caffe2|aoti)", symbol) or symbol.startswith(
            ("aoti_torch", "THP")
        ):
            if not bound:
                return (
                    "it names none of torch's libraries as needed, so it loads only where a program has made their "
                    "symbols global before: this says nothing of its ABI"
                )
            return f"torch ABI mismatch: it was built for another torch than the installed {torch}".rstrip()
        if symbol.startswith(("Py", "_Py")):
            return "it was built for another version of Python"
        if symbol.startswith(("cu", "nv", "__cuda")):
            return "it was built for another version of CUDA, or for a newer driver"
        return "it was built for other libraries than those installed"
    if found := re.search(r"(\S+\.so[.\d]*): cannot open shared object file", error):
        hint = next((text for name, text in _HINTS.items() if found[1].startswith(name)), None)
        return f"{found[1]} is missing" + (f": {hint}" if hint else "")
    if found := re.search(r"version [`'](\w+_[\d.]+)' not found", error):
        return f"the system's C or C++ library is older than {found[1]}, for which it was built"
    return None


def _one_process(
    python: str, paths: Sequence[str], first: Sequence[str], env: Mapping[str, str], cwd: str | None, limit: float
) -> tuple[list[dict[str, Any]], str]:
    """What one child said, and how it ended."""
    with tempfile.TemporaryFile() as out:
        argv = [python, "-c", _TRY, str(out.fileno()), " ".join(first), *paths]
        try:
            child = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[out.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            return [], f"cannot be run: {error.strerror}"
        size, deadline = 0, time.monotonic() + limit
        try:
            while (code := child.poll()) is None and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.2)
                if (now := os.fstat(out.fileno()).st_size) != size:
                    size, deadline = now, time.monotonic() + limit
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # not reaped yet: the group is ours
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(5)
        out.seek(0)
        news = [json.loads(line) for line in out.read().splitlines()]
    if code is None:
        return news, f"did not come back within {limit:g} s"
    if code < 0:
        with contextlib.suppress(ValueError):
            return news, f"ends the process with {signal.Signals(-code).name}"
    return news, f"ends the process with exit code {code}"
