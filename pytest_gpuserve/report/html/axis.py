"""Time from left to right, in percent of a picture's width, so that a page of any width shows all of it."""

from __future__ import annotations

from dataclasses import dataclass

from .wording import steps, tick


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of an axis. ``x`` and ``width``: SVG lengths."""

    x: str
    width: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on an axis. ``end``: so far to the right that its text must end there."""

    x: str
    text: str = ""
    end: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """From ``begin`` to ``end`` (seconds since the epoch); labels count from ``zero``."""

    begin: float
    end: float
    zero: float

    @property
    def seconds(self) -> float:
        return max(self.end - self.begin, 1e-3)

    def part(self, when: float) -> float:
        """0 at the begin, 1 at the end, never outside."""
        return min(1.0, max(0.0, (when - self.begin) / self.seconds))

    def x(self, when: float) -> str:
        return f"{100 * self.part(when):.5g}%"

    def span(self, begin: float, end: float, title: str = "") -> Span:
        left, right = self.part(begin), self.part(end)
        return Span(f"{100 * left:.5g}%", f"{max(0.1, 100 * (right - left)):.5g}%", title)

    def shows(self, begin: float, end: float) -> bool:
        return end >= self.begin and begin <= self.end

    def ticks(self) -> tuple[Mark, ...]:
        """At round numbers of seconds, at most eight."""
        step = steps(self.seconds)
        first = -int(-(self.begin - self.zero) // step)
        marks = [(first + n) * step for n in range(10)]
        return tuple(
            Mark(self.x(self.zero + at), tick(at, step), self.part(self.zero + at) > 0.96)
            for at in marks
            if self.zero + at <= self.end
        )
