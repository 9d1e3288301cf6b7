"""Forty tests over twelve cells, in files and an order by chance: twelve starts, whatever else is asked of pytest.

Servers are stand-ins that only take a lease: what is tested is who is started when (benchmarks/shared_gpus.py does the
same with processes).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.server import lease_files

CONFTEST = """
import json, os
from types import SimpleNamespace
from pytest_gpuserve.plugin import pool

class Server:
    "Ready at once; its GPUs are those that pytest leased."
    left, url, model, port = (), "http://127.0.0.1:9", "m", 9

    def __init__(self, spec, parent):
        self.spec, self.directory = spec, parent
        self.record = SimpleNamespace(root=None, gpus=(), cookie="")
        self.control = SimpleNamespace(
            alive=lambda: True, events=lambda since=0: [], disarm=lambda name: True,
            arm=lambda *arguments, **more: None, stop=lambda grace: None, wait=lambda until, limit: until([]),
        )

    def exit_code(self): return None
    def incidents(self): return []
    def stop(self): pass

def note(*words):
    with open(os.environ["NOTES"], "a") as file:
        file.write(" ".join(words) + chr(10))

class Leasing(pool.Leasing):
    "Notes what is leased as soon as it is, and what is given back just before."

    def take(self, spec, item, held):
        lease = super().take(spec, item, held)
        note("start", spec.id, *(device.name for device in lease.devices))
        return lease

    def give_back(self, lease, server, pids, label):
        note("stop", server.spec.id, *(device.name for device in lease.devices))
        return super().give_back(lease, server, pids, label)

pool.start, pool.Leasing = lambda spec, engine, *, parent, **more: Server(spec, parent), Leasing
pool.processes, pool.answers = lambda record: [], lambda server: None
pool.Watching.begin = lambda self: None
"""


@pytest.fixture
def counted(project: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``counted(arguments...)``: (result, started ids, GPUs leased at most) of one run of the project's tests."""
    project.write(conftest=CONFTEST)
    notes, leases = tmp_path_factory.mktemp("notes") / "notes", tmp_path_factory.mktemp("leases") / "all"
    steered = type(project).environment
    environment = property(lambda self: {**steered.fget(self), "NOTES": str(notes), "GPUSERVE_LEASES": str(leases)})
    monkeypatch.setattr(type(project), "environment", environment)

    def run(*arguments: str) -> tuple[pytest.RunResult, Counter[str], int]:
        notes.unlink(missing_ok=True)
        result = project.wait(project.start("--gpuserve-gpus=virtual:8", *arguments))
        started: Counter[str] = Counter()
        held: set[str] = set()
        most = 0
        for line in notes.read_text().splitlines():  # one order for all processes: a line is written under the lease
            what, spec, *gpus = line.split()
            if what == "start":
                assert not held & set(gpus), "a GPU is leased once"
                started[spec] += 1
                held |= set(gpus)
            else:
                held -= set(gpus)
            most = max(most, len(held))
        assert not held
        assert not lease_files.entries(Path(leases), "lease")
        return result, started, most

    return run


@pytest.fixture
def forty(project: Any, counted: Any) -> Any:
    """``counted`` for forty tests over twelve cells."""
    dice = random.Random(5)
    cells = [(tp, graph, attention) for tp in (1, 2, 4) for graph in ("on", "off") for attention in ("triton", "fa3")]
    tests = [(n, cells[n % 12]) for n in range(40)]
    dice.shuffle(tests)
    files: dict[str, list[str]] = {f"test_{n}": ["import os, pytest"] for n in range(5)}
    for n, (tp, graph, attention) in tests:
        files[dice.choice(sorted(files))] += [
            f"@pytest.mark.gpuserve(engine='sim', tp={tp}, cuda_graph='{graph}', attention_backend='{attention}')",
            f"def test_{n}(server): assert not os.path.exists('fail-{n}')",
        ]
    project.write(**{name: "\n".join(lines) for name, lines in files.items()})
    names = [f"{name}.py" for name in files]
    dice.shuffle(names)
    return lambda *arguments: counted(*arguments, *names)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-p", "no:randomly"],
        ["-p", "randomly", "-p", "no:cacheprovider"],
        ["-p", "no:randomly", "--reruns", "1"],
        ["-p", "no:randomly", "-n4"],
    ],
    ids=["files in any order", "randomly", "reruns", "four workers"],
)
def test_twelve_starts(forty: Any, arguments: list[str]) -> None:
    result, started, most = forty(*arguments)
    result.assert_outcomes(passed=40)
    assert len(started) == 12
    assert set(started.values()) == {1}
    assert 4 <= most <= 8
    result.stdout.fnmatch_lines(["12 server starts for 12 configurations, reused 28 times"])


def test_twelve_starts_are_planned(project: Any, forty: Any) -> None:
    with pytest.raises(FileNotFoundError):  # nothing is started, nothing noted
        forty("-p", "no:randomly", "--gpuserve=plan")
    assert re.search(r"12 servers to start for 40 tests; 28 starts fewer", project.output("out.txt"))


def test_twelve_starts_after_a_failure_with_ff_and_sw(project: Any, forty: Any) -> None:
    (project.path / "fail-17").touch()
    result, started, _ = forty("-p", "no:randomly")
    result.assert_outcomes(passed=39, failed=1)
    assert (len(started), sum(started.values())) == (12, 13), "the test's server is not used again"
    (project.path / "fail-17").unlink()
    result, started, _ = forty("-p", "no:randomly", "--ff")
    result.assert_outcomes(passed=40)
    assert (len(started), sum(started.values())) == (12, 12)
    (project.path / "fail-17").touch()
    stopped, before, _ = forty("-p", "no:randomly", "--sw")
    (project.path / "fail-17").unlink()
    result, started, _ = forty("-p", "no:randomly", "--sw")
    assert set(before.values()) == set(started.values()) == {1}
    assert len(before | started) == 12
    assert stopped.parseoutcomes()["failed"] == 1
    assert stopped.parseoutcomes().get("passed", 0) + result.parseoutcomes()["passed"] == 40


WARM = """
import os, time

def test_eight(gpuserve_pool):
    gpuserve_pool.release(gpuserve_pool.get(engine="sim", tp=4, env={{"WHO": "{who}"}}))
    open("warm-{who}", "w").close()
    while not os.path.exists("warm-{other}"): time.sleep(0.02)
    gpuserve_pool.get(engine="sim", tp=8, env={{"WHO": "{who}"}})
"""


def test_two_workers_with_warm_servers_both_get_all_gpus(project: Any, counted: Any) -> None:
    """Each keeps four GPUs of an idle server and wants eight: neither waits while it holds them."""
    project.write(test_one=WARM.format(who="a", other="b"), test_two=WARM.format(who="b", other="a"))
    result, started, most = counted("-p", "no:randomly", "-n2", "--dist=loadfile")
    result.assert_outcomes(passed=2)
    assert started == {"sim-tp4": 2, "sim-tp8": 2}
    assert most == 8
