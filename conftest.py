"""Tests of this package; they may use ``pytester``."""

from __future__ import annotations

import signal

pytest_plugins = ["pytester"]


def pytest_configure() -> None:
    """Under ``nohup``, or in the background of a shell, these are ignored, and so would the processes that tests start
    and send them to: a handler, unlike that, is not inherited."""
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
