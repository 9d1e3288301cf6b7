"""Leases between real processes on a private lease directory, with virtual GPUs and with the fake NVML library."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import gpu
from pytest_gpuserve.errors import SpecError
from pytest_gpuserve.gpu import Gpu, Reading
from pytest_gpuserve.server import lease_files, lease_status, leases
from pytest_gpuserve.server.leases import Evictor, Lease, LeaseError, acquire, gpu_pool, holders, waiting

LIMIT = 60.0
"""Generous: the machine may be slow; nothing waits that long unless it is broken."""


@pytest.fixture(autouse=True)
def lease_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "leases"
    monkeypatch.setenv("GPUSERVE_LEASES", str(path))
    return path


EIGHT = gpu_pool("virtual:8", {})


def take(count: int, **changes: Any) -> Lease:
    options: dict[str, Any] = {
        "pool": EIGHT,
        "on_wait": lambda _: None,
        "evict_idle": lambda: False,
        "limit": LIMIT,
        **changes,
    }
    return acquire(count, options.pop("pool"), **options)


def until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def tickets(root: Path) -> int:
    return len(lease_files.entries(root, "ticket"))


@contextlib.contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A python process with the lease functions imported; its stdout can be read, its stdin is open."""
    prelude = (
        "import os, sys, time, random\n"
        "from pytest_gpuserve.server.leases import *\n"
        "POOL = gpu_pool('virtual:8', {})\n"
        "def take(n, evict=lambda: False, label='', said=lambda t: None):\n"
        "    return acquire(n, POOL, on_wait=said, evict_idle=evict, limit=100, label=label)\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


HOLD = "lease = take(int(sys.argv[1]), label='sglang-tp8-base'); print('held', flush=True); sys.stdin.read()"


def line(of: subprocess.Popen[str]) -> str:
    assert of.stdout is not None
    return of.stdout.readline().strip()


def test_a_lease_is_exclusive_and_comes_back() -> None:
    first, second = take(4), take(4)
    assert [d.index for d in (*first.devices, *second.devices)] == list(range(8))
    with pytest.raises(LeaseError, match=r"No 1 GPUs after 0\.3 s") as caught:
        take(1, limit=0.3)
    assert caught.value.kind == "timeout"
    second.release()
    second.release()
    assert [d.index for d in take(2).devices] == [4, 5]
    assert len(holders()) == 2


def test_without_gpus_to_count_every_lease_is_granted(lease_directory: Path) -> None:
    pool = gpu_pool(None, {}, lambda _: Reading((), "no driver"))
    lease = take(8, pool=pool)
    assert (lease.fds, lease.gpus, lease.environment) == ((), (), {})
    assert lease.give_back(list) == []
    assert not lease_directory.exists(), "nothing to count, no file touched"


def test_more_than_there_are_is_refused_at_once() -> None:
    with pytest.raises(LeaseError, match="needs 9 GPUs of one kind; this session may use 8") as caught:
        take(9)
    assert caught.value.kind == "too_few"


def test_waiting_tells_who_holds_what() -> None:
    said: list[str] = []
    with process(HOLD, 4) as holder:
        assert line(holder) == "held"

        def hear(text: str) -> None:
            said.append(text)
            holder.kill()

        lease = take(8, on_wait=hear)
    assert len(lease.devices) == 8
    assert f"Waiting for 8 of 8 GPUs: GPU 0-3 held by pid {holder.pid} (" in said[0]
    assert "sglang-tp8-base) for less than a minute" in said[0]


def test_sigkill_of_the_holder_frees_its_gpus(lease_directory: Path) -> None:
    with process(HOLD, 8) as holder:
        assert line(holder) == "held"
        holder.kill()
        holder.wait(LIMIT)
        begin = time.monotonic()
        assert len(take(8).devices) == 8
        assert time.monotonic() - begin < 5
    assert len(list(lease_directory.glob("lease-*"))) == 1, "the dead one's note is gone"


def test_the_supervisor_keeps_the_lease_when_pytest_is_killed() -> None:
    code = (
        "import subprocess\n"
        "lease = take(8)\n"
        "guard = subprocess.Popen([sys.executable, '-S', '-E', '-c', 'import sys; sys.stdin.read()'],\n"
        "                         stdin=int(sys.argv[1]), stdout=subprocess.DEVNULL, pass_fds=lease.fds)\n"
        "print(guard.pid, flush=True); time.sleep(600)"
    )
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    started = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from pytest_gpuserve.server.leases import *\nimport sys, time\n"
            + code.replace("take(8)", "acquire(8, gpu_pool('virtual:8', {}), on_wait=print, evict_idle=bool, limit=9)"),
            str(read_end),
        ],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[read_end],
    )
    os.close(read_end)
    try:
        line(started)
        started.kill()
        started.communicate()
        assert len(holders()) == 1, "still shown as held"
        with pytest.raises(LeaseError):
            take(1, limit=0.5)
    finally:
        os.close(write_end)
    assert len(take(8).devices) == 8


