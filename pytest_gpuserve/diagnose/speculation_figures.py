"""Figures of speculative decoding that a log carries, in the words of either engine, of /metrics or of a benchmark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_STEP: Final = re.compile(rb"accept len: ([\d.]+)(?:, accept rate: ([\d.]+))?")
_MEAN: Final = re.compile(rb"[Mm]ean acceptance length: ([\d.]+)")
_WINDOW: Final = re.compile(rb"Accepted: (\d+) tokens, Drafted: (\d+) tokens")
_TOTAL: Final = re.compile(
    rb"(?:\w+:)?(?:spec_decode_)?num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{[^}]*\})?:? +"
    rb"(\d+(?:\.\d+)?)\b"
)
MARKS: Final = (b"accept len", b"cceptance length", b"num_accepted_tokens", b"num_draft")
"""A line without one of these carries no figure."""


@dataclass(slots=True)
class Figures:
    """Sums over a log. ``lines`` is how many lines carried a figure."""

    lines: int = 0
    lengths: int = 0
    length_sum: float = 0.0
    rates: int = 0
    rate_sum: float = 0.0
    accepted: float = 0.0
    drafted: float = 0.0
    drafts: float = 0.0

    def feed(self, line: bytes) -> None:
        """Take the figures out of one line."""
        if found := _STEP.search(line):
            self.lines += 1
            self.lengths += 1
            self.length_sum += float(found[1])
            if found[2]:
                self.rates += 1
                self.rate_sum += float(found[2])
            return
        before = self.lengths + self.drafted + self.drafts + self.accepted
        if found := _MEAN.search(line):
            window = _WINDOW.search(line)
            accepted, drafted = (float(window[1]), float(window[2])) if window else (0.0, 0.0)
            self.accepted += accepted
            self.drafted += drafted
            if window is None or drafted:
                self.lengths += 1
                self.length_sum += float(found[1])
        else:
            for name, value in _TOTAL.findall(line):
                field = {b"drafts": "drafts", b"draft_tokens": "drafted", b"accepted_tokens": "accepted"}[name]
                setattr(self, field, max(getattr(self, field), float(value)))
        self.lines += self.lengths + self.drafted + self.drafts + self.accepted != before

    @property
    def length(self) -> float | None:
        """Mean accept length: tokens a step, the free one included."""
        if self.drafts:
            return 1 + self.accepted / self.drafts
        return self.length_sum / self.lengths if self.lengths else None

    @property
    def rate(self) -> float | None:
        """Share of the drafted tokens that the target accepted."""
        if self.drafted:
            return self.accepted / self.drafted
        return self.rate_sum / self.rates if self.rates else None

    def poor(self, limits: Mapping[str, float]) -> str | None:
        """What is wrong with the figures, with the figures; None when nothing is or too little was seen."""
        length, rate = self.length, self.rate
        if length is None and rate is None:
            return None
        if self.drafted and self.drafted < limits["min_drafted_tokens"]:
            return None
        low = length is not None and length < limits["min_accept_length"]
        short = length is None or length < limits["poor_accept_length"]
        if not low and not (rate is not None and rate < limits["poor_accept_rate"] and short):
            return None
        shown = [f"accept length {length:.2f} tokens a step"] if length is not None else []
        if rate is not None:
            shown.append(f"accept rate {rate:.2f}")
        if self.drafted:
            shown.append(f"{self.accepted:.0f} of {self.drafted:.0f} drafted tokens accepted")
        return "speculative decoding hardly helps: " + ", ".join(shown)
