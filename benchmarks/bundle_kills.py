"""pytest is SIGKILLed at random moments while an incident is taken: is every bundle readable, and is no secret in it?

Run: ``python benchmarks/bundle_kills.py --kills 50 [--seed 1] [--keep DIR]``. Each run is a pytest of its own with a
server whose rank hangs at start-up; the moments are spread over the incident. Exit code 0: every bundle opens, says
what is missing, is torn nowhere, and the seeded secret is nowhere below the artifacts directory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pytest_gpuserve import procfs
from pytest_gpuserve.report.bundle_check import check
from pytest_gpuserve.report.bundle_reader import BundleError, open_bundles

SECRET = "seeded-5ecret-8841-zq"

TEST = f"""
import pytest

@pytest.mark.gpuserve(engine="sim", tp=3, startup_timeout=2, env={{"SERVICE_TOKEN": "{SECRET}"}},
                      args={{"fault": "sleep@weight_load:rank=1", "api_key": "{SECRET}"}})
def test_it(server):
    pass
"""

_LIMIT = 60.0


@dataclass(frozen=True)
class Result:
    """One kill. ``at``: seconds after the incident's directory appeared; ``bundles``: what each one is."""

    at: float
    bundles: tuple[str, ...]
    problems: tuple[str, ...]


def kill_once(place: Path, at: float, grace: float = 2.0) -> Result:
    """Run pytest in ``place``, kill it ``at`` seconds into the incident, and look at what is left."""
    (place / "test_it.py").write_text(TEST)
    (place / "pytest.ini").write_text("[pytest]\n")
    state, artifacts = place / "state", place / "gpuserve-artifacts"
    state.mkdir(mode=0o700)
    environment = {**os.environ, "GPUSERVE_STATE": str(state), "MY_API_KEY": SECRET}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    argv += [f"--gpuserve-grace={grace:g}", "--gpuserve-dump-timeout=20"]
    with subprocess.Popen(
        argv, cwd=place, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        begun = _wait(lambda: any(state.glob("sessions/*/*/incidents/*")) or process.poll() is not None)
        if begun and process.poll() is None:
            time.sleep(at)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    left = _wait(lambda: not _processes(state))
    problems = [] if begun else ["no incident was begun"]
    problems += [] if left else [f"still there: {_processes(state)}"]
    problems += [f"the secret is in {file}" for file in _files(artifacts) if SECRET.encode() in file.read_bytes()]
    return Result(at, *_bundles(artifacts, problems))


def _bundles(artifacts: Path, problems: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``whole``, or ``incomplete: 3 missing``; it is a problem when one is torn or does not open."""
    told = []
    directories = [path for path in artifacts.iterdir() if path.is_dir()] if artifacts.exists() else []
    for path in directories:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest_gpuserve.cli", "explain", "--check", str(path)],
            capture_output=True, text=True, timeout=_LIMIT, check=False,
        )  # fmt: skip
        try:
            (bundle,) = open_bundles(path)
        except BundleError as error:
            if list(path.iterdir()) or not path.name.startswith("."):  # a draft with nothing in it yet is no bundle
                problems.append(f"{path.name}: {error}")
            else:
                told.append("nothing yet")
            continue
        found = check(bundle)
        if ran.returncode != (0 if found.whole else 1) or not ran.stdout.strip():
            problems.append(f"{path.name}: --check ended with {ran.returncode}: {ran.stderr[-200:]}")
        if torn := [name for name, why in found.torn if "being written" not in why]:
            problems.append(f"{path.name}: torn: {torn}")
        if not found.complete and not found.missing:
            names = set(bundle.files.names)
            told.append("incomplete: nothing missing" if "versions.json" in names else "incomplete, and nothing said")
        else:
            told.append("whole" if found.whole else f"incomplete: {len(found.missing)} missing")
    return tuple(told), tuple(problems)


def _wait(condition: object) -> bool:
    deadline = time.monotonic() + _LIMIT
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]


def _processes(state: Path) -> list[int]:
    """Of this run: by the state directory in their environment or command line."""
    mark = str(state).encode()
    found = []
    for pid in procfs.pids():
        if pid != os.getpid() and mark in procfs.read(f"/proc/{pid}/cmdline") + procfs.read(f"/proc/{pid}/environ"):
            status = procfs.stat(pid)
            if status is not None and status.alive:
                found.append(pid)
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--span", type=float, default=9.0, metavar="S", help="moments lie within so many seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the runs there")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    kinds: Counter[str] = Counter()
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        places = [(options.keep or Path(scratch)) / f"run{number:02}" for number in range(options.kills)]
        for place in places:
            place.mkdir(parents=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            moments = [dice.uniform(0, options.span) for _ in places]
            for number, result in enumerate(pool.map(kill_once, places, moments)):
                kinds.update(result.bundles or ("no bundle yet",))
                bad += bool(result.problems)
                said = "; ".join((*result.bundles, *result.problems))
                print(f"{number:3} killed after {result.at:4.1f} s: {said or 'no bundle yet'}", flush=True)
    print(f"{options.kills} kills, {bad} with a problem; {dict(kinds)}; load {os.getloadavg()[0]:.1f}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
