"""A user-triggered CUDA core dump: which kernel runs on a rank's GPU. The last witness: it **kills the rank**.

Opt-in: ``CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1`` in the server's environment; the launch then names pipe, file and what
is left out. The driver makes the pipe of each process that has a context; a byte in it begins the dump (5.5 s and
193 MB on an H200, memory left out; SIGABRT at its end). cuda-gdb, where it is installed, lists the kernels.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from . import tools
from .evidence import Witness

SOURCE: Final = "CUDA core dump"
SWITCH, PIPE, FILE = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "CUDA_COREDUMP_PIPE", "CUDA_COREDUMP_FILE"
_KERNEL = re.compile(
    r"^\*?\s*\d+\s+(?:-|\d+)\s+(?P<device>\d+)\s+\d+\s+\w+\s+0x[0-9a-f]+\s+"
    r"(?P<grid>\([\d,]+\))\s+(?P<block>\([\d,]+\))\s+(?P<name>.+?)\s*$",
    re.MULTILINE,
)
_PLACES = ("/usr/local/cuda/bin",)
_MOST = 5


def asked_for(environment: Mapping[str, str]) -> bool:
    """Whether the server was launched for it."""
    return environment.get(SWITCH) == "1" and bool(environment.get(PIPE)) and bool(environment.get(FILE))


def take(pid: int, environment: Mapping[str, str], limit: float) -> Path | None:
    """Make the driver write a process's core; its path, or None when there is none within ``limit`` seconds.

    ``environment`` is the process's own. Pipe and core must belong to this user.
    """
    if not asked_for(environment):
        return None
    core = Path(_expand(environment[FILE], pid))
    deadline = time.monotonic() + limit
    if not _write(_expand(environment[PIPE], pid)):
        return None
    size, since = -1, time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = _size(core)
        if now != size:
            size, since = now, time.monotonic()
        elif now > 0 and time.monotonic() - since > 1.0:
            return core
    return None


def _expand(template: str, pid: int) -> str:
    return template.replace("%h", socket.gethostname()).replace("%p", str(pid))


def _write(pipe: str) -> bool:
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # no pipe, or nobody reads it: no context, or a driver that does not know how
        return False
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
            return False
        os.write(descriptor, b"1")
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _size(path: Path) -> int:
    with suppress(OSError):
        found = path.lstat()
        return found.st_size if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() else -1
    return -1


def debugger() -> str | None:
    """cuda-gdb: of PATH, of CUDA_HOME, or where the toolkit is installed as a rule."""
    home = os.environ.get("CUDA_HOME")
    places = [os.environ.get("PATH", os.defpath), *([str(Path(home, "bin"))] if home else []), *_PLACES]
    return shutil.which("cuda-gdb", path=os.pathsep.join(places))


def read(core: Path, executable: str, limit: float) -> str | None:
    """What cuda-gdb says of the kernels in a core; None when it fails or takes longer than ``limit`` seconds."""
    commands = ("set pagination off", f"target cudacore {core}", "info cuda kernels")
    words = [word for command in commands for word in ("-ex", command)]
    attempt = tools.run([executable, "-nx", "-batch", *words], limit)
    return None if attempt.trouble else attempt.raw


def kernels(text: str) -> tuple[str, ...] | None:
    """The kernels that ran, as cuda-gdb lists them; none when there were none; None when it says nothing of them."""
    found = [f"{m['name'][:200]} on grid {m['grid']} of blocks {m['block']}" for m in _KERNEL.finditer(text)]
    if not found and not re.search(r"(?i)\bno CUDA kernels\b", text):
        return None
    return tuple(found)


def witness(label: str, core: Path, text: str | None) -> Witness | None:
    """What a rank's core proves: a kernel that has not ended, or that the rank does not wait for its GPU."""
    found = kernels(text) if text is not None else None
    if found is None:
        return Witness(SOURCE, f"the core of {label} was not read (cuda-gdb is missing or failed): {core}")
    if not found:
        return Witness(SOURCE, f"no kernel runs on the GPU of {label}: it does not wait for it", (), "host")
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return Witness(SOURCE, f"on the GPU of {label} runs {'; '.join(found[:_MOST])}{more}", (), "gpu")
