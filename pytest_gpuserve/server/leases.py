"""GPUs as leases: atomic, fair, freed by the kernel when their holder dies, shared by everybody on the machine.

A lease belongs to a *server*: its descriptors (:attr:`Lease.fds`) are passed to the server's supervisor, so that the
GPUs stay taken until the supervisor has seen the last process of the server die, also when pytest is long gone; and
pytest keeps its own copies until the GPUs' memory is back (:meth:`Lease.give_back`).
Nobody waits while holding an idle server: :func:`acquire` first evicts the caller's own, and a waiter makes every
other holder evict (:func:`waiting`, :class:`Evictor`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from ..gpu import Gpu, Release, Sampler, find, wait_release
from ..procfs import ProcessId
from . import lease_files as files
from .gpu_pool import GpuPool, gpu_pool
from .lease_files import LeaseError
from .lease_policy import Device, Request, candidates, decide
from .lease_status import Evictor, holders, holders_text, in_use, wait_text, waiting
from .quarantine import ADVICE, impose, quarantined

__all__ = ["Evictor", "GpuPool", "Lease", "LeaseError", "acquire", "gpu_pool", "holders", "holders_text", "waiting"]

PATIENCE = 10.0
"""Seconds a stranger must be seen before ``foreign="raise"`` raises: memory of a server just ended looks like one."""

FIRST_LOOK = 20.0
"""Seconds for the first reading: without nvidia-persistenced the driver sets up every GPU first."""

_POLL = 0.1
_SPEAK_AGAIN = 30.0

_open: weakref.WeakSet[Lease] = weakref.WeakSet()


class Lease:
    """GPUs that are ours until :meth:`give_back` or :meth:`release`, or until every process with its fds is dead.

    Attributes:
        devices: what is leased; empty when there is nothing to count.
        baselines: readings of the GPUs from just before they were handed over; empty for virtual devices.
        beside: devices that this session itself uses besides, by name: one phrase each (foreign text: escape it).
    """

    def __init__(
        self, devices: tuple[Device, ...], baselines: tuple[Gpu, ...], fds: list[int], entry: Path | None
    ) -> None:
        self.devices = devices
        self.baselines = baselines
        self.beside: Mapping[str, str] = {}
        self._fds = fds
        self._entry = entry
        _open.add(self)

    def __repr__(self) -> str:
        return f"<Lease of {', '.join(d.label for d in self.devices) or 'nothing'}>"

    @property
    def fds(self) -> tuple[int, ...]:
        """For ``pass_fds`` of the supervisor's Popen; the supervisor needs to do nothing with them.

        Not together with ``preexec_fn``, which runs fork hooks in the child, ours included.
        """
        return tuple(self._fds)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Entries for CUDA_VISIBLE_DEVICES: numbers, because engines read them as such; a MIG instance's UUID."""
        if not self.baselines:
            return ()
        return tuple(d.name if d.group == "mig" else str(d.index) for d in self.devices)

    @property
    def environment(self) -> dict[str, str]:
        """What shows a server these GPUs and no others. The numbers are NVML's, hence the order variable."""
        if not self.gpus:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def give_back(self, ours: Callable[[], Collection[int]], *, limit: float = 30.0, label: str = "") -> list[Release]:
        """Wait until the GPUs' memory is back at the baseline (invariant 9), then release them.

        Call it when the server's last process is gone. The :class:`Release` of GPUs that do not come back within
        ``limit`` seconds is returned: with ``blame`` ``ours`` the test leaked. They are quarantined for everybody, but
        not where the memory may be a stranger's: later leases find that out for themselves.

        Args:
            ours: every pid the server ever had.
            label: whose leak it is (a test's node id), for the messages of later leases.
        """
        seen: dict[str, Release] = {}
        try:
            if self.baselines and self._fds:
                try:
                    wait_release(self.baselines, ours=ours, limit=limit, seen=seen)
                finally:  # after Ctrl-C too: whoever gets the GPU next must not find it half full
                    self._impose(seen, label)
        finally:
            self.release()
        return [found for found in seen.values() if not found.free]

    def _impose(self, seen: Mapping[str, Release], label: str) -> None:
        """Quarantine what is not known to be free; not what may be a stranger's."""
        for device, baseline in zip(self.devices, self.baselines, strict=False):
            found = seen.get(device.name)
            if found is None or not (found.free or found.blame == "unknown"):
                why = found.text if found else f"nobody waited until the memory of {device.label} was back."
                impose(files.directory(), device, why, label=label, baseline=baseline)

    def quarantine(self, why: str, *, processes: Sequence[tuple[int, int]] = (), label: str = "") -> None:
        """Keep everybody off these GPUs: the kernel would not let ``processes`` (pid, start time) die."""
        for n, device in enumerate(self.devices):
            baseline = self.baselines[n] if self.baselines else None
            impose(files.directory(), device, why, label=label, baseline=baseline, processes=processes)

    def release(self) -> None:
        """Let go of our copies. While others (the supervisor) hold theirs, the GPUs stay leased, and are shown so."""
        if self._fds and self._close() and self._entry is not None and not files.locked(self._entry):
            with contextlib.suppress(OSError):
                self._entry.unlink()

    def _close(self) -> bool:
        fds, self._fds = self._fds, []
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        return bool(fds)


