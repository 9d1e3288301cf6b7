"""Who dies when pytest dies: nothing that a server started outlives it by more than the grace and a moment.

The server ignores signals and has left a detached child behind that does so too.
"""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.errors import ServerStartError
from pytest_gpuserve.plugin.state import State
from pytest_gpuserve.procfs import ProcessId
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.paths import here, session_directory
from pytest_gpuserve.spec import ServerSpec

GRACE = 2.0
MODULE = """
import os, pathlib, time
from pytest import mark

@mark.gpuserve(engine="sim", tp=2, args={"daemonize": "helper", "ignore_term": True})
def test_it(server):
    pathlib.Path("worker.pid").write_text(str(os.getpid()))
    time.sleep(120)

def test_other(): pass
"""


@pytest.fixture
def running(project):
    """A session in the middle of a test that has a server: the process, and the pid of pytest or its worker."""
    project.write(test_it=MODULE)
    started = []

    def run(*arguments: str):
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_controller(project, running, number):
    """The worker notices late (execnet: about 5 s); the server's supervisor does at once."""
    process, pid = running("-n1")
    begin = time.monotonic()
    process.send_signal(number)
    assert_gone(project, begin)
    project.wait_for(lambda: procfs.process_id(pid) is None or not procfs.stat(pid).alive, "end of the worker")


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
