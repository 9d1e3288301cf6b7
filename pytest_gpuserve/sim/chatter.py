"""Lines beside those of the script: the log of an engine at debug level, for who must keep up with it."""

from __future__ import annotations

import time
from threading import Thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .script import Script

BEAT = 0.05
"""Seconds between two bursts: a line at a time would cost more to wake up for than to print."""


def begin(script: Script, rate: float) -> None:
    """Print ``rate`` lines a second in the script's name until the process ends."""
    Thread(target=_talk, args=(script, rate), daemon=True).start()


def _talk(script: Script, rate: float) -> None:
    began, printed = time.monotonic(), 0
    while True:
        time.sleep(BEAT)
        due = int((time.monotonic() - began) * rate)
        for number in range(printed, due):
            script.line(
                f"MoE layer {number % 61}: {number * 7 % 4096} tokens went to {number % 64} of 256 experts, the "
                f"busiest got {number % 977}; fused_moe took {number % 331} us",
                "fused_moe.py:412",
            )
        printed = max(printed, due)
