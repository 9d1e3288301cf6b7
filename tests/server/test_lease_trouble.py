"""Leases when something is wrong: full disks, damaged files of others, sentences that ended, GPUs that do not tell."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.gpu import Gpu, GpuProcess, Reading
from pytest_gpuserve.server import gpu_pool, lease_files, lease_status, leases, quarantine, reaper
from pytest_gpuserve.server.lease_policy import Device
from pytest_gpuserve.server.leases import LeaseError

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUSERVE_LEASES", str(tmp_path / "leases"))
    return lease_files.directory()


@pytest.fixture(autouse=True)
def outside_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_status, "pids_match", lambda: True)


def device(name: str = "GPU-1") -> Device:
    return Device(name, 1)


def gpu(**more: Any) -> Gpu:
    return Gpu(index=1, uuid="GPU-1", name="H", **more)


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


# The directory


@pytest.mark.parametrize("what", ["open", "write"])
def test_a_full_disk_is_told_and_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(os, what, full)
    with pytest.raises(LeaseError, match=r"No space left on device\. Make room .*GPUSERVE_LEASES") as told:
        lease_files.announce(root, "ticket", {"count": 1})
    monkeypatch.undo()
    assert told.value.kind == "directory"
    assert list(root.iterdir()) == []


def test_a_lock_file_that_cannot_be_made_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse_to_make(path: Any, flags: int, *mode: int, **more: Any) -> int:
        return full() if flags & os.O_CREAT else real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", refuse_to_make)
    with pytest.raises(LeaseError, match="The file mutex of GPU leases cannot be used: No space left"):
        lease_files.try_lock(root / "mutex")


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_makes_nobody_wait(root: Path, kind: str) -> None:
    """Any user may put anything into the directory."""

    def put(name: str) -> None:
        if kind == "fifo":
            os.mkfifo(root / name)
        elif kind == "link":
            (root / name).symlink_to(root.parent)
        else:
            (root / name).mkdir()

    me = lease_files.user(os.getuid())
    for name in ("lease-0-1-a", "ticket-0-1-a", "quarantine-GPU-1-a"):
        put(name)
    assert len(lease_files.strange(root)) == 3
    swept = reaper.sweep_dead_sessions()
    # what we may remove is gone; another user's stays, and is told
    assert swept.text.count(f"is no regular file, and ignored; it belongs to {me}: have it removed") == (
        3 if kind == "folder" else 1
    )
    assert quarantine.quarantined(root, [device()], {}) == {}
    pool = gpu_pool.gpu_pool("virtual:1", {})
    leases.acquire(1, pool, on_wait=str, evict_idle=bool, limit=20.0).release()
    for name in ("mutex", lease_files.device(root, pool.devices[0]).name):
        (root / name).unlink()
        put(name)
        with pytest.raises(LeaseError, match=f"The file {name} .*belongs to {me}: have .* removed"):
            leases.acquire(1, pool, on_wait=str, evict_idle=bool, limit=20.0)
        path = root / name
        path.rmdir() if kind == "folder" else path.unlink()


def test_the_lock_of_all_decisions_is_waited_for_no_longer_than_said(root: Path) -> None:
    held = lease_files.try_lock(root / "mutex")
    assert held is not None
    with lease_files.mutex(root, 0.05) as mine:
        assert not mine
    os.close(held)
    with lease_files.mutex(root, 0.05) as mine:
        assert mine


LOCK = """
import sys, time
from pathlib import Path
from pytest_gpuserve.server import lease_files
lock = lease_files.try_lock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("name", ["mutex", "device"])
def test_who_keeps_a_lock_while_it_is_stopped(root: Path, name: str) -> None:
    pool = gpu_pool.gpu_pool("virtual:1", {})
    path = root / "mutex" if name == "mutex" else lease_files.device(root, pool.devices[0])
    with subprocess.Popen([sys.executable, "-c", LOCK, str(path)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            assert "being freed" in lease_status.wait_text(root, "9", 1, pool, {}, {})
            holder.send_signal(signal.SIGSTOP)
            while procfs.stat(holder.pid).state != "T":
                time.sleep(0.01)
            with pytest.raises(LeaseError, match=f"{path.name} is held by pid {holder.pid} .*kill -CONT {holder.pid}"):
                leases.acquire(1, pool, on_wait=str, evict_idle=bool, limit=0.1)
        finally:
            holder.kill()


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"devices": 3}', b'{"devices": [["GPU-1"]]}'])
def test_damaged_files_of_others_stop_nobody(root: Path, body: bytes) -> None:
    """Whoever wrote it holds the lock; what it says cannot be used."""
    path, lock = lease_files.announce(root, "lease", {})
    other, waiter = lease_files.announce(root, "ticket", {"count": 1, "devices": []})
    path.write_bytes(body)
    other.write_bytes(body)
    pool = gpu_pool.gpu_pool("virtual:2", {})
    assert lease_status.holders_text(lease_status.holders(root)) == ""
    assert "GPUs: " in lease_status.wait_text(root, "9", 1, pool, {}, {})
    assert not lease_status.waiting([device("nobody's")])
    lease = leases.acquire(2, pool, on_wait=str, evict_idle=bool, limit=20.0)
    assert len(lease.devices) == 2
    lease.release()
    os.close(lock)
    os.close(waiter)


def test_a_nest_of_another_user_stops_nobody(root: Path) -> None:
    for kind in ("lease", "ticket"):
        path, lock = lease_files.announce(root, kind, {})
        path = path.rename(path.with_name(path.name.replace(f"-{os.getpid()}-", "-1-")))
        path.write_bytes(b"[" * 60_000)
        assert lease_files.entries(root, kind) == []
        assert not lease_status.waiting([device()])
        os.close(lock)


def test_drafts_of_the_dead_are_swept_and_those_of_the_living_stay(root: Path) -> None:
    dead, fresh, held = root / ".1-1-a", root / ".2-2-b", root / ".3-3-c"
    for path in (dead, fresh, held):
        path.touch()
    lock = lease_files.try_lock(held)
    for path in (dead, held):
        os.utime(path, (1, 1))
    lease_files.sweep(root)
    assert sorted(path.name for path in root.glob(".*")) == [fresh.name, held.name]
    assert lock is not None
    os.close(lock)


def test_users_without_a_name_and_processes_that_vanish() -> None:
    assert lease_files.user(4_000_000_000) == "4000000000"
    assert lease_files.owner(os.getpid()) == lease_files.user(os.getuid())
    assert lease_files.owner(1 << 22) is None


# Who is in the way


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ({"memory_used": 21 * 10**9, "processes": ()}, "21.0 GB in use by no visible process"),
        ({"memory_used": 500 * MIB, "processes": ()}, None),
        ({"memory_used": 1200 * MIB, "processes": (GpuProcess(1, 250 * MIB),)}, None),  # a desktop
        ({"memory_used": None, "processes": None}, None),
        ({"processes": (GpuProcess(1 << 22, None),)}, f"pid {1 << 22}, user unknown"),
        ({"processes": (GpuProcess(1 << 22, 3 * 10**9),)}, f"pid {1 << 22}, user unknown, 3.0 GB"),
        ({"processes": (GpuProcess(1 << 22, 503 * MIB),)}, f"pid {1 << 22}, user unknown, 503 MiB"),
        ({"processes": (GpuProcess(1, 10 * MIB),)}, None),
        ({"memory_used": 21 * 10**9, "error": "GPU is lost"}, None),
    ],
)
def test_what_strangers_are_known_by(root: Path, seen: Any, told: str | None) -> None:
    pool = gpu_pool.GpuPool((device(),))
    found = lease_status.in_use(root, pool, {"GPU-1": gpu(**seen)})
    assert found.strangers == ({"GPU-1": f"{device().label}: {told}"} if told else {})
    assert not found.ours


