"""What the plugin knows of one session, kept in ``config.stash``; costly parts are made when needed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pytest

from .option_values import monotonic
from .options import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from ..errors import GpuserveError
    from ..procfs import ProcessId
    from .ledger import Ledger
    from .pool import Pool
    from .resolve import Wanted
    from .timeouts import Clock

SERVER: Final = "gpuserve_server"
"""The fixture through which a test gets its server; in a test's closure exactly when its ``server`` is ours."""

POOL: Final = "gpuserve_pool"

STATE: pytest.StashKey[State] = pytest.StashKey()
WANTED: pytest.StashKey[Wanted] = pytest.StashKey()
"""On a test: the server it wants."""

PROBLEM: pytest.StashKey[str] = pytest.StashKey()
"""On a test: one paragraph why its marks cannot be obeyed; its set-up fails with it."""

LACKS: pytest.StashKey[str] = pytest.StashKey()
"""On a test without a server of ours: the GPUs that its ``sm`` marks ask for, and that are not there."""

ERROR: pytest.StashKey[GpuserveError] = pytest.StashKey()
"""On a test: why it did not get its server, in the attempt under way."""


class State:
    """One per process and session.

    Attributes:
        item: the test in progress.
        near: the test in progress and the next one.
        fixtures: requests of the fixtures being set up, outermost first.
        pool: made by the first request for a server.
        pending: tests still to come, by the key of the server they want.
        planned: the tests selected, in order.
        page: the session's HTML page, once it is written.
        say: shows a line of foreign text at once; a worker of pytest-xdist has it shown by its controller.
    """

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.item: pytest.Item | None = None
        self.near: tuple[pytest.Item, ...] = ()
        self.fixtures: list[pytest.FixtureRequest] = []
        self.pool: Pool | None = None
        self.pending: Counter[str] = Counter()
        self.planned: list[pytest.Item] = []
        self._began = time.time(), time.monotonic()
        self.page: Path | None = None
        self.say: Callable[[str], None] = self._say
        if sent := self._sent_by_controller():
            self.settings = replace(settings, session_deadline=monotonic(sent["session_deadline"]))

    def _say(self, text: str) -> None:
        from .terminal import say

        if not self.is_worker:
            say(self.config, text)

    @property
    def began(self) -> float:
        """When the session began, in seconds since the epoch, by the wall clock as it was then or as it is now: the
        earlier, so that what came since is known as ours though the clock was set meanwhile."""
        wall, monotonic = self._began
        return min(wall, time.time() - (time.monotonic() - monotonic))

    @cached_property
    def clock(self) -> Clock:
        from .timeouts import Clock

        return Clock(self)

    @cached_property
    def ledger(self) -> Ledger:
        from .ledger import Ledger

        return Ledger()

    @property
    def counted(self) -> bool:
        """True when a server was asked for, here or in a worker."""
        return "ledger" in vars(self)

    @property
    def is_worker(self) -> bool:
        """True in a process that pytest-xdist started."""
        return hasattr(self.config, "workerinput")

    @property
    def distributes(self) -> bool:
        """True in the process that hands tests to pytest-xdist's workers."""
        return not self.is_worker and bool(self.config.getoption("tx", None)) and self.config.getoption("dist") != "no"

    @property
    def owners(self) -> tuple[ProcessId, ...]:
        """Who, beside this process, must not be outlived by our servers: the controller, when it is on this machine.

        A dead one too: a worker that outlives its controller may not start a server that nobody would miss.
        """
        from ..procfs import ProcessId
        from ..server.paths import here

        sent = self._sent_by_controller()
        return (ProcessId(*sent["controller"]),) if sent and sent["place"] == here() else ()

    def _sent_by_controller(self) -> Mapping[str, Any] | None:
        return getattr(self.config, "workerinput", {}).get("gpuserve")

    def selected(self, items: list[pytest.Item]) -> None:
        """These tests will be run, in this order."""
        self.planned = items
        self.pending = Counter(item.stash[WANTED].key for item in items if WANTED in item.stash)
        if self.settings.action == "run" and not self.distributes and any(map(uses_pool, items)):
            from .session_results import follow

            follow(self.config, self)

    def test_begins(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """The first attempt of a test is about to be set up."""
        self.item = item
        self.near = (item,) if nextitem is None else (item, nextitem)
        if self.pool is not None and uses_pool(item):
            self.pool.test_begins(item)

    def last_of_its_server(self, item: pytest.Item) -> None:
        """Under pytest-xdist: the other tests of this test's server ran, or will run, in another worker."""
        if wanted := item.stash.get(WANTED, None):
            self.pending[wanted.key] = 1

    def test_ended(self, item: pytest.Item) -> None:
        """The last attempt of a test is over."""
        self.item = None
        if wanted := item.stash.get(WANTED, None):
            self.pending[wanted.key] -= 1
        if self.pool is not None:
            self.pool.test_ended()

    def session_finished(self) -> None:
        """Send what was counted here to the controller, if there is one; else write the pages."""
        if self.pool is not None:
            self.pool.close()
        if self.is_worker and self.counted:
            self.config.workeroutput["gpuserve"] = self.ledger.to_json()  # type: ignore[attr-defined]
        elif self.counted:
            from . import pages

            pages.write(self)


def state_of(config: pytest.Config) -> State:
    return config.stash[STATE]


def uses_pool(item: object) -> bool:
    """True for a test that may ask for a server: ``gpuserve_pool`` is among its fixtures, directly or not."""
    return POOL in getattr(item, "fixturenames", ())


def uses_server(item: object) -> bool:
    """True for a test whose ``server`` (or ``gpuserve_server``) is ours."""
    return SERVER in getattr(item, "fixturenames", ())
