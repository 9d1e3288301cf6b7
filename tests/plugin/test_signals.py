"""Who dies when pytest dies: nothing that a server started outlives it by more than the grace and a moment.

The server ignores signals and has left a detached child behind that does so too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.errors import ServerStartError
from pytest_gpuserve.plugin.state import State
from pytest_gpuserve.procfs import ProcessId
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.owned import stop_servers_of
from pytest_gpuserve.server.paths import here, session_directory
from pytest_gpuserve.spec import ServerSpec

GRACE = 2.0
MODULE = """
import os, pathlib, signal, time
from pytest import mark

@mark.gpuserve(engine="sim", tp=2, args={"daemonize": "helper", "ignore_term": True})
def test_it(server):
    pathlib.Path("worker.pid").write_text(str(os.getpid()))
    time.sleep(120)

def test_other(): pass
"""

DEAF = MODULE.replace("    time.sleep", "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    time.sleep")


@pytest.fixture
def running(project):
    """A session in the middle of a test that has a server: the process, and the pid of pytest or its worker."""
    started = []

    def run(*arguments: str, module: str = MODULE):
        project.write(test_it=module)
        options = ("-p", "no:randomly", f"--gpuserve-grace={GRACE}", "-k", "test_it")
        started.append(project.start(*options, *arguments))
        pid = project.path / "worker.pid"
        project.wait_for(lambda: pid.exists() and pid.read_text(), "server")
        carriers = [
            n for n in procfs.pids() if procfs.cookie(n) and str(project.state) in " ".join(procfs.environ(n).values())
        ]
        assert len(carriers) >= 5  # front end, detokenizer, two ranks, the detached helper
        return started[0], int(pid.read_text())

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def assert_gone(project, since: float) -> None:
    """Nothing is left ``GRACE`` + 1 s after ``since``; a busy machine is given three more."""
    project.assert_nothing_left(GRACE + 4)
    print(f"gone after {time.monotonic() - since:.1f} s")


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_pytest(project, running, number):
    process, pid = running()
    assert process.pid == pid
    begin = time.monotonic()
    process.send_signal(number)
    assert_gone(project, begin)
    assert process.wait(30) != 0


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_worker(project, running, number):
    process, pid = running("-n1", "--max-worker-restart=0")
    assert process.pid != pid
    begin = time.monotonic()
    os.kill(pid, number)
    assert_gone(project, begin)
    project.wait(process, 60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_controller(project, running, number):
    """The worker notices late (execnet: about 5 s), and after SIGINT the controller waits for it (xdist: 10 s, if it
    does not listen); the server's supervisor knows at once."""
    process, pid = running("-n1", module=DEAF if number == signal.SIGINT else MODULE)
    begin = time.monotonic()
    process.send_signal(number)
    assert_gone(project, begin)
    if number == signal.SIGINT:
        (server,) = project.servers()
        assert [event["why"] for event in project.events(server) if event["event"] == "killing"] == ["stop"]
        assert procfs.stat(pid).alive  # it was not the worker's end that ended the server
        os.kill(pid, signal.SIGKILL)
    project.wait_for(lambda: procfs.process_id(pid) is None or not procfs.stat(pid).alive, "end of the worker")


def test_a_worker_of_an_interrupted_controller(project):
    """A test fails for its server's end, which is no hang, and a server that it starts now is stopped too."""
    project.write(
        test_it="""
        import pathlib, signal, time
        from pytest import mark
        @mark.gpuserve(engine="sim", tp=1)
        def test_it(server, gpuserve_pool):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            pathlib.Path("begun").touch()
            try:
                while True:
                    server.get("/health")
                    time.sleep(0.05)
            except Exception as error:
                pathlib.Path("error").write_text(str(error))
            gpuserve_pool.get(engine="sim", tp=2, args={"load_seconds": 60})
        """
    )
    process = project.start("-n1", "-p", "no:randomly", f"--gpuserve-grace={GRACE}")
    project.wait_for(lambda: (project.path / "begun").exists(), "server")
    process.send_signal(signal.SIGINT)
    project.wait(process, 60)
    assert (project.path / "error").read_text() == "server sim-tp1 was stopped (stop)."
    events = [event for server in project.servers() for event in project.events(server)]
    assert [event["why"] for event in events if event["event"] == "killing"] == ["stop", "stop"]
    assert "fired" not in [event["event"] for event in events]
    assert project.incidents() == []
    lines = (project.path / "gpuserve-artifacts/results.jsonl").read_text().splitlines()
    (end,) = (line for line in map(json.loads, lines) if line["outcome"] != "running")
    assert (end["outcome"], end["verdict"]) == ("failed", "infra")
    project.assert_nothing_left()


