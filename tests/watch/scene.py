"""A session with a watcher and real servers, for the tests of the watcher."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.server.control import Control
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.spec import ServerSpec
from pytest_gpuserve.watch import watcher

RECORD = "import json,sys;open(sys.argv[1],'a').write(json.dumps(sys.argv[3:])+chr(10));sys.exit(int(sys.argv[2]))"


def until(condition, limit=60.0):
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    pytest.fail(f"{condition} never came true")


def read(path: Path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


class Scene:
    """A session directory, its watcher, its servers, and what the incidents were told."""

    def __init__(self, path: Path) -> None:
        self.session = path / "session"
        self.session.mkdir()
        self.cache = path / "cache"
        self.told = path / "told.jsonl"
        self.process: subprocess.Popen[bytes] | None = None
        self.servers = []
        self.threads = []

    def watch(self, *, exit_code: int = 0, window: float = 3.0, **config):
        incident = [
            sys.executable,
            "-S",
            "-c",
            RECORD,
            str(self.told),
            str(exit_code),
            "{server}",
            "{reason}",
            "{after}",
        ]
        settings = {"interval": 0.2, "incident": incident, "cache": str(self.cache), "gpus": False}
        settings["budgets"] = {"window": window, "first_request": window}
        self.process = watcher.start(self.session, {**settings, **config})
        return self.process

    def serve(self, *, fault: str | None = None, background: bool = False, **args):
        options = {"fault": fault, **args} if fault else dict(args)
        spec = ServerSpec.from_mapping({"engine": "sim", "tp": 2, "args": options})

        def run():
            server = start(
                spec,
                get_engine("sim"),
                parent=self.session,
                limits=Limits(startup=120, grace=0.5, dump=10),
                incident=lambda directory, reason: [],
            )
            self.servers.append(server)
            return server

        if not background:
            return run()

        def quietly():
            with suppress(GpuserveError):
                run()

        thread = threading.Thread(target=quietly)
        thread.start()
        self.threads.append(thread)
        return None

    def incidents(self) -> list[list[str]]:
        return [json.loads(line) for line in self.told.read_text().splitlines()] if self.told.exists() else []

    def progress(self):
        return [read(path) for path in self.session.glob("*/progress.json")]

    def close(self) -> None:
        for directory in self.session.iterdir():
            with suppress(GpuserveError):
                Control(directory).stop(0.0)
        for server in self.servers:
            server.stop(0.0)
        for thread in self.threads:
            thread.join(60)
        if self.process is not None:
            self.process.terminate()
            assert self.process.wait(30) == 0


def post(server, results):
    try:
        results.append(server.post("/v1/completions", json={"model": server.model, "prompt": "x", "max_tokens": 4}))
    except Exception as error:  # whatever ends it is looked at by the test
        results.append(error)
