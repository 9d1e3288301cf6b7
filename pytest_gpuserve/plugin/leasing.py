"""GPUs for the session's servers: leased before a server is started, given back when their memory is back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from ..engines import uses_gpus
from ..errors import SpecError
from ..gpu import Release
from ..server.lease_policy import Device, candidates
from ..server.leases import GpuPool, Lease, LeaseError, acquire, gpu_pool
from ..server.quarantine import ADVICE
from ..text import escape
from .checks import reading, suitable_gpus, visible_to

if TYPE_CHECKING:
    from ..server.handle import Server
    from ..spec import ServerSpec
    from .state import State

SETTLE = 30.0
"""Seconds that a GPU's memory may take to come back once its server is gone."""


class Leasing:
    """What one process of pytest leases.

    Args:
        evict: stops servers that nobody holds, returns whether there were any.
    """

    def __init__(self, state: State, evict: Callable[[], bool]) -> None:
        self._state = state
        self._evict = evict
        self._told: set[str] = set()

    @cached_property
    def gpus(self) -> GpuPool:
        """What ``--gpuserve-gpus`` and CUDA_VISIBLE_DEVICES leave of the machine."""
        return gpu_pool(self._state.settings.gpus, os.environ, lambda limit: reading(self._state.config))

    def counts(self, spec: ServerSpec) -> bool:
        """True when a server of this spec takes something that is leased."""
        if self._state.settings.gpus.startswith("virtual:"):
            return True
        return uses_gpus(spec) and self.gpus.counted

    def take(self, spec: ServerSpec, item: pytest.Item | None, held: Collection[Device]) -> Lease:
        """The GPUs of a server that is about to start; waits for them.

        Args:
            held: devices of servers of this process that are in use: to wait for those would be for ever.

        Raises:
            LeaseError, SpecError: there is no way to get them. A test is skipped when this machine has too few, or
                when strangers use them and ``--gpuserve-foreign=skip``.
        """
        if not self.counts(spec):
            return Lease((), (), [], None)
        settings, pool = self._state.settings, self._suitable(spec, item)
        names = {device.name for device in held}
        others = [device for device in pool.devices if device.name not in names]
        if candidates(spec.tp, pool.devices) and not candidates(spec.tp, others):
            raise SpecError(
                f"{spec.id} needs {spec.tp} GPUs, and {', '.join(d.label for d in held)} are still held by another "
                f"server of this test. Let go of it first (gpuserve_pool.release(server), or a narrower fixture "
                f"scope), or give pytest more GPUs."
            )
        limit = settings.lease_timeout
        if settings.session_deadline is not None:
            limit = max(1.0, min(limit, settings.session_deadline - time.monotonic()))
        try:
            lease = acquire(
                spec.tp,
                pool,
                on_wait=self._state.say,
                evict_idle=self._evict,
                limit=limit,
                foreign=settings.foreign if settings.foreign in ("wait", "ignore") else "raise",
                label=spec.id,
                session=self._state.owners,
            )
        except LeaseError as error:
            here = error.kind == "too_few" and not settings.strict_arch
            if here or (error.kind == "foreign" and settings.foreign == "skip"):
                pytest.skip(escape(str(error)))
            raise LeaseError(escape(str(error)), error.kind) from None
        for name, text in lease.beside.items():
            if name not in self._told:
                self._told.add(name)
                self._state.say(f"{text}. Servers are started there all the same, with that much less memory.")
        return lease

    def capabilities(self, lease: Lease, spec: ServerSpec) -> list[tuple[int, int]]:
        """Compute capabilities of a server's GPUs; where none is leased, of the only kind that it can see."""
        if lease.baselines or not uses_gpus(spec):
            return [gpu.capability for gpu in lease.baselines if gpu.capability]
        seen = {gpu.capability for gpu in visible_to(self._state.config, spec)}
        return [kind for kind in seen if kind] if len(seen) == 1 else []

    def give_back(self, lease: Lease, server: Server | None, pids: Collection[int], label: str) -> list[Release]:
        """Let go of a server's GPUs, once it is gone; returns those that did not come back.

        Args:
            server: what ran on them; None: it never became ready.
            pids: every process it was seen to have.
            label: node id of the test whose doing it is.
        """
        if server is not None and server.left and lease.devices:
            undead = [(pid, _start(pid)) for pid, _ in server.left]
            why = ", ".join(f"process {pid} (state {state}) cannot be killed" for pid, state in server.left)
            lease.quarantine(why, processes=undead, label=label)
        try:
            return lease.give_back(lambda: pids, limit=SETTLE, label=label)
        except KeyboardInterrupt:
            names = ", ".join(device.label for device in lease.devices)
            self._state.say(f"Interrupted while the memory of {names} was awaited: in quarantine until it is back.")
            raise

    def _suitable(self, spec: ServerSpec, item: pytest.Item | None) -> GpuPool:
        """The part that the test's ``sm`` marks and the server's own CUDA_VISIBLE_DEVICES allow."""
        if self.gpus.virtual:
            return self.gpus
        allowed = {gpu.uuid for gpu in suitable_gpus(item, visible_to(self._state.config, spec))}
        return self.gpus.only(lambda gpu: gpu.uuid in allowed)


def told(spec: ServerSpec, release: Release, last: str) -> str:
    """A paragraph on a GPU that did not come back after a server's end; ``last``: node id of the last test on it."""
    if release.blame == "unknown":
        return f"{spec.id} is gone, and {release.text} Later servers go elsewhere, or wait as --gpuserve-foreign says."
    verdict = "infra" if release.blame == "unreadable" else "leak"
    since = f" (the last test on it: {last})" if last else ""
    return f"{verdict}: {spec.id} is gone, but {release.text} The GPU is in quarantine{since}. {ADVICE}"


def _start(pid: int) -> int:
    from ..procfs import process_id

    found = process_id(pid)
    return found.start if found is not None else 0
