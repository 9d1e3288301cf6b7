"""What the samples are made of: processes, requests in flight, the engine's counters."""

from __future__ import annotations

import gc
import http.server
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import ClassVar

import pytest

from pytest_gpuserve import gpu, procfs
from pytest_gpuserve.engines.base import ProcessRole, Rank
from pytest_gpuserve.server import inflight
from pytest_gpuserve.server.inflight import Requests
from pytest_gpuserve.watch.metrics import Poller, read_counters
from pytest_gpuserve.watch.proc_tree import ProcessTable, ProcTree
from pytest_gpuserve.watch.watched import GpuReader


def until(condition, limit=20.0):
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    pytest.fail(f"{condition} never came true")


def role_of(cmdline, comm):
    words = " ".join(cmdline)
    return ProcessRole("worker", Rank(tp=int(words[-1]))) if "rank-" in words else None


@pytest.fixture
def run(request):
    """Start a program; it and what it started are ended after the test."""

    def start(code, stdin=None, **environment):
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            stdin=stdin,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )

        def end():
            pids = procfs.descendants(process.pid)
            process.kill()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            process.wait()
            process.stdout.close()

        request.addfinalizer(end)
        assert process.stdout.readline() == b"ready\n"
        return process

    return start


@pytest.fixture
def tree(request):
    """A tree with ``process`` for its first."""

    def make(process, cookie=None):
        found = ProcTree(procfs.process_id(process.pid), os.getpid(), cookie, role_of)
        request.addfinalizer(found.close)
        return found

    return make


FAMILY = """
import subprocess, sys
nap = "import time; time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-S", "-c", nap, f"rank-{n}"]) for n in range(2)]
print("ready", flush=True)
children[0].wait()
"""


def test_a_tree_is_its_first_process_and_its_descendants(run, tree):
    process = run(FAMILY)
    stranger = run("import time;print('ready',flush=True);time.sleep(600)")
    found = until(lambda: (s := tree(process).sample()) and len(s) == 3 and s)
    labels = {p.label for p in found.values()}
    assert {"TP0", "TP1"} <= labels
    assert stranger.pid not in {p.process.pid for p in found.values()}
    assert all(p.rank for p in found.values() if p.label.startswith("TP"))


def test_counters_grow(run, tree):
    code = "import mmap\nprint('ready',flush=True)\nwhile True:\n m=mmap.mmap(-1,1<<20);m.write(bytes(1<<20));m.close()"
    process = run(code)
    watch = tree(process)
    (first,) = watch.sample().values()
    later = until(lambda: (s := next(iter(watch.sample().values()))) and s.cpu > first.cpu + 0.1 and s)
    assert later.minflt > first.minflt
    assert later.rss > 1 << 20
    (close,) = watch.sample(closely=True).values()
    assert close.main is not None


def test_descendants_that_were_left_behind_stay_in_the_tree(run, tree):
    """A daemonised grandchild: known from when its parent lived, or found again by the cookie."""
    code = """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(600)
"""
    cookie = f"{os.getpid()}:1:{'c' * 32}"
    process = run(code, GPUSERVE_COOKIE=cookie)
    orphan = next(
        pid for pid, s in procfs.snapshot().items() if s.session == process.pid and pid != process.pid and s.alive
    )
    try:
        parent = procfs.stat(orphan).ppid
        watch = ProcTree(procfs.process_id(process.pid), parent, cookie, role_of)
        assert orphan in {p.pid for p in watch.sample()}
        watch.close()
        without = ProcTree(procfs.process_id(process.pid), parent, "another", role_of)
        assert orphan not in {p.pid for p in without.sample()}
        without.close()
    finally:
        os.kill(orphan, 9)


def test_a_process_that_ends_leaves_the_tree_and_no_descriptor(run, tree):
    process = run(FAMILY)
    gc.collect()  # what earlier tests left open is not ours to count
    before = len(os.listdir("/proc/self/fd"))
    watch = tree(process)
    until(lambda: len(watch.sample()) == 3)
    victim = next(p for p in watch.sample().values() if p.label == "TP1")
    os.kill(victim.process.pid, 9)
    until(lambda: not any(p.label == "TP1" and p.alive for p in watch.sample().values()))
    watch.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_stopped_process_is_seen_stopped(run, tree):
    process = run(FAMILY)
    watch = tree(process)
    rank = until(lambda: next((p for p in watch.sample().values() if p.label == "TP0"), None))
    os.kill(rank.process.pid, 19)
    until(lambda: watch.sample()[rank.process].state == "T")


