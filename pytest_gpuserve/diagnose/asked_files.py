"""Which file does a process ask for, again and again? A loop that polls for a lock file holds nothing open, so that no
table of the kernel shows what it waits for: its system calls do.

``python asked_files.py PID SECONDS`` traces the main thread for that long (PTRACE_SEIZE: it is never stopped for good,
and the kernel lets it go when this program ends, however that happens) and prints one JSON object, path to how often.
A program of its own, of the standard library alone: a tracer that is stuck is killed, and nothing is lost.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import time

SEIZE, INTERRUPT, SYSCALL, LISTEN, DETACH, GET_SYSCALL_INFO = 0x4206, 0x4207, 24, 0x4208, 17, 0x420E
_TRACESYSGOOD = 1
_WALL = 0x40000000
_ENTRY = 1

_PATH_ARGUMENT = {
    "x86_64": {2: 0, 4: 0, 6: 0, 21: 0, 257: 1, 262: 1, 269: 1, 332: 1, 437: 1, 439: 1},
    "aarch64": {48: 1, 56: 1, 79: 1, 291: 1, 437: 1, 439: 1},
}
"""System calls that look for a file by its path (open, stat, access and their kin), and which argument that is."""


def watch(pid: int, seconds: float) -> dict[str, int]:
    """Paths that the thread ``pid`` asks for within ``seconds``, and how often.

    Raises:
        OSError: it cannot be traced.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    paths = _PATH_ARGUMENT.get(os.uname().machine)
    if paths is None:
        raise OSError(f"no table of system calls for {os.uname().machine}")

    def trace(what: int, address: int = 0, data: object = 0) -> int:
        result = int(libc.ptrace(what, pid, address, data))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    trace(SEIZE, 0, _TRACESYSGOOD)
    found: dict[str, int] = {}
    deadline = time.monotonic() + seconds
    try:
        trace(INTERRUPT)
        info = ctypes.create_string_buffer(88)
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            while (status := _next(pid, deadline)) is not None:
                if not os.WIFSTOPPED(status):
                    return found
                signal = os.WSTOPSIG(status)
                if signal & 0x80:
                    trace(GET_SYSCALL_INFO, len(info), info)
                    operation, number, *arguments = struct.unpack_from("<B23x7Q", info.raw)
                    if operation == _ENTRY and number in paths:
                        path = _text(memory, arguments[paths[number]])
                        found[path] = found.get(path, 0) + 1
                group = status >> 16 == 128 and signal in (19, 20, 21, 22)  # somebody stops it: it is left stopped
                event = status >> 16 != 0 or signal & 0x80
                trace(LISTEN if group else SYSCALL, 0, 0 if event else signal)
    finally:
        _let_go(pid, trace)
    return found


def _next(pid: int, deadline: float) -> int | None:
    """The next stop's status; None when the time is up."""
    while time.monotonic() < deadline:
        got, status = os.waitpid(pid, os.WNOHANG | _WALL)
        if got:
            return status
        time.sleep(0.002)
    return None


def _let_go(pid: int, trace: object) -> None:
    """A thread must be stopped to be detached; where it does not stop in time, the end of this program detaches it."""
    assert callable(trace)
    try:
        trace(INTERRUPT)
        status = _next(pid, time.monotonic() + 1.0)
        if status is not None and os.WIFSTOPPED(status):
            signal = os.WSTOPSIG(status)
            trace(DETACH, 0, 0 if status >> 16 or signal & 0x80 else signal)
    except OSError:
        return


def _text(memory: object, address: int) -> str:
    try:
        memory.seek(address)  # type: ignore[attr-defined]
        raw: bytes = memory.read(1024)  # type: ignore[attr-defined]
    except (OSError, ValueError, OverflowError):
        return "?"
    return raw.partition(b"\0")[0].decode(errors="replace")


if __name__ == "__main__":
    try:
        print(json.dumps(watch(int(sys.argv[1]), float(sys.argv[2]))))  # noqa: T201
    except OSError as problem:
        sys.exit(str(problem))
