"""Makespan of a mixed TP=1/2/4/8 workload on eight virtual GPUs, against a lower bound.

    python benchmarks/makespan.py [--cells 60] [--seeds 20]     simulated time, many workloads
    python benchmarks/makespan.py --real [--scale 0.02]         real pytest -n 4, real leases, servers that only sleep

Real runs: one process; plain ``-n 4`` (pytest-xdist's own scheduler, the same leases); ``-n 4`` with ours, without and
with durations of a past run. No schedule beats the bound: longest unit, work per worker, GPU time per GPU, and what
cannot overlap. Waits of TP=8 for its lease are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pytest_gpuserve.isolation.plan import Unit, longest_first, lower_bound, simulate

CONFTEST = """
import json, os, time, pytest
from pytest_gpuserve.plugin.distribution import CHANNEL, Distributor, WorkerEnd
from pytest_gpuserve.server.leases import acquire, gpu_pool

MODE, SCALE = os.environ["MODE"], float(os.environ["SCALE"])
PAST = json.loads(os.environ["PAST"])
POOL = gpu_pool("virtual:8", {})
LEFT, RUNNING = {}, {}

def server_of(item):
    mark = item.get_closest_marker("serve")
    return mark and (mark.args[0], mark.args[0], mark.args[1])

def pytest_configure(config):
    config.addinivalue_line("markers", "serve(key, gpus, start, test): a server that only takes time")
    if MODE == "ours" or MODE == "ours, with history":
        if channel := getattr(config, "workerinput", {}).get(CHANNEL):
            last = lambda item: LEFT.update({server_of(item)[0]: 1})
            config.pluginmanager.register(WorkerEnd(channel, server_of, last))
        elif config.getoption("tx", None):
            config.pluginmanager.register(Distributor(config, lambda: PAST, lambda: 8))

def pytest_collection_finish(session):
    for item in session.items:
        LEFT[server_of(item)[0]] = LEFT.get(server_of(item)[0], 0) + 1

def stop(key):
    RUNNING.pop(key).release()

def evict():
    found = bool(RUNNING)
    for key in list(RUNNING):
        stop(key)
    return found

@pytest.fixture
def server(request):
    key, gpus, start, test = request.node.get_closest_marker("serve").args
    if key not in RUNNING:
        asked = time.monotonic()
        evict()
        RUNNING[key] = acquire(gpus, POOL, on_wait=lambda text: None, evict_idle=evict, limit=3600, label=key)
        note(key=key, gpus=gpus, waited=time.monotonic() - asked)
        time.sleep(start * SCALE)
    yield test * SCALE
    LEFT[key] -= 1
    if not LEFT[key]:
        stop(key)

def note(**what):
    with open(os.path.join(os.environ["NOTES"], f"{os.getpid()}"), "a") as file:
        file.write(json.dumps(what) + chr(10))
"""


def workload(cells: int, seed: int) -> list[tuple[int, float, float, int]]:
    """(gpus, seconds to start, seconds of a test, tests) of each cell."""
    dice = random.Random(seed)
    return [
        (dice.choice([1, 1, 2, 2, 4, 8]), dice.uniform(15, 120), dice.uniform(2, 25), dice.randint(1, 5))
        for _ in range(cells)
    ]


def units_of(work: list[tuple[int, float, float, int]]) -> list[Unit]:
    units, position = [], 0
    for n, (gpus, start, test, tests) in enumerate(work):
        units.append(Unit(f"cell{n}", f"cell{n}", gpus, tuple(range(position, position + tests)), start + test * tests))
        position += tests
    return units


def simulated(cells: int, seeds: int, workers: int) -> float:
    """Worst ratio over the seeds."""
    ratios, ahead = [], []
    for seed in range(seeds):
        units = units_of(workload(cells, seed))
        bound = lower_bound(units, workers=workers, gpus=8)
        order = longest_first(units)
        ratios.append(simulate(order, workers=workers, gpus=8, lookahead=False).makespan / bound)
        ahead.append(simulate(order, workers=workers, gpus=8, lookahead=True).makespan / bound)
    print(
        f"-n {workers}: {statistics.mean(ratios):.3f} x the bound, worst {max(ratios):.3f} of {seeds} workloads; "
        f"with a look-ahead of one unit it would be {statistics.mean(ahead):.3f}, worst {max(ahead):.3f}"
    )
    return max(ratios)


def real(cells: int, seed: int, scale: float, mode: str, past: dict[str, float]) -> tuple[float, int, float]:
    """(seconds, server starts, longest wait of TP=8) of one run of pytest."""
    work = workload(cells, seed)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "notes").mkdir()
        (home / "conftest.py").write_text(CONFTEST)
        lines = ["import time, pytest"]
        tests = [(n, t) for n, cell in enumerate(work) for t in range(cell[3])]
        random.Random(seed).shuffle(tests)
        if mode == "serial":
            tests.sort()
        for n, t in tests:
            gpus, start, test, _ = work[n]
            lines.append(f"@pytest.mark.serve('cell{n}', {gpus}, {start}, {test})")
            lines.append(f"def test_{n}_{t}(server): time.sleep(server)")
        (home / "test_cells.py").write_text("\n".join(lines))
        environment = {
            **os.environ,
            "MODE": mode,
            "SCALE": str(scale),
            "PAST": json.dumps(past),
            "NOTES": str(home / "notes"),
            "GPUSERVE_LEASES": str(home / "leases"),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:gpuserve",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
        ]
        begin = time.monotonic()
        done = subprocess.run(
            [*command, *(["-n4"] if mode != "serial" else [])],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        took = time.monotonic() - begin
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        notes = [json.loads(line) for path in (home / "notes").iterdir() for line in path.read_text().splitlines()]
    return took, len(notes), max((n["waited"] for n in notes if n["gpus"] == 8), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--scale", type=float, default=0.02)
    options = parser.parse_args()
    if not options.real:
        return 0 if max(simulated(options.cells, options.seeds, workers) for workers in (2, 4, 8)) <= 1.2 else 1
    work = workload(options.cells, 0)
    units = units_of(work)
    bound = lower_bound(units, workers=4, gpus=8) * options.scale
    past = {
        f"test_cells.py::test_{n}_{t}": start * (t == 0) + test
        for n, (_, start, test, tests) in enumerate(work)
        for t in range(tests)
    }
    alone = sum(unit.seconds or 0 for unit in units) * options.scale
    print(f"{len(units)} cells, lower bound for -n 4 on 8 GPUs {bound:.1f} s, one after the other {alone:.1f} s")
    ours = None
    for mode in ("ours, with history", "ours", "plain", "serial"):
        seconds, starts, wait = real(options.cells, 0, options.scale, mode, past if "history" in mode else {})
        ratio = seconds / bound
        ours = ratio if ours is None else ours
        print(
            f"{mode:20} {seconds:7.1f} s  {ratio:5.2f} x the bound  {starts:4} starts  "
            f"longest wait of TP=8 {wait:.1f} s",
            flush=True,
        )
    return 0 if ours is not None and ours <= 1.2 else 1


if __name__ == "__main__":
    sys.exit(main())