def test_only_the_servers_of_this_controller_are_stopped(project):
    """Those of another, those that it started itself, and those of a dead process hear nothing."""
    place, me, other = here(), procfs.process_id(os.getpid()), ProcessId(1, 1)
    heard: list[str] = []
    sockets = []

    def server(name: str, session: ProcessId, owners: list[ProcessId], where: object = place) -> None:
        directory = project.state / "sessions" / f"{session.pid}-{session.start}-{len(sockets):08x}" / name
        directory.mkdir(parents=True, mode=0o700)
        (directory.parent / ".gpuserve").write_text(json.dumps(where))
        config = {"owners": [[one.pid, one.start] for one in owners], "grace": 1.5}
        (directory / "supervisor.json").write_text(json.dumps(config))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sockets.append(listener)
        here = os.open(directory, os.O_PATH)
        listener.bind(f"/proc/self/fd/{here}/supervisor.sock")
        os.close(here)
        listener.listen()

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        heard.append(f"{name} {json.loads(connection.recv(1000))}")
                        connection.sendall(b'{"ok": true}\n')

        threading.Thread(target=answer, daemon=True).start()

    parent = procfs.process_id(os.getppid())
    server("ours", me, [me, parent])
    server("started-by-it", parent, [parent])
    server("of-another", me, [me, ProcessId(parent.pid, parent.start + 1)])
    server("of-a-dead-worker", other, [other, parent])
    server("elsewhere", me, [me, parent], {**place, "boot": "another"})
    told: set[Path] = set()
    stop_servers_of(parent, told)
    stop_servers_of(parent, told)
    assert heard == ["ours {'do': 'stop', 'grace': 1.5}"]
    marked = {path.parent for path in project.state.glob("sessions/*/.interrupted")}
    assert marked == {path.parent for path in told}
    for listener in sockets:
        listener.shutdown(socket.SHUT_RDWR)  # ends the thread
        listener.close()


def test_a_run_without_servers_is_interrupted(tmp_path, monkeypatch):
    """Looking for servers makes no state directory."""
    monkeypatch.setenv("GPUSERVE_STATE", str(tmp_path / "state"))
    stop_servers_of(procfs.process_id(os.getpid()), set())
    assert list(tmp_path.iterdir()) == []


def test_a_controller_that_is_dead_owns_what_a_worker_still_starts(project):
    """The worker's five seconds are enough for a start; whoever has got the controller's pid by then owns nothing."""
    controller = ProcessId(os.getpid(), 1)  # the pid lives, and another process had it
    sent = {"controller": (controller.pid, controller.start), "place": here()}
    config = SimpleNamespace(workerinput={"gpuserve": sent}, stash={}, getoption=lambda *_: None)
    state = State.__new__(State)
    state.config = config
    assert state.owners == (controller,)
    sent["place"] = {**here(), "boot": "another machine"}
    assert state.owners == ()
    with pytest.raises(ServerStartError, match="a process that owns it is gone"):
        start(
            ServerSpec.from_mapping({"engine": "sim", "args": {"load_seconds": 60}}),
            get_engine("sim"),
            parent=session_directory(),
            limits=Limits(startup=60, grace=0.2, dump=5),
            incident=lambda directory, reason: [],
            owners=(controller,),
        )
    project.assert_nothing_left()


def test_a_whole_terminal(project, running):
    process, _ = running("-n1")
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert_gone(project, begin)
    process.wait(30)


def test_exit_of_the_test_process(project):
    project.write(
        test_it="""
        import os
        from pytest import mark
        @mark.gpuserve(engine="sim", tp=1)
        def test_it(server): os._exit(3)
        """
    )
    assert project.run().ret == 3
    project.assert_nothing_left(20)


def test_the_supervisor_is_killed(project):
    """The next test gets a fresh server, and what was left of the old one is ended."""
    project.write(
        test_it="""
        import os, signal, time
        from pytest import mark
        pytestmark = mark.gpuserve(engine="sim", tp=2)
        def test_it(server):
            os.kill(server.record.supervisor.pid, signal.SIGKILL)
            while server.control.alive():  # the kernel takes its moment
                time.sleep(0.01)
        def test_next(server):
            assert server.get("/health").status_code == 200
        """
    )
    project.run().assert_outcomes(passed=2)
    assert len(project.servers()) == 2
    project.assert_nothing_left()
