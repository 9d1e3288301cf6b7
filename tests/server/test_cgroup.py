"""A server's own cgroup: what has left its parent, its session, its environment and its supervisor is its."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.server import cgroup
from pytest_gpuserve.server.control import group_of, sweep_cookie

Wait = Callable[..., Any]
PROBE = cgroup.make(f"test-{os.getpid()}")
cgroup.remove(PROBE)
needs = pytest.mark.skipif(not PROBE, reason="this user may not make a cgroup (v2) here")


@needs
def test_it_holds_all_and_goes_with_the_server(serve: Any, tagged: Any) -> None:
    server = serve("child", "escape-clear", "hop=" + os.devnull)
    group = group_of(server.control.events())
    assert set(tagged.alive()) <= cgroup.members(group) | {os.getpid()}
    assert server.record.supervisor.pid not in cgroup.members(group)
    server.stop()
    assert tagged.alive() == {}
    assert not Path(group).exists()


@needs
def test_what_lost_its_cookie_and_its_supervisor_is_found(serve: Any, tagged: Any, wait_for: Wait) -> None:
    """Without the cgroup nothing tells whose it was."""
    server = serve("escape-clear")
    group = group_of(server.control.events())
    wait_for(lambda: len(tagged.alive()) == 2)
    os.kill(server.record.supervisor.pid, signal.SIGKILL)
    wait_for(lambda: not server.control.alive())
    wait_for(lambda: not procfs.same(server.record.root))
    assert [pid for pid in tagged.alive() if procfs.environ(pid).get(procfs.COOKIE_VARIABLE)] == []
    assert len(tagged.alive()) == 1
    sweep_cookie(server.record.cookie, server.directory)
    assert tagged.alive() == {}
    assert not Path(group).exists()


@needs
def test_nobody_spared_is_killed_with_it() -> None:
    group = cgroup.make(f"test-{os.getpid()}-spare")
    code = f"from pytest_gpuserve.server import cgroup; cgroup.enter({group!r}); print(1, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        process.stdout.readline()
        assert cgroup.members(group) == {process.pid}
        assert not cgroup.kill(group, {process.pid})
        time.sleep(0.2)
        assert process.poll() is None
        cgroup.remove(group)  # with somebody in it, who moves to ours
        assert not Path(group).exists()
        assert process.poll() is None
        assert not cgroup.kill(group, ())
        group = cgroup.make(f"test-{os.getpid()}-again")
        (Path(group) / "cgroup.procs").write_text(str(process.pid))
        assert cgroup.kill(group, {1})
        assert process.wait(10) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
        cgroup.remove(group)


def test_a_hunt_kills_it_but_no_daemon() -> None:
    """In a process of its own, since the supervisor is a script."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(cgroup.__file__).parent)!r})\n"
        "import cgroup, supervisor\n"
        "cgroup.kill = lambda path, spare: print(path, spare)\n"
        "it = supervisor.Supervisor.__new__(supervisor.Supervisor)\n"
        "it.group, it.me = '/the/group', -1\n"
        "it.hunt({7})\n"
    )
    done = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "/the/group {7}\n", done.stderr


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroup, "own", lambda: "")
    assert cgroup.make("x") == ""
    monkeypatch.setattr(cgroup, "own", lambda: str(tmp_path))  # a kernel whose groups cannot be killed
    assert cgroup.make("x") == ""
    assert list(tmp_path.iterdir()) == []
    cgroup.remove(str(tmp_path / "not-ours"))
    cgroup.enter("")
    assert cgroup.members("") == set()
    assert not cgroup.kill("", ())
