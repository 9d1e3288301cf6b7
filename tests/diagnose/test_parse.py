"""Dumps taken elsewhere: each tool's form, several in one file, inside logs, and anything at all."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.diagnose.model import Frame, ProcessDump, ThreadStack
from pytest_gpuserve.diagnose.parse import as_rounds, pyspy_threads, read_dumps, read_file, to_json
from pytest_gpuserve.diagnose.roles import any_role, rank_in
from pytest_gpuserve.engines.base import ProcessRole, Rank
from pytest_gpuserve.procfs import ProcessId

DATA = Path(__file__).parent.parent / "data" / "stacks"


def titled(words, comm):
    """A role from titles such as Worker_TP1, without any engine."""
    found = re.search(r"(scheduler|Worker)\w*?_TP(\d+)", words[0]) if words else None
    return ProcessRole("worker", Rank(tp=int(found[2]))) if found else None


def names(dump):
    return [frame.name for frame in dump.main.frames]


def test_pyspy_text_of_a_whole_tree():
    dumps = read_file(DATA / "recorded_vllm_cpu_tree.txt", role_of=titled)
    assert [d.process.pid for d in dumps] == [5495, 5506, 5507, 5517, 5518]
    assert [d.label for d in dumps] == ["pid 5495", "pid 5506", "pid 5507", "TP0", "TP1"]
    assert dumps[3].title == "VLLM::Worker_TP0"
    assert names(dumps[3])[0] == "Poller.poll"
    assert dumps[3].main.frames[0] == Frame("Poller.poll", "zmq/sugar/poll.py", 106)
    assert dumps[3].main.active is False
    assert {t.name for t in dumps[3].threads} == {"MainThread", "tqdm_monitor", "DeathPipeMonitor"}
    assert all(d.dumper == "file" and d.problem is None for d in dumps)
    assert len(as_rounds(dumps)) == 1


def test_pyspy_text_inside_a_log_with_rank_prefixes():
    (dump,) = read_file(DATA / "sglang_dp1_tp3_eagle_draft.txt", role_of=lambda w, c: None)
    assert dump.role.rank == Rank(dp=1, tp=3)
    assert [t.name for t in dump.threads] == ["MainThread", "Thread-1 (_read_thread)"]
    assert names(dump)[0] == "draft"


def test_pyspy_text_with_native_frames():
    (dump,) = read_file(DATA / "sglang_pp2_tp1_native_gloo_waitrecv.txt")
    frames = dump.main.frames
    assert frames[2].name == "gloo::transport::tcp::UnboundBuffer::waitRecv"
    assert frames[2].module == "libtorch_cpu.so"
    assert all(f.native for f in frames)
    assert frames[4].name.startswith(
        "pybind11::cpp_function::initialize<...>::{lambda(pybind11::detail::function_call&)"
    )


def test_pyspy_text_without_process_header_and_without_names():
    (dump,) = read_file(DATA / "sglang_decode_cudagraph_replay_thread.txt")
    assert [t.tid for t in dump.threads] == [1392, 4653, 13965]
    assert dump.main.tid == 1392
    assert dump.process.pid == 1392
    (dump,) = read_file(DATA / "vllm_enginecore_startup_sampler_warmup.txt")
    assert dump.main.active is True
    assert dump.main.name is None


def test_pyspy_text_with_locals_reads_frames_only():
    text = (DATA / "pyspy_locals.txt").read_text()
    misleading = text.replace("            n: 3\n", "            n: 3\n            place: at (loc.py:9)\n")
    assert misleading != text
    for found in (text, misleading):
        (dump,) = read_dumps(found)
        assert dump.main.frames == (Frame("inner", "loc.py", 4), Frame("<module>", "loc.py", 5))


def test_pyspy_text_of_several_servers_without_headers():
    one = (DATA / "sglang_decode_cudagraph_replay_thread.txt").read_text()
    dumps = read_dumps(one + one.replace("1392", "1393"))
    assert [d.process.pid for d in dumps] == [1392, 1393]


def test_pyspy_json_alone_and_several_in_a_file():
    text = (DATA / "pyspy_json_pretty.json").read_text()
    (dump,) = read_dumps(text)
    assert names(dump) == ["inner", "<module>"]
    assert dump.main.frames[0].file == "/srv/app/loc.py"
    pid = str(dump.process.pid)
    dumps = read_dumps(f"== rank 0\n{text}\n== rank 1\n{text.replace(pid, '77')}")
    assert [d.process.pid for d in dumps] == [int(pid), 77]
    assert all(names(d) == ["inner", "<module>"] for d in dumps)
    joined = json.dumps(json.loads(text) + json.loads(text.replace(pid, "77")))
    assert [d.process.pid for d in read_dumps(joined)] == [int(pid), 77]


def test_pyspy_json_in_a_recorders_envelope():
    (dump,) = read_file(DATA / "recorded_sglang_tp1_stopped.json", role_of=titled)
    assert dump.label == "TP1"
    assert dump.state == "T"
    assert dump.main.tid == 2897
    assert len(dump.main.frames) == 35
    (dump,) = read_file(DATA / "recorded_sglang_tp1_stopped_failed.json", role_of=titled)
    assert dump.label == "TP1"
    assert not dump.threads
    assert "unexpected waitpid result" in dump.problem
    (dump,) = read_file(DATA / "recorded_sglang_tp0_native.json", role_of=titled)
    assert any(f.native for f in dump.main.frames)
    assert not all(f.native for f in dump.main.frames)


def test_main_thread_is_the_one_whose_id_is_the_pid():
    """Names are missing in a program that never imported threading, and from CPython 3.14.5 on."""
    threads = [{"os_thread_id": tid, "thread_name": None, "frames": []} for tid in (9, 7, 8)]
    assert [t.main for t in pyspy_threads(threads, 7)] == [False, True, False]
    assert [t.main for t in pyspy_threads(threads, 1)] == [False, False, True]
    threads[0]["thread_name"] = "MainThread"
    assert [t.main for t in pyspy_threads(threads, 1)] == [True, False, False]


def test_activity_is_unknown_where_pyspy_does_not_know_the_thread():
    """A Python before 3.11 that it did not stop: the main thread has the name, and "active" is said of every thread."""
    known = {"thread_id": 0x7F02, "thread_name": "MainThread", "active": True, "owns_gil": False, "frames": []}
    threads = [
        {**known, "os_thread_id": None, "thread_name": "side", "thread_id": 0x7F01},
        {**known, "os_thread_id": None},
        {**known, "os_thread_id": None, "thread_name": "root", "thread_id": 0x7F03},
    ]
    side, main, root = pyspy_threads(threads, 7)
    assert (side.main, main.main, root.main) == (False, True, False)
    assert (side.active, main.active) == (None, None)
    assert (side.identity, main.identity) == (0x7F01, 0x7F02)
    numbered, owner, idle = pyspy_threads(
        [
            {**known, "os_thread_id": 9},
            {**known, "os_thread_id": None, "owns_gil": True},
            {**known, "os_thread_id": None, "active": False},
        ],
        7,
    )
    assert (numbered.active, owner.active, idle.active) == (True, True, False)
    assert (numbered.identity, owner.identity) == (9, 0x7F02)


@pytest.mark.parametrize(
    ("header", "active"),
    [
        ("Thread 0x7F7BFB1C (active)", None),
        ("Thread 0x7F7BFB1C (active+gil)", True),
        ("Thread 0x7F7BFB1C (idle)", False),
        ("Thread 812 (active)", True),
        ("Thread (active)", True),  # the number was cut off by who pasted it
    ],
)
def test_activity_in_text(header, active):
    (dump,) = read_dumps(
        f'Process 7: python x.py\nPython v3.10.13 (/usr/bin/python)\n\n{header}: "T"\n    f (x.py:1)\n'
    )
    assert dump.threads[0].active is active


def test_pyspy_json_refuses_other_json():
    for value in ({}, "x", [1], None):
        with pytest.raises(ValueError):
            pyspy_threads(value, 1)
    assert pyspy_threads([], 1) == ()


def test_faulthandler_of_a_watchdog():
    (dump,) = read_file(DATA / "vllm_watchdog_faulthandler_dump.txt")
    assert [len(t.frames) for t in dump.threads] == [5, 2]
    assert names(dump) == ["all_reduce", "sample_tokens"]  # main: the last that is listed
    assert dump.main.frames[0].file == "/x/vllm/distributed/device_communicators/pynccl.py"
    assert dump.main.frames[0].line == 200


FAULT = """
Thread 0x00007fc90b2a56c0 [tqdm] (most recent call first):
  File "/lib/threading.py", line 992 in run
  ...

