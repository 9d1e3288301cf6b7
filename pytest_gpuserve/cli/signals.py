"""Whoever ends us by a signal gets what Ctrl-C does: things put back, children ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_WANTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def as_interrupt(received: list[int]) -> Iterator[None]:
    """SIGTERM and SIGHUP are as Ctrl-C, unless they are ignored (nohup). ``received`` takes the numbers."""

    def told(number: int, _frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in _WANTED}
    for number in _WANTED:
        if before[number] is not signal.SIG_IGN or number == signal.SIGINT:
            signal.signal(number, told)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def withheld() -> Iterator[list[int]]:
    """What would be raised is only noted, so that nothing is started and forgotten: ``signal.raise_signal`` it then.

    For the main thread.
    """
    received: list[int] = []
    before = {number: handler for number in _WANTED if callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
