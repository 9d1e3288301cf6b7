"""Who has the GPUs' devices open, whoever started it, and ending what a person chose of that. Never by a name."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import select
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .. import procfs
from ..errors import GpuserveError
from ..gpu import MIB, Gpu, Reading, pids_match, query
from ..procfs import ProcessId
from . import tree
from .asking import ask_tree
from .lease_status import FOREIGN_MEMORY
from .lease_status import holders as lease_holders
from .reaper import COOKIE, Seen, in_our_namespace, look

DEVICES = "/dev/nvidia*"
"""NVIDIA's devices; ``/dev/kfd`` and ``/dev/dri/render*`` are AMD's."""

DAEMONS = {
    "nvidia-cuda-mps": "the CUDA MPS daemon",
    "nvidia-persiste": "the NVIDIA persistence daemon",
    "nvidia-powerd": "an NVIDIA daemon",
    "nvidia-topologyd"[:15]: "an NVIDIA daemon",
    "nv-fabricmanager"[:15]: "the NVIDIA fabric manager",
    "nv-hostengine": "DCGM",
    "dcgm-exporter": "DCGM",
    "dcgmi": "DCGM",
    "Xorg": "the display server",
    "X": "the display server",
    "Xwayland": "the display server",
    "gnome-shell": "the desktop",
    "kwin_wayland": "the desktop",
}
"""comm (15 bytes) of what serves others: a name spares, it never condemns."""

_NODE = re.compile(r"/dev/nvidia([0-9]+)")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process with a GPU's device open, or that NVML names.

    Attributes:
        nodes: the device files; empty where only NVML tells (its descriptors may not be read by this user).
        gpus: NVML's numbers of the GPUs.
        memory: bytes on them by that number; a GPU of which NVML does not say is missing.
        spared: why it is not to be killed; "" when it may be.
    """

    process: Seen
    nodes: tuple[str, ...]
    gpus: tuple[int, ...]
    memory: Mapping[int, int]
    spared: str


@dataclass(frozen=True, slots=True)
class View:
    """All holders and GPUs at one moment.

    Attributes:
        unseen: processes that NVML names and that have no process here: (GPU, pid in the host's numbering, bytes).
        hidden: processes whose descriptors this user may not read.
    """

    holders: tuple[Holder, ...]
    reading: Reading
    unseen: tuple[tuple[int, int, int | None], ...]
    hidden: int

    def busy(self) -> list[Gpu]:
        """GPUs with more memory in use than any process explains: 1 GiB, since some drivers count their own."""
        return [gpu for gpu in self.reading.gpus if (unexplained(gpu) or 0) > FOREIGN_MEMORY]

    def unreadable(self) -> list[Gpu]:
        """GPUs, and MIG instances, that do not answer."""
        return [unit for gpu in self.reading.gpus for unit in (gpu, *gpu.instances) if unit.error is not None]


def unexplained(gpu: Gpu) -> int | None:
    """Bytes in use by no process that NVML names; None when it does not say."""
    if gpu.memory_used is None or gpu.processes is None or any(p.memory is None for p in gpu.processes):
        return None
    return gpu.memory_used - sum(p.memory or 0 for p in gpu.processes)


def holders(pattern: str = DEVICES, *, limit: float = 10.0) -> View:
    """Everybody who holds a device whose path matches ``pattern``, and everybody on a GPU by NVML."""
    deadline = time.monotonic() + limit
    opened, hidden = _open_devices(pattern)  # before NVML is asked: its helper opens them too
    nvidia = fnmatch.fnmatchcase("/dev/nvidia0", pattern)
    reading = query(max(1.0, limit / 2)) if nvidia else Reading((), f"NVML knows nothing of {pattern}.")
    minors = {gpu.minor: gpu.index for gpu in reading.gpus if gpu.minor is not None}
    gpus: dict[int, set[int]] = {}
    memory: dict[int, dict[int, int]] = {}
    unseen = []
    same = pids_match()
    for pid, nodes in opened.items():
        numbers = [int(found[1]) for node in nodes if (found := _NODE.fullmatch(node))]
        gpus[pid] = {minors.get(number, number) for number in numbers}
    units = [(gpu.index, unit) for gpu in reading.gpus for unit in (gpu, *gpu.instances)]
    for index, used in [(index, used) for index, unit in units for used in unit.processes or ()]:
        if same and procfs.stat(used.pid):
            gpus.setdefault(used.pid, set()).add(index)
            if used.memory is not None:
                memory.setdefault(used.pid, {})[index] = used.memory
        else:
            unseen.append((index, used.pid, used.memory))
    words, _ = ask_tree([{"do": "about", "pids": sorted(gpus)}], max(1.0, deadline - time.monotonic()))
    commands = {ProcessId(rest[0], rest[1]): str(rest[3]) for word, *rest in words if word == "about"}
    table = procfs.snapshot()
    spared = _spared(table, max(1.0, deadline - time.monotonic())) if gpus else {}
    result = []
    for pid in sorted(gpus):
        if entry := table.get(pid):
            seen = look(entry.id, commands.get(entry.id, entry.comm))
            why = DAEMONS.get(entry.comm) or spared.get(pid, "")
            if not why and entry.id not in commands:
                why = "it cannot be looked at (a driver may hold it)"
            result.append(Holder(seen, opened.get(pid, ()), tuple(sorted(gpus[pid])), memory.get(pid, {}), why))
    return View(tuple(result), reading, tuple(unseen), hidden)


