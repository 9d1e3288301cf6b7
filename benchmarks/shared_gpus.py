"""Forty tests over twelve configurations on eight virtual GPUs: how often servers start, and what kills leave leased.

    python benchmarks/shared_gpus.py [--kills 30] [--seed 1] [--skip-modes]

Tests stand in files and in an order by chance; their servers are the embedded engine. First one run in each mode (one
process, --ff after a failure, --sw, pytest-randomly, --reruns, four workers): starts are counted by server.json files.
Then runs with four workers of which one after the other is SIGKILLed at random moments, until there were ``--kills``.

A checker, a process of its own, samples the lease directory all along: how many GPUs are leased, whether one is leased
twice. After a kill the GPUs of that worker's servers must be free within grace + 1 s (and slack), after a run all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pytest_gpuserve import procfs
from pytest_gpuserve.server import lease_files

GRACE = 1.0
FILES = 5


def project(home: Path, seed: int, seconds: float) -> list[str]:
    """Write forty tests; the files in the order to be named."""
    dice = random.Random(seed)
    cells = [(tp, graph, attention) for tp in (1, 2, 4) for graph in ("on", "off") for attention in ("triton", "fa3")]
    files = {f"test_{n}.py": ["import os, time, pytest"] for n in range(FILES)}
    tests = list(range(40))
    dice.shuffle(tests)
    for n in tests:
        tp, graph, attention = cells[n % 12]
        files[dice.choice(sorted(files))] += [
            f"@pytest.mark.gpuserve(engine='sim', tp={tp}, cuda_graph='{graph}', attention_backend='{attention}',",
            "                      args={'shards': 1, 'quiet': True})",
            f"def test_{n}(server):",
            f"    time.sleep({seconds}); assert not os.path.exists('fail-{n}')",
        ]
    (home / "tox.ini").write_text("[pytest]\n")
    for name, lines in files.items():
        (home / name).write_text("\n".join(lines) + "\n")
    names = sorted(files)
    dice.shuffle(names)
    return names


def begin(home: Path, *words: str) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSERVE", "PYTEST"))}
    own = {"GPUSERVE_STATE": str(home / "state"), "GPUSERVE_LEASES": str(home / "leases")}
    options = ["--gpuserve-gpus=virtual:8", "--gpuserve-stall-timeout=off", f"--gpuserve-grace={GRACE:g}", "-v"]
    with (home / "out.txt").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *words],
            cwd=home,
            env={**kept, **own},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def leased(directory: Path) -> list[str]:
    """Names of the GPUs that are leased now, once a lease."""
    if not directory.is_dir():
        return []
    return [device[0] for entry in lease_files.entries(directory, "lease") for device in entry.body["devices"]]


def sample(directory: str, connection: Any) -> None:
    """The checker: until it is told to stop."""
    most = samples = twice = 0
    while not connection.poll():
        one, other = leased(Path(directory)), leased(Path(directory))  # at a death locks are freed one by one
        found = min(one, other, key=len)
        samples += 1
        most = max(most, len(found))
        twice += len(set(one)) < len(one) and len(set(other)) < len(other)
        time.sleep(0.005)
    connection.send((most, samples, twice))


@contextlib.contextmanager
def checked(home: Path, figures: dict[str, Any]) -> Any:
    ours, theirs = multiprocessing.Pipe()
    checker = multiprocessing.get_context("spawn").Process(target=sample, args=(str(home / "leases"), theirs))
    checker.start()
    try:
        yield
    finally:
        ours.send("stop")
        most, samples, twice = ours.recv()
        checker.join()
        figures["most leased"] = max(figures.get("most leased", 0), most)
        figures["samples"] = figures.get("samples", 0) + samples
        figures["leased twice"] = figures.get("leased twice", 0) + twice


def servers(home: Path) -> set[Path]:
    return set((home / "state").glob("sessions/*/*/server.json"))


def outcome(home: Path) -> str:
    lines = (home / "out.txt").read_text(errors="replace").splitlines()
    return next((line.strip("= ") for line in reversed(lines) if " in " in line and "==" in line), lines[-1])


def modes(home: Path, names: list[str], figures: dict[str, Any]) -> None:
    """Server starts of a run in each mode."""
    order = ["-p", "no:randomly"]
    failing = home / "fail-17"
    for name, words, before in (
        ("one process", order, None),
        ("-p randomly", ["-p", "randomly"], None),
        ("--reruns 1", [*order, "--reruns=1"], None),
        ("-n 4", [*order, "-n4"], None),
        ("--ff after a failure", [*order, "--ff"], order),
        ("--sw, both parts", [*order, "--sw"], [*order, "--sw"]),
    ):
        known = servers(home)
        if before is not None:
            failing.touch()
            begin(home, *before, *names).wait()
            failing.unlink()
            known = known if name.startswith("--sw") else servers(home)
        begin(home, *words, *names).wait()
        figures.setdefault("starts", {})[name] = len(servers(home) - known)
        print(f"{name}: {figures['starts'][name]} starts; {outcome(home)}", flush=True)


def workers(controller: int) -> list[int]:
    """By what they were started with, or by the title that pytest-xdist gives them once tests run."""
    children = [pid for pid, stat in procfs.snapshot().items() if stat.ppid == controller and stat.alive]
    return [p for p in children if re.search(r"sys\.stdin\.readline|^\[pytest-xdist ", " ".join(procfs.cmdline(p)))]


def owned(home: Path, worker: int) -> list[procfs.ProcessId]:
    """Roots of the servers that this worker started."""
    found = []
    for path in (home / "state").glob(f"sessions/{worker}-*/*/server.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(procfs.ProcessId(*json.loads(path.read_text())["root"]))
    return [root for root in found if procfs.same(root)]


def kills(
    home: Path, names: list[str], wanted: int, dice: random.Random, slack: float, figures: dict[str, Any]
) -> None:
    figures |= {"kills": 0, "with a server": 0, "runs": 0, "left": 0, "slowest": 0.0, "outcomes": []}
    while figures["kills"] < wanted:
        run = begin(home, "-p", "no:randomly", "-n4", *names)
        figures["runs"] += 1
        while run.poll() is None and figures["kills"] < wanted:
            while run.poll() is None and not leased(home / "leases"):
                time.sleep(0.02)  # a worker that is still collecting has nothing to leave behind
            time.sleep(dice.uniform(0.0, 3.0))
            if not (found := workers(run.pid)):
                continue
            victim = dice.choice(found)
            roots = owned(home, victim)
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
            moment = time.monotonic()
            figures["kills"] += 1
            figures["with a server"] += bool(roots)
            while any(map(procfs.same, roots)) and time.monotonic() - moment < GRACE + 1 + slack:
                time.sleep(0.02)
            figures["left"] += sum(map(procfs.same, roots))
            if roots:
                figures["slowest"] = max(figures["slowest"], time.monotonic() - moment)
        try:
            run.wait(300)
        except subprocess.TimeoutExpired:
            run.kill()
            figures["outcomes"].append("did not end")
        figures["outcomes"].append(outcome(home))
        deadline = time.monotonic() + GRACE + 1 + slack
        while leased(home / "leases") and time.monotonic() < deadline:
            time.sleep(0.02)
        figures["left"] += len(leased(home / "leases"))
        print(f"run {figures['runs']}: {figures['kills']} kills so far; {figures['outcomes'][-1]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one test")
    parser.add_argument("--slack", type=float, default=5.0, help="beyond grace + 1 s, for machines that are busy")
    parser.add_argument("--skip-modes", action="store_true")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="shared-gpus-") as name:
        home = Path(name)
        (home / "state").mkdir(mode=0o700)
        names = project(home, given.seed, given.seconds)
        with checked(home, figures):
            if not given.skip_modes:
                modes(home, names, figures)
            kills(home, names, given.kills, random.Random(given.seed), given.slack, figures)
    lost = [int(n) for text in figures.pop("outcomes") for n in re.findall(r"(\d+) failed", text)]
    print({**figures, "tests that died with their worker": sum(lost)})
    good = figures["most leased"] <= 8 and not figures["left"] and not figures["leased twice"]
    starts = dict(figures.get("starts", {}))
    stepwise = starts.pop("--sw, both parts", 12)  # the server on which the first part failed is started again
    return 0 if good and stepwise in (12, 13) and set(starts.values()) <= {12} else 1


if __name__ == "__main__":
    sys.exit(main())
