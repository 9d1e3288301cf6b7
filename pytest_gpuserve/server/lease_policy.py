"""Who gets which GPUs: pure decisions on what the lease directory says.

GPUs are handed out in aligned sets (4 of 8 are 0-3 or 4-7), because boards pair them so and because scattered small
leases would keep large ones waiting. Tickets are served by age; the oldest that must wait reserves the set closest to
being free, so that small requests behind it fill the rest of the machine but cannot starve it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """One thing that can be leased.

    Attributes:
        name: unique on this machine: a UUID, or ``virtual-3``.
        index: NVML's number (or the virtual one): decides alignment.
        group: devices of one group may serve one server together (same model); ``mig`` units never share a server.
    """

    name: str
    index: int
    group: str = ""

    @property
    def label(self) -> str:
        """How messages name it."""
        kind = "virtual GPU" if self.name.startswith("virtual-") else "GPU"
        return f"{kind} {self.index}"

    def to_json(self) -> list[Any]:
        return [self.name, self.index, self.group]


@dataclass(frozen=True, slots=True)
class Request:
    """A ticket: ``count`` devices out of ``devices``. ``key`` sorts by age and is unique."""

    key: str
    count: int
    devices: tuple[Device, ...]


def candidates(count: int, devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    """Every set of ``count`` devices that one server may get: aligned ones, else neighbours, else any of one group.

    ``devices`` are those that could be leased at all, held ones included (not broken, not a stranger's).
    """
    if count == 1:
        return [(device,) for device in devices]
    groups: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda d: d.index):
        if device.group != "mig":
            groups.setdefault(device.group, []).append(device)
    aligned: list[tuple[Device, ...]] = []
    windows: list[tuple[Device, ...]] = []
    scattered: list[tuple[Device, ...]] = []
    for members in groups.values():
        for start in range(len(members) - count + 1):
            window = tuple(members[start : start + count])
            if window[-1].index - window[0].index == count - 1:
                (windows if window[0].index % count else aligned).append(window)
        if len(members) >= count:
            scattered.extend(itertools.islice(itertools.combinations(members, count), 1000))
    return aligned or windows or scattered


def decide(
    queue: Sequence[Request], mine: str, free: Collection[str], usable: Collection[str]
) -> tuple[Device, ...] | None:
    """The devices that the request ``mine`` may take now, or None: wait.

    Args:
        queue: live requests, mine among them.
        free: names of devices that nobody holds.
        usable: names of devices that could be leased at all; a request that these can never satisfy reserves nothing.
    """
    left = {name for name in free if name in usable}
    for request in sorted(queue, key=lambda r: r.key):
        sets = candidates(request.count, [d for d in request.devices if d.name in usable])
        if not sets:
            continue
        best = max(sets, key=lambda s: (sum(d.name in left for d in s), -_waste(s, left, request.devices)))
        if request.key == mine:
            return best if all(d.name in left for d in best) else None
        left -= {d.name for d in best}
    return None


def _waste(chosen: Sequence[Device], left: Collection[str], devices: Sequence[Device]) -> int:
    """Size of the largest wholly free aligned block that this choice would break up: small is good."""
    free = {d.index for d in devices if d.name in left}
    size, first, broken = 1, chosen[0].index, 0
    while size <= 2 * len(devices):
        start = first - first % size
        if all(n in free for n in range(start, start + size)):
            broken = size
        size *= 2
    return broken
