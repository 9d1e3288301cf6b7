"""What /proc says of one process, nothing attached: is it running, stopped, traced, dead, and where does it wait?"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import procfs
from .kernel import NO_DESCRIPTORS, RESTARTED

_X86_64 = {
    0: "read",
    1: "write",
    7: "poll",
    16: "ioctl",
    17: "pread64",
    23: "select",
    24: "sched_yield",
    34: "pause",
    35: "nanosleep",
    42: "connect",
    43: "accept",
    45: "recvfrom",
    47: "recvmsg",
    58: "vfork",
    61: "wait4",
    72: "fcntl",
    73: "flock",
    202: "futex",
    219: RESTARTED,
    230: "clock_nanosleep",
    232: "epoll_wait",
    247: "waitid",
    270: "pselect6",
    271: "ppoll",
    281: "epoll_pwait",
    288: "accept4",
    299: "recvmmsg",
    441: "epoll_pwait2",
    449: "futex_waitv",
}
_AARCH64 = {
    22: "epoll_pwait",
    25: "fcntl",
    29: "ioctl",
    32: "flock",
    63: "read",
    64: "write",
    67: "pread64",
    72: "pselect6",
    73: "ppoll",
    95: "waitid",
    98: "futex",
    101: "nanosleep",
    115: "clock_nanosleep",
    124: "sched_yield",
    128: RESTARTED,
    202: "accept",
    203: "connect",
    207: "recvfrom",
    212: "recvmsg",
    242: "accept4",
    243: "recvmmsg",
    260: "wait4",
    441: "epoll_pwait2",
    449: "futex_waitv",
}
_LOOKS = {"select": (0, (1, 2, 3)), "pselect6": (0, (1, 2, 3)), "poll": (1, (0,)), "ppoll": (1, (0,))}
"""Which arguments say how many descriptors are looked at, and which point to them; epoll's set is not among its own."""

_STATUS_BYTES = {
    "VmSize": "vm_bytes",
    "VmRSS": "rss_bytes",
    "RssAnon": "rss_anon_bytes",
    "RssFile": "rss_file_bytes",
    "RssShmem": "rss_shmem_bytes",
    "VmSwap": "swap_bytes",
}


def facts(pid: int) -> dict[str, Any]:
    """One reading; keys that cannot be read are left out, and {} means that the process is gone.

    ``state``: kernel's letter. ``ppid``, ``threads``. ``thread_states``: letter -> number of threads. ``cpu_seconds``:
    user and system, since it started. ``majflt``. ``*_bytes``: vm (address space: no measure of memory), rss, rss_anon,
    rss_file, rss_shmem, swap, read (from storage). ``read_chars``: bytes through read(), caches and pipes included.
    ``tracer``: pid of who traces it. ``wchan``, ``syscall``: where the main thread is in the kernel; syscall is
    ``running`` for a thread on a CPU, ``select of no descriptors`` for one that sleeps by a select or poll.
    ``switches``: voluntary context switches of the main thread. ``caught``: mask of the signals it handles. ``frozen``:
    True under a frozen cgroup. ``exit``: of a zombie, as subprocess says it (-9: SIGKILL). Costs 0.3 ms, and 30 us for
    each thread.
    """
    found = procfs.stat(pid)
    if found is None:
        return {}
    result: dict[str, Any] = {
        "state": found.state,
        "ppid": found.ppid,
        "threads": found.threads,
        "cpu_seconds": (found.utime + found.stime) / os.sysconf("SC_CLK_TCK"),
        "majflt": found.majflt,
    }
    if found.state == "Z":
        result["exit"] = procfs.exit_code(found.id)
        return result
    status = procfs.read(f"/proc/{pid}/status").decode(errors="replace")
    fields = dict(re.findall(r"^(\w+):\s*(\S+)", status, re.MULTILINE))
    for name, key in _STATUS_BYTES.items():
        if fields.get(name, "").isdigit():
            result[key] = int(fields[name]) * 1024
    if fields.get("TracerPid", "0") != "0":
        result["tracer"] = int(fields["TracerPid"])
    if "SigCgt" in fields:
        result["caught"] = int(fields["SigCgt"], 16)
    counters = dict(re.findall(r"^(\w+): (\d+)$", procfs.read(f"/proc/{pid}/io").decode(), re.MULTILINE))
    if "read_bytes" in counters:
        result["read_bytes"] = int(counters["read_bytes"])
        result["read_chars"] = int(counters["rchar"])
    main = f"/proc/{pid}/task/{pid}"  # not the smallest tid: tids wrap
    wchan = procfs.read(f"{main}/wchan").strip(b"\0\n").decode(errors="replace")
    if wchan not in ("", "0"):
        result["wchan"] = wchan
    if syscall := _syscall(procfs.read(f"{main}/syscall")):
        result["syscall"] = syscall
    if switches := re.search(rb"^voluntary_ctxt_switches:\s*(\d+)", procfs.read(f"{main}/status"), re.MULTILINE):
        result["switches"] = int(switches[1])
    result["thread_states"] = _thread_states(pid)
    if _frozen(pid):
        result["frozen"] = True
    return result


