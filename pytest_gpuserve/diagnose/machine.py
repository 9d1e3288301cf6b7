"""Is it the machine? Memory, shared memory, the kernel's log, who listens: read from /proc and the file system."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from .. import procfs
from .evidence import Memory

_UNLIMITED = 1 << 60
_FIELDS = re.compile(r"^(VmSize|VmSwap|RssAnon|RssShmem|VmRSS):\s+(\d+) kB", re.MULTILINE)


def memory(pids: Collection[int], *, oom_before: int | None = None) -> Memory:
    """Memory of a server's processes. Shared memory counts once, address space is told apart.

    ``oom_before`` is :func:`oom_kills` at the launch.
    """
    anonymous = shared = virtual = swapped = 0
    for pid in pids:
        values = {
            k: int(v) << 10 for k, v in _FIELDS.findall(procfs.read(f"/proc/{pid}/status").decode(errors="replace"))
        }
        anonymous += values.get("RssAnon", values.get("VmRSS", 0))
        shared = max(shared, values.get("RssShmem", 0))
        virtual += values.get("VmSize", 0)
        swapped += values.get("VmSwap", 0)
    one = next(iter(pids), os.getpid())
    limit, current = _limit(one)
    after = oom_kills(one)
    return Memory(
        resident=anonymous + shared,
        virtual=virtual,
        limit=limit,
        current=current,
        oom_kills=None if after is None or oom_before is None else max(0, after - oom_before),
        killed=tuple(pid for pid in killed_for_memory() if pid in set(pids)),
        swapped=swapped,
        pressure=_pressure(one),
    )


def _cgroups(pid: int) -> Iterator[tuple[Path, bool]]:
    """(directory, is v2) of the process's memory cgroup and all above it, innermost first."""
    for line in procfs.read(f"/proc/{pid}/cgroup").decode(errors="replace").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            bases, second = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")], True
        elif "memory" in controllers.split(","):
            bases, second = [Path("/sys/fs/cgroup/memory")], False
        else:
            continue
        for base in bases:
            directory = base / path.lstrip("/")
            while True:
                if (directory / ("memory.max" if second else "memory.limit_in_bytes")).exists():
                    yield directory, second
                if directory == base or base not in directory.parents:
                    break
                directory = directory.parent


def _limit(pid: int) -> tuple[int | None, int | None]:
    """The lowest limit above a process and what is used under it; the machine's where there is none."""
    best: tuple[int, int | None] | None = None
    for directory, second in _cgroups(pid):
        limit = _number(directory / ("memory.max" if second else "memory.limit_in_bytes"))
        if limit is not None and limit < _UNLIMITED and (best is None or limit < best[0]):
            best = limit, _number(directory / ("memory.current" if second else "memory.usage_in_bytes"))
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", procfs.read("/proc/meminfo").decode(), re.MULTILINE))
    total = int(fields.get("MemTotal", 0)) << 10
    if best is not None and (not total or best[0] < total):
        return best
    available = int(fields.get("MemAvailable", 0)) << 10
    return (total, total - available) if total else (None, None)


def _number(path: Path) -> int | None:
    text = procfs.read(str(path)).strip()
    return int(text) if text.isdigit() else None


def oom_kills(pid: int | None = None) -> int | None:
    """Processes killed for memory so far in the process's cgroup, else on the machine; None when nobody counts."""
    for directory, second in _cgroups(pid or os.getpid()):
        text = procfs.read(str(directory / ("memory.events" if second else "memory.oom_control"))).decode()
        if found := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return int(found[1])
    found = re.search(r"^oom_kill (\d+)$", procfs.read("/proc/vmstat").decode(), re.MULTILINE)
    return int(found[1]) if found else None


def _pressure(pid: int) -> float | None:
    for directory, second in _cgroups(pid):
        if second and (value := _full(procfs.read(str(directory / "memory.pressure")))) is not None:
            return value
    return _full(procfs.read("/proc/pressure/memory"))


def _full(text: bytes) -> float | None:
    found = re.search(rb"^full avg10=([\d.]+)", text, re.MULTILINE)
    return float(found[1]) if found else None


def kernel_log(limit: int = 4 << 20) -> str:
    """What the kernel logged, newest ``limit`` bytes; empty where it may not be read."""
    records: list[bytes] = []
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        size = 0
        while size < 4 * limit:
            try:
                record = os.read(descriptor, 16384)
            except BrokenPipeError:  # overwritten while we read: go on with the next one
                continue
            except OSError:
                break
            if not record:
                break
            records.append(record)
            size += len(record)
    finally:
        os.close(descriptor)
    return b"".join(records)[-limit:].decode(errors="replace")


def killed_for_memory(log: str | None = None) -> tuple[int, ...]:
    """Pids that the kernel log says were killed for memory."""
    text = kernel_log() if log is None else log
    return tuple(dict.fromkeys(int(pid) for pid in re.findall(r"Killed process (\d+) ", text)))


def xids(log: str | None = None) -> tuple[tuple[str, int], ...]:
    """(PCI address, number) of the driver's errors in the kernel log."""
    text = kernel_log() if log is None else log
    return tuple(dict.fromkeys((a, int(n)) for a, n in re.findall(r"NVRM: Xid \(PCI:([^)]+)\): (\d+)", text)))


def shm_free(path: str = "/dev/shm") -> int | None:
    """Bytes free in shared memory; None without it."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def nccl_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that change how ranks talk to each other."""
    names = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "NVSHMEM_")
    return {k: v for k, v in sorted(environment.items()) if k.startswith(names)}


def listeners(port: int) -> tuple[int, ...]:
    """Pids that listen on a TCP port, as far as they can be seen; -1 for one whose process cannot."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in procfs.read(table).decode().splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return ()
    found = [pid for pid in procfs.pids() if inodes & set(_targets(pid))]
    return tuple(found) or (-1,)


def _targets(pid: int) -> Iterator[str]:
    """What the process's open files link to."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield str(entry.readlink())