Current thread 0x00007fc90be14b80 (most recent call first):
  <no Python frame>
  File "<string>", line ??? in f
"""


def test_faulthandler_twice_is_two_rounds_of_the_process_in_the_markers_name():
    dumps = read_dumps(FAULT + FAULT, source="fh.812.90210.txt")
    assert [d.process for d in dumps] == [ProcessId(812, 90210)] * 2
    assert dumps[0].threads[0].name == "tqdm"
    assert dumps[0].main.frames == (Frame("f", "<string>", None),)
    assert [len(r) for r in as_rounds(dumps)] == [1, 1]


def test_faulthandler_of_many_processes_told_apart_by_prefixes():
    lines = FAULT.strip().splitlines()
    text = "\n".join(f"(Worker_TP{n} pid={70 + n}) {line}" for n in range(2) for line in lines)
    dumps = read_dumps(text)
    assert [(d.process.pid, d.role.rank.tp) for d in dumps] == [(70, 0), (71, 1)]
    text = "\n".join(f"[rank{n}]: {line}" for n in range(2) for line in lines)
    assert [d.label for d in read_dumps(text)] == ["TP0", "TP1"]


def test_pystack_text():
    (dump,) = read_file(DATA / "pystack.txt")
    assert dump.process.pid == dump.main.tid
    assert names(dump) == ["inner", "outer", "<module>"]  # leaf first, though pystack prints the root first
    assert dump.main.owns_gil is False
    (dump,) = read_file(DATA / "pystack_native.txt")
    assert names(dump)[0] == "clock_nanosleep@GLIBC_2.2.5"
    assert dump.main.frames[0].module == "/usr/lib/x86_64-linux-gnu/libc.so.6"
    assert [f.name for f in dump.main.frames if not f.native] == ["inner", "outer", "<module>"]
    text = (DATA / "pystack.txt").read_text()
    one, two = read_dumps(text + text.replace(str(dump.process.pid), "99").replace("14501", "101"))
    assert two.process.pid == 99
    assert len(one.threads) == len(two.threads) == 2


def test_gdb_backtraces_in_c_and_in_python():
    (dump,) = read_file(DATA / "gdb_bt.txt")
    assert [t.tid for t in dump.threads] == [14501, 14499]
    assert dump.main.tid == dump.process.pid == 14499
    assert names(dump)[0] == "__GI___clock_nanosleep"
    assert all(f.native for f in dump.main.frames)
    (dump,) = read_file(DATA / "gdb_py_bt.txt")
    assert names(dump) == ["inner", "outer", "<module>"]
    assert dump.main.tid == 14499
    assert not any(f.native for f in dump.main.frames)


def test_gdb_c_and_python_frames_of_one_thread_are_joined():
    text = (
        'Thread 1 (Thread 0x7f0 (LWP 40) "python"):\n'
        "#0  0x00007f1 in poll () from /lib/libc.so.6\n"
        "#1  0x00007f2 in ?? () from /lib/libcuda.so.1\n"
        "#2  _PyEval_EvalFrameDefault (tstate=<optimized out>) at Python/ceval.c:47\n"
        "Traceback (most recent call first):\n"
        '  File "/x/streams.py", line 9, in synchronize\n'
        "    wait()\n"
        '  File "/x/run.py", line 3, in <module>\n'
    )
    (dump,) = read_dumps(text)
    assert names(dump) == ["poll", "0x00007f2", "synchronize", "<module>"]
    assert dump.main.frames[1].module == "/lib/libcuda.so.1"


def test_gdb_frames_that_a_terminal_wrapped_and_several_processes():
    text = "#0  0x1 in futex_wait (a=1)\n    at ./nptl/futex.c:57\n#1  main () at a.c:3\n"
    one, two = read_dumps(text + text)
    assert one.main.frames == two.main.frames
    assert one.main.frames[0].file == "./nptl/futex.c"
    assert one.main.frames[0].line == 57
    many = "".join(f"Attaching to process {n}\nThread 1 (LWP {n}):\n{text}" for n in (5, 6))
    assert [d.process.pid for d in read_dumps(many)] == [5, 6]


def test_eu_stack():
    text = (
        "PID 812 - process\nTID 812:\n#0  0x00007f9 clock_nanosleep\n#1  0x00007fa time_sleep\nTID 814:\n#0  0x1 poll\n"
    )
    (dump,) = read_dumps(text)
    assert dump.process.pid == 812
    assert names(dump) == ["clock_nanosleep", "time_sleep"]
    assert len(dump.threads) == 2


def test_colours_ci_time_stamps_and_containers_are_looked_through():
    plain = (DATA / "vllm_worker_tp1_idle_healthy.txt").read_text().splitlines()
    expected = read_dumps("\n".join(plain), role_of=titled)[0].threads
    for prefix in ("2026-11-20T10:22:31.1234567Z ", "worker-1  | ", "\x1b[1;32m"):
        (dump,) = read_dumps("\n".join(prefix + line for line in plain), role_of=titled)
        assert dump.threads == expected, prefix
        assert dump.label == "TP1"


def test_our_own_files_read_back():
    frames = (Frame("f", "/x/a.py", 3), Frame("cuda", "/x/libcuda.so", None, "/x/libcuda.so"))
    raw = json.dumps(
        [
            {
                "pid": 7,
                "os_thread_id": 7,
                "thread_name": None,
                "active": True,
                "owns_gil": False,
                "frames": [
                    {"name": f.name, "filename": f.file, "line": f.line or 0, "module": f.module} for f in frames
                ],
            }
        ]
    )
    dump = ProcessDump(
        ProcessId(7, 70), ProcessRole("worker", Rank(tp=2)), "Worker_TP2", "R", "py-spy", raw=raw,
        threads=(ThreadStack(7, None, True, frames, True, False),), facts={"rss_bytes": 5}, taken=3.5, seconds=0.1,
    )  # fmt: skip
    (back,) = read_dumps(json.dumps({"rounds": [to_json(dump)]}, indent=1), role_of=titled)
    assert back.process == dump.process
    assert back.threads == dump.threads
    assert (back.label, back.state, back.taken, back.facts) == ("TP2", "R", 3.5, {"rss_bytes": 5})
    text_dump = ProcessDump(ProcessId(8, 80), dump.role, "Worker_TP2", "S", "faulthandler", raw=FAULT)
    (back,) = read_dumps(json.dumps(to_json(text_dump)), role_of=titled)
    assert len(back.threads) == 2
    bare = ProcessDump(ProcessId(9, 90), dump.role, "Worker_TP2", "Z", "proc", problem="a zombie")
    (back,) = read_dumps(json.dumps(to_json(bare)), role_of=titled)
    assert back.problem == "a zombie"


def test_a_log_without_dumps_holds_none():
    log = "[2026-11-20 TP0] Load weight begin. (avail: 1)\nProcess 12: started\n{'a': 1}\n[1, 2]\nThread pool (4)\n"
    assert read_dumps(log) == []
    assert read_dumps("") == []


def test_rank_tags():
    assert rank_in("[2026-06-06 09:01:03 DP1 TP3] x") == Rank(dp=1, tp=3)
    assert rank_in("(Worker_TP1 pid=7)") == Rank(tp=1)
    assert rank_in("[rank12]: x") == Rank(tp=12)
    assert rank_in("HTTP 200 in STEP3") is None


def test_roles_without_an_engine():
    assert any_role(["/usr/local/cuda/bin/cicc", "--x"], "cicc").role == "compiler"
    assert (
        any_role(["python", "-c", "from multiprocessing.resource_tracker import main;main(9)"], "python").role
        == "helper"
    )
    assert any_role([], "x") is None


def test_huge_and_endless_lines_cost_no_time():
    began = time.monotonic()
    assert read_dumps("(" * 3_000_000) == []
    assert read_dumps('Thread 1 (idle): "MainThread"\n    ' + " (" * 1_000_000)[0].main.frames == ()
    assert read_dumps("[" * 200_000 + "\n" + '{"a":' * 100_000) == []
    assert time.monotonic() - began < 5


LINES = st.sampled_from(
    [line for path in sorted(DATA.glob("*.txt")) for line in path.read_text().splitlines()[:40]] + FAULT.splitlines()
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(LINES, st.text(max_size=80)), max_size=60).map("\n".join))
def test_anything_is_read_without_trouble(text):
    for dump in read_dumps(text):
        assert dump.process.pid >= 0
        assert dump.threads or dump.problem
        assert [t.main for t in dump.threads].count(True) <= 1
        json.dumps(to_json(dump))