def changes(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """What moved between two readings: ``interval`` (seconds) and ``<counter>_delta`` for each counter in both."""
    if not before or not after or seconds <= 0:
        return {}
    result: dict[str, Any] = {"interval": round(seconds, 3)}
    for key in ("cpu_seconds", "majflt", "read_bytes", "read_chars", "rss_bytes", "switches"):
        if key in before and key in after:
            result[f"{key}_delta"] = round(after[key] - before[key], 3)
    return result


def undisturbable(found: Mapping[str, Any]) -> bool:
    """True when a tracer that stops its target would fail or wait for ever: D, stopped, traced, frozen."""
    return bool(found.get("tracer") or found.get("frozen") or set("DTt") & set(found.get("thread_states", ())))


def whereabouts(found: Mapping[str, Any]) -> str:
    """Where the main thread is, in words: ``blocked in flock (locks_lock_inode_wait)``."""
    state = found.get("state")
    if state == "T":
        return "stopped (SIGSTOP or a terminal's ^Z)"
    if state == "t":
        return f"stopped by the tracer {found.get('tracer', '?')}"
    if found.get("frozen"):
        return "frozen by its cgroup"
    if state == "R" or found.get("syscall") == "running":
        return "running on a CPU"
    place = found.get("syscall") or found.get("wchan")
    if not place:
        return "asleep, the kernel does not say where"
    wchan = found.get("wchan")
    words = "in uninterruptible sleep (D) in" if state == "D" else "blocked in"
    return f"{words} {place}" + (f" ({wchan})" if wchan and wchan != place else "")


def exit_words(code: int | None) -> str:
    """``exit code 3``, ``killed by SIGKILL``."""
    if code is None:
        return "exit code not readable"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _syscall(raw: bytes) -> str | None:
    """The name of the call in a line of ``/proc/PID/syscall``: its number, six arguments, two registers."""
    number, *words = raw.decode().split() or [""]
    if number == "running":
        return number
    if not number or number == "-1":  # not ours to read; in the kernel, but in no system call: a page fault
        return None
    table = _AARCH64 if os.uname().machine == "aarch64" else _X86_64
    name = table.get(int(number), f"system call {number}")
    arguments = [int(word, 16) for word in words[:6]]
    if name in _LOOKS and len(arguments) == 6:
        count, pointers = _LOOKS[name]
        if not arguments[count] or not any(arguments[n] for n in pointers):
            return name + NO_DESCRIPTORS
    return name


def _thread_states(pid: int) -> dict[str, int]:
    try:
        tids = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return {}
    lines = (procfs.read(f"/proc/{pid}/task/{tid}/stat").rpartition(b")")[2].split() for tid in tids)
    return dict(Counter(fields[0].decode() for fields in lines if fields))


def _frozen(pid: int) -> bool:
    """cgroup v2 shows frozen tasks as asleep (S); a tracer that wants to stop one waits until it thaws."""
    for line in procfs.read(f"/proc/{pid}/cgroup").decode(errors="replace").splitlines():
        if line.startswith("0::/"):
            mount = _unified()
            events = procfs.read(f"{mount}{line[3:]}/cgroup.events") if mount else b""
            return b"frozen 1" in events.splitlines()
    return False


@lru_cache(maxsize=1)
def _unified() -> str | None:
    """Where cgroup v2 is mounted (unified, or beside v1)."""
    return next((p for p in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if Path(p, "cgroup.procs").exists()), None)
