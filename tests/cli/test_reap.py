"""``gpuserve reap``. A file that processes hold open stands for /dev/nvidia0, the fake NVML for the driver."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.cli import main
from pytest_gpuserve.cli.reap import _table
from pytest_gpuserve.gpu import Gpu, GpuProcess, Reading
from pytest_gpuserve.server import gpu_holders, lease_files, quarantine, reaper
from pytest_gpuserve.server.lease_policy import Device

HOLD = """# \x1b[31mred
import os, signal, sys, time
if sys.argv[2] != "-":
    open("/proc/self/comm", "w").write(sys.argv[2])
if sys.argv[3] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
device = open(sys.argv[1])
print("open", flush=True)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    path = tmp_path / "state"
    monkeypatch.setenv("GPUSERVE_STATE", str(path))
    monkeypatch.setenv("GPUSERVE_LEASES", str(tmp_path / "leases"))
    return path


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "dev" / "accelerator0"
    path.parent.mkdir()
    path.write_text("")
    return path


@pytest.fixture
def hold():
    """Starts a process that holds a file open."""
    with contextlib.ExitStack() as stack:

        def start(path, comm="-", how="-", **env):
            process = subprocess.Popen(
                [sys.executable, "-c", HOLD, str(path), comm, how],
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
            )
            stack.callback(end, process)
            assert process.stdout.readline() == b"open\n"
            return process

        yield start


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def gone_cookie():
    process = subprocess.Popen(["true"])
    found = procfs.process_id(process.pid)
    process.wait()
    return f"{found.pid}:{found.start}:{uuid.uuid4().hex}"


def cookie_of(process):
    found = procfs.process_id(process.pid)
    return f"{found.pid}:{found.start}:{uuid.uuid4().hex}"


def reap(capsys, *arguments):
    code = main(["reap", *map(str, arguments)])
    return code, *capsys.readouterr()


def only(monkeypatch, *cookies):
    """Other tests have strays too, on this machine and now."""
    everything = reaper.find_leftovers
    ours = lambda *where, **how: [one for one in everything(*where, **how) if one.cookie in cookies]  # noqa: E731
    monkeypatch.setattr(reaper, "find_leftovers", ours)


def test_lists_and_frees_what_dead_sessions_left(capsys, hold, device, monkeypatch):
    """A stray here; what has a directory is tests/server/test_reaper.py's."""
    dead, living = gone_cookie(), cookie_of(hold("/dev/null"))
    only(monkeypatch, dead, living)
    stray = hold(device, GPUSERVE_COOKIE=dead)
    live = hold(device, GPUSERVE_COOKIE=living)
    code, out, _ = reap(capsys)
    assert code == 1
    assert f"{stray.pid}  " in out
    assert f"{live.pid}  " not in out
    assert "\x1b" not in out
    assert stray.poll() is None
    code, out, _ = reap(capsys, "--yes", "--grace", "0.1")
    assert (code, stray.wait(10)) == (0, -signal.SIGKILL) or stray.returncode == -signal.SIGTERM
    assert f"pid {stray.pid}" in out
    assert live.poll() is None
    assert str(stray.pid) not in reap(capsys)[1]


def test_a_daemon_that_others_use_is_no_failure(capsys, hold, device, state, monkeypatch):
    """Every run of a job that ends with ``reap --yes`` would fail."""
    cookie, markers = gone_cookie(), state / "sessions" / "1-2-3" / "1-sim" / "markers"
    markers.mkdir(parents=True)
    daemon = hold(device, "raylet", GPUSERVE_COOKIE=cookie, GPUSERVE_MARKERS=str(markers))
    only(monkeypatch, cookie)
    for words in ((), ("--yes",)):
        code, out, _ = reap(capsys, *words)
        assert (code, f"{daemon.pid}" in out, "others may use" in out) == (0, True, True)
        assert "GPUSERVE_STATE" not in out
    assert daemon.poll() is None


def test_devices_lists_everybody(capsys, hold, device):
    one, other = hold(device), hold(device.parent / ".." / "dev" / "accelerator0")
    elsewhere = hold("/dev/null")
    code, out, _ = reap(capsys, "--devices", f"{device.parent}/acc*")
    assert code == 1
    assert str(one.pid) in out
    assert str(other.pid) in out
    assert str(elsewhere.pid) not in out
    assert gpu_holders.look(procfs.process_id(one.pid), "").user in out
    assert "\\x1b[31mred" in out
    assert "\x1b" not in out
    assert (one.poll(), other.poll()) == (None, None)


