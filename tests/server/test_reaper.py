"""What dead sessions left is freed; what lives, or is not proved to be ours, is never touched."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.server import dead_sessions, paths, reaper, tree
from pytest_gpuserve.server.asking import ask_tree
from pytest_gpuserve.server.control import Control, Event, group_of
from pytest_gpuserve.server.record import load

SHM = Path("/dev/shm")
Wait = Callable[..., Any]


@pytest.fixture
def shm() -> Iterator[str]:
    """A name for a file in /dev/shm."""
    found = f"gpuserve-test-{uuid.uuid4().hex[:12]}"
    yield found
    (SHM / found).unlink(missing_ok=True)


@pytest.fixture
def own(tagged: Any, programs: Path, state: Path) -> Iterator[Callable[..., Any]]:
    """Start owner.py, which owns a server: (its process, the server's directory)."""
    started: list[subprocess.Popen[str]] = []

    def start(*what: str) -> tuple[subprocess.Popen[str], Path]:
        argv = [sys.executable, str(programs / "owner.py"), str(state), tagged.tag, json.dumps({"what": what})]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the owner died"
        return process, Path(json.loads(line)["directory"])

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def decoy(*words: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", "import time; time.sleep(300)", *words]
    process = subprocess.Popen(argv, env={**os.environ, **env}, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def kill(directory: Path, owner: subprocess.Popen[str]) -> None:
    """Supervisor first, so that nobody is there to see the owner die. Its child, the server's root, dies with it."""
    record = load(directory)
    assert record.supervisor is not None
    assert record.root is not None
    os.kill(record.supervisor.pid, signal.SIGKILL)
    owner.kill()
    owner.wait()
    wait_for_end(record.root)


def wait_for_end(process: procfs.ProcessId) -> None:
    deadline = time.monotonic() + 20
    while procfs.same(process):
        assert time.monotonic() < deadline, f"{process} does not end"
        time.sleep(0.01)


def noted(directory: Path, name: str) -> bool:
    events = (directory / "events.jsonl").read_text()
    return f'"name": "{name}"' in events


def gone_pid() -> procfs.ProcessId:
    process = subprocess.Popen(["true"])
    found = procfs.process_id(process.pid)
    process.wait()
    assert found is not None
    return found


def dead_session(state: Path, *, age: float = 0.0, marker: object = None) -> Path:
    """The directory of a session whose process is gone, swept ``age`` seconds ago."""
    owner = gone_pid()
    path = state / "sessions" / f"{owner.pid}-{owner.start}-{uuid.uuid4().hex[:8]}"
    (path / "1-server").mkdir(parents=True)
    (path / "1-server" / "server.log").write_text("last words")
    (path / paths.MARKER).write_text(json.dumps(marker or paths.here()))
    if age:
        (path / dead_sessions.SWEPT).touch()
        for file in (path / dead_sessions.SWEPT, path / "1-server" / "server.log", path / "1-server", path):
            os.utime(file, (time.time() - age,) * 2)
    return path


def test_what_a_killed_supervisor_and_owner_left(own: Any, tagged: Any, wait_for: Wait, shm: str, state: Path) -> None:
    owner, directory = own("ignore-term", "escape", "child", f"shm={shm}")
    wait_for(lambda: noted(directory, shm))
    cookie = load(directory).cookie
    with (
        decoy(tagged.tag, "same name") as stranger,
        decoy(tagged.tag, GPUSERVE_COOKIE=cookie[:-1]) as prefix,
        decoy(tagged.tag, GPUSERVE_COOKIE=cookie + "0") as longer,
        decoy(tagged.tag, SOME_COOKIE=cookie) as other,
    ):
        decoys = [process.pid for process in (stranger, prefix, longer, other)]
        kill(directory, owner)
        left = wait_for(lambda: tagged.alive(*decoys))
        assert "escaped" in left.values()
        assert {seen.id.pid for found in reaper.find_leftovers(state) for seen in found.processes} == set(left)
        assert set(tagged.alive(*decoys)) == set(left), "looking must not touch"
        swept = reaper.sweep_dead_sessions(30.0)
        assert {seen.id.pid for seen in swept.ended} == set(left)
        assert (swept.left, swept.kept, swept.problems, swept.unlinked) == ((), (), (), (shm,))
        assert tagged.alive(*decoys) == {}
        assert not (SHM / shm).exists()
        assert sorted(tagged.alive()) == sorted(decoys)
    assert "Ended" in swept.text
    assert shm in swept.text
    assert (directory / "server.log").exists(), "recent logs stay"


def test_a_live_owner_is_never_touched(own: Any, tagged: Any, state: Path, wait_for: Wait) -> None:
    """Not even when the supervisor is gone: the owner sees to that itself."""
    owner, directory = own("ignore-term", "escape")
    supervisor = load(directory).supervisor
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: not procfs.same(supervisor))
    assert "escaped" in tagged.alive(owner.pid).values()
    assert load(directory).cookie not in {found.cookie for found in reaper.find_leftovers(state, strays=True)}
    assert reaper.sweep_dead_sessions() == reaper.Swept()
    assert "escaped" in tagged.alive(owner.pid).values()


def test_a_live_supervisor_ends_its_server_itself(
    own: Any, tagged: Any, state: Path, wait_for: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped is told, with what to do: nothing but that one knows all that is the server's."""
    owner, directory = own("ignore-term", "escape")
    supervisor = load(directory).supervisor
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        owner.kill()
        owner.wait()
        real = procfs.stat
        # also when the owner died before it could note its supervisor: that one listens
        record = json.loads((directory / "server.json").read_text())
        for known in (None, record["supervisor"]):
            if known:
                (directory / "supervisor.sock").unlink()
            (directory / "server.json").write_text(json.dumps({**record, "supervisor": known}))
            swept = reaper.sweep_dead_sessions()
            assert (swept.ended, f"pid {supervisor.pid}, is stopped" in swept.text) == ((), True)
            assert f"kill -CONT {supervisor.pid}" in swept.text
            with monkeypatch.context() as patch:
                patch.setattr(procfs, "stat", lambda pid: (found := real(pid)) and replace(found, state="S"))
                swept = reaper.sweep_dead_sessions()
                assert (len(swept.waiting), swept.ended, swept.text) == (1, (), "")
            assert "escaped" in tagged.alive().values()
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    assert tagged.gone_within(20.0) is not None
    wait_for(lambda: not procfs.same(supervisor))
    assert reaper.sweep_dead_sessions() == reaper.Swept()
    assert (directory.parent / dead_sessions.SWEPT).exists()


def test_a_pid_that_was_used_again(own: Any, tagged: Any, state: Path) -> None:
    """The owner's number belongs to somebody else now: the start time tells."""
    owner, directory = own("ignore-term", "escape")
    kill(directory, owner)
    record = load(directory)
    escaped = set(tagged.alive())
    with decoy("now has the number") as heir:
        start = record.owner.start
        cookie = f"{heir.pid}:{start}:{uuid.uuid4().hex}"
        found = json.loads((directory / "server.json").read_text())
        heirs = directory.parent.with_name(f"{heir.pid}-{start}-0a0a0a0a")
        directory.parent.rename(heirs)
        found.update(owner=[heir.pid, start], cookie=cookie)
        (heirs / directory.name / "server.json").write_text(json.dumps(found))
        with decoy("left", GPUSERVE_COOKIE=cookie) as left:
            swept = reaper.sweep_dead_sessions(30.0)
            ended = {seen.id.pid for seen in swept.ended}
            assert ended in ({left.pid}, {left.pid, *escaped})  # by the server's cgroup, where it has one
        assert heir.poll() is None


@pytest.mark.parametrize("broken", ["boot", "pid_namespace", "no marker", "cookie of another", "link", "other user"])
def test_what_is_not_proved_to_be_ours(
    own: Any, tagged: Any, state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    owner, directory = own("ignore-term", "escape")
    kill(directory, owner)
    session = directory.parent
    marker = session / paths.MARKER
    if broken in ("boot", "pid_namespace"):
        marker.write_text(json.dumps({**paths.here(), broken: "another"}))
    elif broken == "no marker":
        marker.unlink()
    elif broken == "cookie of another":
        record = json.loads((directory / "server.json").read_text())
        start = procfs.process_id(os.getpid()).start
        cookie = f"{os.getpid()}:{start}:{'0' * 32}"
        (directory / "server.json").write_text(json.dumps({**record, "cookie": cookie}))
        with decoy(GPUSERVE_COOKIE=cookie) as served:
            assert reaper.sweep_dead_sessions(30.0).ended == ()
            assert served.poll() is None
    elif broken == "link":
        session.rename(tmp_path / "elsewhere")
        session.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(reaper, "existing_state", lambda: state)
    assert reaper.sweep_dead_sessions(30.0).ended == ()
    assert "escaped" in tagged.alive().values()


def test_strays_of_a_state_directory_that_is_gone(tmp_path: Path) -> None:
    owner = gone_pid()
    me = procfs.process_id(os.getpid())
    cookie, live = f"{owner.pid}:{owner.start}:{'a' * 32}", f"{me.pid}:{me.start}:{'a' * 32}"
    supervised, other = (f"{owner.pid}:{owner.start}:{letter * 32}" for letter in "bc")
    elsewhere = tmp_path / "another" / "sessions" / "1-2-3" / "1-sim-tp1" / "markers"
    elsewhere.mkdir(parents=True)
    code = "import subprocess,sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(300)'])"
    with (
        decoy("stray", GPUSERVE_COOKIE=cookie) as stray,
        decoy("elsewhere", GPUSERVE_COOKIE=other, GPUSERVE_MARKERS=str(elsewhere)) as kept,
        decoy("of a live owner", GPUSERVE_COOKIE=live) as ours,
        decoy("no cookie", GPUSERVE_COOKIE="1:2") as odd,
        subprocess.Popen(
            [sys.executable, "-c", code, "pytest_gpuserve/server/supervisor.py"],
            env={**os.environ, "GPUSERVE_COOKIE": supervised},
            start_new_session=True,
        ) as above,
    ):
        try:
            deadline = time.monotonic() + 20
            while len(procfs.carriers(supervised)) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not [found for found in reaper.find_leftovers(tmp_path) if found.cookie == cookie]
            found = {f.cookie: f for f in reaper.find_leftovers(tmp_path, strays=True)}
            assert live not in found
            assert [seen.id.pid for seen in found[cookie].processes] == [stray.pid]
            assert found[supervised].waits
            assert f"GPUSERVE_STATE={tmp_path / 'another'} gpuserve reap" in found[other].waits
            swept = reaper.free([found[cookie], found[supervised], found[other]], limit=30.0)
            assert [seen.id.pid for seen in swept.ended] == [stray.pid]
            assert (kept.poll(), ours.poll(), odd.poll(), above.poll()) == (None, None, None, None)
        finally:
            os.killpg(above.pid, signal.SIGKILL)


def test_files_that_somebody_holds_stay_and_are_tried_again(
    own: Any, tagged: Any, wait_for: Wait, shm: str, state: Path
) -> None:
    owner, directory = own(f"shm={shm}")
    wait_for(lambda: noted(directory, shm))
    with open(SHM / shm, "rb"):
        kill(directory, owner)
        assert tagged.gone_within(20.0) is not None
        os.utime(directory / "server.json", (time.time() - 3600,) * 2)  # nothing can come up any more
        swept = reaper.sweep_dead_sessions(30.0)
        assert f"process {os.getpid()} holds it" in swept.kept[0]
        assert (SHM / shm).exists()
    assert reaper.sweep_dead_sessions(30.0).unlinked == (shm,)


def test_another_file_of_that_name_stays(own: Any, tagged: Any, wait_for: Wait, shm: str) -> None:
    owner, directory = own(f"shm={shm}")
    wait_for(lambda: noted(directory, shm))
    kill(directory, owner)
    assert tagged.gone_within(20.0) is not None
    with open(SHM / shm, "rb"):  # so that its inode is not given again
        (SHM / shm).unlink()
        (SHM / shm).write_text("somebody else's")
        assert reaper.sweep_dead_sessions(30.0).unlinked == ()
    assert (SHM / shm).read_text() == "somebody else's"


def test_old_logs_go_and_recent_ones_stay(state: Path, tmp_path: Path) -> None:
    day = 86400.0
    old, recent = dead_session(state, age=4 * day), dead_session(state, age=1 * day)
    elsewhere = dead_session(state, age=4 * day, marker={"boot": "another", "pid_namespace": 1})
    (elsewhere / dead_sessions.SWEPT).unlink()
    forgotten = dead_session(state, age=31 * day, marker={"boot": "another", "pid_namespace": 1})
    (forgotten / dead_sessions.SWEPT).unlink()
    os.utime(forgotten, (time.time() - 31 * day,) * 2)
    os.utime(forgotten / paths.MARKER, (time.time() - 31 * day,) * 2)
    unmarked = dead_session(state, age=40 * day)
    (unmarked / paths.MARKER).unlink()
    strange = state / "sessions" / "my-notes"
    strange.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (old / "1-server" / "link").symlink_to(outside)
    swept = reaper.sweep_dead_sessions()
    assert (swept.removed, swept.problems) == (2, ())
    assert not old.exists()
    assert not forgotten.exists()
    assert all(path.is_dir() for path in (recent, elsewhere, unmarked, strange))
    assert (outside / "precious").read_text() == "x"


KILLED = """
import os, signal
from pytest_gpuserve.server.paths import scratch
with scratch("cold") as path:
    (path / "kernel").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_is_of_no_use_without_its_process_goes_at_once(state: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    (left,) = (state / "sessions").glob("*/scratch-cold-*")
    (left.parent / "server.log").write_text("last words")
    (tmp_path / "outside").mkdir()
    (left.parent / "scratch-link").symlink_to(tmp_path / "outside")
    with paths.scratch("cold") as living:
        assert reaper.sweep_dead_sessions().problems == ()
        assert living.is_dir()
    assert not living.exists()
    assert not left.exists()
    assert (left.parent / "server.log").exists()
    assert (tmp_path / "outside").is_dir()


def test_sessions_behind_a_link_are_not_ours(state: Path, tmp_path: Path) -> None:
    """No server starts there either."""
    state.mkdir(mode=0o700)
    kept = dead_session(tmp_path / "far", age=1e7)
    (state / "sessions").symlink_to(kept.parent)
    assert "sessions is a link" in reaper.sweep_dead_sessions().text
    assert kept.is_dir()


def test_nothing_to_do_is_quick(state: Path) -> None:
    for _ in range(50):
        (dead_session(state) / dead_sessions.SWEPT).touch()
    mine = paths.session_directory()
    taken = []
    for _ in range(5):
        begin = time.thread_time()
        assert reaper.sweep_dead_sessions() == reaper.Swept()
        taken.append(time.thread_time() - begin)
    assert min(taken) < 0.05, taken
    assert mine.is_dir()
    assert not (mine / dead_sessions.SWEPT).exists()


def test_a_sweep_never_raises(state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(paths.STATE_VARIABLE, str(tmp_path / "file"))
    assert "cannot be used" in reaper.sweep_dead_sessions().text
    monkeypatch.setenv(paths.STATE_VARIABLE, str(state))
    session = dead_session(state)
    (session / "1-server" / "server.json").write_text("{broken")
    (session / "1-server" / "events.jsonl").write_bytes(b"\xff\n[]\n")
    (state / "sessions" / f"{gone_pid().pid}-1-0a0a0a0a").write_text("a file")
    (problem,) = reaper.sweep_dead_sessions().problems
    assert "server.json cannot be read" in problem
    assert not (session / dead_sessions.SWEPT).exists(), "a record that nobody can read is not done with"


@pytest.mark.parametrize("broken", ["a key less", "no JSON", "deep", "no file"])
def test_a_record_that_is_broken_or_of_another_version(own: Any, tagged: Any, broken: str) -> None:
    """The cookie is all that has to be known, and the supervisor was told it too."""
    owner, directory = own("ignore-term", "escape")
    kill(directory, owner)
    path = directory / "server.json"
    if broken == "a key less":
        record = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in record.items() if key != "own_timeout"}))
    elif broken == "no file":
        path.unlink()
    else:
        path.write_text("[" * 100_000 if broken == "deep" else "{broken")
    left = set(tagged.alive())
    swept = reaper.sweep_dead_sessions(30.0)
    assert {seen.id.pid for seen in swept.ended} == left != set()
    assert swept.problems == ()


def test_one_sessions_trouble_stops_no_other(own: Any, tagged: Any, state: Path) -> None:
    """What nothing in its directory proves is ended by hand: the process itself carries the cookie of a dead owner."""
    (bad, hidden), (good, other) = own("ignore-term", "escape"), own("ignore-term", "escape")
    kill(hidden, bad)
    kill(other, good)
    cookie = load(hidden).cookie
    found = {leftover.cookie: leftover for leftover in reaper.find_leftovers(state)}
    mine, others = ({seen.id.pid for seen in found[load(where).cookie].processes} for where in (hidden, other))
    for name in ("server.json", "supervisor.json"):
        (hidden / name).write_text("{}")
    swept = reaper.sweep_dead_sessions(30.0)
    assert {seen.id.pid for seen in swept.ended} == others
    assert str(hidden / "server.json") in swept.text
    assert set(tagged.alive()) == mine != set()
    (stray,) = [leftover for leftover in reaper.find_leftovers(state, strays=True) if leftover.cookie == cookie]
    assert (stray.waits, stray.problem, stray.endable) == ("", "", True)
    assert {seen.id.pid for seen in reaper.free([stray], limit=30.0).ended} == mine


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"shm","time":1,"monotonic":1}',
        b'{"event":"shm","time":1,"monotonic":1,"inode":[],"name":{}}',
        b'{"event":"shm","time":1,"monotonic":1,"inode":"x","name":"x"}',
        b'{"event":"cgroup","time":1,"monotonic":1,"path":["x"]}',
        b'{"event":"unlinked","time":1,"monotonic":1}',
        b'{"event":[],"time":1,"monotonic":1}',
        b'{"event":"stopped","time":"x","monotonic":1}',
        b"[1]",
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_journal_line_that_is_none(own: Any, tagged: Any, line: bytes) -> None:
    owner, directory = own("ignore-term", "escape")
    kill(directory, owner)
    journal = directory / "events.jsonl"
    journal.write_bytes(line + b"\n" + journal.read_bytes())
    left = set(tagged.alive())
    swept = reaper.sweep_dead_sessions(30.0)
    assert {seen.id.pid for seen in swept.ended} == left != set()
    assert swept.problems == ()


def test_a_journal_that_is_too_large(tmp_path: Path) -> None:
    with open(tmp_path / "events.jsonl", "w") as journal:
        journal.write('{"event": "started", "time": 1, "monotonic": 1}\n')
        journal.truncate(512 << 20)
    tracemalloc.start()
    try:
        assert [event.kind for event in Control(tmp_path).events()] == ["started"]
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_a_cgroup_that_is_not_ours(tmp_path: Path) -> None:
    """Whatever a journal says: only what is named as ours is looked into."""
    for name, ours in (("user.slice", False), ("gpuserve-1-2-0a0a0a0a", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text("17\n")
        path = str(tmp_path / name)
        assert group_of([Event("cgroup", 1.0, 1.0, {"path": path})]) == (path if ours else "")
        assert tree.inside(path) == ({17} if ours else set())
    assert group_of([Event("cgroup", 1.0, 1.0, {"path": "gpuserve-1-2-0a0a0a0a"})]) == ""


def test_a_daemon_that_others_use_is_named_and_stays(state: Path) -> None:
    """Also long after its session was swept, with no advice to ask where we are asked."""
    owner = gone_pid()
    cookie = f"{owner.pid}:{owner.start}:{'d' * 32}"
    markers = state / "sessions" / "1-2-3" / "1-sim-tp1" / "markers"
    markers.mkdir(parents=True)
    code = "import time; open('/proc/self/comm', 'w').write('raylet'); print('up', flush=True); time.sleep(300)"
    env = {**os.environ, "GPUSERVE_COOKIE": cookie, "GPUSERVE_MARKERS": str(markers)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == b"up\n"
            (found,) = [one for one in reaper.find_leftovers(state, strays=True) if one.cookie == cookie]
            assert ([one.id.pid for one in found.spared], found.processes, found.waits) == ([daemon.pid], (), "")
            assert not found.endable
            swept = reaper.free([found])
            assert (swept.ended, swept.left, swept.problems, swept.waiting) == ((), (), (), ())
            assert "others may use" in swept.text
            assert f"pid {daemon.pid}" in swept.text
            assert daemon.poll() is None
        finally:
            daemon.kill()


def test_a_stopped_watcher_is_named(state: Path, wait_for: Wait) -> None:
    """It ends by itself with its session, once it goes on."""
    dead = dead_session(state)
    alive = paths.session_directory()
    with (
        decoy("pytest_gpuserve.watch.watcher", "--session", str(dead)) as stopped,
        decoy("pytest_gpuserve.watch.watcher", "--session", str(alive)) as living,
        decoy("pytest_gpuserve.watch.watcher", "--session", str(dead)) as running,
    ):
        for process in (stopped, living):
            wait_for(lambda process=process: procfs.cmdline(process.pid)[-2:-1] == ["--session"])
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda process=process: procfs.stat(process.pid).state == "T")
        told = " ".join(found.problem for found in reaper.find_leftovers(state, strays=True))
        assert f"kill -CONT {stopped.pid}" in told
        assert str(living.pid) not in told
        assert str(running.pid) not in told


def test_one_sweep_at_a_time(state: Path) -> None:
    dead_session(state)
    with dead_sessions.alone(state, time.monotonic()) as alone:
        assert alone
        begin = time.monotonic()
        swept = reaper.sweep_dead_sessions(0.3)
        assert 0.2 < time.monotonic() - begin < 10
        assert "Another session" in swept.text
    assert reaper.sweep_dead_sessions().problems == ()


def test_lease_files_of_the_dead(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = tmp_path / "leases"
    monkeypatch.setenv("GPUSERVE_LEASES", str(leases))
    reaper.sweep_dead_sessions()
    assert not leases.exists(), "a sweep makes no directory"
    from pytest_gpuserve.server import lease_files

    root = lease_files.directory()
    body = {"label": "x", "count": 1, "devices": []}
    path, descriptor = lease_files.announce(root, "lease", body)
    reaper.sweep_dead_sessions()
    assert path.exists()
    os.close(descriptor)
    reaper.sweep_dead_sessions()
    assert not path.exists()


def test_a_helper_that_falls_silent_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It hangs at one process; the second hang there proves that, and the third helper skips it."""
    script = tmp_path / "tree.py"
    script.write_text(
        "import json, sys, time\n"
        "request = json.loads(sys.stdin.readline())\n"
        "print(json.dumps(['?', 77]), flush=True)\n"
        "time.sleep(0 if 77 in request['skip'] else 600)\n"
        "print(json.dumps(['about', *request['skip']]), flush=True)\n"
        "print(json.dumps(['.']), flush=True)\n"
    )
    monkeypatch.setattr("pytest_gpuserve.server.asking._TREE", script)
    monkeypatch.setattr("pytest_gpuserve.server.asking.TREE_SILENCE", 0.2)
    assert ask_tree([{"do": "about"}], 60.0) == ([["about", 77]], True)
    monkeypatch.setattr("pytest_gpuserve.server.asking._TREE", tmp_path / "missing.py")
    assert ask_tree([{"do": "about"}], 0.5) == ([], False)


def test_a_helper_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = subprocess.Popen, []

    def popen(*words: Any, **more: Any) -> Any:
        if len(refused) < 2:
            refused.append(1)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return real(*words, **more)

    monkeypatch.setattr(subprocess, "Popen", popen)
    words, complete = ask_tree([{"do": "about", "pids": [os.getpid()]}], 60.0)
    assert ([word[:2] for word in words], complete) == ([["about", os.getpid()]], True)
    refused.clear()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: popen(refused.clear()))
    assert ask_tree([{"do": "about", "pids": []}], 0.2) == ([], False)


def test_files_are_noted_at_once(own: Any, tagged: Any, wait_for: Wait, shm: str) -> None:
    """Not at the next look, once a second: what is not noted when the supervisor is killed belongs to nobody."""
    taken = []
    for number in range(3):
        name = f"{shm}-{number}"
        try:
            _, directory = own(f"shm={name}")
            wait_for(lambda directory=directory, name=name: noted(directory, name))
            lines = (directory / "events.jsonl").read_text().splitlines()
            (event,) = [e for e in map(json.loads, lines) if e["event"] == "shm"]
            taken.append(event["time"] - (SHM / name).stat().st_mtime)
        finally:
            (SHM / name).unlink(missing_ok=True)
    assert min(taken) < 0.45, taken


def test_the_first_server_of_a_session_sweeps(own: Any, tagged: Any, state: Path, tmp_path: Path) -> None:
    owner, directory = own("ignore-term", "escape")
    kill(directory, owner)
    assert "escaped" in tagged.alive().values()
    (tmp_path / "tox.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_without(): pass\n"
        "@pytest.mark.gpuserve(engine='sim', tp=1)\n"
        "def test_with(server): pass\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:xdist", "-p", "no:cacheprovider"]
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120, "check": False}
    assert subprocess.run([*words, "-k", "without"], **run).returncode == 0
    assert "escaped" in tagged.alive().values(), "no server, no sweep"
    done = subprocess.run(words, **run)
    assert done.returncode == 0, done.stdout
    assert tagged.alive() == {}
    assert "Ended what dead sessions left: pid" in done.stdout
