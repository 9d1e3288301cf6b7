"""Stacks as bug reports hold them: wrapped by collectors, launchers, mail and markdown, cut, edited, of several ranks.

The shapes are those of public reports (named where a shape is rare); the frames were written anew.
"""

from __future__ import annotations

import html

import pytest

from pytest_gpuserve.diagnose.dump_lines import clean, heading
from pytest_gpuserve.diagnose.evidence import Evidence
from pytest_gpuserve.diagnose.merge import merge
from pytest_gpuserve.diagnose.model import Frame
from pytest_gpuserve.diagnose.parse import as_rounds, read_dumps
from pytest_gpuserve.diagnose.telling import telling
from pytest_gpuserve.diagnose.verdict import judge

PAIR = """\
Process 812: VLLM::Worker_TP0
Python v3.12.3 (/usr/bin/python3.12)

Thread 812 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2950)
    execute_model (vllm/v1/worker/gpu_model_runner.py:1700)
Process 813: VLLM::Worker_TP1
Python v3.12.3 (/usr/bin/python3.12)

Thread 813 (active): "MainThread"
    crunch (my/own.py:3)
    execute_model (vllm/v1/worker/gpu_model_runner.py:1700)
"""


def owner(number: int) -> int:
    """The rank that wrote line ``number`` of PAIR."""
    return 0 if number < 6 else 1


def every_line(form: str) -> str:
    return "".join(
        form.format(line=line, rank=owner(n), pid=812 + owner(n)) + "\n" for n, line in enumerate(PAIR.splitlines())
    )


def judged(text: str):
    return judge(Evidence(reason="manual", rounds=as_rounds(read_dumps(text)), foreign=True))


def leaves(text: str) -> list[tuple[str, str]]:
    return [(d.label, d.main.frames[0].name) for d in read_dumps(text)]


@pytest.mark.parametrize(
    "form",
    [
        "Dec 19 02:07:16 s-a60003 bash[2211352]: {line}",
        "déc. 19 02:07:16 s-a60003 bash[2211352]: {line}",
        "2026-05-16T13:12:16.645427617Z stderr F {line}",
        "[2026-05-16 13:12:16.645] {line}",
        "[pod/engine-0/main] {line}",
        "[80{pid}] [rank{rank}]: {line}",
        "(Worker_TP{rank} pid={pid}) {line}",
        "[2026-06-06 01:02:03 TP{rank}] {line}",
        "[default{rank}]:{line}",
        "[1,{rank}]<stderr>:{line}",
        "{rank}: {line}",
        "> {line}",
        "> > {line}",
        "    {line}",
        "{line}\r",
        "\x1b[33m{line}\x1b[0m",
        "[33m{line}[0m",
        "engine-1  | [2026-06-06 01:02:03 TP{rank}] {line}",
    ],
)
def test_what_stands_around_every_line_makes_no_difference(form):
    text = every_line(form)
    assert leaves(text) == [("TP0", "all_reduce"), ("TP1", "crunch")]
    assert [len(d.main.frames) for d in read_dumps(text)] == [2, 2]


def test_markup_of_web_pages_is_undone():
    assert leaves(html.escape(PAIR)) == leaves(PAIR)


def test_lines_of_several_ranks_may_alternate():
    """torchrun and mpirun pass lines on as they come."""
    dump = (
        "Timeout (0:10:00)!\nThread 0x00007f1a2b3c4d0{rank} (most recent call first):\n"
        '  File "/x/threading.py", line 359 in wait\n\nThread 0x00007f1a0000000{rank} (most recent call first):\n'
        '  File "/x/own.py", line 9 in here{rank}\n  File "/x/train.py", line 20 in <module>'
    )
    ranks = [dump.format(rank=rank).splitlines() for rank in range(3)]
    mixed = "\n".join(
        f"[default{rank}]:{line}" for lines in zip(*ranks, strict=True) for rank, line in enumerate(lines)
    )
    assert leaves(mixed) == [("TP0", "here0"), ("TP1", "here1"), ("TP2", "here2")]


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("rank 3", "rank 3"),
        ("Rank 3:", "rank 3"),
        ("===========rank 0 ===============", "rank 0"),
        ("### TP1 (node 2)", "TP1"),
        ("**rank_2**", "rank 2"),
        ("TP0 stuck forever in:", "TP0"),
        ("on rank 7:", "rank 7"),
        ("DP1 TP3:", "DP1 TP3"),
        ("Process 3 timed out with traceback:", "rank 3"),
        ("==> /tmp/stacks/rank_3.txt <==", "rank 3"),
        ("rank0.log", "rank 0"),
        ("==> /tmp/rank-1/stacks.txt <==", ""),
        ("TP1-3 had already moved on:", ""),
        ("rank 0 and rank 1:", ""),
        ("ranks 0, 1:", ""),
        ("rank 3 is stuck in another place", ""),
        ("rank 0: init done", ""),
        ("rank 1.5:", ""),
        ("Rank A:", ""),
        ("rank (thread.py:3)", ""),
        ("    rank 3 (a.py:3)", ""),
    ],
)
def test_a_line_that_only_names_a_rank_is_a_heading(line, rank):
    assert heading(line) == rank


