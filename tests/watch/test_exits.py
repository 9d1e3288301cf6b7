"""Who went first: processes followed by pidfd, on their own and below the watcher."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.watch.exits import NAME, Exits
from pytest_gpuserve.watch.sample import ProcessSample


def entries(directory):
    path = directory / NAME
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def child():
    """Starts a process that ends as it is told; it is reaped by the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        code = "import sys; sys.exit(int(sys.stdin.readline()))"
        started.append(subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()


def sample(process: subprocess.Popen[bytes], label: str, role: str = "worker", state: str = "S") -> ProcessSample:
    found = procfs.process_id(process.pid)
    assert found is not None
    return ProcessSample(process=found, label=label, role=role, state=state, cpu=0.0)  # type: ignore[arg-type]


def wait(exits: Exits) -> list[int]:
    poll = select.poll()
    for fd in exits.fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(60_000)]


def test_they_are_written_down_in_their_order_and_with_their_codes(tmp_path, child):
    exits, first, second, helper = Exits(tmp_path), child(), child(), child()
    exits.follow([sample(first, "python3", "other"), sample(second, "TP1"), sample(helper, "tracker", "helper")])
    exits.follow([sample(first, "TP0"), sample(second, "TP1")])  # a title that came late
    assert len(list(exits.fds)) == 2
    second.kill()
    exits.ended(wait(exits))  # a zombie
    first.stdin.write(b"3\n")
    first.stdin.flush()
    first.wait()
    helper.kill()
    exits.close()  # what has ended meanwhile
    assert [(e["label"], e["pid"]) for e in entries(tmp_path)] == [("TP1", second.pid), ("TP0", first.pid)]
    assert entries(tmp_path)[0]["code"] == -signal.SIGKILL
    assert entries(tmp_path)[1]["code"] in (3, None)  # reaped: Linux before 6.15 does not tell
    assert entries(tmp_path)[0]["monotonic"] < entries(tmp_path)[1]["monotonic"]
    assert list(exits.fds) == []


def test_a_number_that_was_used_again_is_somebody_else(tmp_path, child):
    exits, process = Exits(tmp_path), child()
    old = procfs.ProcessId(process.pid, 1)
    exits.follow([ProcessSample(process=old, label="TP0", role="worker", state="S", cpu=0.0)])
    assert list(exits.fds) == []
    exits.close()


def test_a_rank_that_is_killed_is_the_first_in_the_file(scene, scenes):
    """By then the engine core has ended the others, and the server exits with 0."""
    scene.watch(window=30.0)
    server = scene.serve(flavor="vllm")
    (directory,) = [server.directory]
    scenes.until(lambda: any(p.get("state") == "idle" for p in scene.progress()))
    os.kill(server.ranks()["TP1"], signal.SIGKILL)
    scenes.until(lambda: server.control.last("exited"))
    scenes.until(lambda: entries(directory))
    first = entries(directory)[0]
    assert (first["label"], first["role"]) == ("TP1", "worker")
    assert first["code"] in (-signal.SIGKILL, None)
