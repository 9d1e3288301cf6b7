"""The session's servers: one a spec, kept while a test may still want it, never served again after it failed a test."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..engines import get_engine
from ..errors import GpuserveError, ServerStartError, SpecError
from ..report.incident import command
from ..server.lifecycle import Limits, start
from ..server.paths import session_directory
from ..spec import ServerSpec
from .checks import gpus_for, uses_gpus
from .evidence import SESSION_ALARM, TEST_ALARM, Evidence
from .options import Settings, alarm_limit, incident_limit
from .resolve import Wanted, as_layer, build, resolve
from .state import ERROR, PROBLEM, WANTED, State
from .watching import Watching

if TYPE_CHECKING:
    from ..server.handle import Server


@dataclass(eq=False, slots=True)
class Slot:
    """A server of ours that runs, or ran.

    Attributes:
        limits: the session's settings with the limits of the mark that started it.
        users: fixtures and tests that hold it now; 0 is idle.
        tests: tests that got it.
        retire: why it must not serve another test; None: it may.
        armed: the test's alarm is set.
    """

    server: Server
    limits: Settings
    gpus: tuple[str, ...]
    evidence: Evidence
    users: int = 0
    tests: int = 0
    retire: str | None = None
    armed: bool = False

    @property
    def key(self) -> str:
        return self.server.spec.key

    def unfit(self) -> str | None:
        """Why it cannot serve another test; None: it can."""
        if self.retire is None:
            if (code := self.server.exit_code()) is not None:
                self.retire = f"it ended by itself with exit code {code}"
            elif not self.server.control.alive():
                self.retire = "its supervisor was killed"
        return self.retire


class Pool:
    """What the fixture ``gpuserve_pool`` gives. Not for several threads at once.

    Attributes:
        touched: servers held at some moment of the test in progress, stopped ones included.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._slots: list[Slot] = []
        self._strikes: dict[str, list[str]] = {}
        self._watching = Watching(state.settings)
        self.touched: list[Slot] = []
        state.pool = self

    # What tests call

    def get(self, spec: ServerSpec | Mapping[str, object] | str | None = None, /, **values: object) -> Server:
        """The running server for ``spec`` (a ServerSpec, a mapping, or the name of a server in the configuration).

        Keywords are those of the ``gpuserve`` mark and stronger than ``spec``; with neither, the test's own marks
        decide. ``--gpuserve-set`` is stronger than all. Starting takes as long as it takes, none of it is charged to
        the test's timeout. The server is held until the fixture that called, or else the test, is torn down.

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
            wanted = build(self._state.config, self._state.settings, layer, source="gpuserve_pool.get")
        return self._get(wanted, item)

    def release(self, server: Server) -> None:
        """Say earlier than at the end of the fixture that ``server`` is not needed any more."""
        for slot in self._slots:
            if slot.server is server and slot.users:
                slot.users = 0
                self._settle(slot)

    def close(self) -> None:
        """Stop every server. Called at the end of the session."""
        with self._state.clock.paused():
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

    def held(self) -> Iterator[Slot]:
        """Servers that the test in progress may be talking to."""
        return (slot for slot in self._slots if slot.users)

    def arm(self, deadline: float, test: str, timeout: float) -> None:
        """Have every held server dumped at ``deadline`` (CLOCK_MONOTONIC), ``timeout`` seconds into ``test``."""
        for slot in self.held():
            self._arm(slot, TEST_ALARM, deadline, test, timeout)
            slot.armed = True
            _note(slot.server, {"test": test, "timeout": timeout, "deadline": deadline, "since": time.time()})

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
        self._strikes.setdefault(slot.key, []).append(reason)

    def test_ended(self) -> None:
        """Stop what no test that is still to come wants."""
        self.touched = list(self.held())
        idle = [s for s in self._slots if not s.users and (s.unfit() or not self._state.pending[s.key])]
        self._stop(idle)

    # Inside

    def _get(self, wanted: Wanted, item: pytest.Item | None) -> Server:
        key = wanted.spec.key
        with self._state.clock.paused():
            strikes = self._strikes.get(key, ())
            if len(strikes) > 1:
                pytest.skip(f"{wanted.spec.id} failed {len(strikes)} times and is not started again: {strikes[-1]}")
            slot = next((s for s in self._slots if s.key == key and not s.unfit()), None)
            if slot is None:
                slot = self._start(wanted, item)
            else:
                self._state.ledger.reused(slot.server)
            slot.tests += 1
            self._hold(slot, item)
        return slot.server

    def _start(self, wanted: Wanted, item: pytest.Item | None) -> Slot:
        spec, limits, state = wanted.spec, wanted.limits(self._state.settings), self._state
        gpus = gpus_for(spec, item, state.config)
        self._make_room(spec, gpus)
        budget = limits.startup_timeout
        if limits.session_deadline is not None:
            budget = max(1.0, min(budget, limits.session_deadline - time.time()))
        self._watching.begin()
        state.ledger.starting(spec)
        try:
            server = start(
                spec,
                get_engine(spec.engine),
                parent=session_directory(),
                limits=Limits(startup=budget, grace=limits.grace, dump=limits.dump_timeout),
                incident=self._command,
                gpus=gpus,
                owners=state.owners,
            )
        except ServerStartError as error:
            state.ledger.start_failed(spec, error, item.nodeid if item is not None else None)
            reason = f"it did not start ({error.verdict}{f', {error.incident}' if error.incident else ''})"
            self._strikes.setdefault(spec.key, []).append(reason)
            raise
        slot = Slot(server, limits, gpus, Evidence(server, limits.dump_timeout + limits.grace))
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
        limit = incident_limit(settings.dump_timeout)
        return command(directory, settings.artifacts, reason, test=test, after=after, soft=settings.soft, limit=limit)

    def _arm(self, slot: Slot, name: str, deadline: float, test: str | None, after: float | None) -> None:
        argv = self._incident(slot.server.directory, name, test, after)
        slot.evidence.quietly(slot.server.control.arm, name, deadline, argv, alarm_limit(slot.limits.dump_timeout))

    def _hold(self, slot: Slot, item: pytest.Item | None) -> None:
        """Held by the innermost fixture being set up, or else by the test; by nobody outside of tests."""
        slot.users += 1
        if slot not in self.touched:
            slot.evidence.skip()
            self.touched.append(slot)
        if self._state.fixtures:
            self._state.fixtures[-1].addfinalizer(partial(self._let_go, slot))
        elif item is not None:
            item.addfinalizer(partial(self._let_go, slot))

    def _let_go(self, slot: Slot) -> None:
        if slot.users:
            slot.users -= 1
            self._settle(slot)

    def _settle(self, slot: Slot) -> None:
        if slot.users == 0:
            slot.evidence.quietly(slot.server.control.disarm, TEST_ALARM)
            slot.armed = False
            _note(slot.server, {"test": None, "since": time.time()})
            if slot in self._slots and slot.unfit():
                with self._state.clock.paused():
                    self._stop([slot])

    def _make_room(self, spec: ServerSpec, gpus: Sequence[str]) -> None:
        """Stop idle servers whose GPUs are needed; a server that is held is never taken away.

        Raises:
            SpecError: the GPUs are held by another server.
        """
        if not uses_gpus(spec):
            return
        in_the_way = [
            slot
            for slot in self._slots
            if uses_gpus(slot.server.spec) and (not gpus or not slot.gpus or set(gpus) & set(slot.gpus))
        ]
        if held := [slot for slot in in_the_way if slot.users and gpus and slot.gpus]:
            raise SpecError(
                f"{spec.id} needs GPU {', '.join(gpus)}, and {held[0].server.spec.id} is still held there. Let go of "
                f"it first (gpuserve_pool.release(server), or a narrower fixture scope), or give pytest more GPUs."
            )
        self._stop([slot for slot in in_the_way if not slot.users])

    def _stop(self, slots: Sequence[Slot]) -> None:
        """End servers, all at once, and forget them."""
        for slot in slots:
            slot.evidence.quietly(slot.server.control.stop, slot.limits.grace)
        for slot in slots:
            slot.server.stop()
            for pid, state in slot.server.left:
                self._state.ledger.trouble(
                    f"{slot.server.spec.id} left process {pid} (state {state}), which cannot be killed"
                )
            self._slots.remove(slot)


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