@functools.cache
def _mind_forks() -> None:
    """A child that this process forks without exec (multiprocessing) must not keep our GPUs."""

    def forget() -> None:
        for lease in list(_open):
            lease._close()

    os.register_at_fork(after_in_child=forget)


def acquire(
    count: int,
    pool: GpuPool,
    *,
    on_wait: Callable[[str], None],
    evict_idle: Callable[[], bool],
    limit: float,
    foreign: Literal["wait", "raise", "ignore"] = "wait",
    label: str = "",
    session: Collection[ProcessId] = (),
) -> Lease:
    """``count`` GPUs of ``pool``, all or none of them, in the order of asking.

    Args:
        on_wait: told who is in the way, when waiting begins and whenever that changes (foreign text: escape it).
        evict_idle: stops the caller's own idle servers, returns whether there were any. Called before waiting and
            every 0.1 s while waiting, so it must be cheap when there are none.
        limit: seconds to wait at most.
        foreign: while the GPUs are used by processes that hold no lease, wait, raise, or take them all the same.
        label: for what, shown to others who wait: the spec's id.
        session: processes whose own GPU memory, as this one's, is never waited for.

    Raises:
        LeaseError: see its ``kind``.
    """
    if not pool.counted:
        return Lease((), (), [], None)
    if not candidates(count, pool.devices):
        raise LeaseError(_too_few(count, pool), "too_few")
    _mind_forks()
    root, begin = files.directory(), time.monotonic()
    body = {"count": count, "devices": [d.to_json() for d in pool.devices], "label": label}
    ticket, ticket_fd = files.announce(root, "ticket", body)
    said, said_at, evicted, blocked_since = "", 0.0, False, None
    try:
        with Sampler(events=False) if pool.gpus else contextlib.nullcontext() as sampler:
            now = _look(sampler, pool, FIRST_LOOK)
            while True:
                broken = quarantined(root, pool.devices, now)
                seen = in_use(root, pool, now, session)
                beside, others = seen.ours, seen.strangers
                if foreign == "ignore":
                    beside, others = {**beside, **others}, {}
                sound = {d.name for d in pool.devices if d.name not in broken and d.name not in others}
                sound -= {name for name, gpu in now.items() if gpu.error is not None}
                _check_possible(count, pool, broken, now)
                usable = _preferred(count, pool, sound, beside, seen.passing, time.monotonic() - begin)
                if lease := _try(root, ticket, count, pool, usable, label):
                    lease.beside = {d.name: beside[d.name] for d in lease.devices if d.name in beside}
                    return _with_baselines(lease, sampler, pool, now)
                if not evicted:
                    evicted = True
                    evict_idle()
                    continue
                told = {**others, **{name: beside[name] for name in sound - usable}}
                text = wait_text(root, files.key(ticket), count, pool, broken, told)
                blocked = bool(others) and not candidates(count, [d for d in pool.devices if d.name in sound])
                blocked_since = (blocked_since or time.monotonic()) if blocked else None
                if foreign == "raise" and blocked_since and time.monotonic() - blocked_since >= PATIENCE:
                    raise LeaseError(
                        f"{count} of {len(pool.devices)} GPUs are needed, and processes that hold no lease use them: "
                        f"{'; '.join(others.values())}. End those, or wait for them with --gpuserve-foreign=wait.",
                        "foreign",
                    )
                if time.monotonic() - begin >= limit:
                    advice = "Raise --gpuserve-lease-timeout, or ask for fewer GPUs."
                    raise LeaseError(f"No {count} GPUs after {limit:g} s. {text} {advice}", "timeout")
                if text != said or time.monotonic() - said_at > _SPEAK_AGAIN:
                    said, said_at = text, time.monotonic()
                    on_wait(text)
                evict_idle()
                os.utime(ticket_fd)
                time.sleep(_POLL)
                now = _look(sampler, pool, 5.0)
    finally:
        files.withdraw(ticket, ticket_fd)


