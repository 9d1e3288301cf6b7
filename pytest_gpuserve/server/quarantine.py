"""GPUs that did not come back: kept from every later server until they do."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import procfs
from ..gpu import RELEASE_TOLERANCE, Gpu
from ..shape import Maybe, parsed
from .lease_files import place, read
from .lease_policy import Device

ADVICE = (
    "It ends when the memory is back; `gpuserve reap --devices` shows who holds it, and with --lift GPU ends the "
    "quarantine of that GPU at once."
)


_SHAPE = {
    "device": str,
    "why": str,
    "label": str,
    "boot": str,
    "memory_used": Maybe(int),
    "processes": [[int]],
}


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
            with contextlib.suppress(OSError, ValueError):
                sentence = _read(path)
                if _over(sentence, now.get(device.name)):
                    path.unlink()
                else:
                    found[device.name] = sentence.told
    return found


def imposed(root: Path | None = None) -> Iterator[tuple[Path, str, Quarantined | None]]:
    """Every file of a quarantine of this boot, the name of its device, and what it says; None: that is damaged.

    ``root``: by default the directory of all leases, which is never made here.
    """
    root = root or place()
    for path in sorted(root.glob("quarantine-*")):
        name = path.name.removeprefix("quarantine-").rpartition("-")[0]
        try:
            sentence = _read(path)
        except (OSError, ValueError):
            yield path, name, None
        else:
            if sentence.boot == _boot():
                yield path, name, sentence.told


@dataclass(frozen=True, slots=True)
class _Sentence:
    told: Quarantined
    boot: str
    memory_used: int | None
    processes: tuple[procfs.ProcessId, ...]


def _read(path: Path) -> _Sentence:
    """What the file says, which anybody may have written. Raises OSError, ValueError."""
    body = parsed(read(path), _SHAPE)
    if any(len(entry) != 2 for entry in body["processes"]):
        raise ValueError("no process")
    told = Quarantined(body["device"], body["why"], body["label"])
    watched = tuple(procfs.ProcessId(*entry) for entry in body["processes"])
    return _Sentence(told, body["boot"], body.get("memory_used"), watched)


def _over(sentence: _Sentence, now: Gpu | None) -> bool:
    if sentence.boot != _boot():
        return True
    if any(map(procfs.same, sentence.processes)):
        return False
    if now is None:
        return True
    if now.error is not None:
        return False
    if now.memory_used is None or sentence.memory_used is None:
        return not now.processes
    return now.memory_used <= sentence.memory_used + RELEASE_TOLERANCE


def _boot() -> str:
    return procfs.read("/proc/sys/kernel/random/boot_id").decode(errors="replace").strip()
