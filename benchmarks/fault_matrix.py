"""The main job under every fault: sim TP=8 with rank 3 sick, plain and under xdist, both timeout methods, with reruns.

    python benchmarks/fault_matrix.py [--rows 16] [--seed 1] [--json FILE] [--list]

Each row is a run of pytest with one sick server and one healthy one. Rows are chosen so that every two values of
different columns meet at least once (pairwise, greedy, seeded), after the rows that are always run. Of each: tests that
failed and passed, ranks and front end whose stacks are on disk, whether rank 3 is told from the others and nobody else
is blamed, processes left, whether every test has its name in junit. Exit code 1 when a row is not as it must be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pytest_gpuserve import procfs

TAG = "GPUSERVE_FAULT_MATRIX"
LIMIT = 420.0  # seconds for one run
TP = 8
SICK, HOLDER = "TP3", "TP4"  # of the lock that TP3 waits for under flock: a deadlock
HANG = frozenset({"hang"})
EXPECTED: Mapping[str, tuple[frozenset[str], str]] = {
    "sleep": (HANG, SICK),
    "gil": (HANG, SICK),
    "stop": (HANG, SICK),
    "flock": (HANG, HOLDER),
    "spin": (frozenset({"hang", "undecided", "slow"}), SICK),  # it may be slow: too short to tell, but set apart
    "die": (frozenset({"crash"}), ""),  # who of the dead was first is told where somebody saw it
}
"""Verdicts, and who is blamed (nobody need be where it is empty)."""

TESTS = """
import pytest

def ask(server):
    body = {"model": server.model, "prompt": "2+2=", "max_tokens": 4, "temperature": 0}
    assert server.post("/v1/completions", json=body).json()["choices"][0]["text"]

@pytest.mark.gpuserve(engine="sim", tp=2)
def test_healthy(server): ask(server)
"""

SERVING = """
@pytest.mark.gpuserve(engine="sim", tp=TP, args={"fault": "KIND@serving:rank=3:requests=1"})
@pytest.mark.timeout(10)
class TestSick:
    def test_before(self, server): ask(server)
    def test_hang(self, server):
        ask(server)
        ask(server)
    def test_after(self, server): ask(server)
