"""Which GPUs this session may lease: the machine's, less what CUDA_VISIBLE_DEVICES and --gpuserve-gpus hide."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from ..errors import SpecError
from ..gpu import Gpu, Reading, query, visible
from .lease_policy import Device

VIRTUAL = re.compile(r"virtual:([1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class GpuPool:
    """What may be leased.

    Attributes:
        devices: in the order of their indices.
        gpus: readings by device name at the time the pool was made; empty for virtual devices.
        counted: False when there is nothing to count (no GPU, or ``none``): every lease is granted, without devices.
        problem: why there is no GPU; None when there are some or none was wanted.
    """

    devices: tuple[Device, ...] = ()
    gpus: Mapping[str, Gpu] | None = None
    counted: bool = False
    problem: str | None = None

    @property
    def virtual(self) -> bool:
        return self.counted and not self.gpus

    def only(self, wanted: Callable[[Gpu], bool]) -> GpuPool:
        """The part whose GPUs are ``wanted``; of virtual devices, about which there is nothing to know, all."""
        if not self.gpus:
            return self
        return replace(self, devices=tuple(d for d in self.devices if wanted(self.gpus[d.name])))


def gpu_pool(option: str | None, environ: Mapping[str, str], ask: Callable[[float], Reading] = query) -> GpuPool:
    """The pool that ``--gpuserve-gpus`` describes.

    Args:
        option: None or ``auto``: every GPU that CUDA_VISIBLE_DEVICES leaves, nothing to count on a machine without;
            ``0,1`` or UUIDs as in CUDA_VISIBLE_DEVICES, always NVML's own numbers: these only; ``virtual:8``: eight
            that do not exist, to test scheduling or to bound the number of CPU servers; ``none``: lease nothing.
        environ: where CUDA_VISIBLE_DEVICES is looked up.

    Raises:
        SpecError: the option is none of these, or names a GPU that is not there or is hidden.
    """
    option = (option or "auto").strip()
    if option == "none":
        return GpuPool()
    if match := VIRTUAL.fullmatch(option):
        return GpuPool(tuple(Device(f"virtual-{n}", n) for n in range(int(match[1]))), None, counted=True)
    reading = ask(20.0)  # without nvidia-persistenced the driver sets up every GPU first
    shown = visible(reading.gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    if option != "auto":
        shown = _named(option, reading, shown, environ)
    units = sorted((gpu for gpu in shown if gpu.uuid), key=lambda gpu: gpu.index)
    devices = tuple(Device(gpu.uuid, gpu.index, "mig" if gpu.parent else gpu.name) for gpu in units)
    gpus = {gpu.uuid: gpu for gpu in units}
    problem = reading.problem or (None if devices else "CUDA_VISIBLE_DEVICES hides every GPU.")
    return GpuPool(devices, gpus, counted=bool(reading.gpus), problem=problem)


def _named(option: str, reading: Reading, shown: Collection[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    entries = [entry.strip() for entry in option.split(",")]
    chosen: list[Gpu] = []
    for entry in entries:
        if not re.fullmatch(r"[0-9]+|(GPU|MIG)-.+", entry, re.ASCII):
            raise SpecError(
                f"--gpuserve-gpus={option}: {entry!r} is no GPU. Write auto, none, virtual:8, or numbers or UUIDs as "
                f"in CUDA_VISIBLE_DEVICES: 0,1."
            )
        found = visible(reading.gpus, entry)
        if not found:
            there = ", ".join(str(gpu.index) for gpu in reading.gpus) or f"none ({reading.problem})"
            raise SpecError(f"--gpuserve-gpus={option}: there is no GPU {entry}. GPUs of this machine: {there}.")
        if found[0] not in shown:
            raise SpecError(
                f"--gpuserve-gpus={option}: GPU {entry} is hidden by CUDA_VISIBLE_DEVICES="
                f"{environ.get('CUDA_VISIBLE_DEVICES')}. Change one of them (both name GPUs in NVML's numbering)."
            )
        if found[0] not in chosen:
            chosen.append(found[0])
    return tuple(chosen)
