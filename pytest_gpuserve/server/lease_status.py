"""Who holds and who waits: for holders of idle servers, and for messages (whose text is foreign: escape it)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import procfs
from ..gpu import MIB, RELEASE_TOLERANCE, Gpu, GpuProcess, pids_match
from ..procfs import ProcessId
from . import lease_files as files
from .gpu_pool import GpuPool
from .lease_policy import Device
from .quarantine import Quarantined

FOREIGN_MEMORY = 1024 * MIB
"""A free GPU on which more than this is held by no process that NVML names belongs to a stranger (containers)."""

_CUDA_NODE = "nvidia-uvm"
"""The device that every CUDA context opens; NVML, which opens every GPU's, does not."""


def waiting(held: Collection[Device] | None = None) -> bool:
    """True while another process waits for GPUs: holders of idle servers then evict them, within two seconds.

    Cheap (a directory listing), and never makes the directory. With ``held`` only waits count that these could end.
    """
    root = files.place()
    names = None if held is None else {device.name for device in held}
    for path in root.glob("ticket-*"):
        if path.name.split("-")[2:3] == [str(os.getpid())] or not files.locked(path):
            continue
        if names is None:
            return True
        if (body := files.body_of(path)) is not None and shares(body, names):
            return True
    return False


class Evictor:
    """A thread that calls ``evict`` while somebody else waits: for holders that are busy with something else.

    ``evict`` must stop only servers that neither the running test nor the next one uses.
    """

    def __init__(self, evict: Callable[[], object], *, interval: float = 0.5) -> None:
        self._evict = evict
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuserve-evictor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            if waiting():
                self._evict()

    def close(self) -> None:
        """Stop the thread; waits for an eviction that is under way."""
        self._stop.set()
        self._thread.join()


def holders(root: Path | None = None) -> list[dict[str, Any]]:
    """Every live lease of the machine.

    Each is ``{"pid", "start", "user", "label", "since" (wall clock), "count", "devices": [[name, index, group]]}``.
    """
    return [entry.body for entry in files.entries(root or files.directory(), "lease")]


def holders_text(bodies: Sequence[Mapping[str, Any]], names: Collection[str] | None = None) -> str:
    """``GPU 0-3 held by pid 812 (bob, sglang-tp4-base) for 3 min``; ``names``: only these devices."""
    parts = []
    for body in bodies:
        with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):
            indices = sorted(int(d[1]) for d in body["devices"] if names is None or d[0] in names)
            minutes = max(0.0, time.time() - float(body["since"])) / 60
            span = f"{minutes:.0f} min" if minutes >= 1 else "less than a minute"
            if indices:
                parts.append(f"GPU {_ranges(indices)} held by {_who(body)} for {span}")
    return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class InUse:
    """GPUs that nobody leased and that are in use all the same, by name: one phrase each.

    Attributes:
        strangers: to be waited for.
        ours: the memory is this session's own (a model in a test's process): to wait for it would be for ever.
        passing: those of ``ours`` where a process other than pytest's own has some, which may be about to end.
    """

    strangers: dict[str, str] = field(default_factory=dict)
    ours: dict[str, str] = field(default_factory=dict)
    passing: set[str] = field(default_factory=set)


