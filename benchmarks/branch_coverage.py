"""Branch coverage of the package by its whole test suite, subprocesses included: per room, and what is not reached.

    python benchmarks/branch_coverage.py [--least 92] [--json FILE] [--keep DIR] [-- PYTEST ARGUMENTS]

Needs coverage 7.10 (``tox -e coverage`` brings it); settings are in pyproject.toml. Every Python process that a test
starts is measured: pytest's, xdist's workers, watcher, incidents, the embedded engine. Supervisors and their helpers
run as ``python -S -E``, which coverage's start-up file cannot enter: for the time of the run a second such file leaves
these two words out of their command. A process that is ended with SIGKILL leaves no data; those of the embedded engine,
of which hardly one ends otherwise, therefore save what they have 0.5, 1.5, 3.5 … seconds after their start. The figure
is a lower bound. Exit code 1 below ``--least`` percent, or when a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOOK = "gpuserve_measured"
SOURCE = '''"""Supervisors and helpers start with site-packages, and so with coverage; helpers may save it, ranks do."""
import os
import subprocess
import sys

SCRIPTS = ("/server/supervisor.py", "/server/tree.py", "/gpu_helper.py")
start, kill, execute = subprocess.Popen.__init__, subprocess.Popen.kill, os.execvpe


def ours(argv):
    return isinstance(argv, list) and any(str(word).endswith(SCRIPTS) for word in argv[1:4])


def plain(argv):
    return [argv[0], *(word for word in argv[1:] if word not in ("-S", "-E", "-I"))]


def measured(self, args, *more, **keys):
    wanted = ours(args) and "COVERAGE_PROCESS_CONFIG" in os.environ
    start(self, plain(args) if wanted else args, *more, **keys)


def spare(self):
    if ours(self.args) and self.stdin is not None:
        try:
            self.stdin.close()  # both helpers end when nobody is there to ask
            self.wait(1.0)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
    kill(self)


def become(file, argv, env):
    execute(file, plain(argv) if ours(argv) and "COVERAGE_PROCESS_CONFIG" in env else argv, env)


def keep_saving():
    import threading
    import time

    import coverage

    def save():
        pause = 0.5  # ever longer: a process that saves is one that moves, and hangs are to be found
        while True:
            time.sleep(pause)
            pause *= 2
            try:
                coverage.Coverage.current().save()
            except Exception:
                pass  # not begun yet, or no disk left: a lower bound all the same

    threading.Thread(target=save, name="coverage", daemon=True).start()


subprocess.Popen.__init__, subprocess.Popen.kill, os.execvpe = measured, spare, become
words = " ".join(sys.orig_argv)
if "COVERAGE_PROCESS_CONFIG" in os.environ and ("pytest_gpuserve.sim" in words or "multiprocessing" in words):
    keep_saving()
    os.register_at_fork(after_in_child=keep_saving)
'''


@dataclass
class Count:
    """Lines and branches of one room."""

    lines: int = 0
    lines_reached: int = 0
    branches: int = 0
    branches_reached: int = 0

    @property
    def percent(self) -> float:
        """Lines and branches together, as coverage counts them."""
        return 100.0 * (self.lines_reached + self.branches_reached) / max(1, self.lines + self.branches)

    @property
    def of_branches(self) -> float:
        return 100.0 * self.branches_reached / max(1, self.branches)

    def add(self, summary: dict[str, int]) -> None:
        self.lines += summary["num_statements"]
        self.lines_reached += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_reached += summary["covered_branches"]


def room(file: str) -> str:
    """``server`` of ``pytest_gpuserve/server/ports.py``; modules beside the rooms are ``(package)``."""
    parts = Path(file).parts
    below = parts[parts.index("pytest_gpuserve") + 1 :]
    return below[0] if len(below) > 1 else "(package)"


def by_room(report: dict[str, dict[str, dict[str, dict[str, int]]]]) -> dict[str, Count]:
    """Of coverage's JSON report."""
    rooms: dict[str, Count] = {}
    for file, found in report["files"].items():
        for name in (room(file), "all"):
            rooms.setdefault(name, Count()).add(found["summary"])
    return rooms


@contextmanager
def hook() -> Iterator[None]:
    """The start-up file for the time of a run."""
    place = Path(sysconfig.get_path("purelib"))
    files = {place / f"{HOOK}.py": SOURCE, place / f"{HOOK}.pth": f"import {HOOK}\n"}
    try:
        for path, text in files.items():
            path.write_text(text)
        yield
    finally:
        for path in files:
            path.unlink(missing_ok=True)


def run(words: list[str], data: Path) -> int:
    env = {**os.environ, "COVERAGE_FILE": str(data / "coverage")}
    return subprocess.run([sys.executable, "-m", "coverage", *words], cwd=ROOT, env=env, check=False).returncode


def drop_torn(data: Path) -> int:
    """Remove the files of processes that were killed while they saved: one of them ends the combining of all."""
    torn = 0
    for path in data.glob("coverage.*"):
        try:
            with closing(sqlite3.connect(path)) as database:
                whole = database.execute("pragma quick_check").fetchone() == ("ok",)
                whole = whole and database.execute("select count(*) from coverage_schema").fetchone()[0] > 0
        except sqlite3.DatabaseError:
            whole = False
        if not whole:
            path.unlink()
            torn += 1
    return torn


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--least", type=float, default=92.0, metavar="PERCENT")
    parser.add_argument("--json", type=Path, help="coverage's own report")
    parser.add_argument("--keep", type=Path, help="directory for the data; those that are there already count too")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the start-up file goes whatever happens
    with tempfile.TemporaryDirectory(prefix="coverage-") as name:
        data = (options.keep or Path(name)).resolve()
        data.mkdir(parents=True, exist_ok=True)
        with hook():
            failed = run(["run", "-m", "pytest", *options.pytest], data)
        print(f"{drop_torn(data)} processes were killed while they saved what they had reached")
        report = (options.json or data / "report.json").resolve()
        for words in (["combine", "--quiet", "--append"], ["json", "--quiet", "-o", str(report)]):
            if code := run(words, data):
                return code
        rooms = by_room(json.loads(report.read_text()))
    total = rooms.pop("all")
    for label, count in [*sorted(rooms.items()), ("all", total)]:
        print(
            f"{label:12} {count.percent:5.1f} %   branches {count.branches_reached}/{count.branches} "
            f"({count.of_branches:.1f} %)   lines {count.lines_reached}/{count.lines}"
        )
    return 1 if failed or total.percent < options.least else 0


if __name__ == "__main__":
    sys.exit(main())
