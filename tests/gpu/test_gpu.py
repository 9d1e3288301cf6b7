"""gpu.py against a fake libnvidia-ml: the real pynvml, the real helper process, GPUs that leak, hang and get lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import gpu
from pytest_gpuserve.gpu import MIB, Gpu, GpuProcess, Sampler, check_release, devices, query, visible, wait_release


def test_devices_carry_what_nvml_says(nvml: Any) -> None:
    nvml.set(devices=2, used_1=71000, pids_1="812:70000,900:-1", util_1=100, power_1=150500, ecc_1=2, cc_0=9)
    first, second = devices()
    assert (first.index, first.uuid, first.sm, first.processes) == (0, "GPU-00000000-fake", 90, ())
    assert second.capability == (12, 0)
    assert second.name == "NVIDIA FAKE"
    assert second.memory_total == 97887 * MIB
    assert second.memory_used == 71000 * MIB, "version 2 of the memory call, without the driver's own reserve"
    assert (second.utilisation, second.power, second.ecc, second.minor) == (100, 150.5, 2, 1)
    assert second.processes == (GpuProcess(812, 70000 * MIB), GpuProcess(900, None))
    assert Gpu.from_json(second.to_json()) == second


def test_a_driver_older_than_the_binding(nvml: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer bindings then raise an error that is no NVMLError, and only versioned calls answer."""
    old = tmp_path / "old"
    old.mkdir()
    nvml.module.build(old, "-DOLD_DRIVER")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(old))
    nvml.set(devices=1, pids_0="812:70000", used_0=71000)
    (only,) = devices()
    assert only.error is None
    assert only.processes == (GpuProcess(812, 70000 * MIB),)


def test_no_driver_is_an_empty_tuple_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    reading = query()
    assert reading.gpus == ()
    assert reading.problem is not None
    assert "Not Found" in reading.problem


def test_driver_not_loaded_is_said(nvml: Any) -> None:
    nvml.set(init=9)
    reading = query()
    assert reading.gpus == ()
    assert "Driver Not Loaded" in str(reading.problem)


def test_binding_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda _: None)
    assert "nvidia-ml-py is not installed" in str(query().problem)


def test_wedged_initialisation_ends_at_the_limit_and_leaves_no_process(nvml: Any) -> None:
    nvml.set(wedge_init=1)
    with Sampler() as sampler:
        begin = time.monotonic()
        reading = sampler.sample(1.0)
        assert time.monotonic() - begin < 5.0
        assert reading.gpus == ()
        assert "did not answer within 1 s" in str(reading.problem)
        nvml.set(wedge_init=0)
        assert len(sampler.sample().gpus) == 8, "a new helper answers once the driver does"


def test_one_wedged_gpu_costs_the_others_nothing(nvml: Any) -> None:
    with Sampler() as sampler:
        assert all(g.error is None for g in sampler.sample().gpus)
        nvml.set(wedge_3=1)
        for _ in range(2):
            reading = sampler.sample(2.0)
            assert [g.index for g in reading.gpus if g.error] == [3]
            assert "did not answer" in str(reading.gpus[3].error)
            assert reading.gpus[3].uuid == "GPU-00000003-fake", "known from before"
            assert reading.gpus[4].memory_used == 3 * MIB
        assert sampler._process is not None
        tasks = Path(f"/proc/{sampler._process.pid}/task")
        for _ in range(4):
            sampler.sample(1.0)
        deadline = time.monotonic() + 20  # threads of the other GPUs may still be ending
        while len(list(tasks.iterdir())) > 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(list(tasks.iterdir())) <= 4, "main, stdin, events, and one that hangs: not one more a sample"


def test_lost_gpu_is_named_and_the_rest_is_read(nvml: Any) -> None:
    nvml.set(devices=3, lost_1=1)
    assert [g.error for g in devices()] == [None, "NVML says: GPU is lost", None]


def test_gpu_without_memory_of_its_own(nvml: Any) -> None:
    nvml.set(devices=1, total_0=0, pids_0="none")
    (gb10,) = devices()
    assert (gb10.memory_total, gb10.memory_used, gb10.processes, gb10.error) == (None, None, None, None)


def test_xid_is_seen_by_a_sampler_that_was_there(nvml: Any) -> None:
    nvml.set(devices=2)
    with Sampler() as sampler:
        assert sampler.sample().gpus[1].xids == ()
        nvml.set(xid_1=79)
        deadline = time.monotonic() + 20
        while not sampler.sample().gpus[1].xids and time.monotonic() < deadline:
            time.sleep(0.05)
        reading = sampler.sample()
        assert [g.xids for g in reading.gpus] == [(), (79,)]


