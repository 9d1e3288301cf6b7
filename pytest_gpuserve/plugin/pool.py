"""The session's servers: one a spec, kept while a test may still want it, never served again after it failed a test."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .. import procfs
from ..engines import get_engine, uses_gpus
from ..errors import GpuserveError, ServerError, ServerStartError, SpecError
from ..report.incident import command
from ..server.leases import Evictor, Lease, waiting
from ..server.lifecycle import Limits, start
from ..server.paths import session_directory
from ..server.readiness import EXITED
from ..server.reaper import sweep_dead_sessions
from ..server.record import processes
from ..spec import ServerSpec
from .bundles import fill
from .evidence import SESSION_ALARM, TEST_ALARM, Evidence
from .fences import answers
from .leasing import Leasing
from .live import Live
from .options import Settings, alarm_limit, incident_limit
from .resolve import Wanted, as_layer, build, resolve
from .session_results import begin as begin_results
from .state import ERROR, PROBLEM, WANTED, State
from .watching import Watching

if TYPE_CHECKING:
    from ..server.handle import Server

END = "end"
"""Reason of the bundle that --gpuserve-retain=always takes of a server that is about to be stopped."""


@dataclass(eq=False, slots=True)
class Slot:
    """A server of ours that runs, or ran.

    Attributes:
        key: of what was asked for; tests that ask for the same share it.
        limits: the session's settings with the limits of the mark that started it.
        lease: its GPUs.
        users: fixtures and tests that hold it now; 0 is idle.
        tests: tests that got it.
        retire: why it must not serve another test; None: it may.
        armed: the test's alarm is set.
    """

    key: str
    server: Server
    limits: Settings
    lease: Lease
    evidence: Evidence
    users: int = 0
    tests: int = 0
    retire: str | None = None
    armed: bool = False

    def unfit(self) -> str | None:
        """Why it cannot serve another test; None: it can."""
        if self.retire is None:
            if (code := self.server.exit_code()) is not None:
                self.retire = f"it ended by itself with exit code {code}"
            elif not self.server.control.alive():
                self.retire = "its supervisor was killed"
            elif (root := self.server.record.root) is not None and not procfs.same(root):
                self.retire = "it ended by itself"  # and its supervisor is about to say so
        return self.retire


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
            self._arm(slot, TEST_ALARM, deadline, test, timeout)
            slot.armed = True
            _note(slot.server, {"test": test, "timeout": timeout, "deadline": deadline, "since": time.time()})

    def test_begins(self, item: pytest.Item) -> None:
        """Servers of wider fixtures are this test's too."""
        for slot in self.held():
            _note(slot.server, {"test": item.nodeid, "since": time.time()})

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
        spec, limits, state = wanted.spec, wanted.limits(self._state.settings), self._state
        if not self._swept:
            self._swept = True
            if text := sweep_dead_sessions().text:
                state.ledger.trouble(text)
        self._make_room(spec)
        lease = self._leasing.take(spec, item, [d for slot in self.held() for d in slot.lease.devices])
        if lease.devices and self._evictor is None:
            self._evictor = Evictor(self._evict_for_others)
        budget = limits.startup_timeout
        if limits.session_deadline is not None:
            budget = max(1.0, min(budget, limits.session_deadline - time.time()))
        self._watching.begin()
        begin_results(state.config)
        state.ledger.starting(spec)
        live, server = Live(state, item), None
        try:
            server = start(
                spec,
                get_engine(spec.engine),
                parent=session_directory(),
                limits=Limits(startup=budget, grace=limits.grace, dump=limits.dump_timeout),
                incident=self._command,
                gpus=lease.gpus,
                capabilities=self._leasing.capabilities(lease, spec),
                owners=state.owners,
                pass_fds=lease.fds,
                progress=live.note,
                tick=live.tick,
            )
        except BaseException as error:
            for release in self._leasing.give_back(lease, None, ()):
                state.ledger.trouble(f"{spec.id}: {release.text}")
            if not isinstance(error, ServerStartError):
                state.ledger.not_started(spec)
                raise
            state.ledger.start_failed(spec, error, item.nodeid if item is not None else None)
            fill(state, error.incident)
            reason = f"it did not start ({error.verdict}{f', {error.incident}' if error.incident else ''})"
            self._strikes.setdefault(spec.key, []).append(reason)
            raise
        finally:
            live.end(ready=server is not None)
        slot = Slot(wanted.key, server, limits, lease, Evidence(server, limits.dump_timeout + limits.grace))
        self._slots.append(slot)
        if limits.session_deadline is not None:
            moment = time.monotonic() + limits.session_deadline - time.time()
            self._arm(slot, SESSION_ALARM, moment, None, None)
        state.config.hook.pytest_gpuserve_server_started(server=server)
        return slot

    def _command(self, directory: Path, reason: str) -> list[str]:
        """argv of an incident in the test in progress, as the server's start-up and its requests need it."""
        item = self._state.item
        return self._incident(directory, reason, item.nodeid if item is not None else None)

    def _incident(self, directory: Path, reason: str, test: str | None, after: float | None = None) -> list[str]:
        settings = self._state.settings
        limit, rounds = incident_limit(settings.dump_timeout), 1 if reason in (EXITED, END) else None
        return command(
            directory,
            settings.artifacts,
            reason,
            test=test,
            after=after,
            soft=settings.soft,
            limit=limit,
            rounds=rounds,
            keep=settings.keep,
        )

    def _arm(self, slot: Slot, name: str, deadline: float, test: str | None, after: float | None) -> None:
        argv = self._incident(slot.server.directory, name, test, after)
        slot.evidence.quietly(slot.server.control.arm, name, deadline, argv, alarm_limit(slot.limits.dump_timeout))

    def _hold(self, slot: Slot, item: pytest.Item | None) -> None:
        """Held by the innermost fixture being set up, or else by the test; by nobody outside of tests."""
        slot.users += 1
        if item is not None:
            _note(slot.server, {"test": item.nodeid, "since": time.time()})
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
            _note(slot.server, {"test": None, "since": time.time()})
            if slot in self._slots and (slot.unfit() or last):
                with self._state.clock.paused():
                    leaks = self._stop([slot])
                if leaks and self._state.item is not None:
                    pytest.fail("\n".join(leaks), pytrace=False)

    def _was_last(self, slot: Slot) -> bool:
        """Whether no test after the one in progress wants this server: stopped in its teardown, a leak is its own."""
        wanted = self._state.item.stash.get(WANTED, None) if self._state.item is not None else None
        return wanted is not None and wanted.key == slot.key and self._state.pending[slot.key] == 1

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

    def _stop(self, slots: Sequence[Slot]) -> list[str]:
        """End servers, all at once, and forget them. Returns one sentence for each GPU whose memory stayed behind."""
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
            for release in self._leasing.give_back(slot.lease, slot.server, pids.get(id(slot), ())):
                text = f"leak: {slot.server.spec.id} is gone, but {release.text} The GPU is in quarantine."
                self._state.ledger.trouble(text)
                if release.blame == "ours":
                    leaks.append(text)
        return leaks


def _note(server: Server, entry: Mapping[str, object]) -> None:
    """``current_test.json`` beside the server's log: what pytest was doing, for whoever looks after a crash."""
    path = server.directory / "current_test.json"
    try:
        draft = path.with_name(f".{path.name}")
        draft.write_text(
            json.dumps({"worker": os.environ.get("PYTEST_XDIST_WORKER"), **entry}) + "\n", encoding="utf-8"
        )
        draft.replace(path)
    except OSError:
        pass  # the directory is gone: so is the server
