"""Of a pool of idle compile workers a few are read; of one that works, all who work."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.diagnose import crowd, stacks
from pytest_gpuserve.engines.base import ProcessRole
from pytest_gpuserve.report.incident_text import stacks_text

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def role_of(cmdline, comm):
    return ProcessRole("compiler" if "compile_worker" in cmdline[-1] else "helper")


@pytest.fixture
def pool():
    """Starts processes: so many that sleep, so many that compute, and how they are called."""
    with ExitStack() as cleanup:

        def pool(idle: int, busy: int = 0, name: str = "compile_worker"):
            works = ["import sys; sys.stdin.read()"] * idle + ["while True: pass"] * busy
            found = [subprocess.Popen([sys.executable, "-c", work, name], stdin=subprocess.PIPE) for work in works]
            for process in found:
                cleanup.callback(process.stdin.close)
                cleanup.callback(process.wait)
                cleanup.callback(process.kill)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                states = [procfs.stat(process.pid).state for process in found]
                if states[:idle] == ["S"] * idle and _settled(found[:idle]):
                    break
                time.sleep(0.05)
            return [procfs.stat(process.pid) for process in found]

        yield pool


def _settled(processes):
    """None of them has used CPU for a while: they are where they stay."""
    before = [procfs.stat(p.pid).utime for p in processes]
    time.sleep(0.3)
    return before == [procfs.stat(p.pid).utime for p in processes]


def test_idle_workers_beyond_the_first_are_left_out_and_busy_ones_never(pool):
    stats = pool(7, 1)
    assert list(crowd.left_out(stats, role_of)) == [s.id for s in stats[crowd.ENOUGH : 7]]


def test_few_of_a_kind_and_other_kinds_are_all_read(pool):
    assert crowd.left_out(pool(crowd.ENOUGH), role_of) == {}
    assert crowd.left_out(pool(crowd.ENOUGH + 1, name="something_else"), role_of) == {}


def test_a_worker_with_a_child_is_read(pool):
    from dataclasses import replace

    stats = pool(6)
    child = replace(stats[5], ppid=stats[4].pid)
    assert stats[4].id not in crowd.left_out([*stats[:5], child], role_of)


def test_a_role_that_cannot_be_told_costs_nothing(pool):
    def broken(cmdline, comm):
        raise RuntimeError("an engine's trouble")

    assert crowd.left_out(pool(crowd.ENOUGH + 1), broken) == {}


def test_a_reading_that_blocks_is_not_waited_for(monkeypatch, pool):
    stats = pool(crowd.ENOUGH + 1)
    monkeypatch.setattr(procfs, "cmdline", lambda pid: time.sleep(20))
    began = time.monotonic()
    assert crowd.left_out(stats, role_of, limit=0.2) == {}
    assert time.monotonic() - began < 10


def test_a_round_has_one_line_for_those_left_out(pool):
    stats = pool(5)
    told = []
    dumps = stacks.take(stats, role_of, on_dump=told.append)
    assert [bool(dump.threads) for dump in dumps] == [True] * crowd.ENOUGH + [False] * 2
    assert len(told) == crowd.ENOUGH
    assert all(dump.facts["cpu_seconds"] >= 0 for dump in dumps), "what they use is known all the same"
    assert crowd.unread(dumps) == "2 idle compile workers were not read, as 3 of their kind were."
    assert crowd.unread(dumps[: crowd.ENOUGH]) is None
    text = stacks_text(None, [dumps], None)
    assert text.count("Process ") == crowd.ENOUGH
    assert "2 idle compile workers were not read" in text