def test_release_leaves_the_gpus_to_whoever_inherited_them() -> None:
    lease = take(8)
    guard = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=lease.fds
    )
    lease.release()
    with pytest.raises(LeaseError, match="held by"):
        take(1, limit=0.3)
    guard.communicate()
    assert take(8)


def test_a_forked_child_does_not_keep_the_gpus() -> None:
    lease = take(8)
    ready, parent_done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(parent_done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        lease.release()
        assert take(8, limit=5.0)
    finally:
        os.write(parent_done[1], b"x")
        os.waitpid(child, 0)
        for fd in (*ready, *parent_done):
            os.close(fd)


def test_a_large_request_is_not_starved_by_a_stream_of_small_ones(lease_directory: Path) -> None:
    small = (
        "count = 0\n"
        "lease = take(1); print('held', flush=True)\n"
        "while not sys.stdin.closed:\n"
        "    time.sleep(random.uniform(0, 0.05)); lease.release(); lease = take(1)\n"
    )
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(process(small)) for _ in range(3)]
        for one in started:
            assert line(one) == "held"
        begin = time.monotonic()
        lease = take(8)
        waited = time.monotonic() - begin
        assert len(lease.devices) == 8
        assert waited < 20
        until(lambda: tickets(lease_directory) == 3)
        lease.release()


def test_own_idle_servers_are_evicted_before_waiting() -> None:
    warm = [take(8)]

    def evict() -> bool:
        if not warm:
            return False
        warm.pop().release()
        return True

    lease = take(8, evict_idle=evict, limit=5.0, on_wait=lambda text: pytest.fail(f"nothing to wait for: {text}"))
    assert len(lease.devices) == 8


def test_servers_that_become_idle_while_waiting_are_evicted_too() -> None:
    warm, asked = [take(8)], []

    def evict() -> bool:
        asked.append(len(warm))
        if len(asked) > 3 and warm:
            warm.pop().release()
        return False

    assert len(take(8, evict_idle=evict, limit=20.0).devices) == 8
    assert len(asked) >= 4


def test_decisions_are_made_one_at_a_time(lease_directory: Path) -> None:
    lease_files.directory()
    with lease_files.mutex(lease_directory, 1.0) as inside:
        assert inside
        with pytest.raises(LeaseError) as caught:
            take(1, limit=0.2)
        assert caught.value.kind == "timeout"
    assert take(1)


