"""Does the server answer, and does the test wait for it? Asked from outside, each question with a limit."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import procfs
from ..diagnose.evidence import Front
from ..diagnose.model import Frame, ProcessDump
from ..engines.base import Engine, ReadyProbe
from ..redaction.sensitive import is_secret_name
from ..server.record import ServerRecord

HEALTH = "/health"
"""Static in most engines; where it makes a token too, ``/`` tells the same by any answer at all."""

_ESTABLISHED = "01"
_READING = re.compile(
    r"(?:.*\.)?(recv|recv_into|readinto|read|read1|readline|getresponse|begin|_read_status|urlopen|select|handle_request"
    r"|_?receive_response_headers|_receive_event)"
)
_CLIENT_FILES = (
    "socket.py",
    "ssl.py",
    "http/client.py",
    "http11.py",
    "connectionpool.py",
    "_backends/sync.py",
    "selectors.py",
)


@dataclass(frozen=True, slots=True)
class Probe:
    """``answers``: tokens came; None: no completion could be asked for. ``reachable``: anything answered over HTTP.
    ``front``: what the front end itself does, where no tokens came. ``responds``: one of the pages was answered, with a
    status of any kind."""

    answers: bool | None
    reachable: bool
    how: str
    seconds: float
    front: Front | None = None
    responds: bool = False


def ask(record: ServerRecord, engine: Engine | None, limit: float = 3.0) -> Probe:
    """One-token completion where the engine knows one, else its ready path; never much longer than ``limit`` seconds.

    A refusal (401, 404, 422) shows that the front end lives, and says nothing of the engine behind it. A page that
    needs no engine is asked for when no token comes at once: it tells a dead front end from one behind which tokens
    stand still.
    """
    began = time.monotonic()
    try:
        ready = engine.ready(record.spec) if engine else ReadyProbe()
        model = engine.served_model(record.spec) if engine else ""
    except Exception:  # somebody else's engine
        ready, model = ReadyProbe(), ""
    answers: bool | None = None
    if ready.generate is not None:
        body = json.dumps({"model": model, **ready.generate})
        asked = _Asked(record, "POST", ready.generate_path, body, limit)
        pages = _pages(record, asked, limit)
        status = asked.get()
        how = f"POST {ready.generate_path}: {_status(status, limit)}"
        answers = True if status == 200 else False if status is None or status >= 500 else None
        reachable = status is not None
    else:
        asked = _Asked(record, "GET", ready.path, None, limit)
        pages = _pages(record, asked, limit)
        status = asked.get()
        how = f"GET {ready.path}: {_status(status, limit)}"
        reachable = status == 200
        if "generate" in ready.path:  # SGLang's health page that makes a token
            answers = True if reachable else False if status is None or status >= 500 else None
    front: Front | None = None
    if answers is False:
        health, root = (page.get() for page in pages)
        front = _front(record, health, root)
        how += f"; GET {HEALTH}: {f'status {health}' if health else 'no answer'}"
    responds = status is not None or any(page.get() is not None for page in pages)
    return Probe(answers, reachable, how, time.monotonic() - began, front, responds)


def _pages(record: ServerRecord, asked: _Asked, limit: float) -> list[_Asked]:
    """Requests for pages that need no engine, where the one for a token is not answered soon; else none."""
    soon = asked.get(limit / 3)
    if soon is not None and soon < 500:
        return []
    return [_Asked(record, "GET", page, None, 2 * limit / 3) for page in (HEALTH, "/")]


def _front(record: ServerRecord, health: int | None, root: int | None) -> Front:
    """An error page, and a 404 as well, come from a front end that is alive."""
    if health == 200:
        return "healthy"
    if health is not None or root is not None:
        return "responds"
    try:
        socket.create_connection((record.host, record.port), timeout=1.0).close()
    except OSError:
        return "closed"
    return "silent"


def _status(status: int | None, limit: float) -> str:
    return f"status {status}" if status else f"no answer within {limit:g} s"


class _Asked:
    """One request under way; its whole answer is read. A server that trickles cannot hold us."""

    def __init__(self, record: ServerRecord, method: str, path: str, body: str | None, limit: float) -> None:
        self._result: list[int] = []
        self._deadline = time.monotonic() + limit

        def request() -> None:
            connection = http.client.HTTPConnection(record.host, record.port, timeout=limit)
            with suppress(OSError, http.client.HTTPException, ValueError):
                headers = {"Content-Type": "application/json", "Connection": "close", **_key(record)}
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                answer.read(1 << 20)
                self._result.append(answer.status)
            connection.close()

        self._thread = threading.Thread(target=request, name="gpuserve-probe", daemon=True)
        self._thread.start()

    def get(self, within: float | None = None) -> int | None:
        """Its status; None: no answer in time, or ``within`` so many seconds from now."""
        left = max(0.0, self._deadline - time.monotonic())
        self._thread.join(left if within is None else min(left, within))
        return self._result[0] if self._result else None


def _key(record: ServerRecord) -> dict[str, str]:
    """The API key that the server was started with; a record of a server that we only attached to has none."""
    if record.api_key:
        return record.headers
    options = list(record.argv)
    for position, word in enumerate(options):
        name, equals, value = word.partition("=")
        if name.startswith("--") and is_secret_name(name) and "api" in name:
            value = value if equals else next(iter(options[position + 1 :]), "")
            return {"Authorization": f"Bearer {value}"} if value else {}
    return {}


def connections(pid: int, port: int) -> int:
    """Established TCP connections of a process to a port of this machine."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in procfs.read(table).decode(errors="replace").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _ESTABLISHED and int(fields[2].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    count = 0
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                count += str(link.readlink()) in inodes
    return count


def test_waits(owner: ProcessDump | None, pid: int, port: int, in_flight: int | None) -> bool | None:
    """True when the test's process has a request in flight: counted by our client, or seen in its sockets and stacks.

    A connection alone proves nothing (keep-alive); with a thread that reads an answer it does. None: cannot be seen.
    """
    if in_flight:
        return True
    if connections(pid, port) == 0:
        return False
    if owner is None or not owner.threads:
        return None
    return any(_reads_answer(thread.frames[:6]) for thread in owner.threads)


def _reads_answer(leaf: Sequence[Frame]) -> bool:
    return any(_READING.fullmatch(frame.name) and frame.file.endswith(_CLIENT_FILES) for frame in leaf)