def test_helper_killed_by_somebody_is_replaced(nvml: Any) -> None:
    with Sampler() as sampler:
        sampler.sample()
        assert sampler._process is not None
        sampler._process.kill()
        sampler._process.wait(10)
        assert len(sampler.sample().gpus) == 8


def test_helper_dying_in_the_middle_is_an_answer_not_a_wait(nvml: Any) -> None:
    nvml.set(wedge_init=1)
    with Sampler() as sampler:
        killer = threading.Timer(0.5, lambda: sampler._process is not None and sampler._process.kill())
        killer.start()
        begin = time.monotonic()
        reading = sampler.sample(60.0)
        killer.join()
    assert time.monotonic() - begin < 30
    assert "ended" in str(reading.problem)


def test_unkillable_helper_is_left_alone_and_named(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.set(wedge_init=1)
    sampler = Sampler()

    def stop(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while _state(process.pid) not in "Tt" and time.monotonic() < deadline:
            time.sleep(0.01)

    monkeypatch.setattr(subprocess.Popen, "kill", stop)
    sampler.sample(0.3)
    stuck = sampler._stuck
    assert stuck is not None, "still there half a second after it was to be killed"
    try:
        begin = time.monotonic()
        reading = sampler.sample(5.0)
        assert time.monotonic() - begin < 1.0
        assert str(stuck.pid) in str(reading.problem)
        assert sampler._process is None, "no second process is thrown at a wedged driver"
    finally:
        os.kill(stuck.pid, signal.SIGKILL)
        stuck.wait(10)
        sampler.close()


def test_helper_does_not_outlive_a_killed_parent(nvml: Any) -> None:
    nvml.set(wedge_0=1)
    code = (
        "from pytest_gpuserve.gpu import Sampler; import time\n"
        "s = Sampler()\nwhile s._process is None: s.sample(4)\nprint(s._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    helper = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while _alive(helper) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(helper)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _alive(pid: int) -> bool:
    return _state(pid) not in "ZX"


FOUR = tuple(Gpu(index=n, uuid=f"GPU-{n}{n}ab") for n in range(4))
MIG = (
    Gpu(index=0, uuid="GPU-a", mig=True, instances=(Gpu(0, "MIG-1", parent="GPU-a"), Gpu(0, "MIG-2", parent="GPU-a"))),
    Gpu(index=1, uuid="GPU-b"),
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("1,1", [1]),
        ("1,9,2", [1]),
        ("1,-1,2", [1]),
        ("GPU-22ab,0", [2, 0]),
        ("GPU-3", [3]),
        ("GPU-", []),
        ("NoDevFiles", []),
        ("٣", []),
    ],
)
def test_visible_reads_the_variable_as_cuda_does(value: str | None, expected: list[int]) -> None:
    assert [g.index for g in visible(FOUR, value)] == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["MIG-1", "MIG-2", "GPU-b"]),
        ("MIG-2,1", ["MIG-2", "GPU-b"]),
        ("0", ["MIG-1"]),
        ("GPU-a", ["MIG-1"]),
        ("MIG-9", []),
    ],
)
def test_visible_with_mig(value: str | None, expected: list[str]) -> None:
    assert [g.uuid for g in visible(MIG, value)] == expected


def test_mig_instances_are_read(nvml: Any) -> None:
    nvml.set(devices=2, mig_1=2)
    reading = devices()
    assert [u.uuid for u in visible(reading, None)] == [
        "GPU-00000000-fake",
        "MIG-00000001-0-fake",
        "MIG-00000001-1-fake",
    ]
    assert reading[1].instances[0].parent == "GPU-00000001-fake"
    assert reading[1].instances[0].capability == (12, 0)


def _gpu(used: int | None, *processes: tuple[int, int | None], error: str | None = None) -> Gpu:
    size = None if used is None else used * MIB
    held = tuple(GpuProcess(pid, None if mib is None else mib * MIB) for pid, mib in processes)
    return Gpu(0, "GPU-x", memory_used=size, processes=held, error=error)