def test_a_lock_on_a_file_that_is_gone_is_no_lock(lease_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lease_files.directory() / "device-x"
    real, swept = lease_files.open_lock, []

    def slow(path: Path) -> int:
        descriptor = real(path)
        if not swept:  # a cleaner of /tmp comes between our opening and our locking
            swept.append(path)
            path.unlink()
        return descriptor

    monkeypatch.setattr(lease_files, "open_lock", slow)
    descriptor = lease_files.try_lock(path)
    assert descriptor is not None
    assert lease_files.locked(path), "the file that others will find"
    os.close(descriptor)


def test_idle_servers_stay_when_there_is_room() -> None:
    take(4)
    assert take(4, evict_idle=lambda: pytest.fail("evicted without need"))


def test_two_processes_with_warm_tp4_both_get_tp8() -> None:
    code = (
        "warm = [take(4)]; print('warm', flush=True); sys.stdin.readline()\n"
        "def evict():\n"
        "    [lease.release() for lease in warm]; found = bool(warm); warm.clear(); return found\n"
        "lease = take(8, evict); print(len(lease.devices), flush=True); time.sleep(0.1); lease.release()\n"
    )
    with process(code) as one, process(code) as two:
        assert [line(one), line(two)] == ["warm", "warm"]
        for started in (one, two):
            assert started.stdin is not None
            started.stdin.write("go\n")
            started.stdin.flush()
        assert [line(one), line(two)] == ["8", "8"]


def test_a_waiter_makes_a_busy_holder_evict_within_two_seconds() -> None:
    warm = [take(4)]
    take(4, label="busy with a test")
    begin, took = time.monotonic(), []

    def evict() -> None:
        while warm:
            took.append(time.monotonic() - begin)
            warm.pop().release()

    assert not waiting()
    evictor = Evictor(evict)
    try:
        with process("lease = take(4); print('got it', flush=True)") as waiter:
            assert not took or took[0] > 0
            assert line(waiter) == "got it"
    finally:
        evictor.close()
    assert took


def test_waiting_counts_only_others_and_only_what_we_could_end(lease_directory: Path) -> None:
    held = take(4)
    assert not waiting(), "no directory entry, nobody waits"
    with process("take(8)"):
        until(waiting)
        assert waiting(held.devices)
        assert not waiting([leases.Device("GPU-elsewhere", 0)])
    assert not waiting()
    stop = threading.Event()
    thread = threading.Thread(target=lambda: take(8, evict_idle=stop.is_set))
    thread.start()
    until(lambda: tickets(lease_directory) == 1)
    assert not waiting(), "our own tickets are no reason: acquire evicts by itself"
    held.release()
    thread.join(LIMIT)


def test_a_stopped_waiter_does_not_hold_up_those_behind_it(
    lease_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = take(4)
    with process("take(8)") as stopped:
        until(lambda: tickets(lease_directory) == 1)
        with pytest.raises(LeaseError, match=f"pid {stopped.pid} .* is before us and waits for 8"):
            take(1, limit=0.5)
        stopped.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(lease_files, "STALE", 0.5)
        assert take(1)
    held.release()


NURSERY = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:  # forked, because thirty starts of an interpreter take long
    if (pid := os.fork()) == 0:
        dice = random.Random(int(line))
        while True:
            lease = take(dice.choice([1, 1, 2, 4, 8])); time.sleep(dice.uniform(0, 0.03)); lease.release()
    print(pid, flush=True)
"""


def test_thirty_random_kills_leave_no_lease_and_never_more_than_eight(lease_directory: Path) -> None:
    dice, stop, most = random.Random(7), threading.Event(), 0
    seen: set[str] = set()

    def look() -> int:
        """GPUs leased; 99 when one is leased twice."""
        found = lease_files.entries(lease_directory, "lease")
        names = [d[0] for entry in found for d in entry.body["devices"]]
        seen.update(entry.key for entry in found)
        return len(names) if len(set(names)) == len(names) else 99

    def check() -> None:
        nonlocal most
        while not stop.is_set():  # twice: at a death the kernel frees locks one after the other
            most = max(most, min(look(), look()))

    lease_files.directory()
    with process(NURSERY) as nursery:

        def born(seed: int) -> int:
            assert nursery.stdin is not None
            nursery.stdin.write(f"{seed}\n")
            nursery.stdin.flush()
            return int(line(nursery))

        running = [born(n) for n in range(3)]
        checker = threading.Thread(target=check)
        checker.start()
        try:
            for n in range(30):
                before = len(seen)
                until(lambda before=before: len(seen) > before)  # type: ignore[misc]
                time.sleep(dice.uniform(0, 0.05))
                os.kill(running.pop(dice.randrange(3)), signal.SIGKILL)
                running.append(born(100 + n))
        finally:
            stop.set()
            checker.join(LIMIT)
            for pid in running:
                os.kill(pid, signal.SIGKILL)
    assert len(seen) >= 30
    assert most <= 8
    until(lambda: holders() == [])
    assert len(take(8, limit=10).devices) == 8
    assert tickets(lease_directory) == 0


def test_the_directory_is_shared_by_all_users(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid():
        pytest.skip("needs root to become another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own directories are closed to other users
        home = Path(name)
        home.chmod(0o711)
        monkeypatch.setenv("GPUSERVE_LEASES", str(home / "leases"))
        lease = take(4)
        assert (home / "leases").stat().st_mode & 0o7777 == 0o1777
        other_user = "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        code = other_user + "print(len(take(4).devices), len(holders()), flush=True); sys.stdin.read()"
        with process(code) as other:
            assert line(other) == "4 2"
            with pytest.raises(LeaseError, match="held by"):
                take(1, limit=0.3)
        lease.release()
        with process(code) as other:
            assert line(other) == "4 1", "device files of root are locked by another user too"
        assert len(take(8).devices) == 8


@pytest.mark.parametrize("what", ["link", "file", "open to all"])
def test_a_directory_that_cannot_be_trusted_is_refused(lease_directory: Path, what: str) -> None:
    elsewhere = lease_directory.with_name("elsewhere")
    elsewhere.mkdir()
    if what == "link":
        lease_directory.symlink_to(elsewhere)
    elif what == "file":
        lease_directory.write_text("")
    else:
        lease_directory.mkdir()
        lease_directory.chmod(0o777)
    with pytest.raises(LeaseError, match=r"\$GPUSERVE_LEASES") as caught:
        take(1)
    assert caught.value.kind == "directory"
    assert "\n" not in str(caught.value)


def test_a_planted_link_is_not_followed(lease_directory: Path) -> None:
    target = lease_directory.with_name("precious")
    lease_files.directory()
    (lease_directory / "device-virtual-0").symlink_to(target)
    with pytest.raises(LeaseError, match="device-virtual-0 of GPU leases cannot be used"):
        take(1)
    assert not target.exists()


def test_lock_files_swept_from_under_us_are_made_again(lease_directory: Path) -> None:
    take(1).release()
    for path in lease_directory.iterdir():
        path.unlink()
    lease = take(8)
    with pytest.raises(LeaseError):
        take(1, limit=0.3)
    lease.release()


# ---- with (fake) GPUs


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = Path(__file__).parents[1] / "gpu" / "fake.py"
    spec = importlib.util.spec_from_file_location("lease_tests_fake", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("fakenvml")
    if reason := module.build(directory):
        pytest.skip(reason)
    return module, directory


@pytest.fixture
def nvml(fake_library: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module, directory = fake_library
    library = module.FakeNvml(directory, tmp_path / "gpus")
    for name, value in library.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for room in (gpu, lease_status):  # also where these tests run in a container
        monkeypatch.setattr(room, "pids_match", lambda: True)
    return library


def test_a_lease_shows_the_server_its_gpus(nvml: Any) -> None:
    lease = take(4, pool=gpu_pool(None, {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3"}))
    assert lease.gpus == ("4", "5", "6", "7")
    assert lease.environment == {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [g.memory_used for g in lease.baselines] == [3 << 20] * 4
    assert [d.index for d in take(1, pool=gpu_pool("0,3", {})).devices] == [0]


def test_a_mig_instance_is_named_by_its_uuid(nvml: Any) -> None:
    nvml.set(devices=1, mig_0=2)
    pool = gpu_pool(None, {})
    assert [take(1, pool=pool).environment["CUDA_VISIBLE_DEVICES"] for _ in range(2)] == [
        "MIG-00000000-0-fake",
        "MIG-00000000-1-fake",
    ]


def test_a_strangers_process_is_waited_for(nvml: Any) -> None:
    nvml.set(used_3=71000, pids_3="4194304:70000", used_5=20000)
    pool, said = gpu_pool(None, {}), []
    assert [d.index for d in take(2, pool=pool).devices] == [0, 1], "others are free"

    def hear(text: str) -> None:
        said.append(text)
        nvml.set(used_3=3, pids_3="", used_5=3)

    assert [d.index for d in take(4, pool=gpu_pool("2,3,4,5", {}), on_wait=hear).devices] == [2, 3, 4, 5]
    assert "GPU 3: pid 4194304, user " in said[0]
    assert ", 73.4 GB" in said[0]
    assert "GPU 5: 21.0 GB in use by no visible process" in said[0]


def test_a_strangers_process_raises_when_asked_to(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "PATIENCE", 0.3)
    nvml.set(used_3=71000, pids_3="4194304:70000")
    with pytest.raises(LeaseError, match="GPU 3: pid 4194304") as caught:
        take(8, pool=gpu_pool(None, {}), foreign="raise")
    assert caught.value.kind == "foreign"


def test_a_leak_is_reported_and_kept_from_the_next_server(nvml: Any) -> None:
    pool = gpu_pool(None, {})
    lease = take(2, pool=pool)
    nvml.set(used_0=20483, used_1=30000)
    threading.Timer(0.5, lambda: nvml.set(used_1=3)).start()
    (leak,) = lease.give_back(set, limit=3.0, label="test_greedy[tp2]")
    assert (leak.blame, leak.excess) == ("ours", 20480 << 20)
    assert "GPU 0 holds 20483 MiB" in leak.text
    assert [d.index for d in take(2, pool=pool).devices] == [2, 3], "the next server goes elsewhere"
    with pytest.raises(LeaseError, match=r"GPU 0 is in quarantine since test_greedy\[tp2\]: GPU 0 holds") as caught:
        take(8, pool=pool)
    assert caught.value.kind == "quarantine"
    nvml.set(used_0=200)
    assert take(1, pool=gpu_pool("0", {})), "memory is back: so is the GPU"


def test_an_interrupt_while_memory_is_awaited_leaves_no_full_gpu_to_others(nvml: Any) -> None:
    pool = gpu_pool("0,1", {})
    lease = take(2, pool=pool)
    nvml.set(used_0=20483)
    looks = 0

    def interrupted() -> set[int]:
        nonlocal looks
        looks += 1
        if looks > 4:
            raise KeyboardInterrupt
        return set()

    with pytest.raises(KeyboardInterrupt):
        lease.give_back(interrupted, limit=60.0, label="test_x")
    assert not holders()
    with pytest.raises(LeaseError, match=r"but GPU 0 is in quarantine since test_x: GPU 0 holds .*--lift GPU ends"):
        take(2, pool=pool)
    assert [d.index for d in take(1, pool=pool).devices] == [1], "that one was free"


def test_an_interrupt_before_the_first_look(nvml: Any) -> None:
    pool = gpu_pool("0", {})
    lease = take(1, pool=pool)
    nvml.set(used_0=20483)

    def interrupted() -> set[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lease.give_back(interrupted)
    with pytest.raises(LeaseError, match="nobody waited until the memory of GPU 0 was back"):
        take(1, pool=pool)


def test_quarantine_lasts_as_long_as_the_unkillable_process(nvml: Any) -> None:
    undead = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    from pytest_gpuserve import procfs

    identity = procfs.process_id(undead.pid)
    assert identity is not None
    pool = gpu_pool("0", {})
    lease = take(1, pool=pool)
    lease.quarantine("pid 77 is in state D", processes=[(identity.pid, identity.start)])
    lease.release()
    try:
        with pytest.raises(LeaseError, match="pid 77 is in state D"):
            take(1, pool=pool)
    finally:
        undead.kill()
        undead.wait()
    assert take(1, pool=pool)


def test_lost_and_wedged_gpus_are_not_waited_for(nvml: Any) -> None:
    pool = gpu_pool(None, {})
    nvml.set(lost_1=1)
    assert [d.index for d in take(2, pool=pool).devices] == [2, 3]
    with pytest.raises(LeaseError, match="GPU 1: NVML says: GPU is lost") as caught:
        take(8, pool=pool)
    assert caught.value.kind == "unreadable"


def test_the_baseline_is_read_after_the_gpu_is_ours(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.set(used_0=900)
    pool = gpu_pool("0", {})
    real = leases._try

    def slow(*arguments: Any) -> Any:
        nvml.set(used_0=3)
        return real(*arguments)

    monkeypatch.setattr(leases, "_try", slow)
    assert take(1, pool=pool).baselines[0].memory_used == 3 << 20


TWO = Reading(tuple(Gpu(n, f"GPU-{n}", f"NVIDIA {'H200' if n else 'RTX'}", (9 if n else 12, 0)) for n in range(3)))


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        (None, {}, [0, 1, 2]),
        ("auto", {"CUDA_VISIBLE_DEVICES": "GPU-2,0"}, [0, 2]),
        ("2,0", {}, [0, 2]),
        ("GPU-1", {"CUDA_VISIBLE_DEVICES": "1,2"}, [1]),
        ("virtual:3", {"CUDA_VISIBLE_DEVICES": ""}, [0, 1, 2]),
        (None, {"CUDA_VISIBLE_DEVICES": ""}, []),
        ("none", {}, []),
    ],
)
def test_pool(option: str | None, environ: dict[str, str], expected: list[int]) -> None:
    pool = gpu_pool(option, environ, lambda _: TWO)
    assert [d.index for d in pool.devices] == expected


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("0,x", "'x' is no GPU"),
        ("virtual:0", "no GPU"),
        ("virtual", "no GPU"),
        ("-1", "no GPU"),
        ("7", "there is no GPU 7. GPUs of this machine: 0, 1, 2"),
        ("1", "hidden by CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_pool_errors(option: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        gpu_pool(option, {"CUDA_VISIBLE_DEVICES": "0"}, lambda _: TWO)
    assert said in str(caught.value)
    assert f"--gpuserve-gpus={option}" in str(caught.value)


def test_hidden_gpus_are_too_few_not_uncounted() -> None:
    pool = gpu_pool(None, {"CUDA_VISIBLE_DEVICES": ""}, lambda _: TWO)
    with pytest.raises(LeaseError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        take(1, pool=pool)


def test_pool_by_architecture() -> None:
    pool = gpu_pool(None, {}, lambda _: TWO)
    assert [d.index for d in pool.only(lambda gpu: gpu.sm == 90).devices] == [1, 2]
    assert pool.only(lambda gpu: gpu.sm == 75).devices == ()
    assert EIGHT.only(lambda gpu: False) == EIGHT
