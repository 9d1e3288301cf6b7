"""Does ``gpuserve bisect`` tell the truth? Real git repositories with a bug planted at a random commit.

    python benchmarks/bisect_truth.py [--seeds 60] [--repro 0.8] [--server] [--commits 64]

Each repository has 64 commits; 10 % do not build, 5 % fail in another way, and from the planted commit on the test
fails with the given repro rate. ``--server``: the test starts a server (the embedded engine, copied into the
repository) that hangs. ``--fast``: a stand-in for pytest that reports as our plugin does, so that many seeds take
minutes. Right: the reported range holds
the planted commit, and every commit of it but the first bad one is one that cannot be tested.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest_gpuserve
from pytest_gpuserve.cli import bisect
from pytest_gpuserve.cli.judge import Settings
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.isolation.judge import BAD, GOOD, SKIP, Judged, repeats

PLAIN = """\
import random
import state

def test_it():
    if state.OTHER:
        raise RuntimeError("another failure")
    assert not (state.BROKEN and random.random() < state.REPRO), "the planted failure"
"""
SERVER = """\
import random, sys
import pytest, state

fault = "sleep@cuda_graph:rank=1" if state.BROKEN and random.random() < state.REPRO else ""
fault = "raise@weight_load" if state.OTHER else fault
command = [sys.executable, "-m", "vendored.sim", "--tp", "2", "--port", "{port}"]

@pytest.mark.gpuserve(engine="command", tp=2, command=[*command, *(["--fault", fault] if fault else [])])
def test_it(server):
    assert server.get("/health").ok
"""
FAST = f"""\
#!{sys.executable} -IS
import json, os, random, sys
sys.path.insert(0, os.getcwd())
import state
bad = state.BROKEN and random.random() < state.REPRO
error = "RuntimeError" if state.OTHER else "AssertionError" if bad else None
entry = {{"nodeid": "test_it", "outcome": "failed" if error else "passed", "error": error}}
with open(os.environ["GPUSERVE_RESULTS"], "w") as file:
    file.write(json.dumps(entry))