def test_a_heading_names_the_process_below_it():
    """NVIDIA/TensorRT-LLM#2560: each rank's gdb threads under a line with the rank."""
    stack = "```\nThread 2 (LWP 2{n}):\n#0  0x1 in poll ()\n\nThread 1 (LWP 1{n}):\n#0  0x1 in place{n} ()\n```\n"
    text = "".join(f"rank{n}\n{stack.format(n=n)}" for n in range(4))
    assert leaves(text) == [(f"TP{n}", f"place{n}") for n in range(4)]


def test_a_title_tells_the_rank_better_than_a_heading():
    assert leaves("rank 5:\n" + PAIR.partition("Process 813")[0]) == [("TP0", "all_reduce")]


@pytest.mark.parametrize(
    "frame",
    [
        "    cuEventSynchronize                     (libcuda.so.580.95.05)",
        "    cuEventSynchronize (libcuda.so.580.95.05)   <-- here",
        "    cuEventSynchronize (libcuda.so.580.95.05)  # blocked",
        "    cuEventSynchronize (libcuda.so.580.95.05)  ← for ever",
    ],
)
@pytest.mark.parametrize("number", ["<pid> ", "", "812 "])
def test_headers_and_frames_that_people_edited(number, frame):
    (dump,) = read_dumps(f'Thread {number}(active): "MainThread"\n{frame}\n    step (a/b.py:3)\n')
    assert dump.main.frames[0] == Frame("cuEventSynchronize", "libcuda.so.580.95.05", None, "libcuda.so.580.95.05")
    assert dump.main.frames[1:] == (Frame("step", "a/b.py", 3),)


def test_frames_in_columns():
    text = (
        'Thread (idle): "MainThread"\n    synchronize   torch/cuda/streams.py:254    no timeout\n    step  a/b.py:3\n'
    )
    (dump,) = read_dumps(text)
    assert dump.main.frames == (Frame("synchronize", "torch/cuda/streams.py", 254), Frame("step", "a/b.py", 3))


def test_a_header_among_locals_is_none():
    local = '        Locals:\n            note: 1\n            Thread 99 (idle): "x"\n            Process 5: y\n'
    text = PAIR.replace("    execute_model", local + "    execute_model", 1)
    assert leaves(text) == leaves(PAIR)
    assert [len(d.threads) for d in read_dumps(text)] == [1, 1]


PYTEST_TIMEOUT = """\
+++++++++++++++++++++ Timeout +++++++++++++++++++++
~~~~~~~~~ Stack of Thread-4 (139924397356608) ~~~~~~~~~
  File "/x/threading.py", line 1032, in _bootstrap
    self._bootstrap_inner()
  File "/x/tqdm/_monitor.py", line 60, in run
    self.was_killed.wait(self.sleep_interval)
~~~~~~~~~ Stack of MainThread (139924999999999) ~~~~~~~~~
  File "/x/bin/pytest", line 8, in <module>
    sys.exit(main())
  File "/x/torch/distributed/distributed_c10d.py", line 2950, in all_reduce
    work.wait()
+++++++++++++++++++++ Timeout +++++++++++++++++++++
Traceback (most recent call last):
  File "/x/other.py", line 1, in elsewhere
"""


def test_pytest_timeout_prints_the_outermost_frame_first():
    (dump,) = read_dumps(PYTEST_TIMEOUT)
    assert [t.name for t in dump.threads] == ["Thread-4", "MainThread"]
    assert [f.name for f in dump.main.frames] == ["all_reduce", "<module>"]


def test_lldb_counts_up():
    """pytorch/pytorch#149153."""
    text = (
        "* thread #1, name = 'python', stop reason = signal SIGSTOP\n"
        "  * frame #0: 0x00007f0a libc.so.6`__futex_wait(private=0) at futex-internal.c:57:12\n"
        "    frame #1: 0x000052cf python`PyThread_acquire_lock_timed + 92\n"
        "  thread #16, name = 'python'\n"
        "    frame #0: 0x00007f0b libc.so.6`syscall + 29\n"
        "    frame #1: 0x00007f0c libtorch_cuda.so`c10d::ProcessGroupNCCL::abort() + 664\n"
    )
    (dump,) = read_dumps(text)
    assert [t.main for t in dump.threads] == [True, False]
    assert dump.main.frames == (
        Frame("__futex_wait", "futex-internal.c", 57, "libc.so.6"),
        Frame("PyThread_acquire_lock_timed", "python", None, "python"),
    )
    assert dump.threads[1].frames[1].module == "libtorch_cuda.so"


