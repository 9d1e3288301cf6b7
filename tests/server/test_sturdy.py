"""The supervisor survives its clients, full disks and tight limits."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pytest_gpuserve
from pytest_gpuserve import procfs
from pytest_gpuserve.procfs import ProcessId
from pytest_gpuserve.server import loop
from pytest_gpuserve.server.control import Control
from pytest_gpuserve.server.readiness import lost_supervisor
from pytest_gpuserve.text import escape

Wait = Callable[..., Any]
SERVER = Path(pytest_gpuserve.__file__).parent / "server"


def connect(directory: Path) -> socket.socket:
    folder = os.open(directory, os.O_PATH)
    try:
        client = socket.socket(socket.AF_UNIX)
        client.connect(f"/proc/self/fd/{folder}/supervisor.sock")
        client.settimeout(5)
        return client
    finally:
        os.close(folder)


def dropped(client: socket.socket, data: bytes, times: int) -> bool:
    """Whether the other end closes the connection while we send."""
    try:
        for _ in range(times):
            client.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


def test_clients_of_all_kinds(serve: Any) -> None:
    server = serve()
    with connect(server.directory) as garbage:
        garbage.sendall(b"\x00\xff\xfe garbage\n[1]\n\n" + b"[" * 100_000 + b"\nnull\n" + b"1" * 10_000 + b"\n")
        replies = b""
        while replies.count(b"\n") < 6:
            replies += garbage.recv(65536)
        assert all(json.loads(line)["ok"] is False for line in replies.splitlines())
    with connect(server.directory) as endless:  # no line ends
        assert dropped(endless, b"x" * 65536, 64)
    with connect(server.directory) as silent:  # no answer is read
        assert dropped(silent, b'{"do": "status"}\n' * 20, 20_000)
    half = connect(server.directory)
    half.sendall(b'{"do": ')
    assert server.control.status()["ok"]
    half.sendall(b'"status"}\n')
    assert json.loads(half.recv(4096))["ok"]
    half.close()


def test_the_oldest_of_too_many_clients_is_dropped(serve: Any) -> None:
    server = serve()
    clients = [connect(server.directory) for _ in range(40)]
    assert server.control.status()["ok"]
    assert clients[0].recv(1) == b""
    for client in clients:
        client.close()
    assert server.control.status()["ok"]


def bare(tmp_path: Path, **more: Any) -> tuple[subprocess.Popen[bytes], Path]:
    """A supervisor without the rest of the package."""
    directory = tmp_path / "server"
    directory.mkdir(exist_ok=True)
    me = procfs.process_id(os.getpid())
    assert me
    config = {
        "directory": str(directory),
        "cookie": f"{me.pid}:{me.start}:{os.urandom(8).hex()}",
        "owners": [[me.pid, me.start]],
        "grace": 0.2,
        "argv": ["sleep", "300"],
        "env": {},
        "cwd": "/",
        "log": str(directory / "server.log"),
        "alarms": [],
        **more,
    }
    path = directory / "supervisor.json"
    path.write_text(json.dumps(config))
    argv = [sys.executable, "-S", "-E", str(SERVER / "supervisor.py"), str(path)]
    with (directory / "supervisor.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    return process, directory


def ask(directory: Path, **words: Any) -> Any:
    with connect(directory) as client:
        client.sendall(json.dumps(words).encode() + b"\n")
        return json.loads(client.recv(65536))


def test_a_full_disk(tmp_path: Path) -> None:
    directory = tmp_path / "server"
    directory.mkdir()
    (directory / "events.jsonl").symlink_to("/dev/full")
    process, _ = bare(tmp_path)
    assert process.stdout
    pid = json.loads(process.stdout.read())["pid"]
    assert ask(directory, do="arm", name="x", deadline=1e9, argv=[])["ok"]
    assert ask(directory, do="stop", grace=0)["ok"]
    assert process.wait(20) == 0
    assert procfs.stat(pid) is None
    process.stdout.close()


def test_a_full_disk_loses_no_line_and_tears_none(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = loop.Journal(str(path))
    journal.emit("one")
    good, journal.fd = journal.fd, os.open("/dev/full", os.O_WRONLY)
    journal.emit("two")
    journal.emit("three")
    assert path.read_text().count("\n") == 1
    os.close(journal.fd)
    journal.fd = good
    journal.emit("four")
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["one", "two", "three", "four"]
    os.close(good)


def test_no_process_to_be_had_is_tried_again_without_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    found, before = loop.Loop(), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", no)
    tree = loop.Tree(found, lambda *_: None, resource.getrlimit(resource.RLIMIT_NOFILE))
    for _ in range(3):
        assert (tree.asked, tree.pid, found.handlers) == ("start", -1, {}), "nothing that is ready at once"
        assert 0 < tree.limit - time.monotonic() <= loop.TREE_RETRY
        tree.replace()
    os.close(tree.input)
    assert len(os.listdir("/proc/self/fd")) == before


def test_few_descriptors(tmp_path: Path, wait_for: Wait) -> None:
    """The server gets the limit it was given; the supervisor takes what the hard limit allows, here nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = "import resource,time; print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True); time.sleep(300)"
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard) - 1, hard))
    try:
        process, directory = bare(tmp_path, argv=[sys.executable, "-c", code])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.stdout
    process.stdout.read()
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (24, 24))
    wait_for(lambda: (directory / "server.log").read_text())
    assert (directory / "server.log").read_text().strip() == str((min(soft, hard) - 1, hard))
    clients = []
    for _ in range(30):
        clients.append(connect(directory))
    for client in clients:
        client.close()
    wait_for(lambda: ask(directory, do="status")["ok"])
    assert ask(directory, do="stop", grace=0)["ok"]
    assert process.wait(20) == 0
    process.stdout.close()


