"""Does ``gpuserve bisect`` tell the truth? Real git repositories with a bug planted at a random commit.

    python benchmarks/bisect_truth.py --server [--seeds 60] [--first 0] [--repro 0.8] [--tell]
    python benchmarks/bisect_truth.py --model --seeds 2000

Each repository has 64 commits; 10 % do not build, 5 % fail in another way, and from the planted commit on the test
fails with the given repro rate. ``--server``: the test starts a server, the embedded engine (copied into the
repository) with one rank, that dies while it captures CUDA graphs; in every sixth seed it hangs there instead.
``--model``: commits and test runs in memory, the decisions alone. Without either, a plain test fails.

Right: the reported range holds the planted commit, and every commit of it but the first bad one is one that cannot be
tested. A seed costs about 26 runs of pytest; ``--first`` and ``--seeds`` cut the work into slices.
"""

from __future__ import annotations

import argparse
import os
import random
import re
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
from pytest_gpuserve.cli.bisect_state import State
from pytest_gpuserve.cli.git import Position
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

fault = state.KIND + "@cuda_graph" if state.BROKEN and random.random() < state.REPRO else ""
fault = "raise@weight_load" if state.OTHER else fault
command = [sys.executable, "-m", "vendored.sim", "--tp", "1", "--shards", "1", "--quiet", "--port", "{port}"]

@pytest.mark.gpuserve(engine="command", tp=1, command=[*command, *(["--fault", fault] if fault else [])])
def test_it(server):
    assert server.get("/health").ok