def _open_devices(pattern: str) -> tuple[dict[int, tuple[str, ...]], int]:
    """Device files by pid, and how many processes may not be looked at."""
    found, hidden = {}, 0
    for pid in procfs.pids():
        try:
            nodes = set()
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    nodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))  # noqa: PTH115
        except PermissionError:
            hidden += 1
        except OSError:
            pass  # gone
        else:
            if nodes := {node for node in nodes if fnmatch.fnmatchcase(node, pattern)}:
                found[pid] = tuple(sorted(nodes))
    return found, hidden


def _spared(table: dict[int, procfs.Stat], limit: float) -> dict[int, str]:
    """pids that are not to be killed, and why: this command and what started it, live sessions, leases."""
    found: dict[int, str] = {}

    def spare(roots: Collection[int], why: str) -> None:
        for root in roots:
            for pid in (root, *procfs.descendants(root, table)):
                found.setdefault(pid, why)

    pid = os.getpid()
    while pid in table:
        found[pid] = "this command, or what started it"
        pid = table[pid].ppid
    found.setdefault(1, "pid 1: all that runs here ends with it")
    from .lease_files import place

    with contextlib.suppress(OSError, GpuserveError):
        if place().is_dir():
            for body in lease_holders():
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    holder = ProcessId(int(body["pid"]), int(body["start"]))
                    if procfs.same(holder):
                        spare([holder.pid], f"pid {holder.pid} has leased GPUs through gpuserve")
    words, complete = ask_tree([{"do": "about", "pids": None}], limit)
    for word, *rest in words:
        owner = COOKIE.fullmatch(str(rest[2])) if word == "about" else None
        if owner is None:
            continue
        if procfs.same(ProcessId(int(owner[1]), int(owner[2]))):
            spare([int(rest[0]), int(owner[1])], f"a server of the live gpuserve session of pid {owner[1]}")
        elif not in_our_namespace(int(rest[0])):
            spare([int(rest[0])], "a server of a gpuserve session in a container")
    if not complete:
        found.update(dict.fromkeys(table, "it cannot be said whose it is: looking at all processes took too long"))
    return found


def end(processes: Sequence[ProcessId], *, grace: float = 10.0, limit: float = 5.0) -> list[ProcessId]:
    """SIGTERM, then SIGKILL to what is left after ``grace`` seconds, to exactly these processes; those still there
    ``limit`` seconds later."""
    members = [tree.Member(id.pid, id.start, "", False, False) for id in processes]
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, limit)):
        tree.send(number, [member for member in members if procfs.same(ProcessId(member.pid, member.start))])
        if not (left := _wait(processes, patience)):
            return []
    return left


def _wait(processes: Sequence[ProcessId], patience: float) -> list[ProcessId]:
    deadline = time.monotonic() + patience
    while left := [id for id in processes if procfs.same(id)]:
        if time.monotonic() > deadline:
            break
        select.select([], [], [], 0.02)
    return left


def wait_idle(before: Reading, chosen: Sequence[Holder], limit: float = 15.0) -> Reading:
    """The reading once the memory of the ended ``chosen`` is back on their GPUs, or the last one at the limit."""
    deadline, pause = time.monotonic() + limit, 0.1
    touched = {number for holder in chosen for number in holder.gpus}
    had = {number: sum(holder.memory.get(number, 0) for holder in chosen) for number in touched}
    start = {gpu.index: gpu.memory_used for gpu in before.gpus}

    def back(gpu: Gpu) -> bool:
        free, used = unexplained(gpu), gpu.memory_used
        fell = used is not None and used <= (start.get(gpu.index) or 0) - had[gpu.index] + 64 * MIB
        return gpu.error is None and (used is None or fell or (free is not None and free <= FOREIGN_MEMORY))

    while True:
        now = query(5.0)
        if all(back(gpu) for gpu in now.gpus if gpu.index in touched) or time.monotonic() + pause > deadline:
            return now
        time.sleep(pause)
        pause = min(1.0, pause * 2)
