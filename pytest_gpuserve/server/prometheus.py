"""Prometheus (or OpenMetrics) text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of Prometheus text."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics(text: str) -> list[Sample]:
    """Samples of a Prometheus (or OpenMetrics) text; lines that are none are passed over."""
    found = []
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line.split(" # ", 1)[0].strip()) if line and line[0] != "#" else None
        if match:
            with suppress(ValueError):
                name, labels, value = match.groups()
                unescaped = {k: re.sub(r"\\(.)", _unescape, v) for k, v in _LABEL.findall(labels or "")}
                found.append(Sample(name, unescaped, float(value)))
    return found


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
