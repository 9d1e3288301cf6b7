"""A completion of one token every now and then: requests of others are not seen by us, and an idle server never hangs.

It is entered in the table of requests in flight, which the watcher reads, and waits as long as it takes: whether the
server hangs is the watcher's to say, by what moves meanwhile.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..engines.base import ReadyProbe
from ..server.inflight import Requests
from ..server.lifecycle import READY
from ..server.record import ServerRecord

_CONNECT: Final = 10.0
_ASK: Final = 1.0
"""Seconds between questions whether the server is ready."""


class Canary:
    """Asks one server from a thread of its own, until it refuses or is gone.

    A server that was attached to is ready when its ready path answers 200: the file ``ready`` is made then.
    """

    def __init__(self, record: ServerRecord, probe: ReadyProbe, every: float, say: Callable[[str], None]) -> None:
        self._record = record
        self._probe = probe
        self._every = every
        self._say = say
        self._requests = Requests(record.directory)
        self._over = threading.Event()

    def start(self) -> None:
        """Begin. The thread is a daemon: it may wait for an answer that never comes."""
        threading.Thread(target=self._run, name="gpuserve-canary", daemon=True).start()

    def stop(self) -> None:
        """Ask no more; does not wait."""
        self._over.set()

    def _run(self) -> None:
        ready = self._record.directory / READY
        while not ready.exists():
            if self._status("GET", self._probe.path, None) == 200:
                ready.touch(mode=0o600)
            elif self._over.wait(_ASK):
                return
        while self._every > 0 and not self._over.wait(self._every):
            status = self._complete()
            if status == 501 or (status is not None and 400 <= status < 500 and status not in (408, 425, 429)):
                self._say(f"{self._record.spec.id} answers a one-token completion with {status}: none is sent any more")
                return

    def _complete(self) -> int | None:
        body = dict(self._probe.generate or {"prompt": "0", "max_tokens": 1, "temperature": 0})
        if not body.get("model"):
            body["model"] = self._record.spec.model or self._served()
        with self._requests.one():
            return self._status("POST", self._probe.generate_path, body)

    def _served(self) -> str:
        """The model's name, as the server tells it."""
        try:
            found = json.loads(self._ask("GET", "/v1/models", None, _CONNECT)[1])
            return str(found["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return ""

    def _status(self, method: str, path: str, body: Mapping[str, Any] | None) -> int | None:
        try:
            return self._ask(method, path, body, _CONNECT if body is None else None)[0]
        except (OSError, http.client.HTTPException):
            return None

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, limit: float | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._record.host, self._record.port, timeout=_CONNECT)
        try:
            connection.connect()
            connection.sock.settimeout(limit)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
            answer = connection.getresponse()
            return answer.status, answer.read(1 << 20)
        finally:
            connection.close()
