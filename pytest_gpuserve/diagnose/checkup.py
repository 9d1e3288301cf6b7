"""Is this machine fit for what we do? What ``gpuserve doctor`` says of it, engines apart."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest_gpuserve

from ..errors import GpuserveError
from ..gpu import Reading
from ..server.paths import state_root
from . import machine, tools

_GIB: Final = 1 << 30
_SHM_LEAST: Final = 1 * _GIB
"""NCCL and the engines' message queues; a container gets 64 MiB unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. ``ok``: None when it is neither good nor bad, or could not be told."""

    name: str
    ok: bool | None
    text: str


def checkup(reading: Reading) -> Iterator[Check]:
    """Every check of the machine; ``reading`` is NVML's."""
    if reading.gpus:
        broken = [f"{gpu.label}: {gpu.error}" for gpu in reading.gpus if gpu.error]
        text = f"{len(reading.gpus)} by NVML, driver {reading.driver or 'unknown'}"
        yield Check("GPUs", not broken, "; ".join([text, *broken]))
    else:
        yield Check("GPUs", None, f"none: {reading.problem or 'NVML lists none'}")
    yield _kernel()
    yield _stacks()
    yield _shared_memory()
    yield _memory()
    yield _state()
    for name, why in (("nvcc", "flashinfer and others compile kernels at run time"), ("ninja", "the same")):
        path = shutil.which(name)
        yield Check(name, True if path else None, path or f"not in PATH ({why})")


def _kernel() -> Check:
    release = platform.release()
    try:
        os.close(os.pidfd_open(os.getpid()))
        ok = hasattr(signal, "pidfd_send_signal")
    except (OSError, AttributeError):
        ok = False
    text = f"Linux {release}, pidfd" if ok else f"Linux {release} has no pidfd (5.3 or newer, and no seccomp filter)"
    return Check("kernel", ok, text)


def _stacks() -> Check:
    """Takes the stack of a process of ours that is not below the taker, as a rank is not."""
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    said = f"Yama ptrace_scope {scope}" if scope else "no Yama"
    found = tools.find("py-spy", None)
    if not found:
        return Check("stacks", False, f"{said}; py-spy is not installed (pip install py-spy)")
    inject = str(Path(pytest_gpuserve.__file__).parent / "diagnose" / "inject")
    target = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"],
        env={**os.environ, "PYTHONPATH": inject},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    try:
        assert target.stdout is not None
        target.stdout.readline()  # its imports are done
        begin = time.monotonic()
        attempt = tools.pyspy(found[0], target.pid, limit=20.0, stop=False)
        took = time.monotonic() - begin
    finally:
        target.kill()
        target.communicate()
    if attempt.trouble is None:
        return Check("stacks", True, f"{said}; py-spy takes one in {took:.1f} s ({found[0]})")
    text = f"{said}; py-spy cannot take one: {attempt.message or attempt.trouble}"
    return Check(
        "stacks",
        False,
        f"{text}. Stacks then come from the injected faulthandler alone (in a container: --cap-add=SYS_PTRACE)",
    )


def _shared_memory() -> Check:
    free = machine.shm_free()
    if free is None:
        return Check("/dev/shm", False, "there is none")
    enough = free >= _SHM_LEAST
    text = f"{_size(free)} free" + (
        "" if enough else ": too little for NCCL (in a container: --shm-size, or --ipc=host)"
    )
    return Check("/dev/shm", enough, text)


def _memory() -> Check:
    seen = machine.memory([os.getpid()])
    if seen.limit is None:
        return Check("memory", None, "no limit that can be read")
    kills = machine.oom_kills()
    text = f"{_size(seen.current or 0)} of {_size(seen.limit)} used" + (
        f", {kills} killed for memory so far" if kills else ""
    )
    return Check("memory", None if kills else True, text)


def _state() -> Check:
    try:
        root = state_root()
        free = shutil.disk_usage(root).free
    except (GpuserveError, OSError) as error:
        return Check("state", False, str(error))
    return Check("state", free > _GIB, f"{root}, {_size(free)} free on its disk")


def _size(value: int) -> str:
    return f"{value / _GIB:.1f} GiB" if value >= _GIB else f"{value / (1 << 20):.0f} MiB"


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""
