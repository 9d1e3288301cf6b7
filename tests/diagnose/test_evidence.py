"""Second witnesses and the machine: what is read, from recordings, from real files and real processes."""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pytest_gpuserve.diagnose import flight, locks, machine, ras
from pytest_gpuserve.diagnose.evidence import Memory
from pytest_gpuserve.diagnose.kernel import kernel_wait
from pytest_gpuserve.diagnose.merge import merge

WITNESSES = Path(__file__).parent.parent / "data" / "witnesses"
LABELS = {868: "TP0", 869: "TP1"}


def until(condition, limit=20.0):
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    pytest.fail(f"{condition} never came true")


# --- NCCL RAS

HEAD = "NCCL version 2.28.9 compiled with CUDA 13.0\n\nCommunicators... (0.00s)\n=============\n\n"
LAG = (
    HEAD
    + """Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 77 on node node1
"""
)


def test_ras_of_a_healthy_job_accuses_nobody():
    report = ras.parse((WITNESSES / "ras_healthy.txt").read_text())
    assert (report.silent, report.errors, report.lagging) == ((), (), ())
    assert ras.witnesses(report, report, LABELS) == ()


def test_ras_names_the_stopped_rank_and_no_garbage():
    """The recorded answer also lists 257 ranks that never existed."""
    report = ras.parse((WITNESSES / "ras_hung.txt").read_text())
    assert report.silent == (869,)
    (seen,) = ras.witnesses(report, None, LABELS)
    assert (seen.ranks, seen.source) == (("TP1",), "NCCL RAS")
    assert ras.witnesses(report, None, {5: "TP0"}) == (), "processes of another job are nobody of ours"


def test_ras_lag_counts_only_when_it_stands_still():
    report = ras.parse(LAG)
    assert report.counts == ((77, 60),)
    assert report.lagging == (77,)
    assert ras.witnesses(report, None, {77: "TP7"}) == (), "one answer may be a snapshot of healthy work"
    (seen,) = ras.witnesses(report, report, {77: "TP7"})
    assert seen.ranks == ("TP7",)
    later = ras.parse(LAG.replace("64", "70").replace("operation 60", "operation 66"))
    assert ras.witnesses(report, later, {77: "TP7"}) == ()
    catching_up = ras.parse(LAG.replace("operation 60", "operation 62"))
    assert ras.witnesses(report, catching_up, {77: "TP7"}) == ()


def test_ras_lists_of_outliers_belong_to_the_count_above():
    text = HEAD + (
        "#0-0 (2) MISMATCH\n  Communicator ranks have different collective operation counts\n"
        "  26 ranks have launched up to operation 6650\n  2 ranks have launched up to operation 6649\n"
        "  Rank 0 -- GPU 0 managed by process 10 on node n\n  Rank 2 -- GPU 2 managed by process 12 on node n\n"
    )
    assert ras.parse(text).lagging == (10, 12)


def test_ras_that_counts_the_leaders_accuses_the_laggard():
    """Two ranks: each is an outlier of its own."""
    text = HEAD + (
        "#0-0 (2) MISMATCH\n  Communicator ranks have different collective operation counts\n"
        "  Rank 0 has launched up to operation 9 -- GPU 0 managed by process 868 on node n\n"
        "  Rank 1 has not launched any operations -- GPU 1 managed by process 869 on node n\n"
    )
    report = ras.parse(text)
    assert [w.ranks for w in ras.witnesses(report, report, LABELS)] == [("TP1",)]


def test_ras_dead_processes_are_silent_too():
    text = HEAD + "Errors\n======\n\nDEAD\n  1 job process is considered dead\n  Process 869 on node n managing GPU 1\n"
    report = ras.parse(text)
    assert report.dead == report.silent == (869,)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("127.0.0.1", 28028)),
        ({"NCCL_RAS_ADDR": "localhost:4000"}, ("127.0.0.1", 4000)),
        ({"NCCL_RAS_ADDR": "192.0.2.1:4000"}, None),
        ({"NCCL_RAS_ADDR": "localhost:none"}, None),
        ({"NCCL_RAS_ENABLE": "0"}, None),
    ],
)
def test_ras_is_asked_on_this_machine_only(environment, expected):
    assert ras.address(environment) == expected