def test_coredumpctl_names_the_process_and_its_end():
    text = (
        "       Message: Process 4242 (python) of user 0 dumped core.\n\n                Stack trace of thread 4242:\n"
        "                #0  0x00007f1f deduce_unreachable (libpython3.10.so.1.0 + 0x107f10)\n"
        "                #1  0x00007f1e n/a (libcuda.so.1 + 0x1f3a)\n"
        "                Stack trace of thread 4250:\n                #0  0x00007f1d __poll (libc.so.6 + 0x10)\n"
    )
    (dump,) = read_dumps(text)
    assert dump.process.pid == 4242
    assert dump.facts["fatal"] == "Process 4242 (python) of user 0 dumped core"
    assert dump.main.frames == (
        Frame("deduce_unreachable", "libpython3.10.so.1.0", None, "libpython3.10.so.1.0"),
        Frame("0x00007f1e", "libcuda.so.1", None, "libcuda.so.1"),
    )


def test_python_frames_that_gdb_shows_as_arguments():
    """Before Python 3.11; Xpra-org/xpra#148 has them quoted and wrapped."""
    text = (
        "> #0  0x00007f4e in sem_wait () from /lib/libpthread.so.0\n"
        "> #1  0x000000004a in call_function (f=\n"
        ">     Frame 0x127, for file /x/server.py, line 1008, in run (self=<X(a={1: 2})>)) at ceval.c:3750\n"
        "> #2  PyEval_EvalFrameEx (f=Frame 0x127, for file /x/server.py, line 1008, in run (s=1)) at ceval.c:2412\n"
        "> #3  0x0000004b in PyEval_EvalFrameEx (f=Frame 0x12, for file /bin/x, line 10, in main (x=1)) at ceval.c:9\n"
    )
    (dump,) = read_dumps(text)
    assert [f for f in dump.main.frames if not f.native] == [
        Frame("run", "/x/server.py", 1008),
        Frame("main", "/bin/x", 10),
    ]
    assert dump.main.frames[0].name == "sem_wait"


PY_BT = """\
Traceback (most recent call first):
  Waiting for the GIL
  File "/x/{n}.py", line 3, in place{n}
    with lock:
"""


def test_py_bt_of_several_processes():
    text = "".join(f"$ gdb -p 410{n} -batch -ex py-bt\n{PY_BT.format(n=n)}" for n in (1, 2))
    assert leaves(text) == [("pid 4101", "place1"), ("pid 4102", "place2")]
    assert leaves(PY_BT.format(n=1) + PY_BT.format(n=2)) == [("process", "place1"), ("process", "place2")]


def test_py_bt_of_several_threads_under_their_numbers():
    (dump,) = read_dumps(f"Thread 1:\n```\n{PY_BT.format(n=1)}```\nThread 2:\n```\n{PY_BT.format(n=2)}```\n")
    assert [(t.main, t.frames[0].name) for t in dump.threads] == [(True, "place1"), (False, "place2")]


FAULT = (
    'Thread 0x00007f{rank}a2b3c4d00 (most recent call first):\n  File "/x/threading.py", line 359 in wait\n'
    '  File "/x/threading.py", line 1032 in _bootstrap\n\nThread 0x00007f{rank}a00000001 (most recent call first):\n'
    '  File "/x/own.py", line 10 in here{rank}\n  File "/x/train.py", line 20 in <module>\n'
)


def test_faulthandler_ends_with_the_main_thread():
    text = "".join(FAULT.format(rank=rank) for rank in range(3))
    assert [d.main.frames[0].name for d in read_dumps(text)] == ["here0", "here1", "here2"]


def test_faulthandler_has_one_current_thread():
    """torch's own tests print it of each process (pytorch/pytorch#54818)."""
    one = 'Current thread 0x00007f{rank}a (most recent call first):\n  File "a.py", line 3 in here{rank}\n'
    assert [d.main.frames[0].name for d in read_dumps(one.format(rank=0) + one.format(rank=1))] == ["here0", "here1"]


