"""Servers to take incidents of: real processes with a record, no supervisor."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.report import incident
from pytest_gpuserve.server.record import ServerRecord, boot_id
from pytest_gpuserve.spec import ServerSpec

FAKE = Path(__file__).with_name("fake_server.py")


class Fake:
    """One server and its record; :meth:`incident` takes one as a supervisor would."""

    def __init__(self, directory, artifacts, ranks, answer, faults, title=None):
        self.directory = directory
        self.artifacts = artifacts
        directory.mkdir(mode=0o700, parents=True)
        (directory / "markers").mkdir(mode=0o700)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        me = procfs.process_id(os.getpid())
        cookie = f"{me.pid}:{me.start}:{uuid.uuid4().hex}"
        argv = (sys.executable, str(FAKE), str(self.port), str(ranks), answer, *faults)
        environment = {
            **os.environ,
            "GPUSERVE_COOKIE": cookie,
            "FAKE_DIR": str(directory),
            "HF_TOKEN": "token-of-the-env-9",
        }
        self.log = directory / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment, start_new_session=True)
        spec = {"engine": "sglang", "model": "/models/x", "tp": ranks, "env": {"MY_SECRET": "in-the-spec-42"}}
        self.record = ServerRecord(
            spec=ServerSpec.from_mapping(spec),
            engine="sglang",
            argv=(*argv, "--api-key", "given-as-flag-31"),
            url=f"http://127.0.0.1:{self.port}",
            host="127.0.0.1",
            port=self.port,
            gpus=(),
            python=sys.executable,
            cookie=cookie,
            owner=me,
            supervisor=None,
            root=procfs.process_id(self.process.pid),
            directory=directory,
            log=self.log,
            started=time.time(),
            boot=boot_id(),
        )
        self.record.save()
        self.until(lambda: "fake server up" in self.log.read_text(), "its front end")
        dead = [f for f in faults if f.endswith("=die")]
        self.until(lambda: len(self.ranks()) == ranks - len(dead), "its ranks")
        if dead:
            self.until(
                lambda: "Z" in {s.state for s in procfs.snapshot().values() if s.ppid == self.process.pid}, "death"
            )

    def until(self, condition, what):
        deadline = time.monotonic() + 20
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.02)

    def ranks(self):
        """Titled processes that wait where they shall stay."""
        found = {}
        for pid in procfs.descendants(self.process.pid):
            title = " ".join(procfs.cmdline(pid))
            stat = procfs.stat(pid)
            if title.startswith("sglang::scheduler_TP") and stat and stat.state in "ST" and "TP" in title:
                found[int(title.rpartition("TP")[2])] = pid
        return found

    def command(self, reason, *more, artifacts=True, **options):
        return [*incident.command(self.directory, self.artifacts if artifacts else None, reason, **options), *more]

    def incident(self, reason, *more, environment=None, launcher=(), timeout=60, **options):
        """Exit code and the directory that it tells."""
        ran = subprocess.run(
            [*launcher, *self.command(reason, *more, **options)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=environment,
        )
        assert "Traceback" not in ran.stderr, ran.stderr
        self.stderr = ran.stderr
        return ran.returncode, self.line()

    def lines(self):
        path = self.directory / "incidents.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def line(self):
        (line,) = self.lines()
        return line

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def targets():
    """The launchers of tests/diagnose/targets.py."""
    path = Path(__file__).parents[1] / "diagnose" / "targets.py"
    spec = importlib.util.spec_from_file_location("report_targets", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake(tmp_path):
    """``fake(ranks=4, answer="no", faults=["2=lock"])``: a running server with its record."""
    made = []

    def make(ranks=4, answer="no", faults=(), name="server"):
        server = Fake(tmp_path / "state" / name, tmp_path / "artifacts", ranks, answer, faults)
        made.append(server)
        return server

    yield make
    for server in made:
        server.end()