def test_a_shared_table_shows_every_new_process_to_every_tree(run, tree):
    """One server is looked at more often than another: neither may miss a child of its own."""
    code = "import subprocess,sys,time;print('ready',flush=True);sys.stdin.readline()"
    code += ";subprocess.Popen([sys.executable,'-S','-c','import time;time.sleep(600)','rank-1']);time.sleep(600)"
    process, other = run(code, stdin=subprocess.PIPE), run("import time;print('ready',flush=True);time.sleep(600)")
    table, watch, second = ProcessTable(), tree(process), tree(other)
    table.refresh()
    assert (len(watch.sample(table)), len(second.sample(table))) == (1, 1)
    process.stdin.write(b"\n")
    process.stdin.close()

    def seen_by_the_other_one():
        table.refresh()
        second.sample(table)
        watch.notice(table)
        return any(procfs.stat(pid).ppid == process.pid for pid in table.fresh if procfs.stat(pid))

    def named():  # seen between fork and exec it has its parent's command line, and is looked at again later
        table.refresh()
        return "TP1" in {p.label for p in watch.sample(table).values()}

    until(seen_by_the_other_one)
    until(named)
    assert len(second.sample(table)) == 1


def test_an_engine_that_raises_does_not_end_the_watch(run):
    process = run("import time;print('ready',flush=True);time.sleep(600)")

    def broken(cmdline, comm):
        raise RuntimeError("an engine of somebody else's")

    watch = ProcTree(procfs.process_id(process.pid), None, None, broken)
    assert len(watch.sample()) == 1
    watch.close()


# --- requests in flight


def test_requests_are_counted_while_they_run(tmp_path):
    ours = Requests(tmp_path)
    assert inflight.read(tmp_path).count == 0
    with ours.one(), ours.one():
        found = inflight.read(tmp_path)
        assert (found.count, found.begun, found.ended) == (2, 2, 0)
        assert 0 <= found.oldest < 60
    found = inflight.read(tmp_path)
    assert (found.count, found.oldest, found.ended) == (0, None, 2)


def test_a_request_that_fails_ends_too(tmp_path):
    ours = Requests(tmp_path)
    with pytest.raises(OSError, match="reset"), ours.one():
        raise OSError("reset")
    assert inflight.read(tmp_path).count == 0


def test_the_oldest_request_counts(tmp_path):
    ours = Requests(tmp_path)
    with ours.one():
        time.sleep(0.3)
        with ours.one():
            assert inflight.read(tmp_path).oldest >= 0.3


def test_more_requests_than_slots_are_counted_still(tmp_path):
    ours = Requests(tmp_path)
    contexts = [ours.one() for _ in range(inflight.SLOTS + 5)]
    for context in contexts:
        context.__enter__()
    assert inflight.read(tmp_path).count == inflight.SLOTS + 5
    for context in contexts:
        context.__exit__(None, None, None)
    assert inflight.read(tmp_path).count == 0


