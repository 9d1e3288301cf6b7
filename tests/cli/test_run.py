"""``gpuserve run``: from a launch to its end, and a server that somebody else started."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.cli import main
from pytest_gpuserve.cli.run import _Run, shell_code

SIM = (sys.executable, "-m", "pytest_gpuserve.sim", "--tp", "2", "--quiet")
QUICK = ("--stall-timeout", "3", "--probe-every", "0.5", "--grace", "2")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, times: int) -> None:
    """Completions of a client that nobody watches; the last one may never be answered."""
    for _ in range(times):
        body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
        with suppress(OSError), urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()


class Runs:
    """Starts processes with a state directory of their own; whatever is left at the end is killed by its pid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processes: list[subprocess.Popen[str]] = []
        (path / "state").mkdir(mode=0o700)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUSERVE")}
        return {**kept, "GPUSERVE_STATE": str(self.path / "state"), "PYTHONUNBUFFERED": "1"}

    def start(self, *command: str) -> Run:
        process = subprocess.Popen(
            command,
            cwd=self.path,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return Run(process)

    def gpuserve(self, *arguments: str) -> Run:
        return self.start(sys.executable, "-m", "pytest_gpuserve.cli", "run", *QUICK, *arguments)

    def left(self) -> list[int]:
        """Processes that carry a cookie of this state directory."""
        state = str(self.path / "state").encode()
        mark = procfs.COOKIE_VARIABLE.encode()
        found = []
        for pid in procfs.pids():
            environ = procfs.read(f"/proc/{pid}/environ")
            entry = procfs.stat(pid)
            if mark in environ and state in environ and entry is not None and entry.alive:
                found.append(pid)
        return found


class Run:
    """A process and what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError):  # closed
            self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def says(self, pattern: str, limit: float = 60) -> re.Match[str]:
        deadline = time.monotonic() + limit
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, f"{pattern!r} not in:\n{self.text}"
            time.sleep(0.05)
        return found

    def ends(self, limit: float = 90) -> int:
        code = self.process.wait(limit)
        self._reader.join(10)
        print(self.text)
        return code


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    found = Runs(tmp_path)
    yield found
    for process in found.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
    for pid in found.left():
        os.kill(pid, signal.SIGKILL)


def test_progress_then_ready_then_ctrl_c(runs: Runs) -> None:
    port = free_port()
    run = runs.gpuserve("--", *SIM, "--port", str(port), "--load-seconds", "2", "--shards", "40")
    run.says(r"gpuserve: sim-tp2: pid \d+, log /.*server\.log\n")
    run.says(r"gpuserve: sim-tp2: weight_load \d+/40 shards \(TP0-1\), \d+ s\n")
    run.says(rf"sim-tp2 is ready after \d+ s at http://127\.0\.0\.1:{port}; Ctrl-C ends it\.")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        assert answer.status == 200
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130
    assert run.text.endswith("gpuserve: nothing of it is left.\n")
    assert runs.left() == []


INTERRUPTED = """
import signal, sys, time
from pytest_gpuserve.cli import canary, main
canary.Canary.__init__ = lambda *_: signal.raise_signal(signal.SIGINT)
print("code", main(["run", *sys.argv[1:]]), flush=True)
time.sleep(600)
"""


def test_ctrl_c_at_the_moment_it_is_ready_leaves_nothing(runs: Runs) -> None:
    """Between the launch and the watch: nothing else ends the server, since who launched it lives on."""
    run = runs.start(sys.executable, "-c", INTERRUPTED, *QUICK, "--", *SIM, "--port", str(free_port()))
    run.says(r"nothing of it is left\.\n")
    run.says(r"code 130\n")
    assert runs.left() == []


def test_a_hang_while_it_serves_is_dumped_and_ended(runs: Runs) -> None:
    """Nobody but the canary asks it anything: its third completion hangs."""
    fault = "sleep@serving:rank=1:requests=2"
    run = runs.gpuserve("--", *SIM, "--port", "{port}", "--fault", fault)
    assert run.ends() == 3
    assert re.search(r"gpuserve: hang in (ready|serving) after", run.text)
    assert "TP1 sleeps (synchronize at stalls.py" in run.text
    where = re.search(r"gpuserve: evidence: (\S+)\n", run.text)
    assert where
    assert (runs.path / where[1] / "verdict.md").is_file()
    assert "sim-tp2 hung, and was ended." in run.text
    assert runs.left() == []


def test_soft_dumps_and_ends_nothing(runs: Runs) -> None:
    run = runs.gpuserve("--soft", "--", *SIM, "--port", "{port}", "--fault", "sleep@serving:rank=1:requests=1")
    run.says("gpuserve: evidence: ")
    assert run.process.poll() is None
    assert len(runs.left()) >= 3
    run.process.terminate()
    assert run.ends() == 143
    assert runs.left() == []


def test_a_server_that_never_is_ready_ends_with_its_own_code(runs: Runs) -> None:
    code = "print('last words'); import sys; sys.exit(7)"
    run = runs.gpuserve("--port", str(free_port()), "--", sys.executable, "-c", code)
    assert run.ends() == 7
    assert "last words" in run.text
    assert "before it was ready" in run.text


def test_exit_codes_are_those_of_ashell_code_and_a_crash_is_never_0() -> None:
    assert [shell_code(code, False) for code in (0, 5, -9)] == [0, 5, 137]
    assert [shell_code(code, True) for code in (0, 5, -9)] == [1, 5, 137]


def test_a_ready_server_that_ends_by_itself_ends_with_its_own_code(runs: Runs) -> None:
    code = (
        "import http.server, os, sys, threading, time\n"
        "s = http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)\n"
        "threading.Thread(target=s.serve_forever, daemon=True).start()\n"
        "while not os.path.exists('go'): time.sleep(0.05)\n"
        "sys.exit(9)\n"
    )
    run = runs.gpuserve("--ready", "/", "--", sys.executable, "-c", code, "{port}")
    run.says("is ready after")
    run.says("answers a one-token completion with 501")
    (runs.path / "go").touch()
    assert run.ends() == 9
    assert "exited with code 9" in run.text


def test_a_server_of_somebody_else_is_dumped_and_lives(runs: Runs) -> None:
    port = free_port()
    server = runs.start(*SIM, "--port", str(port), "--fault", "sleep@serving:rank=1:requests=2")
    pid = server.process.pid
    watch = runs.gpuserve("--probe-every", "0", "--attach", f"http://127.0.0.1:{port}", "--pid", str(pid))
    watch.says("sim-tp2 is ready")
    threading.Thread(target=ask, args=(port, 3), daemon=True).start()  # only the server's own counters tell of these
    watch.says(rf"watching pid {pid} \(.*pytest_gpuserve\.sim.*\) at http://127\.0\.0\.1:{port}, engine sim\. ")
    watch.says("sim-tp2: nothing moved for .* in (ready|serving) .*it is left alone")
    watch.says("TP1 sleeps \\(synchronize at stalls.py")
    where = watch.says(r"written to (\S+-sim-tp2-no_progress)")
    assert (runs.path / where[1] / "stacks.txt").is_file()
    assert server.process.poll() is None
    server.process.kill()
    assert watch.ends() == 3
    assert f"pid {pid} is gone, and was hung before" in watch.text


def test_who_listens_is_found_and_a_healthy_server_is_left_in_peace(runs: Runs) -> None:
    port = free_port()
    server = runs.start(*SIM, "--port", str(port))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.1)
    watch = runs.gpuserve("--attach", f"127.0.0.1:{port}")
    watch.says(f"watching pid {server.process.pid} ")
    watch.says("sim-tp2 is ready")
    watch.process.send_signal(signal.SIGINT)
    assert watch.ends() == 130
    assert "the server runs on" in watch.text
    assert server.process.poll() is None
    assert "no_progress" not in watch.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either the server's command, after --, or --attach URL"),
        (["--attach", "http://127.0.0.1:1", "--", "x"], "give either"),
        (["--", "my-server", "--x"], "does not say where its server listens"),
        (["--attach", "http://127.0.0.1"], "names no port"),
        (["--attach", "http://10.0.0.1:8000"], "is not this machine"),
        (["--attach", "http://127.0.0.1:1"], "nobody listens at port 1"),
        (["--attach", "http://127.0.0.1:1", "--pid", "4194305"], "there is no process 4194305"),
        (["--attach", "http://127.0.0.1:1", "--pid", str(os.getpid())], "is this command's own shell or parent"),
    ],
)
def test_what_cannot_be_watched_is_said(
    arguments: list[str], words: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSERVE_STATE", str(tmp_path / "state"))
    assert main(["run", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "nothing of it is left"),
        (
            [{"event": "left", "pid": 41, "state": "D"}, {"event": "stopped"}],
            "of its processes 41 (state D) would not die",
        ),
    ],
)
def test_ctrl_c_tells_what_would_not_die(
    events: list[dict[str, Any]], words: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any) -> int:
        self._directory = tmp_path
        signal.raise_signal(signal.SIGINT)
        return 0

    lines = [json.dumps({"time": 1.0, "monotonic": 1.0, **event}) + "\n" for event in events]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    monkeypatch.setattr(_Run, "run", interrupted)
    assert main(["run", "--", *SIM]) == 130
    printed = capsys.readouterr()
    assert words in printed.out + printed.err
    assert ("nothing of it is left" in printed.out + printed.err) == (not events)


def test_a_port_of_another_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("GPUSERVE_STATE", str(tmp_path / "state"))
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with socket.create_server(("127.0.0.1", 0)) as mine:
            port = mine.getsockname()[1]
            assert main(["run", "--attach", f"http://127.0.0.1:{port}", "--pid", str(other.pid)]) == 2
    finally:
        other.kill()
        other.communicate()
    assert f"which is no process of pid {other.pid}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "isolate"])
def test_a_failed_start_says_nothing_secret(runs: Runs, command: str) -> None:
    code = "import os, sys; print('it is', os.environ['MY_TOKEN'], sys.argv[2], flush=True); sys.exit(3)"
    run = runs.start(
        *(sys.executable, "-m", "pytest_gpuserve.cli", command, "--", "MY_TOKEN=k9Rt5uVbnmqw34"),
        *(sys.executable, "-c", code, "--api-key", "Wq7pZabcdef12", "--port", "{port}", "--bad"),
    )
    assert run.ends() != 0
    assert "Last lines of" in run.text
    kept = "".join(path.read_text() for path in runs.path.glob("gpuserve-*/**/*") if path.is_file())
    for secret in ("k9Rt5uVbnmqw34", "Wq7pZabcdef12"):
        assert secret not in run.text + kept
