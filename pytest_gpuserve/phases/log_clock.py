"""The time of log records: their own stamps where they have some, arrival else, on one clock that never turns back."""

from __future__ import annotations

import re
from datetime import date
from typing import Final

SET_BACK: Final = 60.0
"""Seconds by which a stamp may be older than one before it (ranks interleave); more is a clock that was set back."""


class LogClock:
    """Times of records, in seconds. Their differences are the log's; :meth:`arrival` tells them on another clock."""

    def __init__(self, stamp: re.Pattern[bytes] | None) -> None:
        self._stamp = stamp
        self._shift: float | None = None
        self._latest = float("-inf")
        self._ahead = 0.0
        self._year = date.today().year

    def time(self, record: bytes, now: float) -> float:
        """When the record was written; without a stamp, when it arrived (``now``, on the caller's clock)."""
        raw = self._raw(record)
        if raw is None:
            self._latest = max(self._latest, now + self._ahead)
            return self._latest
        if self._shift is None:
            self._shift = now - raw
        time = raw + self._shift
        if time < self._latest - SET_BACK:  # set back, or a new year in a log without years
            self._shift += self._latest - time
            time = self._latest
        self._latest = max(self._latest, time)
        self._ahead = max(self._ahead, time - now)  # an old log read at once: its last line is what arrives now
        return time

    def look(self, record: bytes, now: float) -> float:
        """The same for a record that is looked at out of its turn, which may be older than the last one."""
        raw = self._raw(record)
        return self.time(record, now) if raw is None or self._shift is None else min(self._latest, raw + self._shift)

    def _raw(self, record: bytes) -> float | None:
        found = self._stamp.search(record) if self._stamp else None
        return _seconds(found, self._year) if found else None

    @property
    def started(self) -> bool:
        """A stamp has been seen."""
        return self._shift is not None

    def begin(self, text: bytes, now: float) -> None:
        """The first stamp of a text is where the log's time begins."""
        if self._stamp and (found := self._stamp.search(text)):
            self.time(found.group(), now)

    def pass_over(self, text: bytes, now: float) -> None:
        """The last stamp of a text: what comes after it is no earlier."""
        last = None
        for last in self._stamp.finditer(text) if self._stamp else ():  # noqa: B007
            pass
        if last:
            self.time(last.group(), now)

    def stamped(self, record: bytes) -> bool:
        """The record has a time of its own."""
        return self._stamp is not None and self._stamp.search(record) is not None

    def arrival(self, time: float) -> float:
        """The same moment on the caller's clock."""
        return time - self._ahead


def _seconds(found: re.Match[bytes], this_year: int) -> float | None:
    """Seconds of a stamp; a log without years is of this year, or of a leap year."""
    values = found.groupdict()
    for year in (int(values.get("year") or this_year), 2000):
        try:
            day = date(year, int(values["month"]), int(values["day"])).toordinal()
        except ValueError:
            continue
        return day * 86400.0 + int(values["h"]) * 3600 + int(values["m"]) * 60 + float(values["s"])
    return None
