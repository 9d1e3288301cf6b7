"""Who holds and who waits: for holders of idle servers, and for messages (whose text is foreign: escape it)."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..gpu import MIB, RELEASE_TOLERANCE, Gpu
from . import lease_files as files
from .gpu_pool import GpuPool
from .lease_policy import Device
from .quarantine import Quarantined

FOREIGN_MEMORY = 1024 * MIB
"""A free GPU with more than this in use belongs to a stranger even when NVML names no process (containers)."""


def waiting(held: Collection[Device] | None = None) -> bool:
    """True while another process waits for GPUs: holders of idle servers then evict them, within two seconds.

    Cheap (a directory listing), and never makes the directory. With ``held`` only waits count that these could end.
    """
    root = Path(os.environ.get(files.VARIABLE) or files.DEFAULT)
    names = None if held is None else {device.name for device in held}
    for path in root.glob("ticket-*"):
        if path.name.split("-")[2:3] == [str(os.getpid())] or not files.locked(path):
            continue
        if names is None:
            return True
        with contextlib.suppress(OSError, ValueError):
            body = json.loads(files.read(path))
            if isinstance(body, dict) and shares(body, names):
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


def strangers(root: Path, pool: GpuPool, now: Mapping[str, Gpu]) -> dict[str, str]:
    """Devices that nobody leased and that are in use all the same: name to one phrase."""
    found = {}
    for device in pool.devices:
        gpu = now.get(device.name)
        if gpu is None or gpu.error is not None or files.locked(files.device(root, device)):
            continue
        used = gpu.memory_used or 0
        if big := [p for p in gpu.processes or () if p.memory is None or p.memory > RELEASE_TOLERANCE]:
            found[device.name] = f"{device.label}: " + ", ".join(
                f"pid {p.pid}, user {files.owner(p.pid) or 'unknown'}"
                + (f", {p.memory / 1e9:.0f} GB" if p.memory is not None else "")
                for p in big
            )
        elif used > FOREIGN_MEMORY:
            found[device.name] = f"{device.label}: {used / 1e9:.0f} GB in use by no visible process"
    return found


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