@pytest.fixture
def child() -> Iterator[procfs.ProcessId]:
    """A process that this one started."""
    process = subprocess.Popen(["sleep", "600"])
    found = procfs.process_id(process.pid)
    assert found
    yield found
    process.kill()
    process.wait()


def test_memory_of_this_session_is_not_a_strangers(
    root: Path, monkeypatch: pytest.MonkeyPatch, child: procfs.ProcessId
) -> None:
    """A reference model in pytest, in another worker, or in what a fixture started."""
    pool, me = gpu_pool.GpuPool((device(),)), os.getpid()
    mine = gpu(memory_used=9000 * MIB, processes=(GpuProcess(me, 503 * MIB), GpuProcess(child.pid, 8000 * MIB)))
    found = lease_status.in_use(root, pool, {"GPU-1": mine})
    assert not found.strangers
    assert found.ours == {
        "GPU-1": f"GPU 1 is in use by pytest itself (pid {me}) of this session, 503 MiB, "
        f"pid {child.pid} (sleep) of this session, 8.4 GB"
    }
    assert found.passing == {"GPU-1"}, "the child may be about to end"
    alone = replace(mine, processes=(mine.processes or ())[:1])
    assert not lease_status.in_use(root, pool, {"GPU-1": alone}).passing
    beside = replace(mine, processes=(*(mine.processes or ()), GpuProcess(1, 400 * MIB)))
    assert "pid 1 " in lease_status.in_use(root, pool, {"GPU-1": beside}).strangers["GPU-1"]
    monkeypatch.setattr(os, "getpid", lambda: 1 << 22)  # a sibling of theirs, under one controller
    assert str(me) in lease_status.in_use(root, pool, {"GPU-1": mine}).strangers["GPU-1"]
    controller = procfs.process_id(me)
    assert controller
    assert not lease_status.in_use(root, pool, {"GPU-1": mine}, [controller]).strangers
    dead = procfs.ProcessId(controller.pid, controller.start + 1)
    assert lease_status.in_use(root, pool, {"GPU-1": mine}, [dead]).strangers