def test_a_thread_that_another_started_is_no_main_thread():
    """vllm-project/vllm#21022: pystack's threads in the order in which somebody copied them."""
    text = (
        "Traceback for thread 15 (ray::X) [] (most recent call last):\n"
        '    (Python) File "/x/manager.py", line 696, in actor_method\n        return method()\n'
        '    (Python) File "/x/own.py", line 3, in here\n        f()\n\n'
        "Traceback for thread 16 (ray::IDLE) [] (most recent call last):\n"
        '    (Python) File "/x/threading.py", line 973, in _bootstrap\n        self.run()\n'
        '    (Python) File "/x/threading.py", line 607, in wait\n        wait()\n'
    )
    (dump,) = read_dumps(text)
    assert [f.name for f in dump.main.frames] == ["here", "actor_method"]


def test_what_the_interpreter_died_of_is_kept():
    text = "[rank0]:Fatal Python error: Segmentation fault\n" + "".join(
        f"[rank0]:{line}\n" for line in FAULT.format(rank=0).splitlines()
    )
    (dump,) = read_dumps(text)
    assert (dump.label, dump.facts["fatal"]) == ("TP0", "Fatal Python error: Segmentation fault")
    (dump,) = read_dumps("Timeout (0:00:30)!\n" + FAULT.format(rank=0))
    assert "fatal" not in dump.facts


def test_the_c_stack_of_python_3_14_is_no_thread():
    text = (
        "Fatal Python error: Segmentation fault\n\n<Cannot show all threads while the GIL is disabled>\n"
        'Current thread 0x00007f1a [python] (most recent call first):\n  File "/x/a.py", line 3 in f\n  ...\n\n'
        "Current thread's C stack trace (most recent call first):\n"
        '  Binary file "/usr/lib/libc.so.6", at abort+0x48 [0x7f1a]\n  <truncated rest of calls>\n'
    )
    (dump,) = read_dumps(text)
    assert [[f.name for f in t.frames] for t in dump.threads] == [["f"]]


def test_a_dump_of_vllms_watchdog_is_no_quotation():
    assert clean(">>> Call stack dump #1 at Fri Nov 20 10:22:31 2026 due to feed timeout").prefix == ""


AUTOGRAD = """\
Process {pid}: python train.py
Python v3.10.14 (/usr/bin/python3.10)

Thread {pid} (idle): "MainThread"
    _engine_run_backward (torch/autograd/graph.py:769)
    backward (torch/autograd/__init__.py:289)
    main (train.py:582)
    <module> (train.py:586)
Thread 1{pid} (idle)
Thread 2{pid} (active)
    all_gather_into_tensor (torch/distributed/distributed_c10d.py:2709)
    fetch_sub_module (deepspeed/runtime/zero/partitioned_param_coordinator.py:300)
    pre_backward (deepspeed/runtime/zero/parameter_offload.py:90)
"""


def test_backward_runs_on_the_devices_thread():
    """huggingface/accelerate#3104, deepspeedai/DeepSpeed#6524."""
    (dump,) = read_dumps(AUTOGRAD.format(pid=42))
    thread, found = telling(dump)
    assert thread is not None
    assert found is not None
    assert (thread.frames[0].name, found.signature.id) == ("all_gather_into_tensor", "c10d-collective")


def test_one_rank_of_many_says_nothing_of_its_peers():
    found = judged(AUTOGRAD.format(pid=42))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "every rank" not in found.text.lower()
    assert "what its peers do is not in this dump" in found.text
    both = judged(AUTOGRAD.format(pid=42) + AUTOGRAD.format(pid=43))
    assert "every rank has entered the collective" in both.text


def test_processes_that_nobody_named_are_counted():
    merged = merge(as_rounds(read_dumps("".join(FAULT.format(rank=rank) for rank in range(2)))))
    assert [m.label for m in merged.members] == ["process 1", "process 2"]
    assert [m.label for m in merge(as_rounds(read_dumps(FAULT.format(rank=0)))).members] == ["process"]


def test_native_frames_do_not_hide_the_collective_above_them():
    """sgl-project/sglang#33289: one rank deep inside NCCL, its peer back at the request broadcast."""
    native = "".join(f"    nccl{n} (libnccl.so.2)\n" for n in range(9))
    inner = "    gloo::transport::tcp::UnboundBuffer::waitRecv (libtorch_cpu.so)\n"
    text = PAIR.replace("    all_reduce", native + "    all_reduce").replace(
        "    crunch (my/own.py:3)\n", inner + "    broadcast (torch/distributed/distributed_c10d.py:2974)\n"
    )
    found = judged(text)
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "desync" in found.text


