"""Servers of tests/server/programs, found again by a tag in their command lines."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.server.handle import Server
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.paths import session_directory
from pytest_gpuserve.spec import ServerSpec

PROGRAMS = Path(__file__).with_name("programs")


class Tagged:
    """The processes whose command line has a tag of their own."""

    def __init__(self) -> None:
        self.tag = f"tag-{uuid.uuid4().hex[:12]}"

    def alive(self, *but: int) -> dict[int, str]:
        """Live processes by pid, with what they do."""
        found = {}
        for pid, entry in procfs.snapshot().items():
            words = procfs.cmdline(pid)
            if entry.alive and pid not in (os.getpid(), *but) and self.tag in " ".join(words):
                found[pid] = words[-1] if words else "?"
        return found

    def gone_within(self, seconds: float, *but: int) -> float | None:
        """Seconds until none was left, None when some were at the end."""
        begin = time.monotonic()
        while self.alive(*but):
            if time.monotonic() - begin > seconds:
                return None
            time.sleep(0.01)
        return time.monotonic() - begin


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The condition's first true value; fails when there is none in time."""
    limit = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < limit, f"not within {seconds} s"
        time.sleep(0.01)
    return value


@pytest.fixture(name="wait_for")
def _wait_for() -> Callable[..., Any]:
    return wait_for


@pytest.fixture
def programs() -> Path:
    return PROGRAMS


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own."""
    path = tmp_path / "state"
    monkeypatch.setenv("GPUSERVE_STATE", str(path))
    return path


@pytest.fixture
def tagged() -> Iterator[Tagged]:
    """A tag; whatever carries it at the end of the test is killed, and the test fails when it should not be there."""
    found = Tagged()
    yield found
    for pid in found.alive():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def spec(tagged: Tagged) -> Callable[..., ServerSpec]:
    """The spec of serve.py doing what its words say."""

    def make(*what: str, **more: object) -> ServerSpec:
        command = [sys.executable, str(PROGRAMS / "serve.py"), "{port}", tagged.tag, *what]
        return ServerSpec.from_mapping({"engine": "command", "command": command, **more})

    return make


@pytest.fixture
def serve(spec: Callable[..., ServerSpec]) -> Iterator[Callable[..., Server]]:
    """Starts serve.py; keywords are those of lifecycle.start, of Limits, or ``spec`` (a mapping of spec keys)."""
    servers: list[Server] = []

    def launch(
        *what: str, startup: float = 60, grace: float = 0.5, dump: float = 10, log: int = 1 << 30, **options: Any
    ) -> Server:
        options.setdefault("incident", lambda directory, reason: [])
        server = start(
            spec(*what, **options.pop("spec", {})),
            get_engine("command"),
            parent=session_directory(),
            limits=Limits(startup=startup, grace=grace, dump=dump, log=log),
            **options,
        )
        servers.append(server)
        return server

    yield launch
    for server in servers:
        server.stop(0.0)