@pytest.mark.parametrize("processes", [(GpuProcess(1, 5000 * MIB),), (), None])
def test_in_a_container_nobody_knows_whose_memory_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, processes: Any
) -> None:
    """NVML's pids mean nothing there; that pid 1 is of this session would be a coincidence. Every process with a CUDA
    context may have all GPUs open."""
    monkeypatch.setattr(lease_status, "pids_match", lambda: False)
    pool, seen = gpu_pool.GpuPool((device(),)), gpu(memory_used=5003 * MIB, processes=processes)
    (told,) = lease_status.in_use(root, pool, {"GPU-1": seen}).strangers.values()
    assert "user" not in told
    assert "ignore" not in told
    monkeypatch.setattr(lease_status, "cuda_users", lambda pids, minor: [os.getpid()] if os.getpid() in pids else [])
    found = lease_status.in_use(root, pool, {"GPU-1": seen})
    assert not found.ours
    assert f"it may be pytest itself (pid {os.getpid()})" in found.strangers["GPU-1"]
    assert "--gpuserve-foreign=ignore" in found.strangers["GPU-1"]


def test_a_process_without_a_size_is_all_of_the_memory(root: Path) -> None:
    pool, mine = gpu_pool.GpuPool((device(),)), gpu(memory_used=9000 * MIB, processes=(GpuProcess(os.getpid(), None),))
    found = lease_status.in_use(root, pool, {"GPU-1": mine})
    assert list(found.ours) == ["GPU-1"]
    assert not found.strangers


def test_a_cuda_context_is_known_by_both_devices(tmp_path: Path) -> None:
    """NVML, in our own helpers too, opens /dev/nvidia0 but not /dev/nvidia-uvm."""
    for name in ("nvidia0", "nvidia-uvm"):
        (tmp_path / name).touch()
    me = [os.getpid(), 1 << 22]
    with (tmp_path / "nvidia0").open():
        assert lease_status.cuda_users(me, 0, str(tmp_path)) == []
        with (tmp_path / "nvidia-uvm").open():
            assert lease_status.cuda_users(me, 0, str(tmp_path)) == [os.getpid()]
            assert lease_status.cuda_users(me, 1, str(tmp_path)) == []


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Callable[..., gpu_pool.GpuPool]:
    """A pool of two GPUs; the first is used by these processes."""

    def made(*processes: GpuProcess) -> gpu_pool.GpuPool:
        used = 3 * MIB + sum(p.memory or 0 for p in processes)
        gpus = [
            Gpu(0, "GPU-0", "H", memory_used=used, processes=processes),
            Gpu(1, "GPU-1", "H", memory_used=0, processes=()),
        ]
        monkeypatch.setattr(leases, "_look", lambda sampler, pool, limit: {g.uuid: g for g in gpus})
        return gpu_pool.gpu_pool(None, {}, lambda limit: Reading(tuple(gpus)))

    return made


def taken(lease: leases.Lease) -> list[int]:
    return [device.index for device in lease.devices]


def test_gpus_that_the_session_itself_uses_are_for_servers_that_need_them(root: Path, two: Any) -> None:
    """Others are waited for, even if they are leased for a while: theirs is all the memory."""
    pool = two(GpuProcess(os.getpid(), 20 << 30))
    first = leases.acquire(1, pool, on_wait=str, evict_idle=bool, limit=20.0)
    assert taken(first) == [1]
    assert not first.beside
    said: list[str] = []
    with pytest.raises(LeaseError):
        leases.acquire(1, pool, on_wait=said.append, evict_idle=bool, limit=0.5)
    assert "pytest itself" in said[0]
    first.release()
    both = leases.acquire(2, pool, on_wait=str, evict_idle=bool, limit=20.0)
    assert taken(both) == [0, 1]
    assert list(both.beside) == ["GPU-0"]
    assert "pytest itself" in both.beside["GPU-0"]
    both.release()


