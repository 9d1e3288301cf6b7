"""CUDA core dumps on request: the pipe, the core, what cuda-gdb lists; nothing happens unless it was asked for."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from pytest_gpuserve.diagnose import coredump
from pytest_gpuserve.diagnose.evidence import Evidence, Progress, Witness
from pytest_gpuserve.diagnose.merge import merge
from pytest_gpuserve.diagnose.verdict import judge
from pytest_gpuserve.report import gather
from pytest_gpuserve.server.witness_env import witness_environment

LISTED = """\
[New Thread 0x7f (LWP 11)]
  Kernel Parent Dev Grid Status           SMs Mask  GridDim  BlockDim Invocation
*      0      -   0    7 Active 0x0000000000000001  (1,1,1) (256,1,1) spin(unsigned long*)()
       1      -   0    9 Active 0x00000000000000ff  (8,2,1)  (32,4,1) ncclDevKernel_AllReduce_Sum_bf16_RING_LL()
"""
NONE_LISTED = (
    "Opening GPU coredump: /s/cuda.7.core\nNo CUDA kernels.\n"  # as recorded on an H200, rank waiting on the host
)


def environment(tmp_path, **more):
    given = {"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1", **more}
    return {**given, **witness_environment(tmp_path, given)}


def test_kernels_are_listed_with_their_grids():
    assert coredump.kernels(LISTED) == (
        "spin(unsigned long*)() on grid (1,1,1) of blocks (256,1,1)",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL() on grid (8,2,1) of blocks (32,4,1)",
    )
    assert coredump.kernels(NONE_LISTED) == ()
    assert coredump.kernels("Not a core file.\n") is None


def test_what_it_proves(tmp_path):
    assert coredump.witness("TP1", tmp_path, LISTED).layer == "gpu"
    assert "on the GPU of TP1 runs spin(unsigned long*)() on grid" in coredump.witness("TP1", tmp_path, LISTED).claim
    assert coredump.witness("TP1", tmp_path, NONE_LISTED).layer == "host"
    assert "was not read" in coredump.witness("TP1", tmp_path, None).claim
    assert "was not read" in coredump.witness("TP1", tmp_path, "gibberish").claim


@pytest.fixture
def driver(tmp_path):
    """Plays the driver: makes the pipe of this process and writes the core in two parts when a byte comes."""
    env = environment(tmp_path)
    pipe = env["CUDA_COREDUMP_PIPE"].replace("%p", str(os.getpid()))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def run():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if os.read(reader, 10):
                    break
            except BlockingIOError:
                pass
            time.sleep(0.02)
        with open(env["CUDA_COREDUMP_FILE"].replace("%p", str(os.getpid())), "wb") as core:
            core.write(b"a" * 100)
            core.flush()
            time.sleep(0.5)
            core.write(b"b" * 100)

    thread = threading.Thread(target=run)
    thread.start()
    yield env
    thread.join()
    os.close(reader)


def test_a_core_is_asked_for_and_waited_for(driver):
    core = coredump.take(os.getpid(), driver, limit=60.0)
    assert core is not None
    assert core.stat().st_size == 200, "it is whole"


def test_nothing_without_a_pipe_or_without_being_asked(tmp_path):
    env = environment(tmp_path)
    assert coredump.take(os.getpid(), env, limit=1.0) is None
    (tmp_path / f"cuda.{os.getpid()}.pipe").write_text("")
    assert coredump.take(os.getpid(), env, limit=1.0) is None, "a file is no pipe"
    assert (tmp_path / f"cuda.{os.getpid()}.pipe").read_text() == "", "nothing is written to it"
    assert not coredump.asked_for(witness_environment(tmp_path, {}))
    assert not coredump.asked_for({**env, "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "0"})


def test_cuda_gdb_is_run_with_a_limit(tmp_path):
    tool = tmp_path / "cuda-gdb"
    tool.write_text(f"#!{sys.executable}\nimport sys\nprint({LISTED!r})\nprint(sys.argv)\n")
    tool.chmod(0o755)
    text = coredump.read(tmp_path / "core", str(tool), 30.0)
    assert f"target cudacore {tmp_path / 'core'}" in text
    assert len(coredump.kernels(text)) == 2
    tool.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    began = time.monotonic()
    assert coredump.read(tmp_path / "core", str(tool), 0.5) is None
    assert time.monotonic() - began < 20


def test_the_launch_prepares_the_recorder_always_and_the_core_on_request(tmp_path):
    plain = witness_environment(tmp_path, {})
    assert plain["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert plain["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"].startswith(str(tmp_path))
    assert not any(name.startswith("CUDA_") for name in plain)
    asked = witness_environment(tmp_path, {"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1", "CUDA_COREDUMP_FILE": "/mine"})
    assert asked["CUDA_COREDUMP_PIPE"] == str(tmp_path / "cuda.%p.pipe")
    assert "skip_global_memory" in asked["CUDA_COREDUMP_GENERATION_FLAGS"]
    assert "CUDA_COREDUMP_FILE" not in asked, "what the user gives stays"
    for given in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        assert witness_environment(tmp_path, {given: "1"}) == {}, "a recorder of the user's own is left alone"


def test_a_kernel_that_runs_is_what_a_symmetric_hang_is_about(dumps):
    kernel = Witness(coredump.SOURCE, "on the GPU of TP0 runs spin() on grid (1,1,1) of blocks (1,1,1)", (), "gpu")
    found = judge(
        Evidence(
            reason="no_progress",
            rounds=[dumps.same(4, dumps.COLLECTIVE)],
            progress=Progress("hung", still=40.0, window=30.0, last="log"),
            witnesses=(kernel,),
            tp=4,
        )
    )
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "look at the GPU: on the GPU of TP0 runs spin()" in found.text


def test_the_first_suspect_alone_is_asked(monkeypatch, dumps, tmp_path):
    asked = []
    monkeypatch.setattr(gather, "_devices", lambda pid: True)
    monkeypatch.setattr(gather.procfs, "environ", lambda pid: {"pid": str(pid)})
    monkeypatch.setattr(coredump, "take", lambda pid, environment, limit: asked.append(pid) or tmp_path / "core")
    monkeypatch.setattr(coredump, "debugger", lambda: None)
    merged = merge([[dumps.dump(n, dumps.COLLECTIVE, pid=100 + n, state="T" if n == 0 else "S") for n in range(4)]])
    (found,) = gather.cores(merged, ("TP2",), 5.0)
    assert asked == [102]
    assert "the core of TP2 was not read" in found.claim
    monkeypatch.setattr(coredump, "take", lambda pid, environment, limit: asked.append(pid))
    assert gather.cores(merged, (), 5.0) == ()
    assert asked == [102, 101, 102, 103], "no core of a rank that is stopped: it would not answer"