@pytest.fixture
def serve():
    """A service on a port of its own that answers one question; one that ``hangs`` keeps the connection open."""
    over, threads = threading.Event(), []

    def start(answer: bytes, *, hangs: bool = False):
        server = socket.create_server(("127.0.0.1", 0))
        address = server.getsockname()

        def run():
            with server:
                link, _ = server.accept()
            with link:
                link.recv(100)
                link.sendall(answer)
                if hangs:
                    over.wait(30)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return address

    yield start
    over.set()
    for thread in threads:
        thread.join()


def test_ras_answers_are_read_to_their_end(serve):
    text = (WITNESSES / "ras_healthy.txt").read_text()
    assert ras.ask(serve(text.encode())) == text


def test_ras_has_a_limit(serve):
    began = time.monotonic()
    assert ras.ask(serve(b"", hangs=True), limit=0.5) is None
    assert time.monotonic() - began < 10


def test_strangers_on_the_ras_port_are_ignored(serve):
    assert ras.ask(serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")) is None
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert ras.ask(unused.getsockname(), limit=1.0) is None


# --- Flight Recorder


def record(entries, group="0"):
    def entry(sequence, state, name="all_reduce"):
        return {
            "process_group": [group, "default"],
            "collective_seq_id": sequence,
            "profiling_name": f"nccl:{name}",
            "state": state,
            "input_sizes": [[8]],
            "input_dtypes": ["Float"],
        }

    made = [entry(*e) for e in entries]
    return flight.read(pickle.dumps({"version": "2.10", "entries": made, "pg_config": {group: {"ranks": "[0, 1]"}}}))


def test_a_recorded_flight():
    found = flight.read((WITNESSES / "flight_rank0.pickle").read_bytes())
    assert found.last["3"].sequence == 15462
    assert found.last["3"].name == "_all_gather_base"
    assert not found.pending
    assert found.members == {"3": (0, 1)}
    (seen,) = flight.witnesses({"TP0": found})
    assert (seen.ranks, seen.layer) == ((), "host")


def test_the_rank_that_misses_a_collective_is_accused():
    ahead = record([(1, "completed"), (2, "started")])
    behind = record([(1, "completed")])
    (seen,) = flight.witnesses({"TP0": ahead, "TP1": behind, "TP2": ahead})
    assert seen.ranks == ("TP1",)
    assert "collective 2 (all_reduce)" in seen.claim


def test_a_rank_that_is_merely_behind_accuses_nobody():
    """Nothing pends: the others are simply further."""
    (seen,) = flight.witnesses({"TP0": record([(2, "completed")]), "TP1": record([(1, "completed")])})
    assert seen.ranks == ()


def test_different_collectives_of_one_number_are_a_desync():
    (seen,) = flight.witnesses({"TP0": record([(2, "started")]), "TP1": record([(2, "started", "broadcast")])})
    assert (seen.ranks, seen.layer) == ((), "desync")


class Attack:
    """Unpickled carelessly, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("what", ["call", "class", "list", "shape", "empty", "torn", "text"])
def test_a_file_that_is_no_plain_record_is_refused(what, tmp_path):
    raw = {
        "call": pickle.dumps({"entries": [Attack(tmp_path / "mark")]}),
        "class": pickle.dumps({"entries": [], "x": Path("x")}),
        "list": pickle.dumps([1, 2]),
        "shape": pickle.dumps({"entries": [{}]}),
        "empty": b"",
        "torn": b"\x80\x02}q",
        "text": b"not a pickle at all",
    }[what]
    with pytest.raises(ValueError, match="not a flight record"):
        flight.read(raw)
    assert not (tmp_path / "mark").exists()


def fr_environment(tmp_path):
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "trace_"),
    }


def test_a_record_is_asked_for_through_the_pipe(tmp_path):
    pipe = tmp_path / "pipe1.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    content = (WITNESSES / "flight_rank0.pickle").read_bytes()

    def recorder():
        until(lambda: _read(reader))
        with open(tmp_path / "trace_1", "wb") as file:
            file.write(content[:100])
            file.flush()
            time.sleep(0.05)
            file.write(content[100:])

    thread = threading.Thread(target=recorder)
    thread.start()
    try:
        assert flight.dump(fr_environment(tmp_path), 1, limit=20.0) == content
    finally:
        thread.join()
        os.close(reader)


def _read(descriptor):
    try:
        return os.read(descriptor, 10)
    except BlockingIOError:
        return b""


def test_no_recorder_no_record(tmp_path):
    assert flight.dump({}, 0, limit=1.0) is None
    assert flight.dump(fr_environment(tmp_path), 0, limit=1.0) is None, "no pipe"
    (tmp_path / "pipe0.pipe").write_text("")
    assert flight.dump(fr_environment(tmp_path), 0, limit=1.0) is None, "a file is no pipe"
    os.mkfifo(tmp_path / "pipe1.pipe")
    assert flight.dump(fr_environment(tmp_path), 1, limit=1.0) is None, "nobody reads it"


# --- memory and the rest of the machine


def test_memory_is_what_is_resident_not_address_space():
    import mmap

    reserved = mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    try:
        found = machine.memory([os.getpid()], oom_before=machine.oom_kills())
        assert found.virtual > 4 << 30
        assert 5 << 20 < found.resident < 2 << 30
        assert found.limit
        assert found.oom_kills in (0, None)
        assert not found.short
    finally:
        reserved.close()


def test_an_oom_kill_is_a_difference_not_a_count():
    now = machine.oom_kills()
    if now is None:
        pytest.skip("this kernel does not count")
    assert machine.memory([os.getpid()], oom_before=now - 2 if now >= 2 else now).oom_kills in (0, 2)
    assert machine.memory([os.getpid()]).oom_kills is None


def test_memory_is_short_near_its_limit():
    assert Memory(resident=98, limit=100).short
    assert not Memory(resident=90, limit=100).short
    assert Memory(resident=10, limit=100, current=98).short
    assert not Memory(resident=98, limit=None).short


def test_the_kernel_log_names_who_was_killed_and_gpu_errors():
    log = (
        "4,1,1,-;Memory cgroup out of memory: Killed process 29935 (python) total-vm:1kB\n"
        "4,2,2,-;NVRM: Xid (PCI:0000:dc:00): 79, pid=7, name=python3\n"
        "4,2,2,-;NVRM: Xid (PCI:0000:dc:00): 79, pid=7, name=python3\n"
    )
    assert machine.killed_for_memory(log) == (29935,)
    assert machine.xids(log) == (("0000:dc:00", 79),)


def test_who_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert machine.listeners(server.getsockname()[1]) == (os.getpid(),)
    assert machine.listeners(1) == ()


def test_variables_of_the_ranks_communication():
    found = machine.nccl_variables({"NCCL_DEBUG": "INFO", "HOME": "/x", "GLOO_SOCKET_IFNAME": "lo", "HF_TOKEN": "s"})
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("wchan", "place", "local"),
    [
        ("locks_lock_inode_wait", "lock", True),
        ("fcntl_setlk", "lock", True),
        ("do_wait", "child", True),
        ("folio_wait_bit_common", "disk", True),
        ("anon_pipe_read", "pipe", False),
        ("pipe_read", "pipe", False),
        ("unix_stream_read_generic", "socket", False),
        ("__skb_wait_for_more_packets", "socket", False),
        ("futex_do_wait", "futex", False),
        ("futex_wait_queue", "futex", False),
        ("hrtimer_nanosleep", "sleep", False),
        ("do_epoll_wait", "poll", False),
        ("poll_schedule_timeout.constprop.0", "poll", False),
        ("0", "", False),
        ("", "", False),
        ("some_new_function", "", False),
    ],
)
def test_where_the_kernel_says_a_thread_waits(wchan, place, local):
    found = kernel_wait({"wchan": wchan})
    assert (found.place, found.local) == (place, local)


def test_the_system_call_decides_where_the_kernel_hides_the_function():
    assert kernel_wait({"wchan": "", "syscall": "flock"}).place == "lock"
    assert kernel_wait({"wchan": "0", "syscall": "running"}).place == "cpu"
    assert kernel_wait({"wchan": "do_sys_poll", "syscall": "poll"}).place == "poll"
    assert kernel_wait({"wchan": "do_sys_poll", "syscall": "poll of no descriptors"}).place == "sleep"
    assert kernel_wait({}).place == ""


# --- locks

HOLD = "import fcntl,sys,time;f=open(sys.argv[1],'w');fcntl.flock(f,2);print('ready',flush=True);time.sleep(600)"
WAIT = "import fcntl,sys;f=open(sys.argv[1],'w');print('ready',flush=True);fcntl.flock(f,2)"


@pytest.fixture
def run(request):
    """Start Python programs that print ``ready``; they are ended after the test."""

    def start(code, *arguments, **environment):
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        request.addfinalizer(lambda: (process.kill(), process.wait(), process.stdout.close()))
        assert process.stdout.readline() == b"ready\n"
        return process

    return start


def test_the_holder_of_a_flock_is_found_by_inode(dumps, run, tmp_path):
    path = tmp_path / "build.lock"
    holder, waiter = run(HOLD, path), run(WAIT, path)

    def waits():
        return kernel_wait({"wchan": Path(f"/proc/{waiter.pid}/wchan").read_text()}).place == "lock"

    until(waits)
    facts = {"wchan": Path(f"/proc/{waiter.pid}/wchan").read_text()}
    members = [dumps.dump(0, dumps.COLLECTIVE, pid=holder.pid), dumps.dump(1, dumps.ELSEWHERE, pid=waiter.pid, **facts)]
    (found,) = locks.locks(merge([members]))
    assert found.path == str(path)
    assert found.waiters == ("TP1",)
    assert (found.holder, found.holder_label, found.holder_alive) == (holder.pid, "TP0", True)
    (stranger,) = locks.locks(merge([members[1:]]))
    assert (stranger.holder, stranger.holder_label) == (holder.pid, None)
    assert "fcntl" in stranger.holder_title


def test_a_torch_extension_lock_that_nobody_has_open_is_stale(dumps, run, tmp_path):
    cache = tmp_path / "ext"
    (cache / "a").mkdir(parents=True)
    (cache / "a" / "lock").touch()
    waiter = run(
        "import time;print('ready',flush=True);time.sleep(600)", TORCH_EXTENSIONS_DIR=str(cache), HOME=str(tmp_path)
    )
    merged = merge([[dumps.dump(3, dumps.BATON, pid=waiter.pid)]])
    (found,) = locks.locks(merged)
    assert (found.path, found.waiters, found.holder_alive, found.kind) == (
        str(cache / "a" / "lock"),
        ("TP3",),
        False,
        "file",
    )
    assert found.age is not None
    builder = run("import sys,time;f=open(sys.argv[1]);print('ready',flush=True);time.sleep(600)", cache / "a" / "lock")
    (held,) = locks.locks(merged)
    assert (held.holder, held.holder_alive) == (builder.pid, True)


def test_a_polled_file_lock_has_its_holder_in_the_kernels_table(dumps, run, tmp_path):
    cache = tmp_path / ".cache" / "flashinfer" / "90a"
    cache.mkdir(parents=True)
    waiter = run("import time;print('ready',flush=True);time.sleep(600)", HOME=str(tmp_path))
    merged = merge([[dumps.dump(0, dumps.FLASHINFER_LOCK, pid=waiter.pid)]])
    assert locks.locks(merged) == ()
    with open(cache / "sampling.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (found,) = locks.locks(merged)
        assert (found.path, found.holder, found.kind) == (str(cache / "sampling.lock"), os.getpid(), "flock")


def test_no_waiter_no_lock(dumps):
    assert locks.locks(merge([dumps.same(4, dumps.COLLECTIVE)])) == ()