def test_only_the_pid_that_was_named(capsys, hold, device):
    chosen, other = hold(device, "-", "stubborn"), hold(device)
    code, out, _ = reap(capsys, "--devices", device, "--kill", "--pid", chosen.pid, "--grace", "0.2")
    assert (code, chosen.wait(10)) == (0, -signal.SIGKILL)
    assert f"pid {chosen.pid}" in out
    assert "is gone" in out
    assert other.poll() is None


def test_a_polite_process_gets_its_grace(capsys, hold, device):
    process = hold(device)
    assert reap(capsys, "--devices", device, "--kill", "--pid", process.pid, "--grace", "30")[0] == 0
    assert process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("comm", ["nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "Xorg"])
def test_daemons_are_spared(capsys, hold, device, comm):
    daemon = hold(device, comm)
    code, _, err = reap(capsys, "--devices", device, "--kill", "--pid", daemon.pid)
    assert code == 2
    assert "is spared" in err
    assert daemon.poll() is None


def test_live_sessions_and_leases_are_spared(capsys, hold, device, tmp_path, monkeypatch):
    owner = hold(device)
    served = hold(device, GPUSERVE_COOKIE=cookie_of(owner))
    dead = hold(device, GPUSERVE_COOKIE=gone_cookie())
    view = gpu_holders.holders(str(device))
    spared = {holder.process.id.pid: holder.spared for holder in view.holders}
    assert "live gpuserve session" in spared[served.pid]
    assert "live gpuserve session" in spared[owner.pid]
    assert spared[dead.pid] == ""
    from pytest_gpuserve.server import lease_files

    lessee = subprocess.Popen([sys.executable, "-c", LEASE, str(device)], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    try:
        child = int(lessee.stdout.readline())
        assert lease_files.entries(lease_files.directory(), "lease")
        spared = {h.process.id.pid: h.spared for h in gpu_holders.holders(str(device)).holders}
        assert "leased" in spared[child]
    finally:
        lessee.communicate()


LEASE = """
import subprocess, sys
from pytest_gpuserve.server import lease_files
lease_files.announce(lease_files.directory(), "lease", {"label": "x", "count": 1, "devices": []})
code = "import sys, time; file = open(sys.argv[1]); print('open', flush=True); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
"""


def test_this_command_is_spared(device):
    with open(device):
        (me,) = gpu_holders.holders(str(device)).holders
    assert me.process.id.pid == os.getpid()
    assert "this command" in me.spared


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_killing_all_needs_a_terminal_and_the_word(capsys, hold, device, monkeypatch):
    ours, daemon = hold(device), hold(device, "Xorg")
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    code, _, err = reap(capsys, "--devices", device, "--kill")
    assert code == 2
    assert f"--pid {ours.pid}" in err
    for answer in ("", "y\n", "no\n"):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert reap(capsys, "--devices", device, "--kill")[0] == 1
    assert ours.poll() is None
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    assert reap(capsys, "--devices", device, "--kill")[0] == 0
    assert ours.wait(10) == -signal.SIGTERM
    assert daemon.poll() is None


def test_a_process_that_is_not_the_same_any_more(hold, device):
    process = hold(device)
    found = procfs.process_id(process.pid)
    assert gpu_holders.end([procfs.ProcessId(found.pid, found.start + 1)], grace=0.1, limit=0.1) == []
    assert process.poll() is None


def test_misuse(capsys, hold, device):
    bystander = hold("/dev/null")
    for words, say in (
        (["--kill"], "--devices"),
        (["--lift", "0"], "--devices"),
        (["--devices", device, "--kill", "--lift", "0"], "--lift"),
        (["--devices", device, "--pid", bystander.pid], "--kill"),
        (["--devices", device, "--kill", "--yes"], "--pid"),
        (["--devices", "nvidia", "--kill"], "path"),
        (["--devices", device, "--kill", "--pid", bystander.pid], "holds none"),
    ):
        code, _, err = reap(capsys, *words)
        assert code == 2, words
        assert say in err
    assert bystander.poll() is None


@pytest.fixture
def nvml(request, tmp_path, monkeypatch, tmp_path_factory):
    """The fake library of tests/gpu."""
    path = Path(__file__).parents[1] / "gpu" / "fake.py"
    spec = importlib.util.spec_from_file_location("gpu_tests_fake_for_reap", path)
    fake = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = fake
    spec.loader.exec_module(fake)
    directory = tmp_path_factory.mktemp("fakenvml")
    if reason := fake.build(directory):
        pytest.skip(reason)
    library = fake.FakeNvml(directory, tmp_path / "gpus")
    for name, value in library.environment.items():
        monkeypatch.setenv(name, value)
    return library


def test_gpus_by_nvml(capsys, hold, nvml, monkeypatch):
    """A process is ended that only NVML names; the memory is back, save what no process owns."""
    monkeypatch.setattr(gpu_holders, "pids_match", lambda: True)
    chosen, other = hold("/dev/null"), hold("/dev/null")
    nvml.set(devices=4, used_0=20003, pids_0=f"{chosen.pid}:20000", used_1=503, pids_1=f"{other.pid}:500", used_3=20483)
    code, out, _ = reap(capsys, "--devices")
    assert code == 1
    (line,) = (line for line in out.splitlines() if line.split()[:1] == [str(chosen.pid)])
    assert " 0 " in line
    assert "20,000 MiB" in line
    assert "GPU 3: 20,483 MiB are in use by no process" in out
    assert "GPU 1: " not in out

    really = gpu_holders.end

    def end_and_free(processes, **options):
        left = really(processes, **options)
        nvml.set(used_0=3, pids_0="", used_3=3)
        return left

    monkeypatch.setattr(gpu_holders, "end", end_and_free)
    code, out, _ = reap(capsys, "--devices", "--kill", "--pid", chosen.pid)
    assert (code, chosen.wait(10)) == (0, -signal.SIGTERM)
    assert "GPU 0: 20,003 MiB before, 3 now" in out
    assert "No GPU is busy without a process" in out
    assert other.poll() is None


def test_memory_that_does_not_come_back(capsys, hold, nvml, monkeypatch):
    monkeypatch.setattr(gpu_holders, "pids_match", lambda: True)
    wait = gpu_holders.wait_idle
    monkeypatch.setattr(gpu_holders, "wait_idle", lambda before, chosen: wait(before, chosen, 0.5))
    chosen = hold("/dev/null")
    nvml.set(devices=2, used_0=20003, pids_0=f"{chosen.pid}:20000")
    really = gpu_holders.end

    def end_and_keep(processes, **options):
        left = really(processes, **options)
        nvml.set(pids_0="")
        return left

    monkeypatch.setattr(gpu_holders, "end", end_and_keep)
    code, out, _ = reap(capsys, "--devices", "--kill", "--pid", chosen.pid)
    assert code == 1
    assert "GPU 0: 20,003 MiB before, 20,003 now" in out
    assert "GPU 0: 20,003 MiB are in use by no process" in out


def test_pids_of_the_host_are_nobody_here(capsys, hold, nvml, monkeypatch):
    """In a container NVML's pids are the host's: the same number here is somebody else."""
    monkeypatch.setattr(gpu_holders, "pids_match", lambda: False)
    bystander = hold("/dev/null")
    nvml.set(devices=1, used_0=20003, pids_0=f"{bystander.pid}:20000")
    _, out, _ = reap(capsys, "--devices")
    assert f"GPU 0: NVML names pid {bystander.pid} with 20,000 MiB, which is not of this container" in out
    assert "COMMAND" not in out
    assert reap(capsys, "--devices", "--kill", "--pid", bystander.pid)[0] == 2
    assert bystander.poll() is None


def test_a_wedged_driver_does_not_hang_it(capsys, hold, device, nvml, monkeypatch):
    nvml.set(wedge_init=1)
    monkeypatch.setattr(gpu_holders, "query", lambda limit, ask=gpu_holders.query: ask(1.0))
    begin = time.monotonic()
    code, out, _ = reap(capsys, "--devices")
    assert time.monotonic() - begin < 30
    assert "wedged" in out
    assert code == 1


@pytest.mark.parametrize("trouble", ["lost_1", "wedge_1"])
def test_a_gpu_that_does_not_answer_is_told(capsys, nvml, monkeypatch, trouble):
    monkeypatch.setattr(gpu_holders, "query", lambda limit, ask=gpu_holders.query: ask(2.0))
    monkeypatch.setattr(gpu_holders, "_open_devices", lambda pattern: ({}, 0))
    nvml.set(devices=2)
    assert reap(capsys, "--devices")[0] == 0
    nvml.set(**{trouble: 1})
    code, out, _ = reap(capsys, "--devices")
    assert code == 1
    assert re.search(r"^GPU 1 cannot be read: .*(lost|did not answer)", out, re.M)
    assert "GPU 0" not in out


def test_a_machine_without_a_driver_is_nothing_to_mend(capsys, nvml, monkeypatch):
    monkeypatch.setattr(gpu_holders, "_open_devices", lambda pattern: ({}, 0))
    nvml.set(init=9)
    code, out, _ = reap(capsys, "--devices")
    assert (code, "Driver Not Loaded" in out) == (0, True)


def test_pid_1_is_spared_also_where_it_started_this_command(monkeypatch):
    monkeypatch.setattr(gpu_holders, "_open_devices", lambda pattern: ({1: ("/dev/x",), os.getpid(): ("/dev/x",)}, 0))
    first, me = gpu_holders.holders("/dev/x").holders
    assert (first.process.id.pid, me.process.id.pid) == (1, os.getpid())
    assert "what started it" in first.spared


def test_pid_1_is_spared_where_this_command_came_from_outside(monkeypatch):
    """docker exec: its parent is none of the container's."""
    me = os.getpid()
    table = {pid: replace(procfs.stat(pid), ppid=0) for pid in (1, me)}
    assert set(gpu_holders._spared(table, 5.0)) >= {1, me}


def test_quarantines_are_listed_and_lifted(capsys, device, state, monkeypatch):
    root = lease_files.directory()
    for name, number in (("GPU-a", 0), ("GPU-b", 1), ("virtual-1", 1)):
        quarantine.impose(root, Device(name, number), "it \x1b[31mholds.", label="test_x", baseline=Gpu(number, name))
    (root / "quarantine-GPU-c-00000000").write_text("{}")
    code, out, _ = reap(capsys, "--devices", device)
    assert code == 1
    assert "GPU 0 is in quarantine since test_x: it \\x1b[31mholds. It ends by itself, or with --lift 0." in out
    assert "virtual GPU 1 is in quarantine since test_x" in out
    assert "or with --lift virtual-1." in out
    assert re.search("quarantine-GPU-c-00000000 is damaged, and ignored: remove it, or --lift GPU-c", out)
    for choice, left in (("1", "GPU-a GPU-c virtual-1"), ("virtual-1", "GPU-a GPU-c"), ("GPU-c", "GPU-a"), ("0", "")):
        assert reap(capsys, "--devices", device, "--lift", choice)[:2] == (
            0,
            f"GPU {choice} is in quarantine no more.\n",
        )
        assert sorted(path.name.rpartition("-")[0] for path in root.glob("quarantine-*")) == [
            f"quarantine-{name}" for name in left.split()
        ]
    assert reap(capsys, "--devices", device)[:1] == (0,)
    code, _, err = reap(capsys, "--devices", device, "--lift", "0")
    assert code == 2
    assert "No GPU 0 is in quarantine" in err
    quarantine.impose(root, Device("GPU-a", 0), "it holds.", baseline=Gpu(0, "GPU-a"))

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    code, _, err = reap(capsys, "--devices", device, "--lift", "0")
    assert code == 2
    assert "Its owner, or root, may do so" in err


def test_node_and_nvml_are_one_holder(monkeypatch, hold):
    """/dev/nvidia2 has the minor number of a GPU that NVML counts as 5."""
    process = hold("/dev/null")
    gpu = Gpu(index=5, uuid="GPU-x", minor=2, memory_used=1 << 30, processes=(GpuProcess(process.pid, 1 << 30),))
    monkeypatch.setattr(gpu_holders, "pids_match", lambda: True)
    monkeypatch.setattr(gpu_holders, "query", lambda limit: Reading((gpu,)))
    monkeypatch.setattr(gpu_holders, "_open_devices", lambda pattern: ({process.pid: ("/dev/nvidia2",)}, 3))
    view = gpu_holders.holders()
    (holder,) = view.holders
    assert (holder.gpus, holder.memory, view.unseen, view.busy()) == ((5,), {5: 1 << 30}, (), [])
    assert "3 processes of other users" in _table(view, "/dev/nvidia*")