def test_memory_that_is_about_to_go_is_waited_for_a_while(
    root: Path, two: Any, child: procfs.ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is just ending is a child of the session as well."""
    pool = two(GpuProcess(child.pid, 60 << 30))
    with pytest.raises(LeaseError) as caught:
        leases.acquire(2, pool, on_wait=str, evict_idle=bool, limit=0.5)
    assert f"pid {child.pid} (sleep) of this session" in str(caught.value)
    monkeypatch.setattr(leases, "PATIENCE", 0.3)
    lease = leases.acquire(2, pool, on_wait=str, evict_idle=bool, limit=20.0)
    assert list(lease.beside) == ["GPU-0"]
    lease.release()


def test_strangers_that_are_to_be_ignored(root: Path, two: Any) -> None:
    pool = two(GpuProcess(1 << 22, 20 << 30))
    lease = leases.acquire(2, pool, on_wait=str, evict_idle=bool, limit=20.0, foreign="ignore")
    assert f"pid {1 << 22}" in lease.beside["GPU-0"]
    lease.release()


# Quarantine


def sentence(root: Path, **more: Any) -> Path:
    quarantine.impose(root, device(), "its memory stayed.", label="test_x", **more)
    (path,) = root.glob("quarantine-*")
    return path


def kept(root: Path, now: Gpu | None) -> list[str]:
    found = quarantine.quarantined(root, [device()], {} if now is None else {"GPU-1": now})
    assert bool(found) == bool(list(root.glob("quarantine-*")))
    return [str(entry) for entry in found.values()]


def test_a_gpu_stays_until_its_memory_is_back(root: Path) -> None:
    sentence(root, baseline=gpu(memory_used=100 * MIB))
    told = [f"{device().label} is in quarantine since test_x: its memory stayed"]
    assert kept(root, gpu(memory_used=900 * MIB)) == told
    assert kept(root, gpu(memory_used=100 * MIB, error="GPU is lost")) == told  # it says nothing that can be believed
    assert kept(root, gpu(memory_used=300 * MIB)) == []


@pytest.mark.parametrize(("processes", "free"), [((GpuProcess(1, None),), False), ((), True)])
def test_a_gpu_that_does_not_tell_its_memory_is_free_when_no_process_is_on_it(
    root: Path, processes: Any, free: bool
) -> None:
    sentence(root, baseline=gpu(memory_used=None))
    assert (kept(root, gpu(memory_used=None, processes=processes)) == []) is free


def test_a_process_that_cannot_be_killed_keeps_its_gpu(root: Path) -> None:
    me = procfs.process_id(os.getpid())
    assert me
    sentence(root, baseline=gpu(memory_used=0), processes=[(me.pid, me.start)])
    assert kept(root, gpu(memory_used=0))
    (path,) = root.glob("quarantine-*")
    path.write_text(json.dumps({**json.loads(path.read_text()), "processes": [[me.pid, me.start + 1]]}))
    assert kept(root, gpu(memory_used=0)) == []


@pytest.mark.parametrize("changes", [{"boot": "another"}, {"processes": []}])
def test_a_sentence_ends_with_the_boot_and_with_a_gpu_that_is_gone(root: Path, changes: Any) -> None:
    path = sentence(root, baseline=gpu(memory_used=0))
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert kept(root, None) == []


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "[" * 9999, '{"boot": 3}', '{"device": "x"}', {"processes": 5}, {"processes": [5]}),
        *({"processes": [[1, 2, 3]]}, {"processes": [["1", 2]]}, {"memory_used": "1"}, {"why": None}, {"boot": []}),
    ],
)
def test_a_damaged_sentence_keeps_no_gpu(root: Path, text: Any) -> None:
    path = sentence(root, baseline=gpu(memory_used=0))
    whole = json.loads(path.read_text())
    assert kept(root, gpu(memory_used=900 * MIB))
    path.write_text(text if isinstance(text, str) else json.dumps({**whole, **text}))
    assert list(quarantine.imposed(root)) == [(path, "GPU-1", None)], "a person is told of it"
    assert quarantine.quarantined(root, [device()], {"GPU-1": gpu(memory_used=900 * MIB)}) == {}


def test_a_stranger_is_told_with_the_time_that_he_has_had_it(root: Path) -> None:
    held = {"pid": 7, "user": "bob", "label": "", "devices": [["a", 0, ""], ["b", 2, ""]], "since": time.time() - 200}
    assert lease_status.holders_text([held]) == "GPU 0,2 held by pid 7 (bob, no label) for 3 min"
    assert lease_status.holders_text([held], {"b"}) == "GPU 2 held by pid 7 (bob, no label) for 3 min"
    assert lease_status.holders_text([held], {"c"}) == lease_status.holders_text([{**held, "since": "x"}]) == ""