def test_an_owner_is_a_pid_and_a_start_time(tmp_path: Path) -> None:
    """A process that has got the pid of a dead owner is no owner."""
    me = procfs.process_id(os.getpid())
    assert me
    process, directory = bare(tmp_path, owners=[[me.pid, me.start - 1]])
    assert process.wait(20) == 0
    assert '"why": "owner"' in (directory / "events.jsonl").read_text()
    assert process.stdout
    process.stdout.close()


def test_signals_of_a_terminal_are_ignored_and_given_back_to_the_server(tmp_path: Path, wait_for: Wait) -> None:
    process, directory = bare(tmp_path)
    assert process.stdout
    pid = json.loads(process.stdout.read())["pid"]
    for number in (1, 2, 15):
        process.send_signal(number)
    time.sleep(0.2)
    assert ask(directory, do="status")["exit"] is None
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
    terminal = 1 << 0 | 1 << 1 | 1 << 14  # others may be ignored because whoever runs the tests has them ignored
    assert (ignored & terminal, blocked) == (0, 0)
    os.kill(pid, 15)
    wait_for(lambda: ask(directory, do="status")["exit"] == -15)
    ask(directory, do="stop", grace=0)
    assert process.wait(20) == 0
    process.stdout.close()


def test_it_idles(tmp_path: Path) -> None:
    process, directory = bare(tmp_path)
    assert process.stdout
    process.stdout.read()
    time.sleep(0.3)

    def ticks() -> int:
        pids = [process.pid, *procfs.descendants(process.pid)]
        return sum(entry.utime + entry.stime for pid in pids if (entry := procfs.stat(pid)))

    before = ticks()
    time.sleep(2.0)
    used = ticks() - before
    print(f"{used} ticks of 10 ms in 2 s")
    assert used <= 6  # 3 % of one core
    ask(directory, do="stop", grace=0)
    assert process.wait(20) == 0
    process.stdout.close()


@pytest.mark.parametrize("name", ["supervisor", "loop", "tree", "cgroup"])
def test_standard_library_only(name: str) -> None:
    """They run with -S -E, before and after everything else: nothing of the package, nothing slow."""
    code = f"import sys; sys.path.insert(0, {str(SERVER)!r}); import {name}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=True)
    loaded = {module.partition(".")[0] for module in done.stdout.split()}
    assert loaded <= sys.stdlib_module_names | {"supervisor", "loop", "tree", "cgroup", "__main__"}
    assert not loaded & {"pathlib", "subprocess", "asyncio", "inspect", "threading_", "logging"}


def test_no_module_of_this_room_hides_one_of_the_standard_library() -> None:
    """A script's directory comes first in sys.path."""
    assert not {path.stem for path in SERVER.glob("*.py")} & sys.stdlib_module_names - {"__init__"}


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("", "somebody killed pid 7"),
        (
            'Traceback (most recent call last):\n  File "x.py", line 1\nOSError: [Errno 24] no \x1b[31mfile\n',
            "pid 7 failed",
        ),
    ],
)
def test_a_lost_supervisor_is_said_to_be_killed_or_to_have_failed(tmp_path: Path, log: str, says: str) -> None:
    (tmp_path / "supervisor.log").write_text(log)
    record = SimpleNamespace(directory=tmp_path, cookie="0" * 32, shown=escape)
    text = lost_supervisor(record, Control(tmp_path, ProcessId(7, 1)))  # type: ignore[arg-type]
    assert says in text
    assert ("OSError" in text) == bool(log)
    assert "\x1b" not in text