@pytest.mark.parametrize(
    ("baseline", "now", "same", "free", "blame"),
    [
        pytest.param(_gpu(3), _gpu(3), True, True, "nobody", id="back"),
        pytest.param(_gpu(3), _gpu(259), True, True, "nobody", id="within the tolerance"),
        pytest.param(_gpu(3), _gpu(260), True, False, "ours", id="one MiB too much"),
        pytest.param(_gpu(3), _gpu(20483), True, False, "ours", id="held by no process"),
        pytest.param(_gpu(3), _gpu(20483, (50, 20480)), True, False, "ours", id="held by our own"),
        pytest.param(_gpu(3), _gpu(3, (50, 0)), True, False, "ours", id="our own is still there, without memory"),
        pytest.param(_gpu(3), _gpu(20483, (99, 20480)), True, True, "nobody", id="a stranger came"),
        pytest.param(_gpu(1003, (99, 1000)), _gpu(5003, (99, 5000)), True, True, "nobody", id="a stranger grew"),
        pytest.param(_gpu(5003, (99, 5000)), _gpu(5003), True, False, "ours", id="a stranger left, as much leaked"),
        pytest.param(_gpu(3), _gpu(20483), False, False, "unknown", id="container, no process listed"),
        pytest.param(
            _gpu(3), Gpu(0, "GPU-x", memory_used=20483 * MIB), True, False, "unknown", id="a driver that lists nobody"
        ),
        pytest.param(_gpu(3), _gpu(20483, (99, None)), True, False, "unknown", id="a stranger without size"),
        pytest.param(
            _gpu(3), _gpu(20483, (50, 20480)), False, False, "unknown", id="container, a pid that equals ours"
        ),
        pytest.param(_gpu(3), _gpu(20483, (4711, 20480)), False, False, "unknown", id="container, a new host pid"),
        pytest.param(_gpu(3), _gpu(20483, (4711, None)), False, False, "unknown", id="container, a pid without size"),
        pytest.param(
            _gpu(3), _gpu(40483, (4711, 20480)), False, False, "ours", id="container, more than the new pid has"
        ),
        pytest.param(
            _gpu(1003, (77, 1000)), _gpu(9003, (77, 9000)), False, True, "nobody", id="container, old pid grew"
        ),
        pytest.param(_gpu(3), _gpu(3, error="lost"), True, False, "unreadable", id="unreadable"),
        pytest.param(_gpu(None), _gpu(None), True, True, "nobody", id="no memory figure, no process"),
        pytest.param(_gpu(None), _gpu(None, (50, None)), True, False, "ours", id="no memory figure, our process"),
        pytest.param(_gpu(None), _gpu(None, (99, None)), True, True, "nobody", id="no memory figure, a stranger's"),
    ],
)
def test_release(baseline: Gpu, now: Gpu, same: bool, free: bool, blame: str) -> None:
    result = check_release(baseline, now, ours={50}, same_namespace=same)
    assert (result.free, result.blame) == (free, blame), result.text
    assert result.text.endswith(".")


def test_release_names_size_and_pid() -> None:
    result = check_release(_gpu(3), _gpu(20483, (50, 20480)), ours={50}, same_namespace=True)
    assert result.text == (
        "GPU 0 holds 20483 MiB, 20480 MiB more than before the launch (3 MiB): pid 50 (20480 MiB) of this server."
    )


def test_wait_release_waits_for_a_driver_that_frees_late(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "pids_match", lambda: True)
    nvml.set(devices=2)
    baselines = devices()
    nvml.set(used_0=20000, used_1=20000)
    looks = 0

    def ours() -> set[int]:
        nonlocal looks
        looks += 1
        if looks == 4:
            nvml.set(used_0=3)
        return set()

    result = wait_release(baselines, ours=ours, limit=4.0)
    assert [result[g.uuid].free for g in baselines] == [True, False]
    assert result[baselines[1].uuid].blame == "ours"


def test_wait_release_with_a_wedged_driver_ends(nvml: Any) -> None:
    nvml.set(devices=1)
    baselines = devices()
    nvml.set(wedge_init=1)
    begin = time.monotonic()
    result = wait_release(baselines, ours=tuple, limit=1.0)
    assert time.monotonic() - begin < 10
    assert not result[baselines[0].uuid].free
    assert result[baselines[0].uuid].blame == "unreadable"


def test_a_gpu_that_stays_mute_is_told_by_the_look_that_had_the_most_time(nvml: Any) -> None:
    nvml.set(devices=1)
    baselines = devices()
    nvml.set(wedge_0=1)
    (found,) = wait_release(baselines, ours=tuple, limit=2.0).values()
    assert re.fullmatch(r"GPU 0 cannot be read: the driver did not answer within 1\.\d+ s\.", found.text)


def test_processes_of_graphics_are_strangers_like_any(nvml: Any) -> None:
    """A browser on the desktop grows while a server runs: nobody leaked."""
    nvml.set(devices=1, used_0=500, graphics_0="98:400")
    (before,) = devices()
    assert before.processes == (GpuProcess(98, 400 * MIB),)
    nvml.set(used_0=900, graphics_0="98:400,99:400", pids_0="99:400")
    (now,) = devices()
    assert now.processes == (GpuProcess(98, 400 * MIB), GpuProcess(99, 400 * MIB))
    assert check_release(before, now, ours=(), same_namespace=True).free
    nvml.set(pids_0="none")
    assert devices()[0].processes is None, "who computes is not known"
