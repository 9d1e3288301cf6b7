"""Whoever ends us by a signal gets what Ctrl-C does: things put back, children ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def as_interrupt(received: list[int]) -> Iterator[None]:
    """SIGTERM and SIGHUP are as Ctrl-C, unless they are ignored (nohup). ``received`` takes the numbers."""

    def told(number: int, _frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in wanted}
    for number in wanted:
        if before[number] is not signal.SIG_IGN or number == signal.SIGINT:
            signal.signal(number, told)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