"""
BUILD = "import sys, state\nsys.exit(0 if state.BUILDS else 1)\n"


PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "gpuserve",
    "-p",
    "no:cacheprovider",
    "--gpuserve-artifacts",
    "off",
]
"""No other plugin is loaded (PYTEST_DISABLE_PLUGIN_AUTOLOAD): a step of bisect is mostly the start of pytest."""

STALL = 3.0
"""Seconds of stillness after which a server hangs; one that dies is told without a watcher."""


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


def make(where: Path, planned: Plan, commits: int, repro: float, kind: str | None) -> list[str]:
    """A repository of ``commits`` commits, written by one ``git fast-import``; their hashes, oldest first."""
    files = {
        "test_it.py": SERVER if kind else PLAIN,
        "build.py": BUILD,
        "pytest.ini": "[pytest]\n",
        ".gitignore": "__pycache__\n.pytest_cache\nbisect.log\ngpuserve-artifacts\n",
    }
    if kind:
        files["vendored/__init__.py"] = ""
        sim = Path(pytest_gpuserve.__file__).parent / "sim"
        files |= {f"vendored/sim/{path.name}": path.read_text() for path in sim.glob("*.py")}
    stream: list[bytes] = []
    for number in range(commits):
        files["state.py"] = (
            f"NUMBER = {number}\nBROKEN = {number >= planned.culprit}\nBUILDS = {number not in planned.unbuildable}\n"
            f"OTHER = {number in planned.other}\nREPRO = {repro}\nKIND = {kind!r}\n"
        )
        stream += [b"commit refs/heads/main\n", b"committer t <t@example.org> %d +0000\n" % (1_700_000_000 + number)]
        stream += [
            _data(f"change {number}"),
            *(b"M 644 inline %s\n" % name.encode() + _data(files[name]) for name in files),
        ]
        files = {}
    git(where, "init", "-q", "-b", "main")
    subprocess.run(["git", "fast-import", "--quiet"], cwd=where, input=b"".join(stream), check=True)
    git(where, "reset", "-q", "--hard", "main")
    if kind:  # state.py changes within a second, so nothing is compiled later on; the engine never changes
        subprocess.run([sys.executable, "-m", "compileall", "-q", "vendored"], cwd=where, check=True)
    return git(where, "rev-list", "--reverse", "main").split()


def _data(text: str) -> bytes:
    raw = text.encode()
    return b"data %d\n%s\n" % (len(raw), raw)


def one(seed: int, given: argparse.Namespace) -> tuple[str, int, float, str]:
    """(right, wider, wrong or error; runs of pytest; seconds; last lines)."""
    planned = plan(seed, given.commits)
    kind = ("sleep" if seed % 6 == 5 else "exit") if given.server else None
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        hashes = make(where, planned, given.commits, given.repro, kind)
        options = ["--repro-rate", str(given.repro)] if given.tell else []
        command = [sys.executable, "-m", "pytest_gpuserve.cli", "bisect", "--good", hashes[0], "--bad", hashes[-1]]
        command += ["--build", f"{sys.executable} -S build.py", *options, "--", *PYTEST]
        command += ["--gpuserve-stall-timeout", f"{STALL:g}" if kind == "sleep" else "off"]
        environment = {
            **os.environ,
            "GPUSERVE_STATE": str(where / ".git" / "gpuserve-state"),
            "XDG_CACHE_HOME": str(where / ".git" / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        begin = time.monotonic()
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, env=environment, check=False)
        seconds = time.monotonic() - begin
        log = (where / "bisect.log").read_text() if (where / "bisect.log").exists() else ""
        runs = sum(int(n) for n in re.findall(r"\t(\d+) runs\t", log))
        single = re.search(r"First bad commit: (\w+)", done.stdout)
        found = [single[1]] if single else []
        found = found or [h for h in hashes if re.search(rf"(bad side|skipped): +{h[:12]}", done.stdout)]
        if not found:
            return "error", runs, seconds, done.stdout[-1500:] + done.stderr[-500:]
        kind_of_answer = graded(sorted(map(hashes.index, found)), planned)
        if kind_of_answer == "wrong" and len(found) == 1:
            kind_of_answer = "wrong single commit"
        return kind_of_answer, runs, seconds, done.stdout[-1500:] if kind_of_answer != "right" else ""


def graded(numbers: Sequence[int], planned: Plan) -> str:
    """Of a reported range, oldest first: right, wider than the skips need, or wrong."""
    if planned.culprit not in numbers:
        return "wrong"
    testable = [n for n in numbers[:-1] if n not in planned.unbuildable | planned.other]
    return "wider" if testable else "right"


class Line:
    """A line of commits in memory, with what cli/bisect.py asks of git."""

    def __init__(self, names: list[str], directory: Path) -> None:
        self.names = names
        self.directory = self.here = directory
        self.head = names[-1]

    def checkout(self, where: str) -> None:
        self.head = where

    def candidates(self, bad: str, good: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
        low, high = max(map(self.names.index, good)), self.names.index(bad)
        rows = self.names[low + 1 : high + 1][::-1]
        return rows, {name: (self.names[self.names.index(name) - 1],) for name in rows}

    def is_ancestor(self, older: str, newer: str) -> bool:
        return self.names.index(older) <= self.names.index(newer)


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
        state = State(line, "", "pytest", names[-1], (names[0],), Position(names[-1]), repeat=repeat)  # type: ignore[arg-type]
        work = bisect.Bisection(state, chosen, lambda _: None, not given.tell, 0.995)
        try:
            found = work.run()
        except GpuserveError as error:
            return "error", runs, 0.0, str(error)
    return graded(sorted(map(names.index, found.candidates)), planned), runs, 0.0, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--commits", type=int, default=64)
    parser.add_argument("--repro", type=float, default=0.8)
    parser.add_argument("--tell", action="store_true", help="give --repro-rate; otherwise bisect finds out")
    parser.add_argument("--server", action="store_true")
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
    kind = "model" if given.model else "server" if given.server else "plain test"
    print(
        f"{given.commits} commits, repro {given.repro:g}{' told' if given.tell else ''}, {kind}: {counts} of "
        f"{given.seeds}; {runs / given.seeds:.1f} runs and {seconds / given.seeds:.0f} s a bisection"
    )


if __name__ == "__main__":
    main()