def test_clients_add_up_and_dead_ones_do_not_count(tmp_path):
    code = (
        "import sys,time;from pathlib import Path;from pytest_gpuserve.server.inflight import Requests\n"
        "with Requests(Path(sys.argv[1])).one(): print('ready',flush=True);time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"ready\n"
        with Requests(tmp_path).one():
            assert inflight.read(tmp_path).count == 2
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    found = inflight.read(tmp_path)
    assert (found.count, found.oldest) == (0, None)


def test_threads_share_the_table(tmp_path):
    ours = Requests(tmp_path)

    def many():
        for _ in range(200):
            with ours.one():
                pass

    threads = [threading.Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = inflight.read(tmp_path)
    assert (found.begun, found.ended, found.count) == (1600, 1600, 0)


def test_a_directory_that_is_gone_and_garbage_are_no_error(tmp_path):
    with Requests(tmp_path / "gone").one():
        pass
    (tmp_path / "requests.1.2").write_bytes(b"x")
    (tmp_path / "requests.x.y").write_bytes(b"\0" * 9000)
    assert inflight.read(tmp_path).count == 0


# --- counters

VLLM = b"""# HELP vllm:generation_tokens_total Number of generation tokens
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:generation_tokens_total{engine="0",model_name="m"} 8123.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="m"} 20110.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 1441.0
vllm:gpu_cache_usage_perc{engine="0"} 0.3
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m"} 1.0
sglang:num_queue_reqs{model_name="m"} 3.0
sglang:generation_tokens_total{model_name="m"} 55
sglang:token_usage{model_name="m"} 0.11
sglang:cuda_graph_passes_total{mode="decode"} 9.0
"""
LLAMA = b"llamacpp:prompt_tokens_total 10\nllamacpp:tokens_predicted_total 32\nllamacpp:requests_processing 1\n"


@pytest.mark.parametrize(
    ("text", "tokens", "running"),
    [
        (VLLM, 8123.0 + 20110.0 + 1441.0, 2.0),
        (SGLANG, 64.0, 4.0),
        (LLAMA, 42.0, 1.0),
        (b"", None, None),
        (b"tokens_total NaN\n", 0.0, None),
        (b"<html>", None, None),
    ],
)
def test_counters_of_any_engine(text, tokens, running):
    found = read_counters(text)
    assert (found.tokens, found.running) == (tokens, running)


class Handler(http.server.BaseHTTPRequestHandler):
    answers: ClassVar[list] = []
    hold = threading.Event()

    def do_GET(self):
        status, body = self.answers[0]
        if body is None:
            self.hold.wait(30)
            body = b""
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    Handler.hold.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        Handler.hold.set()
        found.shutdown()
        thread.join()


def test_a_server_is_asked_in_the_background(server):
    Handler.answers = [(200, VLLM)]
    poller = Poller(server)
    poller.ask()
    until(lambda: poller.last.tokens)
    Handler.answers = [(200, VLLM.replace(b"8123", b"8124"))]
    before = poller.last.tokens
    until(lambda: (poller.ask(), poller.last.tokens == before + 1)[1])


def test_a_wedged_front_end_holds_nobody_up(server):
    Handler.answers = [(200, None)]
    poller = Poller(server)
    began = time.monotonic()
    for _ in range(100):
        poller.ask()
    assert time.monotonic() - began < 1.0
    assert poller.last.tokens is None


def test_no_metrics_no_counters(server):
    Handler.answers = [(404, b"")]
    poller = Poller(server)
    poller.ask()
    time.sleep(0.2)
    assert poller.last.tokens is None
    nobody = Poller("http://127.0.0.1:9")
    nobody.ask()
    time.sleep(0.2)
    assert nobody.last.tokens is None


class SlowDriver:
    """A sampler whose reading lasts until it is let go."""

    def __init__(self, **_):
        self.reading, self.go, self.closed_in, self.closed = threading.Event(), threading.Event(), [], threading.Event()

    def sample(self, limit):
        self.reading.set()
        assert self.go.wait(20)
        return gpu.Reading(())

    def close(self):
        self.closed_in.append(threading.current_thread().name)
        self.closed.set()


def test_the_gpu_reader_is_not_closed_under_a_reading(monkeypatch):
    """On a loaded machine the reading's thread found its helper gone: an exception in a thread of the user's pytest."""
    driver = SlowDriver()
    monkeypatch.setattr(gpu, "Sampler", lambda **_: driver)
    reader = GpuReader(every=0.0)
    reader.ask()
    assert driver.reading.wait(20)
    reader.close()
    assert not driver.closed_in
    driver.go.set()
    assert driver.closed.wait(20)
    assert driver.closed_in == ["gpuserve-gpus"]
    driver.reading.clear()
    reader.ask()
    assert not driver.reading.wait(0.2), "a closed reader reads no more"


def test_an_idle_gpu_reader_is_closed_at_once(monkeypatch):
    driver = SlowDriver()
    driver.go.set()
    monkeypatch.setattr(gpu, "Sampler", lambda **_: driver)
    reader = GpuReader(every=0.0)
    reader.ask()
    until(lambda: reader._next)
    reader.close()
    assert driver.closed_in == [threading.current_thread().name]
