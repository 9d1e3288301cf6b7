"""Servers for the tests: each gets a free port and a mark in its environment, and all of it is killed at the end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.diagnose.parse import pyspy_threads

LIMIT = 30.0
"""Seconds that anything may take on a slow, busy machine."""

MARK = "GPUSERVE_SIM_TEST"
PY_SPY = Path(sysconfig.get_path("scripts")) / "py-spy"


def until(condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    """The first true value of the condition."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {limit} s: {what}")


def state(pid: int) -> str:
    """The kernel's letter, X for gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(pid: int) -> bool:
    return state(pid) not in "XZ"


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def marked(mark: str) -> list[int]:
    """Every live process that inherited the mark, wherever it was reparented."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environ.split(b"\0") and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


@dataclass
class Reply:
    status: int
    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    log_path: Path
    mark: str
    started: float
    asked_port: int
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def port(self) -> int:
        if self.asked_port:
            return self.asked_port
        found = re.search(r"(?:Uvicorn running on|Starting vLLM server on) http://127\.0\.0\.1:(\d+)", self.log)
        assert found, self.log[-2000:]
        return int(found[1])

    def logged(self, pattern: str) -> re.Match[str]:
        """Wait for a log line."""
        found: re.Match[str] = until(lambda: re.search(pattern, self.log), f"{pattern!r} in {self.log[-3000:]}")
        return found

    def ready(self) -> Server:
        """Wait until it is."""

        def done() -> bool:
            assert self.process.poll() is None, f"exited with {self.process.returncode}: {self.log[-3000:]}"
            return bool(
                re.search(r"(?m)fired up and ready to roll|^INFO:     Application startup complete\.$", self.log)
            )

        until(done, "ready: " + self.log[-2000:])
        return self

    def request(
        self, method: str, path: str, body: object = None, *, timeout: float = LIMIT, raw: bytes = b""
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = raw or (json.dumps(body).encode() if body is not None else None)
            connection.request(method, path, data, self.keys)
            response = connection.getresponse()
            return Reply(response.status, response.read(), dict(response.getheaders()))
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Reply:
        return self.request("GET", path, **options)

    def complete(self, prompt: object = "hello world", **values: Any) -> Reply:
        timeout = values.pop("timeout", LIMIT)
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **values}
        return self.request("POST", "/v1/completions", body, timeout=timeout)

    def text(self, prompt: object = "hello world", **values: Any) -> str:
        reply = self.complete(prompt, **values)
        assert reply.status == 200, reply.body
        return str(reply.json()["choices"][0]["text"])

    def metrics(self) -> dict[str, float]:
        """Samples by name, summed over labels."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").body.decode().splitlines():
            if not line.startswith("#"):
                name, value = line.partition("{")[0], float(line.rpartition(" ")[2])
                found[name] = found.get(name, 0.0) + value
        return found

    def pids(self) -> list[int]:
        return marked(self.mark)

    def title(self, pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").replace(b"\0", b" ").decode()
        except OSError:
            return ""

    def titled(self, pattern: str) -> list[int]:
        return [pid for pid in self.pids() if re.search(pattern, self.title(pid))]

    def rank(self, number: int) -> int:
        """pid of a rank, by its title."""
        pattern = rf"^(sglang::scheduler|VLLM::Worker)_TP{number}$"
        return int(until(lambda: self.titled(pattern), f"a rank {number}: {list(map(self.title, self.pids()))}")[0])

    def main_thread(self, pid: int) -> dict[str, Any]:
        """What py-spy says of it; {} when it could not."""
        command = [PY_SPY, "dump", "--json", "--nonblocking", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, timeout=LIMIT, check=False)
        if done.returncode:
            return {}
        threads = json.loads(done.stdout)
        return next((t for t, read in zip(threads, pyspy_threads(threads, pid), strict=True) if read.main), {})

    def stack(self, pid: int) -> list[str]:
        """Function names of the main thread, leaf first."""
        return [frame["name"].rpartition(".")[2] for frame in self.main_thread(pid).get("frames", ())]

    def stuck_in(self, pid: int, *functions: str) -> list[str]:
        """Wait until the stack, from the leaf on, contains these functions in this order."""

        def there() -> list[str] | None:
            stack = self.stack(pid)
            rest = iter(stack)
            return stack if all(any(name == frame for frame in rest) for name in functions) else None

        found: list[str] = until(there, f"{self.title(pid)} in {functions}: {self.stack(pid)}")
        return found

    def syscall(self, pid: int) -> int | None:
        """Number of the system call that the process is in (x86-64); None where the kernel does not tell."""
        try:
            first = Path(f"/proc/{pid}/syscall").read_text().split()[0]
        except OSError:
            return None
        return int(first) if first.isdigit() and os.uname().machine == "x86_64" else None

    def terminate(self, signum: int = signal.SIGTERM) -> int:
        """Send the signal to the front end and wait; returns the exit code."""
        self.process.send_signal(signum)
        return self.process.wait(LIMIT)

    def destroy(self) -> None:
        end = time.monotonic() + LIMIT
        while (left := self.pids()) and time.monotonic() < end:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        self.process.wait(LIMIT)
        for file in Path("/dev/shm").glob(f"gpuserve_sim_loads_{self.pid}-*"):
            file.unlink()


Start = Callable[..., Server]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _starter(directory: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def start(*arguments: str, port: int = 0, environ: dict[str, str] | None = None) -> Server:
        mark = uuid.uuid4().hex
        log = directory / f"{mark}.log"
        env = {**os.environ, MARK: mark, "SPT_NOENV": "1", "TMPDIR": str(directory), **(environ or {})}
        command = [sys.executable, "-m", "pytest_gpuserve.sim", "--port", str(port), *arguments]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )
        server = Server(process, log, mark, time.monotonic(), port)
        servers.append(server)
        return server

    try:
        yield start
    finally:
        for server in servers:
            server.destroy()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers: ``start("--tp", "3")``."""
    yield from _starter(tmp_path)


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """The same for servers that a module's tests share."""
    yield from _starter(tmp_path_factory.mktemp("sim"))


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    return until
