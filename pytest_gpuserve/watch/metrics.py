"""Token and step counters from an engine's /metrics, whatever it calls them, asked while a request is in flight."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

LIMIT = 2.0
"""Seconds for one request."""

_MAX_BYTES = 8 << 20
_SERIES = re.compile(rb"^([A-Za-z_:][\w:]*)(?:\{[^\n]*\})? ([-+.\deE]+|NaN|[+-]Inf)", re.MULTILINE)
_TOKENS = re.compile(
    rb"(?:.*token.*(?:_total|_count)|.*tokens_(?:predicted|evaluated).*|.*(?:decode|step|iteration|forward|graph_pass)\w*_(?:total|count))"
)
_RUNNING = re.compile(
    rb".*(?:num_requests_(?:running|waiting)|num_(?:running|queue|waiting)_reqs|requests_(?:processing|deferred|running))"
)


@dataclass(frozen=True, slots=True)
class Counters:
    """``tokens``: sum of everything that grows with tokens or steps. ``running``: requests running or queued."""

    tokens: float | None = None
    running: float | None = None


def read_counters(text: bytes) -> Counters:
    """From Prometheus text; None for what is not in it."""
    tokens: float | None = None
    running: float | None = None
    for name, raw in _SERIES.findall(text):
        if _TOKENS.fullmatch(name):
            tokens = (tokens or 0.0) + _number(raw)
        elif _RUNNING.fullmatch(name):
            running = (running or 0.0) + _number(raw)
    return Counters(tokens, running)


def _number(raw: bytes) -> float:
    value = float(raw)
    return value if value == value and abs(value) != float("inf") else 0.0


class Poller:
    """Asks one server in a thread of its own, so that a wedged front end holds nobody up."""

    def __init__(self, url: str, path: str = "/metrics", headers: Mapping[str, str] | None = None) -> None:
        self._headers = {"Connection": "close", **(headers or {})}
        self._parts = urlsplit(url)
        self._path = path
        self._lock = threading.Lock()
        self._busy = False
        self._last = Counters()
        self._failures = 0
        self._next = 0.0

    @property
    def last(self) -> Counters:
        """The last answer; no counters when the server has none or did not answer."""
        with self._lock:
            return self._last

    def ask(self) -> None:
        """Start asking, unless a question is under way. A server that keeps failing is asked less often."""
        with self._lock:
            now = time.monotonic()
            if self._busy or now < self._next:
                return
            self._busy = True
        threading.Thread(target=self._run, name="gpuserve-metrics", daemon=True).start()

    def _run(self) -> None:
        answer: Counters | None = None
        try:
            answer = self._get()
        except (OSError, http.client.HTTPException, ValueError):
            pass
        finally:
            with self._lock:
                self._busy = False
                self._failures = 0 if answer else self._failures + 1
                self._next = time.monotonic() + min(30.0, 2.0**self._failures if self._failures else 0.0)
                if answer:
                    self._last = answer

    def _get(self) -> Counters | None:
        connection = http.client.HTTPConnection(self._parts.hostname or "127.0.0.1", self._parts.port, timeout=LIMIT)
        try:
            connection.request("GET", self._path, headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                return None
            return read_counters(response.read(_MAX_BYTES))
        finally:
            connection.close()
