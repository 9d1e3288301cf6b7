"""What NVML says, asked in a helper process with a limit: a wedged driver must not hang us.

Nothing here raises because of a GPU: no driver, a lost GPU or a call that never returns end as an empty reading or as
a :class:`Gpu` with ``error``. Sizes are bytes. Process ids are the *host's*, which a container cannot match with its
own (NVIDIA/nvidia-docker#179): see :func:`pids_match`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

MIB = 1 << 20

RELEASE_TOLERANCE = 256 * MIB
"""How far above its baseline a GPU's memory may be and still count as given back (never raised to hide a leak)."""

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of the kernel: the inode of /proc/self/ns/pid outside every container."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU, of compute or graphics; ``pid`` in the host's numbering, ``memory`` None where unknown."""

    pid: int
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One reading of one GPU, or of one MIG instance of it (then ``parent`` is the GPU's UUID).

    Attributes:
        index: NVML's number, which is the order of CUDA_DEVICE_ORDER=PCI_BUS_ID.
        uuid: ``GPU-…`` or ``MIG-…``; empty only for a GPU that never answered.
        capability: compute capability, (12, 0) for sm_120; None where unknown.
        memory_total, memory_used: bytes; None where the GPU has none of its own (GB10) or did not answer.
        utilisation: percent of the last sample period in which a kernel ran; None under MIG.
        power: watts.
        processes: None when the driver does not say (which is not the same as none).
        minor: N of /dev/nvidiaN.
        ecc: uncorrected memory errors since the driver was loaded; None where unsupported.
        xids: critical Xid numbers since the sampler that made this reading was started.
        clocks: NVML's bit mask of reasons for lowered clocks (0x1 idle, 0x8 hardware slow-down, 0x40 heat).
        mig: MIG mode is on: only ``instances`` can be used by CUDA.
        error: why this GPU cannot be read; None when it can.
    """

    index: int
    uuid: str = ""
    name: str = ""
    capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    utilisation: int | None = None
    power: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    minor: int | None = None
    ecc: int | None = None
    xids: tuple[int, ...] = ()
    clocks: int | None = None
    mig: bool = False
    instances: tuple[Gpu, ...] = ()
    parent: str | None = None
    error: str | None = None

    @property
    def sm(self) -> int | None:
        """120 for compute capability 12.0, 90 for 9.0; None where unknown."""
        return self.capability[0] * 10 + self.capability[1] if self.capability else None

    @property
    def label(self) -> str:
        """How messages name it: ``GPU 3``, ``GPU 3 (MIG-5c8f…)``."""
        return f"GPU {self.index}" if self.parent is None else f"GPU {self.index} ({self.uuid[:12]}…)"

    def to_json(self) -> dict[str, Any]:
        """Plain values, for reports and JSON files."""
        return {
            "index": self.index,
            "uuid": self.uuid,
            "name": self.name,
            "capability": list(self.capability) if self.capability else None,
            "memory_total": self.memory_total,
            "memory_used": self.memory_used,
            "utilisation": self.utilisation,
            "power": self.power,
            "processes": None if self.processes is None else [[p.pid, p.memory] for p in self.processes],
            "minor": self.minor,
            "ecc": self.ecc,
            "xids": list(self.xids),
            "clocks": self.clocks,
            "mig": self.mig,
            "instances": [i.to_json() for i in self.instances],
            "parent": self.parent,
            "error": self.error,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Gpu:
        """Read what :meth:`to_json` or the helper wrote; missing keys are unknown."""
        capability, processes = raw.get("capability"), raw.get("processes")
        gpu = cls(
            index=int(raw["index"]),
            uuid=str(raw.get("uuid") or ""),
            name=str(raw.get("name") or ""),
            capability=(int(capability[0]), int(capability[1])) if capability else None,
            memory_total=raw.get("memory_total"),
            memory_used=raw.get("memory_used"),
            utilisation=raw.get("utilisation"),
            power=raw.get("power"),
            processes=None if processes is None else tuple(GpuProcess(int(pid), size) for pid, size in processes),
            minor=raw.get("minor"),
            ecc=raw.get("ecc"),
            xids=tuple(raw.get("xids") or ()),
            clocks=raw.get("clocks"),
            mig=bool(raw.get("mig")),
            parent=raw.get("parent"),
            error=raw.get("error"),
        )
        instances = tuple(
            replace(cls.from_json(i), parent=gpu.uuid, capability=gpu.capability) for i in raw.get("instances") or ()
        )
        return replace(gpu, instances=instances)


@dataclass(frozen=True, slots=True)
class Reading:
    """All GPUs of the machine at one moment. ``problem`` says in one sentence why there are none.

    ``mute``: because NVML is there and does not answer.
    """

    gpus: tuple[Gpu, ...]
    problem: str | None = None
    driver: str | None = None
    mute: bool = False


def devices(limit: float = 5.0) -> tuple[Gpu, ...]:
    """All physical GPUs this process may see, whatever CUDA_VISIBLE_DEVICES says; empty without a driver.

    Takes at most about ``limit`` seconds. :func:`query` also says why there are none.
    """
    return query(limit).gpus


def query(limit: float = 5.0) -> Reading:
    """One reading by a helper process that is started for it."""
    with Sampler(events=False) as sampler:
        return sampler.sample(limit)


def find(reading: Reading, old: Gpu) -> Gpu:
    """What ``reading`` says of ``old``, always an answer: a GPU that is gone or mute comes back with ``error``.

    By UUID; a lost GPU has none, so then by index.
    """
    units = [unit for gpu in reading.gpus for unit in (gpu, *gpu.instances)]
    for unit in units:
        if unit.uuid == old.uuid:
            return unit
    for unit in units:
        if not unit.uuid and unit.error is not None and unit.index == old.index:
            return replace(old, error=unit.error)
    return replace(old, error=reading.problem or "NVML no longer lists it")


class Sampler:
    """A helper process kept for repeated readings (about 1 ms each), restarted when it died or hung.

    A helper that the kernel will not let die (a driver call in state D) is left alone, and no other is started beside
    it: ``problem`` then names its pid. Not safe for several threads at once.

    Args:
        events: also collect Xid events from now on.
    """

    def __init__(self, *, events: bool = True) -> None:
        self._events = events
        self._process: subprocess.Popen[bytes] | None = None
        self._stuck: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sample(self, limit: float = 5.0) -> Reading:
        """One reading; the time is split so that one GPU's silence still leaves the others' answers."""
        if self._stuck is not None:
            if self._stuck.poll() is None:
                return Reading(
                    (), f"NVML does not answer: our helper (pid {self._stuck.pid}) hangs in the driver.", mute=True
                )
            self._stuck = None
        module = importlib.util.find_spec("pynvml")
        if module is None or module.origin is None:
            return Reading((), "The Python package nvidia-ml-py is not installed, so NVML cannot be asked.")
        deadline = time.monotonic() + limit
        if self._process is not None and self._process.poll() is not None:
            self._end()
        self._process = self._process or self._start(module.origin)
        try:
            line = self._exchange(self._process, json.dumps({"limit": limit * 0.7}).encode() + b"\n", deadline)
        except OSError as error:
            line, why = None, f"NVML's helper process ended: {error}."
        else:
            why = f"NVML did not answer within {limit:g} s: the driver may be wedged."
        if line is None:
            self._end()
            return Reading((), why, mute=True)
        try:
            reply = json.loads(line)
            if "problem" in reply:
                return Reading((), str(reply["problem"]))
            return Reading(tuple(map(Gpu.from_json, reply["gpus"])), None, reply.get("driver") or None)
        except (ValueError, KeyError, TypeError) as error:
            self._end()
            return Reading((), f"NVML's helper process sent something unreadable: {error}.", mute=True)

    def close(self) -> None:
        """End the helper; never waits for one that the kernel keeps."""
        if self._process is not None:
            self._end()

    def _start(self, pynvml: str) -> subprocess.Popen[bytes]:
        helper = Path(__file__).with_name("gpu_helper.py")
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(helper), pynvml, *(["--events"] if self._events else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: bytes, deadline: float) -> bytes | None:
        """The reply's line, or None at the deadline. Raises OSError when the helper is gone."""
        assert process.stdin is not None
        assert process.stdout is not None
        os.write(process.stdin.fileno(), request)
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if not selector.select(left):
                    continue
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise BrokenPipeError("it closed its output")
                received += chunk
                if received.endswith(b"\n"):
                    return received
        return None

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._stuck = process


def usable(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """What CUDA can run on: a GPU in MIG mode stands for its instances."""
    return tuple(unit for gpu in gpus for unit in (gpu.instances if gpu.mig else (gpu,)))


def visible(gpus: Sequence[Gpu], value: str | None) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES=value`` leaves, in its order; None means it is not set.

    As CUDA reads it: indices, UUIDs or unambiguous beginnings of them, MIG UUIDs; everything from the first entry that
    names nothing on is ignored; empty or -1 hides all. An index of a GPU in MIG mode means its first instance. Indices
    are taken in PCI order (machines that mix GPU models need CUDA_DEVICE_ORDER=PCI_BUS_ID for that to be CUDA's order).
    """
    if value is None:
        return usable(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        found = _named(gpus, entry)
        if found is None:
            break
        if found not in chosen:
            chosen.append(found)
    return tuple(chosen)


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isascii() and entry.isdecimal():
        matches = [gpu for gpu in gpus if gpu.index == int(entry)]
    elif entry.startswith("MIG-"):
        matches = [unit for gpu in gpus for unit in gpu.instances if unit.uuid.startswith(entry)]
    elif entry.startswith("GPU-"):
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    else:
        matches = []
    if len(matches) != 1:
        return None
    (gpu,) = matches
    return (gpu.instances[0] if gpu.instances else None) if gpu.mig else gpu


def pids_match() -> bool:
    """True when NVML's pids are ours: we are outside every pid namespace (in a container they are the host's)."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Release:
    """Whether a GPU was given back after a server's end.

    Attributes:
        free: memory is back at the baseline within the tolerance: the GPU may be leased again.
        excess: bytes above the baseline that no known foreign process explains; None when memory is unknown.
        blame: who holds the excess: ``ours`` (what the server started, or memory that no process owns where every
            process can be seen), ``unknown`` (it may be ours or a stranger's: pids of another namespace, a driver that
            does not list them all), ``unreadable`` (the GPU does not answer), ``nobody`` when free.
        holders: the processes behind ``blame``.
        text: one sentence.
    """

    free: bool
    excess: int | None
    blame: Literal["nobody", "ours", "unknown", "unreadable"]
    holders: tuple[GpuProcess, ...]
    text: str


def check_release(
    baseline: Gpu,
    now: Gpu,
    *,
    ours: Collection[int],
    same_namespace: bool,
    tolerance: int = RELEASE_TOLERANCE,
) -> Release:
    """Compare a GPU with its reading from before the launch. Pure.

    Args:
        baseline: reading from before the server was started.
        now: reading after its end.
        ours: every pid that belonged to the server, living or dead.
        same_namespace: :func:`pids_match`; when False no pid of NVML is ever compared with ``ours``.
    """
    if now.error is not None:
        return Release(False, None, "unreadable", (), f"{now.label} cannot be read: {now.error.rstrip('.')}.")
    before = {p.pid: p.memory or 0 for p in baseline.processes or ()}
    current = now.processes or ()
    mine = tuple(p for p in current if same_namespace and p.pid in ours)
    strangers = tuple(p for p in current if p not in mine and (same_namespace or p.pid in before))
    unknown = tuple(p for p in current if p not in mine and p not in strangers)
    if now.memory_used is None or baseline.memory_used is None:
        if held := mine or unknown:
            blame: Literal["ours", "unknown"] = "ours" if mine else "unknown"
            return Release(False, None, blame, held, f"{now.label} is still used by {_list(held)}.")
        return Release(True, None, "nobody", (), f"{now.label} tells no memory use; no process is left on it.")
    foreign = sum((p.memory or 0) - before.get(p.pid, 0) for p in strangers)
    foreign -= sum(size for pid, size in before.items() if pid not in {p.pid for p in current})
    excess = now.memory_used - baseline.memory_used - foreign
    if excess <= tolerance and not mine:
        return Release(True, excess, "nobody", (), f"{now.label} is back at {now.memory_used // MIB} MiB.")
    held_text = (
        f"{now.label} holds {now.memory_used // MIB} MiB, {excess // MIB} MiB more than before the launch"
        f" ({baseline.memory_used // MIB} MiB)"
    )
    if mine:
        return Release(False, excess, "ours", mine, f"{held_text}: {_list(mine)} of this server.")
    explained = sum(p.memory or 0 for p in unknown)
    if unknown and (excess - explained <= tolerance or any(p.memory is None for p in unknown)):
        return Release(
            False,
            excess,
            "unknown",
            unknown,
            f"{held_text}: {_list(unknown)} in the host's numbering, perhaps not ours.",
        )
    if now.processes is None or not (same_namespace or current) or any(p.memory is None for p in strangers):
        why = "the driver names no process here" if not current else f"{_list(strangers)} may hold more than is told"
        return Release(False, excess, "unknown", (), f"{held_text}, and nobody can say whose that is: {why}.")
    return Release(False, excess, "ours", unknown, f"{held_text}, and no process that could be a stranger's owns it.")


def _list(processes: Sequence[GpuProcess]) -> str:
    return ", ".join(f"pid {p.pid}" + (f" ({p.memory // MIB} MiB)" if p.memory is not None else "") for p in processes)


def wait_release(
    baselines: Sequence[Gpu],
    *,
    ours: Callable[[], Collection[int]],
    limit: float,
    sampler: Sampler | None = None,
    tolerance: int = RELEASE_TOLERANCE,
    seen: dict[str, Release] | None = None,
) -> dict[str, Release]:
    """Wait until every GPU of ``baselines`` is given back, at most ``limit`` seconds; by UUID, the last check of each.

    Drivers free memory some seconds after the last process is gone, so one look is not enough. Without NVML (no
    answer at all) the GPUs count as not free, blame ``unreadable``. ``seen`` is filled as it goes, for callers that
    are interrupted.
    """
    own = Sampler(events=False) if sampler is None else None
    sampler = sampler or own
    assert sampler is not None
    same, deadline, pause = pids_match(), time.monotonic() + limit, 0.05
    result = {} if seen is None else seen
    waiting = {gpu.uuid: gpu for gpu in baselines}
    try:
        while True:
            left = deadline - time.monotonic()
            reading = sampler.sample(max(0.5, min(5.0, left)))
            for uuid, baseline in list(waiting.items()):
                now = find(reading, baseline)
                check = check_release(baseline, now, ours=ours(), same_namespace=same, tolerance=tolerance)
                if check.blame == "unreadable":  # the first look had the most time, so its reason tells most
                    check = result[uuid] if uuid in result and result[uuid].blame == check.blame else check
                result[uuid] = check
                if check.free:
                    del waiting[uuid]
            if not waiting or time.monotonic() + pause >= deadline:
                return result
            time.sleep(pause)
            pause = min(pause * 2, 0.5)
    finally:
        if own is not None:
            own.close()
