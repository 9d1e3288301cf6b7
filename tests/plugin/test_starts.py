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

    def __init__(self, spec, parent, gpus):
        self.spec, self.directory = spec, parent
        self.record = SimpleNamespace(root=None, gpus=gpus, cookie="")
        self.control = SimpleNamespace(
            alive=lambda: True, events=lambda since=0: [], disarm=lambda name: True,
            arm=lambda *arguments, **more: None, stop=lambda grace: None, wait=lambda until, limit: until([]),
        )

    def exit_code(self): return None
    def incidents(self): return []
    def stop(self): note("stop", self.spec.id, *self.record.gpus)

def note(*words):
    with open(os.environ["NOTES"], "a") as file:
        file.write(" ".join(words) + chr(10))

def start(spec, engine, *, parent, gpus, **more):
    note("start", spec.id, *gpus)
    return Server(spec, parent, gpus)

pool.start, pool.processes, pool.answers = start, lambda record: [], lambda server: None
pool.Watching.begin = lambda self: None
"""


@pytest.fixture
def forty(project: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``forty(arguments...)``: (result, started ids, GPUs leased at most) of one run."""
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
    project.write(conftest=CONFTEST, **{name: "\n".join(lines) for name, lines in files.items()})
    names = [f"{name}.py" for name in files]
    dice.shuffle(names)
    notes, leases = tmp_path_factory.mktemp("notes") / "notes", tmp_path_factory.mktemp("leases") / "all"
    steered = type(project).environment
    environment = property(lambda self: {**steered.fget(self), "NOTES": str(notes), "GPUSERVE_LEASES": str(leases)})
    monkeypatch.setattr(type(project), "environment", environment)

    def run(*arguments: str) -> tuple[pytest.RunResult, Counter[str], int]:
        notes.unlink(missing_ok=True)
        result = project.wait(project.start("--gpuserve-gpus=virtual:8", *arguments, *names))
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

    run.path = project.path  # type: ignore[attr-defined]
    return run


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
    assert most <= 8
    result.stdout.fnmatch_lines(["12 server starts for 12 configurations, reused 28 times"])


def test_twelve_starts_are_planned(forty: Any) -> None:
    with pytest.raises(FileNotFoundError):  # nothing is started, nothing noted
        forty("-p", "no:randomly", "--gpuserve=plan")
    assert re.search(r"12 servers to start for 40 tests; 28 starts fewer", (forty.path / "out.txt").read_text())


def test_twelve_starts_after_a_failure_with_ff_and_sw(forty: Any) -> None:
    (forty.path / "fail-17").touch()
    result, started, _ = forty("-p", "no:randomly")
    result.assert_outcomes(passed=39, failed=1)
    assert (len(started), sum(started.values())) == (12, 13), "the test's server is not used again"
    (forty.path / "fail-17").unlink()
    result, started, _ = forty("-p", "no:randomly", "--ff")
    result.assert_outcomes(passed=40)
    assert (len(started), sum(started.values())) == (12, 12)
    (forty.path / "fail-17").touch()
    stopped, before, _ = forty("-p", "no:randomly", "--sw")
    (forty.path / "fail-17").unlink()
    result, started, _ = forty("-p", "no:randomly", "--sw")
    assert set(before.values()) == set(started.values()) == {1}
    assert len(before | started) == 12
    assert stopped.parseoutcomes()["failed"] == 1
    assert stopped.parseoutcomes().get("passed", 0) + result.parseoutcomes()["passed"] == 40
