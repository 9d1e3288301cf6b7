"""Both ends of handing tests to pytest-xdist's workers: what workers say about their tests, and who schedules them.

A worker's description travels through a channel of execnet's own that the controller puts into ``workerinput``: no
file, no environment variable, and it arrives before the worker's list of tests does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import pytest

from ..engines import uses_gpus
from .state import WANTED, State, state_of

MODES = ("load", "loadgroup")
"""Values of --dist that leave the choice to us; any other was made by the user."""

CHANNEL = "gpuserve_channel"

ServerOf: TypeAlias = Callable[[pytest.Item], "tuple[str, str, int] | None"]
"""Key, readable id and number of GPUs of the server that a test wants; None: it wants none."""


def install(config: pytest.Config, state: State) -> None:
    """Register the end that belongs into this process."""
    if state.is_worker:
        if channel := config.workerinput.get(CHANNEL):  # type: ignore[attr-defined]
            from .conclusion import describe as describe_cell

            worker = WorkerEnd(channel, server_of, state.last_of_its_server, describe_cell)
            config.pluginmanager.register(worker, "gpuserve-worker")
            state.say = worker.say
        return
    from .durations import Durations

    durations = Durations(config, lambda: distributor.served)
    distributor = Distributor(config, durations.past, lambda: _to_lease(state), partial(_learn, state), state.say)
    config.pluginmanager.register(durations, "gpuserve-durations")
    config.pluginmanager.register(distributor, "gpuserve-distributor")


def follow(state: State) -> None:
    """Where tests run in this process: keep their durations, and what becomes of the cells among them."""
    from .conclusion import describe as describe_cell
    from .durations import remember

    remember(state)
    _learn(state, {item.nodeid: cell for item in state.planned if (cell := describe_cell(item)) is not None})


def _learn(state: State, cells: Mapping[str, Mapping[str, Any]]) -> None:
    if cells:
        from .conclusion import learn

        learn(state, cells)


def _to_lease(state: State) -> int | None:
    from .leasing import Leasing

    gpus = Leasing(state, lambda: False).gpus
    return len(gpus.devices) if gpus.counted else None


def server_of(item: pytest.Item) -> tuple[str, str, int] | None:
    """Of a test whose marks have been read."""
    wanted = item.stash.get(WANTED, None)
    if wanted is None:
        return None
    virtual = state_of(item.config).settings.gpus.startswith("virtual:")  # every server takes some of those
    return wanted.key, wanted.spec.id, wanted.spec.tp if virtual or uses_gpus(wanted.spec) else 0


class Distributor:
    """The controller's end. Register it before pytest-xdist's own session is (in ``pytest_configure``).

    Args:
        durations: seconds of tests in past runs, by node id; asked for once.
        gpus: how many GPUs there are to lease, None: not known; asked for once, when servers are about to be started.
        learn: told the cells among a worker's tests, described by node id.
        say: shows a line at once; what workers say comes from a thread of execnet's.

    Attributes:
        served: node ids of tests that want a server, once workers have collected.
    """

    def __init__(
        self,
        config: pytest.Config,
        durations: Callable[[], Mapping[str, float]],
        gpus: Callable[[], int | None],
        learn: Callable[[Mapping[str, Mapping[str, Any]]], object] = dict,
        say: Callable[[str], object] = str,
    ) -> None:
        self._mode = config.getvalue("dist")
        self._durations = durations
        self._gpus = gpus
        self._learn = learn
        self._say = say
        self._channels: dict[Any, Any] = {}
        self._published: dict[Any, Mapping[str, Any]] = {}
        self.served: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Open the channel for a worker."""
        channel = self._channels[node] = node.workerinput[CHANNEL] = node.gateway.newchannel()
        channel.setcallback(partial(self._hear, node))

    def _hear(self, node: Any, said: Mapping[str, Any] | str) -> None:
        """A worker's description of its tests, or a line to show."""
        if isinstance(said, str):
            self._say(f"{node.gateway.id}: {said}")
        else:
            self._published[node] = said

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """A worker's list of tests is here, and so is its description of them."""
        if said := self._published.get(node):
            self.served |= {nodeid for nodeid, key in zip(ids, said["of"], strict=False) if key is not None}
            self._learn({ids[n]: cell for n, cell in said["cells"].items() if n < len(ids)})

    @pytest.hookimpl(trylast=True, optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """After every hook of the user's, before pytest-xdist's own, which is trylast too and registered later."""
        if self._mode not in MODES:
            return None
        from .scheduling import ServerScheduling

        return ServerScheduling(config, log, self._published.get, self._allow_pause, self._durations(), self._gpus)

    def _allow_pause(self, node: Any) -> None:
        """Overtakes no test: it is on the same connection as what pytest-xdist sends from now on."""
        self._channels[node].send("pause")

    def pytest_report_header(self) -> str | None:
        """Say what another choice of --dist costs."""
        if self._mode in MODES:
            return None
        return (
            f"gpuserve: --dist {self._mode} may start a server once in every worker; "
            f"--dist load keeps all tests of a server on one worker"
        )


class Pause(pytest.Item):
    """Runs nothing: while it is the next item, the test before it can run and be torn down to the last fixture."""

    def runtest(self) -> None:
        """Nothing."""


class WorkerEnd:
    """The part of the scheduler that lives in a worker. Registered when the controller opened a channel.

    Args:
        last_of_unit: told of a test before it runs when no other test of its server will come to this worker.
    """

    def __init__(
        self,
        channel: Any,
        server_of: ServerOf,
        last_of_unit: Callable[[pytest.Item], object],
        cell_of: Callable[[pytest.Item], dict[str, Any] | None] = lambda item: None,
    ) -> None:
        self._channel = channel
        self._server_of = server_of
        self._last_of_unit = last_of_unit
        self._cell_of = cell_of

    def say(self, text: str) -> None:
        """Have the controller show a line; one that is gone shows nothing."""
        with suppress(OSError):
            self._channel.send(text)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Describe the tests before pytest-xdist reports them."""
        self._channel.send(describe(session.items, self._server_of, self._cell_of))
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Add the pause when the controller's scheduler turns out to be ours: others run whatever is in ``items``.

        Not before every plugin is through with the collection, and before pytest-xdist looks at what it is sent.
        """
        pause = Pause.from_parent(session, name="gpuserve-pause")
        self._channel.setcallback(lambda _: session.items.append(pause))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """The pause is over as soon as the worker knows what comes next."""
        if isinstance(item, Pause):
            return True
        if isinstance(nextitem, Pause):
            self._last_of_unit(item)
        return None


def describe(
    items: Sequence[pytest.Item], server_of: ServerOf, cell_of: Callable[[pytest.Item], dict[str, Any] | None]
) -> dict[str, Any]:
    """What a worker publishes, as plain values.

    ``servers`` key to [id, gpus]; ``of`` key or None per test; ``groups`` xdist_group or None per test; ``cells``
    position to cell, of tests that have one.
    """
    found = [server_of(item) for item in items]
    cells = {n: cell for n, item in enumerate(items) if (cell := cell_of(item)) is not None}
    return {
        "servers": {server[0]: [server[1], server[2]] for server in found if server is not None},
        "of": [None if server is None else server[0] for server in found],
        "groups": [_group(item) for item in items],
        "cells": cells,
    }


def _group(item: pytest.Item) -> str | None:
    """As pytest-xdist reads the mark."""
    names = {str(m.args[0] if m.args else m.kwargs.get("name", "default")) for m in item.iter_markers("xdist_group")}
    return "_".join(sorted(names)) or None
