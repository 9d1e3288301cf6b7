"""GPUs that did not come back: kept from every later server until they do."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import procfs
from ..gpu import RELEASE_TOLERANCE, Gpu
from .lease_files import read
from .lease_policy import Device


@dataclass(frozen=True, slots=True)
class Quarantined:
    """``device`` is how messages name it; ``label`` whose doing it was."""

    device: str
    why: str
    label: str

    def __str__(self) -> str:
        because = f" since {self.label}" if self.label else ""
        return f"{self.device} is in quarantine{because}: {self.why.rstrip('.')}"


def impose(
    root: Path,
    device: Device,
    why: str,
    *,
    label: str = "",
    baseline: Gpu | None = None,
    processes: Sequence[tuple[int, int]] = (),
) -> None:
    """Put a device into quarantine, for all users of the machine.

    It ends by itself: when the memory is back at ``baseline`` and every one of ``processes`` (pid, start time) is gone;
    without a baseline (virtual devices) when the processes, and without those the process that imposed it, are gone.
    """
    me = procfs.process_id(os.getpid())
    watched = list(processes) or ([(me.pid, me.start)] if me and baseline is None else [])
    body = {
        "device": device.label,
        "why": why,
        "label": label,
        "memory_used": baseline.memory_used if baseline else None,
        "processes": watched,
        "boot": _boot(),
    }
    path = root / f"quarantine-{device.name.replace('/', '_')}-{secrets.token_hex(4)}"
    fresh = root / f".{path.name}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.fchmod(descriptor, 0o644)
        os.write(descriptor, json.dumps(body).encode())
    finally:
        os.close(descriptor)
    fresh.rename(path)


def quarantined(root: Path, devices: Sequence[Device], now: Mapping[str, Gpu]) -> dict[str, Quarantined]:
    """Devices still in quarantine, by name. Sentences that have ended are removed where the sticky bit lets us."""
    found: dict[str, Quarantined] = {}
    for device in devices:
        for path in root.glob(f"quarantine-{device.name.replace('/', '_')}-*"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                body = json.loads(read(path))
                if _over(body, now.get(device.name)):
                    path.unlink()
                else:
                    found[device.name] = Quarantined(str(body["device"]), str(body["why"]), str(body["label"]))
    return found


def _over(body: Mapping[str, object], now: Gpu | None) -> bool:
    if body["boot"] != _boot():
        return True
    processes = body["processes"]
    assert isinstance(processes, list)
    if any(procfs.same(procfs.ProcessId(int(pid), int(start))) for pid, start in processes):
        return False
    before = body["memory_used"]
    if now is None:
        return True
    if now.error is not None:
        return False
    if now.memory_used is None or not isinstance(before, int):
        return not now.processes
    return now.memory_used <= before + RELEASE_TOLERANCE


def _boot() -> str:
    return procfs.read("/proc/sys/kernel/random/boot_id").decode(errors="replace").strip()
