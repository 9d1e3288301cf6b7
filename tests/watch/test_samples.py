"""The samples of a whole life in a file of bounded size."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.procfs import ProcessId
from pytest_gpuserve.watch.progress import Reading
from pytest_gpuserve.watch.sample import GpuSample, ProcessSample, Sample
from pytest_gpuserve.watch.samples import SampleFile

MOVING = Reading("moving", 0.0, 60.0, "log")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def look(seconds: float, *labels: str) -> Sample:
    names = labels or ("TP0",)
    processes = {
        ProcessId(n, 1): ProcessSample(ProcessId(n, 1), label, "scheduler", "S", cpu=seconds / 2, rss=1 << 20)
        for n, label in enumerate(names, 1)
    }
    return Sample(at=seconds, processes=processes, phase="cuda_graph", log=100, gpus=(GpuSample(76 << 30, 0, 88.4),))


def test_a_sample_a_second_says_what_moved(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "s.jsonl")
    for n in range(40):  # four looks a second
        file.add(look(n / 4, "TP0", "TP1", "cc1plus", "cc1plus"), MOVING, 1000 + n / 4)
    file.close()
    found = read(tmp_path / "s.jsonl")
    assert len(found) == 10
    assert found[4] == {
        "t": 1004.0,
        "kind": "sample",
        "state": "moving",
        "still": 0.0,
        "phase": "cuda_graph",
        "log": 100,
        "cpu": {"TP0": 2.0, "TP1": 2.0, "cc1plus": 4.0},
        "rss": 4 << 20,
        "gpus": [[76 << 30, 0, 88]],
        "tokens": None,
        "requests": None,
    }


def test_a_change_of_state_is_kept_at_once(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "s.jsonl")
    file.add(look(0), MOVING, 1000.0)
    file.add(look(0.2), Reading("suspect", 30.0, 60.0, "log"), 1000.2)
    assert [entry["state"] for entry in read(tmp_path / "s.jsonl")] == ["moving", "suspect"]


def test_a_clock_that_is_set_costs_no_sample(tmp_path: Path) -> None:
    """Mutation: what is due by ``now``: after the first step nothing is, for a day."""
    file = SampleFile(tmp_path / "s.jsonl")
    for n in range(10):
        file.add(look(n), MOVING, 1000.0 + n + (90_000 if n < 2 else -90_000 if n < 5 else 0))
        file.add(look(n + 0.3), MOVING, 1000.3 + n + (90_000 if n < 1 else -90_000 if n < 4 else 0))
    file.close()
    assert len(read(tmp_path / "s.jsonl")) == 10


@pytest.mark.parametrize("seconds", [50, 101, 1000, 20_000])
def test_any_length_of_life_fits_and_is_covered_evenly(tmp_path: Path, seconds: int) -> None:
    file = SampleFile(tmp_path / "s.jsonl", most=100, notes=10)
    most = 0
    for n in range(seconds):
        file.add(look(n), MOVING, 1000.0 + n)
        if n % 3 == 0:
            file.note(f"test {n} began", 1000.0 + n)
            most = max(most, len((tmp_path / "s.jsonl").read_bytes().splitlines()))
    file.close()
    assert (tmp_path / "s.jsonl").stat().st_mode & 0o077 == 0
    found = read(tmp_path / "s.jsonl")
    assert most <= 120
    times = [entry["t"] for entry in found if entry["kind"] == "sample"]
    assert times == sorted(times)
    assert min(50, seconds) <= len(times) <= 100
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) <= 2 * min(gaps)
    assert times[0] <= 1000 + 2 * max(gaps)
    assert times[-1] >= 1000 + seconds - 1 - max(gaps)
    notes = [entry["text"] for entry in found if entry["kind"] == "event"]
    assert notes[-1] == f"test {(seconds - 1) // 3 * 3} began"


def test_a_directory_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "gone" / "s.jsonl", most=10)
    for n in range(30):
        file.add(look(n), MOVING, float(n))
        file.note("x", float(n))
    file.close()


def test_a_flood_of_processes_is_summed_up(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "s.jsonl")
    file.add(look(2.0, *(f"cc{n}" for n in range(1000))), MOVING, 1.0)
    (found,) = read(tmp_path / "s.jsonl")
    assert len(found["cpu"]) == 601
    assert sum(found["cpu"].values()) == 1000.0