def test_rays_workers_are_vllms():
    (dump,) = read_dumps(PAIR.partition("Process 813")[0].replace("VLLM::Worker_TP0", "ray::RayWorkerProc.run"))
    assert dump.role.role == "worker"


def test_ray_stack_shows_processes_as_ps_does():
    """ray-project/ray#3187: an old py-spy without a header of its own, the main thread last."""
    form = (
        "Stack dump for me     {pid}  0.1  0.1 1751908 151888 pts/0  Sl   12:48   0:01 ray_worker\n"
        "Thread 0x{pid}D9700 (active)\n\t _flush (ray/profiling.py:97)\n\t _bootstrap (threading.py:884)\n"
        "Thread 0x{pid}E7700 (active)\n\t main_loop (ray/worker.py:1005)\n\t <module> (ray/w.py:105)\n\n"
    )
    dumps = read_dumps(form.format(pid=20768) + form.format(pid=20769))
    assert [(d.process.pid, d.title, d.main.frames[0].name) for d in dumps] == [
        (20768, "ray_worker", "main_loop"),
        (20769, "ray_worker", "main_loop"),
    ]


def test_a_line_number_that_gdb_could_not_get():
    """vllm-project/vllm#13418: AMD's runtime below torch."""
    text = (
        'Traceback (most recent call first):\n  File "/r/a.py", line ?, in inner\n    (failed to get frame line)\n'
        '  File "/r/a.py", line 590, in outer\n    return inner()\n'
        "#0  0x1 in rocr::core::InterruptSignal::WaitRelaxed(long, long) () from /opt/rocm/lib/libhsa-runtime64.so.1\n"
        "#1  0x2 in hipStreamSynchronize () from /opt/rocm/lib/libamdhip64.so.6\n"
    )
    (dump,) = read_dumps(text)
    assert [(f.name, f.line) for f in dump.main.frames if not f.native] == [("inner", None), ("outer", 590)]
    found = judged(text)
    assert found.classes[0].signature == "gpu-sync-native"


def test_the_stack_of_a_collective_that_failed_is_pythons():
    text = (
        "[rank1]: Stack trace of the failed collective:\n[rank1]: #0 all_reduce from /x/distributed_c10d.py:2501\n"
        "[rank1]: #1 step from /w/train.py:30\n"
    )
    (dump,) = read_dumps(text)
    assert dump.label == "TP1"
    assert dump.main.frames == (Frame("all_reduce", "/x/distributed_c10d.py", 2501), Frame("step", "/w/train.py", 30))


def test_of_ranks_that_only_work_nobody_stands_out():
    """One look at a server that may be well: only where others wait does the odd one matter."""
    form = 'Process 8{n}: sglang::scheduler_TP{n}\nPython v3.12.3 (/p)\n\nThread 8{n} (active): "MainThread"\n    {f}\n'
    working = "".join(form.format(n=n, f="here (own/a.py:3)" if n < 3 else "there (own/b.py:3)") for n in range(4))
    assert (judged(working).verdict, judged(working).culprits) == ("undecided", ())
    waiting = working.replace("here (own/a.py:3)", "all_reduce (torch/distributed/distributed_c10d.py:2)")
    assert (judged(waiting).verdict, judged(waiting).culprits) == ("hang", ("TP3",))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("rank3.txt", "TP3"),
        ("stacks-tp_2.log", "TP2"),
        ("VLLM_STACK_DUMP_for_worker_1_812.log", "TP1"),
        ("rank0_and_rank1.txt", "process"),
        ("frank3.txt", "process"),
        ("stacks.txt", "process"),
    ],
)
def test_the_name_of_a_file_tells_its_rank(name, label):
    (dump,) = read_dumps(FAULT.format(rank=0), source=name)
    assert dump.label == label


def test_the_name_of_a_file_counts_only_for_one_unknown_process():
    two = FAULT.format(rank=0) + PAIR.partition("Process 813")[0]
    assert [d.label for d in read_dumps(two, source="rank5.txt")] == ["process", "TP0"]
    assert [d.label for d in read_dumps(PAIR, source="rank5.txt")] == ["TP0", "TP1"]
    assert [d.label for d in read_dumps(PAIR.partition("Process 813")[0], source="rank5.txt")] == ["TP0"]
    twice = read_dumps(FAULT.format(rank=0) * 2, source="rank5.txt")
    assert [d.label for d in twice] == ["TP5", "TP5"]


def test_amds_runtime_waits_under_its_own_names():
    text = "#0  0x1 in ioctl () from /lib/libc.so.6\n#1  0x2 in hipStreamSynchronize () from /x/libamdhip64.so\n"
    assert judged(text).classes[0].signature == "gpu-sync-native"
