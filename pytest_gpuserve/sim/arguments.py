"""Types of command line values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int, most: int) -> Callable[[str], int]:
    """Type of a whole number between two bounds."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return parse


def seconds(text: str) -> float:
    return _number(text, math.inf, "number of seconds")


def share(text: str) -> float:
    return _number(text, 1.0, "number from 0 to 1")


def _number(text: str, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most or math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
    return value
