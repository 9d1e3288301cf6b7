"""Tests of this package; they may use ``pytester``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

pytest_plugins = ["pytester"]


def pytest_configure() -> None:
    """Under ``nohup``, or in the background of a shell, these are ignored, and so would the processes that tests start
    and send them to: a handler, unlike that, is not inherited."""
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True)
def own_priority() -> Iterator[None]:
    """What ends a server takes a higher one; called in a test's own process, it must not starve the tests after it."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    if os.getpriority(os.PRIO_PROCESS, 0) != before:
        os.setpriority(os.PRIO_PROCESS, 0, before)
