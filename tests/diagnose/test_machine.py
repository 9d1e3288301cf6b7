"""What the machine says of memory, on kernels and in containers of all kinds: /proc and /sys made by hand."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.diagnose import machine

GB = 1 << 30
PID = 77
MEMINFO = f"MemTotal: {64 * GB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {48 * GB >> 10} kB\n"
Files = Callable[[dict[str, str]], None]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Makes the files of a machine, which has no others."""
    real = procfs.read

    def below(path: str) -> Path:
        return Path(path) if path.startswith(str(tmp_path)) else tmp_path / path.lstrip("/")

    def make(wanted: dict[str, str]) -> None:
        for path, text in wanted.items():
            below(path).parent.mkdir(parents=True, exist_ok=True)
            below(path).write_text(text)

    monkeypatch.setattr(machine, "Path", below)
    monkeypatch.setattr(procfs, "read", lambda path: real(str(below(path))))
    monkeypatch.setattr(machine, "kernel_log", lambda: "")
    return make


def test_a_machine_that_says_nothing() -> None:
    """No /proc/meminfo, no cgroup, no pressure: nothing is known, and nothing is made up."""
    found = machine.memory([PID])
    assert (found.resident, found.limit, found.current, found.oom_kills, found.pressure) == (0, None, None, None, None)
    assert machine.oom_kills(PID) is None
    assert not found.short


def test_without_a_cgroup_the_machine_is_the_limit(files: Files) -> None:
    files({"/proc/meminfo": MEMINFO, "/proc/vmstat": "pgfault 3\noom_kill 7\n"})
    found = machine.memory([PID], oom_before=5)
    assert (found.limit, found.current, found.oom_kills) == (64 * GB, 16 * GB, 2)


def test_the_lowest_limit_above_a_process_counts_with_what_is_used_under_it(files: Files) -> None:
    pod = "/sys/fs/cgroup/pods/pod1"
    files(
        {
            "/proc/meminfo": MEMINFO,
            f"/proc/{PID}/cgroup": "0::/pods/pod1/server\n",
            f"{pod}/server/memory.max": "max\n",
            f"{pod}/server/memory.current": f"{1 * GB}\n",
            f"{pod}/server/memory.events": "low 0\noom 0\noom_kill 3\n",
            f"{pod}/server/memory.pressure": "some avg10=1.00\nfull avg10=41.50 avg60=2.00\n",
            f"{pod}/memory.max": f"{8 * GB}\n",
            f"{pod}/memory.current": f"{7 * GB}\n",
            "/sys/fs/cgroup/pods/memory.max": f"{32 * GB}\n",
        }
    )
    found = machine.memory([PID], oom_before=3)
    assert (found.limit, found.current, found.oom_kills, found.pressure) == (8 * GB, 7 * GB, 0, 41.5)


def test_a_limit_above_the_machines_memory_is_none(files: Files) -> None:
    files(
        {
            "/proc/meminfo": MEMINFO,
            f"/proc/{PID}/cgroup": "0::/server\n",
            "/sys/fs/cgroup/server/memory.max": f"{500 * GB}\n",
            "/sys/fs/cgroup/server/memory.current": f"{1 * GB}\n",
        }
    )
    assert machine.memory([PID]).limit == 64 * GB


@pytest.mark.parametrize("limit", [4 * GB, (1 << 63) - 4096])
def test_cgroups_of_the_first_version(files: Files, limit: int) -> None:
    """Without a limit they say a number that no machine has."""
    base = "/sys/fs/cgroup/memory/docker/abc"
    files(
        {
            "/proc/meminfo": MEMINFO,
            f"/proc/{PID}/cgroup": "12:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc\n1:name=systemd:/x\nodd\n",
            f"{base}/memory.limit_in_bytes": f"{limit}\n",
            f"{base}/memory.usage_in_bytes": f"{3 * GB}\n",
            f"{base}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            "/proc/pressure/memory": "some avg10=0.00\nfull avg10=0.25 avg60=0.00\n",
        }
    )
    found = machine.memory([PID], oom_before=0)
    assert (found.limit, found.current) == ((4 * GB, 3 * GB) if limit == 4 * GB else (64 * GB, 16 * GB))
    assert (found.oom_kills, found.pressure) == (1, 0.25)


def test_processes_that_vanish_and_old_kernels_that_tell_less(files: Files) -> None:
    """Before Linux 4.5 only VmRSS is told; a process that ended meanwhile counts nothing."""
    files(
        {
            f"/proc/{PID}/status": "Name:\tx\nVmSize:\t 4000 kB\nVmRSS:\t  3000 kB\n",
            "/proc/78/status": "VmSize:\t 9000 kB\nRssAnon:\t 500 kB\nRssShmem:\t 100 kB\nVmSwap:\t 50 kB\n",
        }
    )
    found = machine.memory([PID, 78, 79])
    assert (found.resident, found.virtual, found.swapped) == (3600 << 10, 13000 << 10, 50 << 10)


def test_who_was_killed_is_told_of_the_servers_own(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "kernel_log", lambda: "Killed process 77 (a)\nKilled process 5 (b)\n")
    assert machine.memory([PID]).killed == (77,)


def test_who_listens_where_nothing_may_be_seen(files: Files) -> None:
    assert machine.listeners(8000) == ()
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    line = "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 424242 1 0\n"
    files({"/proc/net/tcp": head + line + "   1: broken\n"})
    assert machine.listeners(8000) == (-1,)
    assert machine.listeners(8001) == ()


class TestKernelLog:
    @pytest.fixture(autouse=True)
    def real(self, monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
        monkeypatch.undo()

    def test_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> int:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "open", refused)
        assert machine.kernel_log() == ""

    @pytest.mark.parametrize("end", [b"", BlockingIOError(errno.EAGAIN, "no more")])
    def test_records_that_are_overwritten_meanwhile_are_passed_over(
        self, monkeypatch: pytest.MonkeyPatch, end: object
    ) -> None:
        answers = [b"one\n", BrokenPipeError(errno.EPIPE, "overwritten"), b"Killed process 7 (x)\n", end]

        def read(*_: object) -> bytes:
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            assert isinstance(answer, bytes)
            return answer

        monkeypatch.setattr(os, "open", lambda *_: os.dup(0))
        monkeypatch.setattr(os, "read", read)
        assert machine.kernel_log() == "one\nKilled process 7 (x)\n"
        assert answers == []


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert machine.shm_free(str(tmp_path / "no")) is None
    assert (machine.shm_free(str(tmp_path)) or 0) > 0