def in_use(root: Path, pool: GpuPool, now: Mapping[str, Gpu], session: Collection[ProcessId] = ()) -> InUse:
    """Who is on the GPUs that nobody leased. What ``session`` and this process started is this session's own. In most
    containers NVML's pids mean nothing: there nobody can know whose memory is, and it counts as a stranger's."""
    found, same, family = InUse(), pids_match(), None
    for device in pool.devices:
        gpu = now.get(device.name)
        if gpu is None or gpu.error is not None or files.locked(files.device(root, device)):
            continue
        listed = gpu.processes or ()
        big = [p for p in listed if p.memory is None or p.memory > RELEASE_TOLERANCE]
        sized = all(p.memory is not None for p in listed)
        loose = (gpu.memory_used or 0) - sum(p.memory or 0 for p in listed) if sized else 0
        if not big and loose <= FOREIGN_MEMORY:
            continue
        family = family or _family(session)
        mine = [p for p in big if p.pid in family] if same else []
        others = [_process(p, same) for p in big if p not in mine]
        if loose > FOREIGN_MEMORY:
            others.append(f"{size(loose)} in use by no visible process")
        openers = cuda_users(family, gpu.minor) if others and not same else []
        if openers:
            others.append(f"it may be {_names(openers)} of this session: --gpuserve-foreign=ignore starts beside it")
        if others:
            found.strangers[device.name] = f"{device.label}: {', '.join(others)}"
        elif mine:
            sizes = ", ".join(f"{_names([p.pid])} of this session{_held(p)}" for p in mine)
            found.ours[device.name] = f"{device.label} is in use by {sizes}"
            if not {p.pid for p in mine} <= {os.getpid(), *(process.pid for process in session)}:
                found.passing.add(device.name)
    return found


def _family(session: Collection[ProcessId]) -> Collection[int]:
    """This process, those of ``session`` that live, and all that they started."""
    table = procfs.snapshot()
    roots = {os.getpid(), *(process.pid for process in session if procfs.same(process))}
    return {pid for root in roots for pid in (root, *procfs.descendants(root, table))}


def cuda_users(pids: Collection[int], minor: int | None, devices: str = "/dev") -> list[int]:
    """Those of ``pids`` with a CUDA context that may be on /dev/nvidia``minor``."""
    wanted, found = {f"{devices}/{_CUDA_NODE}", f"{devices}/nvidia{minor}"}, []
    for pid in sorted(pids):
        nodes = set()
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    nodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))  # noqa: PTH115
        if wanted <= nodes:
            found.append(pid)
    return found


def _names(pids: Sequence[int]) -> str:
    return ", ".join(f"pytest itself (pid {pid})" if pid == os.getpid() else f"pid {pid}{_comm(pid)}" for pid in pids)


def _comm(pid: int) -> str:
    found = procfs.stat(pid)
    return f" ({found.comm})" if found else ""


def _process(process: GpuProcess, same: bool) -> str:
    if not same:
        return f"pid {process.pid} outside this container{_held(process)}"
    return f"pid {process.pid}{_comm(process.pid)}, user {files.owner(process.pid) or 'unknown'}{_held(process)}"


def _held(process: GpuProcess) -> str:
    return "" if process.memory is None else f", {size(process.memory)}"


def size(amount: int) -> str:
    """``503 MiB``, and from 1 GiB on ``73.4 GB``."""
    return f"{amount / 1e9:.1f} GB" if amount >= 1024 * MIB else f"{amount // MIB} MiB"


def wait_text(
    root: Path, mine: str, count: int, pool: GpuPool, broken: Mapping[str, Quarantined], foreign: Mapping[str, str]
) -> str:
    """One sentence: what the ticket ``mine`` waits for, and who is in the way."""
    names = {device.name for device in pool.devices}
    ahead = [e for e in files.entries(root, "ticket") if e.key < mine and shares(e.body, names)]
    parts = [
        holders_text(holders(root), names),
        *foreign.values(),
        *(f"{q.device} in quarantine: {q.why.rstrip('.')}" for q in broken.values()),
        ", ".join(f"{_who(e.body)} is before us and waits for {e.body.get('count')}" for e in ahead),
    ]
    parts.append(files.stuck_locks(root, pool.devices))
    return f"Waiting for {count} of {len(pool.devices)} GPUs: {'; '.join(filter(None, parts)) or 'being freed'}."


def shares(body: Mapping[str, Any], names: Collection[str]) -> bool:
    """True when a ticket or lease is about one of these devices."""
    with contextlib.suppress(KeyError, TypeError, IndexError):
        return any(d[0] in names for d in body["devices"])
    return False


def _who(body: Mapping[str, Any]) -> str:
    return f"pid {body.get('pid')} ({body.get('user')}, {body.get('label') or 'no label'})"


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,6``."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
