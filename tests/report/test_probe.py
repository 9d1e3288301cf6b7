"""Does it answer? Servers that answer, refuse, are silent, trickle."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import threading
import time

import pytest

from pytest_gpuserve.diagnose.model import Frame, ProcessDump, ThreadStack
from pytest_gpuserve.engines.base import ProcessRole, ReadyProbe
from pytest_gpuserve.procfs import ProcessId
from pytest_gpuserve.report import probe
from pytest_gpuserve.server.record import ServerRecord
from pytest_gpuserve.spec import ServerSpec


class Engine:
    def __init__(self, ready):
        self._ready = ready

    def ready(self, spec):
        return self._ready

    def served_model(self, spec):
        return "tiny"


def whole_request(connection):
    text = ""
    while not (found := re.search(r"\r\n\r\n", text)) or len(text) < found.end() + length(text):
        chunk = connection.recv(65536).decode()
        if not chunk:
            break
        text += chunk
    return text


def length(text):
    found = re.search(r"(?i)content-length: (\d+)", text)
    return int(found[1]) if found else 0


@contextlib.contextmanager
def answering(behaviour):
    """A server of one connection; ``behaviour(connection, request)``. Yields its record and the requests it got."""
    listener = socket.create_server(("127.0.0.1", 0))
    requests = []
    over = threading.Event()

    def serve():
        with contextlib.suppress(OSError):
            while not over.is_set():
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(5)
                    requests.append(whole_request(connection))
                    behaviour(connection, over)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    record = ServerRecord(
        ServerSpec.from_mapping({"engine": "command", "model": "m"}), "command", ("server", "--api-key", "k-12345"),
        f"http://127.0.0.1:{port}", "127.0.0.1", port, (), "python", "c", ProcessId(1, 1), None, None, None, None, 0.0,
    )  # fmt: skip
    try:
        yield record, requests
    finally:
        over.set()
        listener.close()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
        thread.join(6)


def status(code):
    def behave(connection, over):
        connection.sendall(f"HTTP/1.1 {code} X\r\nContent-Length: 2\r\n\r\n{{}}".encode())

    return behave


def silent(connection, over):
    over.wait(5)


def trickle(connection, over):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    with contextlib.suppress(OSError):
        while not over.wait(0.1):
            connection.sendall(b"x")


TOKEN = ReadyProbe(generate={"prompt": "0", "max_tokens": 1})


@pytest.mark.parametrize(
    ("behaviour", "ready", "answers", "reachable"),
    [
        (status(200), TOKEN, True, True),
        (status(503), TOKEN, False, True),
        (status(401), TOKEN, None, True),
        (silent, TOKEN, False, False),
        (trickle, TOKEN, False, False),
        (status(200), ReadyProbe(path="/health"), None, True),
        (status(503), ReadyProbe(path="/health"), None, False),
        (silent, ReadyProbe(path="/health"), None, False),
        (status(200), ReadyProbe(path="/health_generate"), True, True),
        (silent, ReadyProbe(path="/health_generate"), False, False),
    ],
)
def test_answers(behaviour, ready, answers, reachable):
    with answering(behaviour) as (record, requests):
        began = time.monotonic()
        found = probe.ask(record, Engine(ready), limit=0.7)
        assert time.monotonic() - began < 3
    assert (found.answers, found.reachable) == (answers, reachable)
    assert requests[0].startswith("POST /v1/completions" if ready.generate else f"GET {ready.path}")
    assert "Authorization: Bearer k-12345" in requests[0]
    if ready.generate:
        assert '"model": "tiny"' in requests[0]
        assert '"max_tokens": 1' in requests[0]


def test_nobody_there_and_a_broken_engine():
    with answering(status(200)) as (record, _):
        assert probe.ask(record, None, limit=1).reachable
        assert probe.ask(record, object(), limit=1).reachable
    gone = probe.ask(record, Engine(TOKEN), limit=1)
    assert (gone.answers, gone.reachable) == (False, False)


def owner(*frames):
    stack = ThreadStack(1, "MainThread", True, tuple(frames))
    return ProcessDump(ProcessId(1, 1), ProcessRole("other"), "pytest", "S", "py-spy", (stack,))


READS = owner(
    Frame("SocketIO.readinto", "/usr/lib/python3.12/socket.py", 7),
    Frame("HTTPResponse.begin", "/usr/lib/python3.12/http/client.py", 3),
)
THINKS = owner(Frame("sleep_on_it", "/t/test_x.py", 3))


def test_who_waits_for_an_answer():
    with answering(silent) as (record, _):
        assert probe.test_waits(READS, os.getpid(), record.port, None) is False  # not connected to this server
        with socket.create_connection(("127.0.0.1", record.port)):
            assert probe.test_waits(READS, os.getpid(), record.port, None) is True
            assert probe.test_waits(THINKS, os.getpid(), record.port, None) is False  # an idle keep-alive connection
            assert probe.test_waits(None, os.getpid(), record.port, None) is None
    assert probe.test_waits(THINKS, os.getpid(), 1, 2) is True  # our own client counts its requests
    assert dataclasses.is_dataclass(READS)