"""

START_UP = """
@pytest.mark.gpuserve(engine="sim", tp=TP, startup_timeout=20, args={"fault": "KIND@PHASE:rank=3"})
def test_hang(server): ask(server)
"""


@dataclass(frozen=True)
class Row:
    """One run. ``workers`` 0: no xdist."""

    fault: str
    phase: str
    workers: int
    method: str
    reruns: int

    def pairs(self) -> Iterator[tuple[object, ...]]:
        yield from itertools.combinations([(f.name, getattr(self, f.name)) for f in fields(self)], 2)


FAULTS = ("sleep", "gil", "spin", "flock", "stop", "die")
EVERY = [Row(*v) for v in itertools.product(FAULTS, ("cuda_graph", "serving"), (0, 2), ("signal", "thread"), (0, 1))]
ALWAYS = (Row("flock", "cuda_graph", 2, "signal", 0), Row("spin", "serving", 2, "thread", 1))
"""Rows in which something was once lost on a busy machine."""


def choose(count: int, seed: int) -> list[Row]:
    """At least ``count`` rows; more when pairs would be left out."""
    rest, rows = EVERY.copy(), list(ALWAYS)
    random.Random(seed).shuffle(rest)
    missing = {pair for row in EVERY for pair in row.pairs()} - {pair for row in rows for pair in row.pairs()}
    while missing or len(rows) < count:
        best = max((row for row in rest if row not in rows), key=lambda row: len(missing & set(row.pairs())))
        rows.append(best)
        missing -= set(best.pairs())
    return rows


@dataclass(frozen=True)
class Seen:
    """What came of one run; ``wrong``: what is not as it must be."""

    failed: tuple[str, ...]
    passed: tuple[str, ...]
    skipped: tuple[str, ...]
    ranks: int
    front_end: bool
    verdict: str
    culprits: tuple[str, ...]
    named_rank: bool
    left: int
    named: bool
    complete: bool
    seconds: float
    load: float
    wrong: tuple[str, ...] = ()


def run(row: Row, directory: Path) -> Seen:
    text = TESTS + (SERVING if row.phase == "serving" else START_UP)
    for word, value in (("KIND", row.fault), ("PHASE", row.phase), ("TP", str(TP))):
        text = text.replace(word, value)
    (directory / "test_it.py").write_text(text)
    (directory / "tox.ini").write_text("[pytest]\n")
    state = directory / "state"
    state.mkdir(mode=0o700)
    tag = uuid.uuid4().hex
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSERVE", "PYTEST"))}
    argv = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", "--junitxml=junit.xml"]
    argv += ["--gpuserve-grace=3", f"--timeout-method={row.method}"]
    argv += [f"-n{row.workers}"] if row.workers else []
    argv += [f"--reruns={row.reruns}"] if row.reruns else []
    begun = time.monotonic()
    with (directory / "out.txt").open("wb") as out:
        env = {**kept, "GPUSERVE_STATE": str(state), TAG: tag}
        process = subprocess.Popen(argv, cwd=directory, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    seconds = time.monotonic() - begun
    time.sleep(0.5)
    left = [pid for pid in procfs.pids() if procfs.environ(pid).get(TAG) == tag]
    seen = Seen(*outcomes(directory), *incident(directory), len(left), *junit(row, directory), round(seconds, 1),
                round(os.getloadavg()[0], 1))  # fmt: skip
    return Seen(**{**asdict(seen), "wrong": tuple(wrong(row, seen))})


def cases(directory: Path) -> list[ET.Element]:
    try:
        return list(ET.parse(directory / "junit.xml").iter("testcase"))
    except (OSError, ET.ParseError):
        return []


def outcomes(directory: Path) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names of tests that failed (or could not be set up), passed, were skipped at last."""
    last: dict[str, str] = {}
    for case in cases(directory):
        kinds = {child.tag for child in case}
        last[case.get("name", "")] = (
            "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        )
    failed, passed, skipped = (
        tuple(sorted(name for name, kind in last.items() if kind == wanted and name))
        for wanted in ("failed", "passed", "skipped")
    )
    return failed, passed, skipped


def junit(row: Row, directory: Path) -> tuple[bool, bool]:
    names = [case.get("name") for case in cases(directory)]
    wanted = {"test_healthy", "test_hang"} | ({"test_before", "test_after"} if row.phase == "serving" else set())
    return all(names) and bool(names), set(names) - {None} == wanted


def incident(directory: Path) -> tuple[int, bool, str, tuple[str, ...], bool]:
    """Of the incident of the sick server with the fewest ranks: ranks and front end on disk, verdict, culprits, and
    whether the sick rank is told from the others: alone in its class, or without a stack, and named in the text."""
    found = []
    for path in directory.glob(f"gpuserve-artifacts/*-sim-tp{TP}-*/incident.json"):
        content = json.loads(path.read_text())
        labels = {file.name.partition(".")[0] for file in (path.parent / "stacks").glob("*.json")}
        ranks = {f"TP{n}" for n in range(TP)} & labels
        classes = [entry["ranks"] for entry in content.get("classes", ()) if SICK in entry["ranks"]]
        apart = SICK in content["text"] and classes in ([[SICK]], [])
        found.append((len(ranks), "api" in labels, str(content["verdict"]), tuple(content["culprits"]), apart))
    return min(found, default=(0, False, "no incident", (), False))


def wrong(row: Row, seen: Seen) -> Iterator[str]:
    if seen.failed != ("test_hang",):
        yield "failed tests"
    others = {"test_healthy"} | ({"test_before", "test_after"} if row.phase == "serving" else set())
    again = {"test_after"} if row.reruns and row.phase == "serving" else set()  # its server hung twice: skipped
    if set(seen.passed) | (set(seen.skipped) & again) != others:
        yield "passed tests"
    if (seen.ranks < TP or not seen.front_end) and row.fault != "die":  # the engine ends when a rank is killed
        yield "stacks"
    verdicts, culprit = EXPECTED[row.fault]
    if seen.verdict not in verdicts or (culprit and seen.culprits != (culprit,)) or not seen.named_rank:
        yield "verdict"
    if seen.left:
        yield "processes left"
    if not seen.named or not seen.complete:
        yield "junit"


def line(row: Row, seen: Seen) -> str:
    how = f"{'-n ' + str(row.workers) if row.workers else 'plain':5} {row.method:6} reruns {row.reruns}"
    stacks = f"{seen.ranks}{'+api' if seen.front_end else ''}"
    tests = f"{len(seen.failed)} failed {len(seen.passed)} passed {len(seen.skipped)} skipped"
    junit = "whole" if seen.named and seen.complete else "NAMELESS" if not seen.named else "INCOMPLETE"
    return (
        f"{row.fault + '@' + row.phase:16} {how}  {tests}  {stacks:5}  {seen.verdict} {','.join(seen.culprits) or '-'}"
        f"  left {seen.left}  junit {junit}  {seen.seconds:5.1f} s  load {seen.load:4.1f}  "
        f"{'WRONG: ' + ', '.join(seen.wrong) if seen.wrong else 'as it must be'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the directories of the runs there")
    parser.add_argument("--list", action="store_true", help="only say which rows would be run")
    given = parser.parse_args()
    rows, seen = choose(given.rows, given.seed), []
    with tempfile.TemporaryDirectory(prefix="gpuserve-faults-") as temporary:
        base = given.keep or Path(temporary)
        for number, row in enumerate(rows):
            if given.list:
                print(row)
                continue
            directory = base / str(number)
            directory.mkdir(parents=True)
            seen.append(run(row, directory))
            print(line(row, seen[-1]), flush=True)
            if given.json:
                told = [{**asdict(r), **asdict(s)} for r, s in zip(rows, seen, strict=False)]
                given.json.write_text(json.dumps(told, indent=1))
    good = sum(not one.wrong for one in seen)
    if seen:
        print(f"{good} of {len(seen)} rows as they must be, {sum(one.seconds for one in seen):.0f} s")
    return 0 if good == len(seen) else 1


if __name__ == "__main__":
    sys.exit(main())
