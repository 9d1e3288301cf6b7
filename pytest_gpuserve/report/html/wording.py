"""Figures in few characters: bytes, seconds, moments."""

from __future__ import annotations

import math
from datetime import datetime, timezone


def size(value: float | None) -> str:
    """``76.4 GiB``."""
    if value is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return ""


def seconds(value: float | None) -> str:
    """``0.4 s``, ``34 s``, ``4 min 12 s``, ``2 h 05 min``."""
    if value is None:
        return ""
    if abs(value) < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def moment(value: float | None) -> str:
    """``2026-11-29 22:29:08 UTC``; "" for what is no moment."""
    if value is None:
        return ""
    try:
        return datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def steps(span: float, most: int = 7) -> float:
    """A round number of seconds between the ticks of an axis of ``span`` seconds."""
    rough = max(span, 0.01) / most
    if rough > 30:
        units = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
        return float(next((unit for unit in units if unit >= rough), math.ceil(rough / 86400) * 86400))
    power = 10.0 ** math.floor(math.log10(rough))
    return next((unit * power for unit in (1, 2, 5) if unit * power >= rough), 10 * power)


def tick(value: float, step: float) -> str:
    """A label of an axis of seconds."""
    if step >= 3600:
        return f"{value / 3600:g} h"
    if step >= 60:
        return f"{value / 60:g} min"
    return f"{value:g} s"