def _preferred(
    count: int, pool: GpuPool, sound: set[str], beside: Mapping[str, str], passing: set[str], waited: float
) -> set[str]:
    """Of the sound GPUs those to be taken now: none ``beside`` other memory where there are others, even if these are
    leased for a while; for some seconds none whose memory is about to go, as that of a server that is ending."""
    free = sound - beside.keys()
    if candidates(count, [d for d in pool.devices if d.name in free]):
        return free
    return sound - passing if waited < PATIENCE else sound


def _try(root: Path, ticket: Path, count: int, pool: GpuPool, usable: set[str], label: str) -> Lease | None:
    """Take the devices if it is our turn. Every descriptor is closed again or belongs to the lease."""
    with files.mutex(root, 2.0) as inside:
        if not inside:
            return None
        held: dict[str, int] = {}
        try:
            for device in pool.devices:
                if device.name in usable and (fd := files.try_lock(files.device(root, device))) is not None:
                    held[device.name] = fd
            chosen = decide(_queue(root, ticket), files.key(ticket), held, usable)
            if chosen is None:
                return None
            body = {"devices": [d.to_json() for d in chosen], "label": label, "count": count}
            files.sweep(root)
            entry, entry_fd = files.announce(root, "lease", body)
            # the note is let go of first: nobody else may seem to hold a GPU while it still says that we do
            return Lease(chosen, (), [entry_fd, *(held.pop(device.name) for device in chosen)], entry)
        finally:
            for fd in held.values():
                os.close(fd)


def _queue(root: Path, mine: Path) -> list[Request]:
    """Live tickets. Those of stopped processes are left out, or they would hold everybody up."""
    found = []
    for entry in files.entries(root, "ticket"):
        if entry.path != mine and abs(time.time() - entry.heartbeat) > files.STALE:  # abs: the clock may be set
            continue
        with contextlib.suppress(KeyError, TypeError, ValueError):
            devices = tuple(Device(str(name), int(index), str(group)) for name, index, group in entry.body["devices"])
            found.append(Request(entry.key, int(entry.body["count"]), devices))
    return found


def _look(sampler: Sampler | None, pool: GpuPool, limit: float) -> dict[str, Gpu]:
    """A fresh reading by device name; a GPU that does not answer carries ``error``. Empty for virtual devices."""
    if sampler is None or pool.gpus is None:
        return {}
    reading = sampler.sample(limit)
    return {device.name: find(reading, pool.gpus[device.name]) for device in pool.devices}


def _with_baselines(lease: Lease, sampler: Sampler | None, pool: GpuPool, seen: Mapping[str, Gpu]) -> Lease:
    """Read again now that the GPUs are ours: the reading before may still show the memory of the holder before."""
    if pool.gpus is not None:
        fresh = _look(sampler, pool, 5.0)
        lease.baselines = tuple(
            seen[d.name] if fresh[d.name].error is not None else fresh[d.name] for d in lease.devices
        )
    return lease


def _too_few(count: int, pool: GpuPool) -> str:
    there = f"{len(pool.devices)} (GPU {', '.join(str(d.index) for d in pool.devices)})" if pool.devices else "none"
    reason = f" {pool.problem}" if pool.problem else ""
    return f"The server needs {count} GPUs of one kind; this session may use {there}.{reason}"


def _check_possible(count: int, pool: GpuPool, broken: Mapping[str, object], now: Mapping[str, Gpu]) -> None:
    """Raise when waiting is in vain: too many GPUs are in quarantine or do not answer."""
    mute = {name: gpu.error for name, gpu in now.items() if gpu.error is not None}
    if candidates(count, [d for d in pool.devices if d.name not in broken and d.name not in mute]):
        return
    parts = [str(q) for q in broken.values()]
    parts += [f"{d.label}: {mute[d.name]}" for d in pool.devices if d.name in mute]
    kind = "quarantine" if broken else "unreadable"
    advice = f" {ADVICE}" if broken else ""
    raise LeaseError(f"The server needs {count} of {len(pool.devices)} GPUs, but {'; '.join(parts)}.{advice}", kind)
