"""Processes in every state that a dumper meets, and launchers that take its rights away."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import pytest

SLEEPER = """
import sys, threading, time
def waits_here(): time.sleep(600)
threading.Thread(target=threading.Event().wait, name="side", daemon=True).start()
print("ready", flush=True)
waits_here()
"""
HOLDS_GIL = """
import ctypes
def holds_gil():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    while True: libc.pthread_mutex_lock(mutex)  # the second time for ever, and no signal interrupts it
print("ready", flush=True)
holds_gil()
"""
SPINS = """
def spins():
    while True: pass
print("ready", flush=True)
spins()
"""
VFORKS = """
import ctypes, sys
print("ready", flush=True)
def in_vfork():
    # the parent is in uninterruptible sleep (D) until the child, stopped here, ends
    libc = ctypes.CDLL(None)
    if libc.vfork() == 0:
        libc.pause()
        libc._exit(0)
in_vfork()
"""

DENY = """
# Run a program with some system calls refused with EPERM, as a container without SYS_PTRACE does.
import ctypes, os, struct, sys
numbers = [int(n) for n in sys.argv[1].split(",")]
load = struct.pack("HBBI", 0x20, 0, 0, 0)
jumps = b"".join(struct.pack("HBBI", 0x15, len(numbers) - i, 0, n) for i, n in enumerate(numbers))
program = load + jumps + struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000) + struct.pack("HBBI", 0x06, 0, 0, 0x00050001)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
code = ctypes.create_string_buffer(program, len(program))
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
if libc.prctl(22, 2, ctypes.byref(Filter(len(program) // 8, ctypes.addressof(code))), 0, 0):  # PR_SET_SECCOMP
    sys.exit("no seccomp: " + os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[2], sys.argv[2:])
"""

KILL_ON_PRCTL = """
# Run a program that the kernel kills (SIGSYS) when it calls prctl with the option given.
import ctypes, os, struct, sys
prctl, option = int(sys.argv[1]), int(sys.argv[2])
program = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 3, prctl), (0x20, 0, 0, 16), (0x15, 0, 1, option),
    (0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000)))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
code = ctypes.create_string_buffer(program, len(program))
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
if libc.prctl(22, 2, ctypes.byref(Filter(len(program) // 8, ctypes.addressof(code))), 0, 0):
    sys.exit("no seccomp: " + os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[3], sys.argv[3:])
"""

X86 = platform.machine() == "x86_64"
PTRACE, READV, PRCTL = ("101", "310", "157") if X86 else ("117", "270", "167")
"""System call numbers: ptrace, process_vm_readv, prctl."""


@contextmanager
def running(
    code: str, *arguments: str, python: str = sys.executable, **options: object
) -> Iterator[subprocess.Popen[str]]:
    """A Python that has said ``ready``; killed afterwards."""
    with subprocess.Popen(
        [python, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    ) as process:
        try:
            assert process.stdout.readline().strip() == "ready"
            _settle(process.pid)
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def _settle(pid: int) -> None:
    """Give it time to get from saying ``ready`` to where it stays; one that spins is there at once."""
    deadline = time.monotonic() + 0.3
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R" and time.monotonic() < deadline:
        time.sleep(0.005)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """``pid`` in a frozen cgroup (v2); skips where this user may not make one."""
    mounts = [p for p in map(Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")) if (p / "cgroup.procs").exists()]
    if not mounts:
        pytest.skip("no cgroup v2 here")
    own = Path("/proc/self/cgroup").read_text().partition("0::")[2].splitlines()[0]
    group = mounts[0] / own.lstrip("/") / f"gpuserve-test-{pid}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        (group / "cgroup.freeze").write_text("1")
    except OSError as error:
        pytest.skip(f"this user may not freeze a cgroup: {error}")
    try:
        until(lambda: "frozen 1" in (group / "cgroup.events").read_text(), "freezing")
        yield
    finally:
        (group / "cgroup.freeze").write_text("0")
        os.kill(pid, signal.SIGKILL)
        until(lambda: _removed(group), "the end of an empty cgroup")  # busy for a moment after its last process


def _removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


@contextmanager
def traced(pid: int) -> Iterator[None]:
    """``pid`` traced by this thread, stopped at once and let run: what strace does."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    seize, detach, interrupt = 0x4206, 17, 0x4207
    if libc.ptrace(seize, pid, None, None):
        raise OSError(ctypes.get_errno(), "PTRACE_SEIZE")
    try:
        yield
    finally:
        libc.ptrace(interrupt, pid, None, None)
        os.waitpid(pid, 0x40000000)  # __WALL
        libc.ptrace(detach, pid, None, None)


def until(condition: Callable[[], object], what: str, limit: float = 20.0) -> None:
    """Wait for a condition; fails with ``what`` when it does not come."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit} s in vain for: {what}"
        time.sleep(0.01)


@lru_cache(maxsize=1)
def pythons() -> dict[str, str]:
    """Version to interpreter, of those that this machine has: on PATH, or installed by pyenv."""
    found = {v: path for v in map("3.{}".format, range(8, 16)) if (path := _works(shutil.which(f"python{v}")))}
    if path := _works("/usr/bin/python3"):  # a distribution's, without a shared libpython
        found["system"] = path
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for binary in sorted(root.glob("versions/3.*/bin/python")):
        version = ".".join(binary.parent.parent.name.split(".")[:2])
        if version not in found and (path := _works(str(binary))):
            found[version] = path
    return found


def _works(path: str | None) -> str | None:
    """pyenv's shims exist for versions that are not selected; they fail when run."""
    if path is None or not Path(path).exists():
        return None
    ran = subprocess.run([path, "-c", ""], capture_output=True, timeout=30, check=False)
    return path if ran.returncode == 0 else None
