"""``gpuserve dump`` of processes that are not ours."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.cli import main
from pytest_gpuserve.cli.dump import resolve
from pytest_gpuserve.diagnose import stacks
from pytest_gpuserve.diagnose.parse import read_dumps, read_file
from pytest_gpuserve.errors import GpuserveError

CODE = """
import socket, subprocess, sys, time
def listens_here(): time.sleep(600)
if len(sys.argv) == 1:
    server = socket.create_server(("127.0.0.1", 0))
    child = subprocess.Popen([sys.executable, __file__, "child", "--api-key", "pa55-w0rd-17"])
    print(server.getsockname()[1], child.pid, flush=True)
listens_here()
"""


@pytest.fixture
def server(tmp_path):
    """(pid, port, pid of its child) of a small server."""
    script = tmp_path / "little_server.py"
    script.write_text(CODE)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            port, child = map(int, process.stdout.readline().split())
            deadline = time.monotonic() + 20
            while b"nanosleep" not in procfs.read(f"/proc/{child}/wchan") and time.monotonic() < deadline:
                time.sleep(0.02)
            yield process.pid, port, child
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def dumped(capsys, *arguments):
    code = main(["dump", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_by_pid_and_by_port(server, capsys):
    pid, port, child = server
    for target in (pid, port, f":{port}", f"pid:{pid}"):
        code, out, err = dumped(capsys, target)
        assert (code, err) == (0, "")
        assert "listens_here (" in out
        assert f"pid {pid}" in out
        assert f"pid {child}" in out


def test_json_and_output_directory(server, capsys, tmp_path):
    pid, _, child = server
    code, out, _ = dumped(capsys, pid, "--json", "-o", tmp_path / "out")
    assert code == 0
    content = json.loads(out)
    assert content["schema"] == "gpuserve.dump/1"
    assert {d["pid"] for d in content["rounds"][0]} == {pid, child}
    assert content["verdict"]["schema"] == "gpuserve.verdict/1"
    assert json.loads((tmp_path / "out" / "dump.json").read_text())["rounds"]
    (dump,) = read_file(tmp_path / "out" / "stacks" / f"pid_{child}.{child}.json")
    assert dump.main.frames[0].name == "listens_here"
    again = read_dumps((tmp_path / "out" / "stacks.txt").read_text())
    assert {d.process.pid for d in again} == {pid, child}
    for text in (out, *(p.read_text() for p in (tmp_path / "out").rglob("*") if p.is_file())):
        assert "pa55-w0rd-17" not in text


def test_explain_reads_the_directory_that_dump_wrote(server, capsys, tmp_path):
    """Mutation: ``written_by_dump`` gives back its argument: no incident."""
    pid, _, child = server
    dumped(capsys, pid, "-o", tmp_path / "out")
    code = main(["explain", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    assert (code, err) == (5, "")
    assert f"pid {pid}" in out
    assert f"pid {child}" in out


def test_several_rounds(server, capsys):
    pid, _, _ = server
    code, out, _ = dumped(capsys, pid, "--rounds", 2)
    assert code == 0
    assert "frozen" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([""], "the target is empty"),
        ([" "], "the target is empty"),
        ([os.getppid(), "--rounds", "0"], "--rounds takes how often to look"),
        ([os.getppid(), "--limit", "0"], "--limit takes the seconds"),
    ],
)
def test_what_leaves_nothing_to_do_is_refused(capsys, monkeypatch, arguments, says):
    monkeypatch.setattr(stacks, "take", None)
    code, out, err = dumped(capsys, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_name_lists_and_attaches_to_nothing(server, capsys, monkeypatch):
    from pytest_gpuserve.diagnose import stacks

    def never(*_, **__):
        raise AssertionError("attached by name")

    monkeypatch.setattr(stacks, "take", never)
    pid, _, child = server
    code, out, err = dumped(capsys, "little_server")
    assert (code, out) == (1, "")
    assert str(pid) in err
    assert str(child) in err
    assert "Nothing was dumped" in err
    code, _, err = dumped(capsys, "no-such-program-anywhere")
    assert code == 1
    assert "no process matches" in err


def test_what_is_not_there(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for target, words in (
        (4194303999, "no process or port"),
        (f":{port}", "nobody listens"),
        (tmp_path, "no directory of a server"),
    ):
        code, _, err = dumped(capsys, target)
        assert code == 2
        assert words in err


def test_number_that_is_both(server, monkeypatch):
    from pytest_gpuserve.cli import dump
    from pytest_gpuserve.diagnose import machine

    pid, _, _ = server
    monkeypatch.setattr(machine, "listeners", lambda port: (1,))
    if pid < 65536:
        with pytest.raises(GpuserveError, match=rf"pid:{pid} or :{pid}"):
            dump.resolve(str(pid))
    assert dump.resolve(f"pid:{pid}").stats[0].pid == pid


def test_directory_of_a_server_of_ours(fake_server, capsys):
    code, out, _ = dumped(capsys, fake_server.directory)
    assert code == 0
    assert "TP0" in out
    fake_server.end()
    code, _, err = dumped(capsys, fake_server.directory)
    assert code == 2
    assert "runs any more" in err


@pytest.mark.parametrize("above", [os.getpid, os.getppid, lambda: 1])
def test_what_started_us_is_no_server(above, monkeypatch):
    """Below process 1, or a shell, runs all that the machine, or the user, has: none of it is to be stopped."""
    monkeypatch.setattr(stacks, "take", lambda *_, **__: pytest.fail("it was dumped"))
    with pytest.raises(GpuserveError, match=f"process {above()} .*is this command, or started it"):
        resolve(f"pid:{above()}")
