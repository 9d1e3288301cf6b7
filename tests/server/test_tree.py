"""What belongs to a server, how it is ended, what stays: processes and shared memory."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.errors import ServerExitedError
from pytest_gpuserve.server import tree
from pytest_gpuserve.server.control import Control, sweep_cookie
from pytest_gpuserve.server.record import load, processes

Wait = Callable[..., Any]
SHM = Path("/dev/shm")


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a file in /dev/shm."""
    found = f"gpuserve-test-{uuid.uuid4().hex[:12]}"
    yield found
    for left in (SHM / found, SHM / f"sem.{found}"):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def decoy(*words: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", "import time; time.sleep(300)", *words]
    process = subprocess.Popen(argv, env={**os.environ, **env}, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "what",
    [
        ("escape",),
        ("ignore-term", "escape-clear"),
        ("stopped-child",),
        ("half-dead",),
        ("titled",),
        ("breed",),
        ("daemonize-child", "child"),
    ],
    ids=lambda what: what[-1],
)
def test_stop_leaves_nothing(serve: Any, tagged: Any, what: tuple[str, ...]) -> None:
    server = serve(*(word for word in what if word != "daemonize-child"))
    time.sleep(0.3)
    begin = time.monotonic()
    server.stop()
    print(f"stopped after {time.monotonic() - begin:.2f} s")
    assert tagged.alive() == {}
    assert server.left == []
    assert time.monotonic() - begin < 6.0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_server_that_becomes_another_user(serve: Any, tagged: Any) -> None:
    """And its children with it; what it started before stays root's."""
    server = serve("child", "escape-clear", "uid=65534", "many=3")
    users = sorted(Path(f"/proc/{pid}").stat().st_uid for pid in tagged.alive())
    assert users == [0, 0, *[65534] * 4]
    server.stop(0.2)
    assert tagged.alive() == {}
    assert server.left == []


def test_what_is_never_where_one_looks(serve: Any, tmp_path: Path) -> None:
    """Children of a server that fork and exit some hundred times a second, in ever new sessions."""
    hops = [tmp_path / f"hops{n}" for n in range(4)]
    server = serve(*(f"hop={path}" for path in hops))
    begin = [path.stat().st_size for path in hops]
    time.sleep(0.3)
    assert all(path.stat().st_size > size for path, size in zip(hops, begin, strict=True))
    server.stop()
    end = [path.stat().st_size for path in hops]
    time.sleep(0.5)
    assert [path.stat().st_size for path in hops] == end


def test_five_hundred_processes(serve: Any, tagged: Any) -> None:
    server = serve("many=500")
    assert len(tagged.alive()) == 501
    begin = time.monotonic()
    server.stop(0.2)
    print(f"stopped after {time.monotonic() - begin:.2f} s")
    assert tagged.alive() == {}
    assert server.left == []


@pytest.fixture
def pids_group() -> Iterator[Path]:
    """A cgroup in which there may be 100 processes."""
    for base in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
        path = base / f"gpuserve-test-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            path.mkdir()
            try:
                (path / "pids.max").write_text("100")
                yield path
                return
            finally:
                path.rmdir()
    pytest.skip("this user may not make a cgroup that counts processes")


def test_forks_without_end(serve: Any, tagged: Any, pids_group: Path, wait_for: Wait) -> None:
    server = serve(f"bomb={pids_group}")
    wait_for(lambda: len((pids_group / "cgroup.procs").read_text().split()) > 95)
    begin = time.monotonic()
    server.stop(0.2)
    took = time.monotonic() - begin
    print(f"stopped after {took:.2f} s")
    if server.control.last("cgroup"):  # 1.5 s; by hunting alone, 19 s beside 80 other runnable processes
        assert took < 15.0
    assert (pids_group / "cgroup.procs").read_text() == ""
    assert tagged.alive() == {}
    assert server.left == []


def test_a_root_that_obeys_ends_at_once_and_the_rest_is_asked(serve: Any, tagged: Any) -> None:
    server = serve("say=x", "escape")
    begin = time.monotonic()
    server.stop(1.0)
    assert server.exit_code() == -signal.SIGTERM
    assert 0.9 < time.monotonic() - begin < 5.0  # the escaped one ignores SIGTERM
    assert tagged.alive() == {}


def test_a_crashed_servers_orphans_stay_until_the_stop(serve: Any, tagged: Any, wait_for: Wait) -> None:
    server = serve("child", "escape")
    os.kill(server.record.root.pid, signal.SIGKILL)
    wait_for(lambda: server.exit_code() is not None)
    assert server.exit_code() == -signal.SIGKILL
    assert sorted(tagged.alive().values()) == ["child", "escaped"]
    assert len(processes(server.record)) == 2
    begin = time.monotonic()
    server.stop(30.0)  # what a dead server left gets no such grace
    assert time.monotonic() - begin < 15.0
    assert tagged.alive() == {}


def test_innocents_survive(serve: Any, tagged: Any) -> None:
    server = serve("escape", "child")
    cookie = server.record.cookie
    owner = ":".join(cookie.split(":")[:2])
    tag, other = tagged.tag + "-not", uuid.uuid4().hex
    with (
        decoy("serve.py", tag) as same_name,
        decoy(tag, GPUSERVE_COOKIE=cookie[:-1]) as prefix,
        decoy(tag, GPUSERVE_COOKIE=cookie + "0") as longer,
        decoy(tag, GPUSERVE_COOKIE=f"{owner}:{other}") as another,
        decoy(tag, OTHER=cookie, GPUSERVE_COOKIE_="x") as elsewhere,
        decoy(cookie, f"GPUSERVE_COOKIE={cookie}") as in_argv,
    ):
        innocents = [same_name, prefix, longer, another, elsewhere, in_argv]
        assert not {p.pid for p in innocents} & {entry.pid for entry in processes(server.record)}
        server.stop()
        sweep_cookie(cookie, server.directory)
        assert [p.poll() for p in innocents] == [None] * 6
        assert {pid for pid in tagged.alive() if pid not in {p.pid for p in innocents}} == set()


def test_shared_daemons_are_spared(serve: Any, tagged: Any, wait_for: Wait) -> None:
    server = serve("daemon-called=sccache", "child")
    wait_for(lambda: any(entry.comm == "sccache" for entry in processes(server.record)))
    daemon = next(entry.pid for entry in processes(server.record) if entry.comm == "sccache")
    server.stop()
    try:
        assert set(tagged.alive()) == {daemon}
        assert sweep_cookie(server.record.cookie) == []
        assert set(tagged.alive()) == {daemon}
        assert server.control.last("stopped")
    finally:
        os.kill(daemon, signal.SIGKILL)


def test_a_namesake_in_the_servers_own_session_is_not_spared(serve: Any, tagged: Any, wait_for: Wait) -> None:
    """Only a daemon is shared: what stays in the server's session serves nobody else."""
    server = serve("child-called=sccache")
    wait_for(lambda: any(entry.comm == "sccache" for entry in processes(server.record)))
    server.stop()
    assert tagged.alive() == {}


def test_trackers_go_last(serve: Any, name: str, tagged: Any) -> None:
    """A resource tracker that is given time unlinks what the others leave; we have nothing to unlink then."""
    server = serve("ignore-term", f"tracked-shm={name}", f"spawn-shm={name}2")
    assert (SHM / name).exists()
    server.stop(0.1)
    assert not (SHM / name).exists()
    assert not (SHM / f"{name}2").exists()
    assert [e.data for e in server.control.events() if e.kind in ("unlinked", "kept")] == []


def test_what_the_server_mapped_is_unlinked(serve: Any, name: str) -> None:
    server = serve(f"shm={name}")
    assert (SHM / name).exists()
    server.stop()
    assert not (SHM / name).exists()
    assert server.control.last("unlinked").data["name"] == name


def test_a_named_semaphore_is_unlinked_too(serve: Any, name: str, wait_for: Wait) -> None:
    server = serve(f"semaphore={name}")
    wait_for(lambda: server.control.last("shm"))
    assert (SHM / f"sem.{name}").exists()
    server.stop()
    assert not (SHM / f"sem.{name}").exists()


def test_what_a_crashed_server_had_mapped_is_unlinked(serve: Any, name: str, wait_for: Wait) -> None:
    """It was noted while the server lived: nobody maps it any more when the server is stopped."""
    server = serve(f"shm={name}")
    wait_for(lambda: server.control.last("shm"))
    os.kill(server.record.root.pid, signal.SIGKILL)
    server.stop()
    assert not (SHM / name).exists()


def test_what_was_there_before_stays(serve: Any, name: str) -> None:
    (SHM / name).write_bytes(b"x" * 4096)
    server = serve(f"shm={name}")
    server.stop()
    assert (SHM / name).exists()
    assert server.control.last("shm", "unlinked") is None


def test_what_somebody_holds_stays(serve: Any, name: str) -> None:
    server = serve(f"shm={name}")
    with (SHM / name).open("r+b") as file:
        with mmap.mmap(file.fileno(), 4096):
            server.stop()
        kept = server.control.last("kept")
    assert (SHM / name).exists()
    assert kept.data["name"] == name
    assert f"process {os.getpid()}" in kept.data["why"]


def test_another_file_of_the_same_name_stays(serve: Any, name: str, wait_for: Wait) -> None:
    server = serve(f"shm={name}")
    wait_for(lambda: server.control.last("shm"))
    (SHM / name).unlink()
    (SHM / name).write_bytes(b"somebody else's")
    server.stop()
    assert (SHM / name).exists()


def test_a_silent_tree_is_replaced(serve: Any, tagged: Any) -> None:
    """What stands for one that is stuck in the kernel: it is stopped."""
    server = serve("child", "escape")
    supervisor = server.record.supervisor.pid
    helper = next(pid for pid in procfs.descendants(supervisor) if "tree.py" in " ".join(procfs.cmdline(pid)))
    os.kill(helper, signal.SIGSTOP)
    server.stop(0.1)
    assert tagged.alive() == {}
    assert server.control.last("stopped")
    assert procfs.stat(helper) is None


def test_a_killed_supervisor_is_noticed_and_its_server_ended(
    serve: Any, tagged: Any, name: str, wait_for: Wait
) -> None:
    """Also a process that wrote a title over its environment (SPT_NOENV), and shared memory."""

    server = serve("ignore-term", "child", "titled", "escape", f"shm={name}")
    wait_for(lambda: server.control.last("shm"))
    wait_for(lambda: any(procfs.cmdline(pid)[0].startswith("x ") for pid in tagged.alive()))
    os.kill(server.record.supervisor.pid, signal.SIGKILL)
    with pytest.raises(ServerExitedError, match="supervisor"):
        wait_for(lambda: server.get("/health").status_code != 200)
    assert tagged.alive() == {}
    assert not (SHM / name).exists()
    server.stop()


def test_stop_after_the_supervisor_was_killed(serve: Any, tagged: Any) -> None:
    server = serve("child", "escape")
    os.kill(server.record.supervisor.pid, signal.SIGKILL)
    server.stop()
    assert tagged.alive() == {}


def test_the_record_lists_the_tree(serve: Any, tagged: Any) -> None:
    server = serve("child", "escape-clear")
    record = load(server.directory)
    assert record == server.record
    assert {entry.pid for entry in processes(record)} == set(tagged.alive())
    assert processes(record)[0].pid == record.root.pid


def test_a_process_whose_first_thread_has_exited_is_alive(serve: Any, tagged: Any, wait_for: Wait) -> None:
    server = serve("half-dead")
    supervisor = server.record.supervisor.pid
    (pid,) = set(procfs.descendants(supervisor)) - {server.record.root.pid, *_own(supervisor)}
    wait_for(lambda: procfs.stat(pid).state == "Z")  # type: ignore[union-attr]
    assert pid in [entry.pid for entry in processes(server.record)]
    assert tree.stat(pid) is not None


def _own(supervisor: int) -> set[int]:
    return {pid for pid, entry in procfs.snapshot().items() if entry.session == supervisor}


def test_what_will_not_die_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel cannot be asked for a process in state D; here no signal arrives."""
    said: list[tuple[Any, ...]] = []
    cookie = f"1:2:{uuid.uuid4().hex}"
    monkeypatch.setattr(tree, "say", lambda *words: said.append(words))
    monkeypatch.setattr(tree, "send", lambda number, members: None)
    monkeypatch.setattr(tree, "GIVE_UP", 0.2)
    requests = tree.Requests()
    requests.closed = True
    with decoy(GPUSERVE_COOKIE=cookie) as process:
        tree.end(requests, supervisor=-1, root=-1, cookie=cookie, skip=[], deadline=0.0)
        assert [words[:2] for words in said if words[0] == "left"] == [("left", process.pid)]
        assert {words[2] for words in said if words[0] == "left"} <= {"S", "R", "D"}


def test_a_skipped_process_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what belongs to a process stuck in a driver blocks: it is found by its parent, never by its cookie."""
    cookie = f"1:2:{uuid.uuid4().hex}"
    monkeypatch.setattr(tree, "say", lambda *words: None)
    with decoy(GPUSERVE_COOKIE=cookie) as process:
        assert [m.pid for m in tree.scan(-1, -1, cookie, [], False)] == [process.pid]
        assert tree.scan(-1, -1, cookie, [process.pid], False) == []
        here = os.getpid()
        assert process.pid in [m.pid for m in tree.scan(here, -1, cookie, [process.pid], False)]


def test_a_reused_pid_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    with decoy() as process:
        found = procfs.stat(process.pid)
        assert found is not None
        tree.send(signal.SIGKILL, [tree.Member(process.pid, found.start - 1, "S", False, False)])
        time.sleep(0.1)
        assert process.poll() is None
        tree.send(signal.SIGKILL, [tree.Member(process.pid, found.start, "S", False, False)])
        assert process.wait(10) == -signal.SIGKILL


def test_events_of_a_dead_supervisor_can_be_read(serve: Any) -> None:
    server = serve()
    server.stop()
    assert Control(server.directory).events()[-1].kind == "stopped"
    with (server.directory / "events.jsonl").open("a") as file:
        file.write(
            'not json\n{"event": "x"}\n' + json.dumps({"event": "later", "time": 1, "monotonic": 2}) + "\n" + "{tor"
        )
    assert Control(server.directory).events()[-1].kind == "later"
