"""The session's servers: one a spec, kept while a test may still want it, never served again after it failed a test."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ..engines import uses_gpus
from ..errors import GpuserveError, ServerError, ServerStartError, SpecError
from ..server.leases import Evictor, waiting
from ..server.reaper import sweep_dead_sessions
from ..server.record import processes
from ..spec import ServerSpec
from .evidence import TEST_ALARM
from .fences import answers
from .launching import launch
from .leasing import Leasing, told
from .resolve import Wanted, as_layer, build, resolve
from .slots import END, Slot, arm, note
from .state import ERROR, PROBLEM, WANTED, State
from .watching import Watching

if TYPE_CHECKING:
    from ..server.handle import Server


class Pool:
    """What the fixture ``gpuserve_pool`` gives. Not for several threads at once.

    (One of our own may stop idle servers at any moment, for somebody who waits for their GPUs: hence the lock.)

    Attributes:
        touched: servers held at some moment of the test in progress, stopped ones included.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._pid = os.getpid()
        self._slots: list[Slot] = []
        self._strikes: dict[str, list[str]] = {}
        self._watching = Watching(state.settings)
        self._leasing = Leasing(state, self._evict)
        self._swept = False
        self._evictor: Evictor | None = None
        self._lock = threading.RLock()
        self.touched: list[Slot] = []
        state.pool = self

    # What tests call

    def get(self, spec: ServerSpec | Mapping[str, object] | str | None = None, /, **values: object) -> Server:
        """The running server for ``spec`` (a ServerSpec, a mapping, or the name of a server in the configuration).

        Keywords are those of the ``gpuserve`` mark and stronger than ``spec``; with neither, the test's own marks
        decide. ``--gpuserve-set`` is stronger than all. ``fresh=True``: a server that nobody else gets. Starting
        takes as long as it takes, none of it is charged to the test's timeout. The server is held until the fixture
        that called, or else the test, is torn down.

        Raises:
            ServerStartError: it did not become ready; the message says why and where the evidence is.
            SpecError, EngineError: there can be no such server.
        """
        item = self._state.item
        if spec is None and not values:
            if item is None:
                raise SpecError("gpuserve_pool.get() outside a test needs to know which server: engine=, model=, tp= …")
            wanted = item.stash.get(WANTED, None) or resolve(item, self._state.settings)
        else:
            layer = as_layer(spec, values, "gpuserve_pool.get")
            if "expect" in layer:
                raise SpecError("gpuserve_pool.get: expect= belongs to a test's mark. Ask server.throughput() instead.")
            wanted = build(
                self._state.config, self._state.settings, layer, source="gpuserve_pool.get", asker=uuid.uuid4().hex
            )
        return self._get(wanted, item)

    def release(self, server: Server) -> None:
        """Say earlier than at the end of the fixture that ``server`` is not needed any more."""
        with self._lock:
            for slot in [slot for slot in self._slots if slot.server is server and slot.users]:
                slot.users = 0
                self._settle(slot)

    def close(self) -> None:
        """Stop every server. Called at the end of the session."""
        if self._evictor is not None:
            self._evictor.close()
        with self._state.clock.paused(), self._lock:
            self._stop(list(self._slots))
            self._watching.end()
        self._state.pool = None

    # What the plugin calls

    def for_test(self, item: pytest.Item) -> Server:
        """The server of a test's own marks; what goes wrong fails the test in one paragraph."""
        try:
            wanted = item.stash.get(WANTED, None)
            if wanted is None:
                if problem := item.stash.get(PROBLEM, None):
                    raise SpecError(problem)
                wanted = resolve(item, self._state.settings)
            return self._get(wanted, item)
        except GpuserveError as error:
            item.stash[ERROR] = error
            message = str(error)
        pytest.fail(message, pytrace=False)

    def server_of(self, wanted: Wanted) -> Server | None:
        """The running server of a test in progress; None when it has ended, or must not serve another test."""
        return next((slot.server for slot in self.held() if slot.key == wanted.key and not slot.unfit()), None)

    def held(self) -> Iterator[Slot]:
        """Servers that the test in progress may be talking to."""
        return (slot for slot in self._slots if slot.users)

    def arm(self, deadline: float, test: str, timeout: float) -> None:
        """Have every held server dumped at ``deadline`` (CLOCK_MONOTONIC), ``timeout`` seconds into ``test``."""
        for slot in self.held():
            arm(slot, TEST_ALARM, deadline, test, timeout)
            slot.armed = True
            note(slot.server.directory, {"test": test, "timeout": timeout, "deadline": deadline, "since": time.time()})

    def test_begins(self, item: pytest.Item) -> None:
        """Servers of wider fixtures are this test's too."""
        for slot in self.held():
            slot.last = item.nodeid
            note(slot.server.directory, {"test": item.nodeid, "since": time.time()})

    def disarm(self) -> None:
        """The test in progress has no deadline any more."""
        for slot in self._slots:
            if slot.armed:
                slot.armed = False
                slot.evidence.quietly(slot.server.control.disarm, TEST_ALARM)

    def failed(self, spared: bool) -> None:
        """The test in progress failed: what it held is suspect, unless the dump said that the server is healthy."""
        for slot in self.held():
            if not spared and slot.retire is None:
                slot.retire = "a test failed on it"

    def strike(self, slot: Slot, reason: str) -> None:
        """A server hung, or died, under a test."""
        slot.retire = reason
        self._strikes.setdefault(slot.server.spec.key, []).append(reason)

    def test_ended(self) -> None:
        """Stop what no test that is still to come wants."""
        with self._lock:
            self.touched = list(self.held())
            idle = [s for s in self._slots if not s.users and (s.unfit() or not self._state.pending[s.key])]
            self._stop(idle)

    # Inside

    def _get(self, wanted: Wanted, item: pytest.Item | None) -> Server:
        key = wanted.key
        with self._state.clock.paused(), self._lock:
            strikes = self._strikes.get(wanted.spec.key, ())
            if len(strikes) > 1:
                pytest.skip(f"{wanted.spec.id} failed {len(strikes)} times and is not started again: {strikes[-1]}")
            slot = next((s for s in self._slots if s.key == key and not s.unfit()), None)
            if slot is not None and not slot.users and not self._may_serve(slot, item):
                self._stop([slot])
                slot = None
            if slot is None:
                slot = self._start(wanted, item)
            else:
                self._state.ledger.reused(slot.server)
            slot.tests += 1
            self._hold(slot, item)
        return slot.server

    def _may_serve(self, slot: Slot, item: pytest.Item | None) -> bool:
        """Whether an idle server, which served other tests, is fit for this one."""
        most = self._state.settings.max_uses
        if most and slot.tests >= most:
            slot.retire = f"it served {most} test{'s' if most > 1 else ''} (--gpuserve-max-uses)"
            return False
        slot.evidence.skip()
        try:
            slot.retire = answers(slot.server)
        except ServerError as error:
            self.strike(slot, "it hung, or ended, between two tests")
            self._state.ledger.incident(
                slot.server.spec,
                test=item.nodeid if item is not None else None,
                reason="before its reuse",
                verdict=error.verdict,
                incident=error.incident,
                spared=None,
            )
        return slot.retire is None

    def _start(self, wanted: Wanted, item: pytest.Item | None) -> Slot:
        if not self._swept:
            self._swept = True
            if text := sweep_dead_sessions().text:
                self._state.ledger.trouble(text)
        self._make_room(wanted.spec)
        held = [device for slot in self.held() for device in slot.lease.devices]
        lease = self._leasing.take(wanted.spec, item, held)
        if lease.devices and self._evictor is None:
            self._evictor = Evictor(self._evict_for_others)
        self._watching.begin()
        try:
            slot = launch(self._state, wanted, item, lease, self._leasing.capabilities(lease, wanted.spec))
        except BaseException as error:
            test = item.nodeid if item is not None else ""
            for release in self._leasing.give_back(lease, None, (), test):
                self._state.ledger.trouble(told(wanted.spec, release, test))
            if isinstance(error, ServerStartError):
                reason = f"it did not start ({error.verdict}{f', {error.incident}' if error.incident else ''})"
                self._strikes.setdefault(wanted.spec.key, []).append(reason)
            raise
        self._slots.append(slot)
        self._state.config.hook.pytest_gpuserve_server_started(server=slot.server)
        return slot

    def _hold(self, slot: Slot, item: pytest.Item | None) -> None:
        """Held by the innermost fixture being set up, or else by the test; by nobody outside of tests."""
        slot.users += 1
        if item is not None:
            slot.last = item.nodeid
            note(slot.server.directory, {"test": item.nodeid, "since": time.time()})
        if slot not in self.touched:
            slot.evidence.skip()
            self.touched.append(slot)
        if self._state.fixtures:
            self._state.fixtures[-1].addfinalizer(partial(self._let_go, slot))
        elif item is not None:
            item.addfinalizer(partial(self._let_go, slot))

    def _let_go(self, slot: Slot) -> None:
        with self._lock:
            if slot.users:
                slot.users -= 1
                self._settle(slot, last=self._was_last(slot))

    def _settle(self, slot: Slot, *, last: bool = False) -> None:
        if slot.users == 0:
            slot.evidence.quietly(slot.server.control.disarm, TEST_ALARM)
            slot.armed = False
            note(slot.server.directory, {"test": None, "since": time.time()})
            if slot in self._slots and (slot.unfit() or last):
                with self._state.clock.paused():
                    leaks = self._stop([slot], fails=self._state.item is not None)
                if leaks and self._state.item is not None:
                    pytest.fail("\n".join(leaks), pytrace=False)

    def _was_last(self, slot: Slot) -> bool:
        """Whether no test after the one in progress wants this server: stopped in its teardown, a leak is its own."""
        if self._state.item is None:
            return False
        wanted = self._state.item.stash.get(WANTED, None)
        return self._state.pending[slot.key] <= (wanted is not None and wanted.key == slot.key)

    def _make_room(self, spec: ServerSpec) -> None:
        """Stop idle servers that may use the same GPUs, where nothing can be leased and so nobody knows."""
        if uses_gpus(spec) and not self._leasing.counts(spec):
            self._stop([slot for slot in self._slots if not slot.users and uses_gpus(slot.server.spec)])

    def _evict(self) -> bool:
        """Stop every server that nobody holds and that has GPUs."""
        idle = [slot for slot in self._slots if not slot.users and slot.lease.devices]
        self._stop(idle)
        return bool(idle)

    def _evict_for_others(self) -> None:
        """In a thread, while somebody else waits: stop what neither the test in progress nor the next one uses."""
        if self._lock.acquire(blocking=False):
            try:
                near = {item.stash[WANTED].key for item in self._state.near if WANTED in item.stash}
                idle = [s for s in self._slots if not s.users and s.lease.devices and s.key not in near]
                self._stop([slot for slot in idle if waiting(slot.lease.devices)])
            finally:
                self._lock.release()

    def _stop(self, slots: Sequence[Slot], *, fails: bool = False) -> list[str]:
        """End servers, all at once, and forget them. Returns a paragraph for each GPU whose memory they left behind.

        ``fails``: the caller fails a test with these. Else the session fails, as for GPUs that do not answer.
        """
        if os.getpid() != self._pid:  # a test forked, and its child came here by an exception: they are its parent's
            return []
        pids = {
            id(slot): {found.pid for found in processes(slot.server.record)} for slot in slots if slot.lease.devices
        }
        for slot in slots:
            if self._state.settings.retain == "always" and slot.server.exit_code() is None:
                slot.evidence.quietly(slot.server.dump, END)
            slot.evidence.quietly(slot.server.control.stop, slot.limits.grace)
        leaks = []
        for slot in slots:
            slot.server.stop()
            if slot.retire is not None and slot.retire not in self._strikes.get(slot.server.spec.key, ()):
                self._state.ledger.retired(slot.server.spec, slot.retire)
            for pid, state in slot.server.left:
                self._state.ledger.trouble(
                    f"{slot.server.spec.id} left process {pid} (state {state}), which cannot be killed"
                )
            self._slots.remove(slot)
            for release in self._leasing.give_back(slot.lease, slot.server, pids.get(id(slot), ()), slot.last):
                text = told(slot.server.spec, release, slot.last)
                self._state.ledger.trouble(text)
                if release.blame == "ours":
                    leaks.append(text)
                if release.blame == "unreadable" or (release.blame == "ours" and not fails):
                    self._state.ledger.unpinned += 1
        return leaks