sys.exit(1 if error else 0)
"""
BUILD = "import sys, state\nsys.exit(0 if state.BUILDS else 1)\n"


PYTEST = [
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist"),
    *("--gpuserve-stall-timeout", "4", "--gpuserve-artifacts", "off"),
]


@dataclass(frozen=True)
class Plan:
    culprit: int
    unbuildable: frozenset[int]
    other: frozenset[int]


def plan(seed: int, commits: int) -> Plan:
    rng = random.Random(seed)
    culprit = rng.randrange(1, commits)
    inner = range(1, commits - 1)
    return Plan(
        culprit,
        frozenset(rng.sample(inner, round(commits * 0.1))),
        frozenset(rng.sample(inner, round(commits * 0.05))),
    )


def git(where: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *words], cwd=where, check=True, capture_output=True, text=True
    ).stdout.strip()


def make(where: Path, planned: Plan, commits: int, repro: float, server: bool) -> list[str]:
    git(where, "init", "-q")
    (where / "test_it.py").write_text(SERVER if server else PLAIN)
    (where / "build.py").write_text(BUILD)
    (where / "pytest").write_text(FAST)
    (where / "pytest").chmod(0o755)
    (where / "pytest.ini").write_text("[pytest]\n")
    (where / ".gitignore").write_text("__pycache__\n.pytest_cache\nbisect.log\ngpuserve-artifacts\n")
    if server:
        shutil.copytree(
            Path(pytest_gpuserve.__file__).parent / "sim",
            where / "vendored" / "sim",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        (where / "vendored" / "__init__.py").touch()
    hashes = []
    for number in range(commits):
        (where / "state.py").write_text(
            f"NUMBER = {number}\nBROKEN = {number >= planned.culprit}\nBUILDS = {number not in planned.unbuildable}\n"
            f"OTHER = {number in planned.other}\nREPRO = {repro}\n"
        )
        git(where, "add", "-A")
        git(where, "commit", "-q", "-m", f"change {number}")
        hashes.append(git(where, "rev-parse", "HEAD"))
    return hashes


def one(seed: int, given: argparse.Namespace) -> tuple[str, int, float, str]:
    """(right, wider, wrong or error; runs of pytest; seconds; last lines)."""
    planned = plan(seed, given.commits)
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        hashes = make(where, planned, given.commits, given.repro, given.server)
        options = ["--repro-rate", str(given.repro)] if given.tell else []
        begin = time.monotonic()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest_gpuserve.cli", "bisect", "--good", hashes[0], "--bad", hashes[-1]),
                *("--build", f"{sys.executable} build.py", *options, "--"),
                *(
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-p",
                    "no:randomly",
                    "-p",
                    "no:cacheprovider",
                    "-p",
                    "no:xdist",
                ),
                *("--gpuserve-stall-timeout", "4", "--gpuserve-artifacts", "off"),
            ],
            cwd=where,
            capture_output=True,
            text=True,
            env={**os.environ, "GPUSERVE_STATE": str(where / ".git" / "state"), "PYTHONDONTWRITEBYTECODE": "1"},
            check=False,
        )
        seconds = time.monotonic() - begin
        log = (where / "bisect.log").read_text() if (where / "bisect.log").exists() else ""
        runs = sum(int(n) for n in re.findall(r"\t(\d+) runs\t", log))
        if "First bad commit: " in done.stdout:
            found = [re.search(r"First bad commit: (\w+)", done.stdout).group(1)]  # type: ignore[union-attr]
        else:
            found = [h for h in hashes if re.search(rf"(bad side|skipped): +{h[:12]}", done.stdout)]
        if not found:
            return "error", runs, seconds, done.stdout[-1500:] + done.stderr[-500:]
        if hashes[planned.culprit] not in found:
            return "wrong", runs, seconds, done.stdout[-1500:]
        numbers = sorted(map(hashes.index, found))
        testable = [n for n in numbers[:-1] if n not in planned.unbuildable | planned.other]
        return ("wider" if testable else "right"), runs, seconds, ""


class Line:
    """A line of commits in memory, with what cli/bisect.py asks of git."""

    def __init__(self, names: list[str], directory: Path) -> None:
        self.names = names
        self.directory = self.top = directory
        self.head = names[-1]

    def checkout(self, where: str) -> None:
        self.head = where

    def candidates(self, bad: str, good: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
        low, high = max(map(self.names.index, good)), self.names.index(bad)
        rows = self.names[low + 1 : high + 1][::-1]
        return rows, {name: (self.names[self.names.index(name) - 1],) for name in rows}

    def run(self, words: Sequence[str]) -> tuple[int, str, str]:
        _, _, older, newer = words  # merge-base --is-ancestor A B
        return int(self.names.index(older) > self.names.index(newer)), "", ""


def modelled(seed: int, given: argparse.Namespace) -> tuple[str, int, float, str]:
    """As :func:`one`, with commits and test runs in memory: the decisions alone, thousands of seeds a minute."""
    planned, rng = plan(seed, given.commits), random.Random(f"runs {seed}")
    names = [f"commit{number:03d}" for number in range(given.commits)]
    runs = 0

    def judge(chosen: Settings, say: object, *, cwd: Path | None = None) -> Judged:
        nonlocal runs
        number = names.index(line.head)
        if number in planned.unbuildable | planned.other:
            return Judged(SKIP, "cannot be tested")
        for _ in range(chosen.repeat):
            runs += 1
            if number >= planned.culprit and rng.random() < given.repro:
                return Judged(BAD, "planted")
        return Judged(GOOD, "passed")

    with tempfile.TemporaryDirectory() as directory:
        line = Line(names, Path(directory))
        bisect.judge = judge  # type: ignore[assignment]
        repeat = repeats(given.repro, 0.005) if given.tell else 1
        chosen = Settings(("pytest",), repeat=repeat)
        work = bisect.Bisection(line, chosen, "", lambda _: None, not given.tell, 0.995, fresh=True)  # type: ignore[arg-type]
        try:
            found = work.run(names[-1], [names[0]])
        except GpuserveError as error:
            return "error", runs, 0.0, str(error)
    numbers = [names.index(name) for name in found.candidates]
    if planned.culprit not in numbers:
        return "wrong", runs, 0.0, ""
    testable = [n for n in numbers if n != max(numbers) and n not in planned.unbuildable | planned.other]
    return ("wider" if testable else "right"), runs, 0.0, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--commits", type=int, default=64)
    parser.add_argument("--repro", type=float, default=0.8)
    parser.add_argument("--tell", action="store_true", help="give --repro-rate; otherwise bisect finds out")
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--model", action="store_true", help="commits and tests in memory: the decisions alone")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    counts: dict[str, int] = {}
    runs = seconds = 0.0
    with ThreadPoolExecutor(1 if given.model else given.jobs) as pool:
        seeds = range(given.first, given.first + given.seeds)
        for seed, (kind, n, took, text) in zip(
            seeds, pool.map(lambda s: (modelled if given.model else one)(s, given), seeds), strict=True
        ):
            counts[kind] = counts.get(kind, 0) + 1
            if not given.model or kind != "right":
                print(f"seed {seed}: {kind}, {n} runs, {took:.0f} s", flush=True)
            runs += n
            seconds += took
            if text:
                print(f"planted {plan(seed, given.commits)}\n{text}", flush=True)
    kind = "model" if given.model else "server" if given.server else "stand-in" if given.fast else "plain test"
    print(
        f"{given.commits} commits, repro {given.repro:g}{' told' if given.tell else ''}, {kind}: {counts} of "
        f"{given.seeds}; {runs / given.seeds:.1f} runs and {seconds / given.seeds:.0f} s a bisection"
    )


if __name__ == "__main__":
    main()
