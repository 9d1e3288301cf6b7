"""Seconds from the end of a server that exits at once to the error that tells it, incident included.

``python benchmarks/exit_latency.py [--runs 10] [--limit 2]``: starts a command that exits with code 3, as a test would;
prints median and worst, and exits with 1 when the worst is above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.errors import ServerStartError
from pytest_gpuserve.report.incident import command
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.spec import ServerSpec

CODE = "import sys; print('no such flag', flush=True); sys.exit(3)"


def one(place: Path) -> float:
    """From the supervisor's event ``exited`` (CLOCK_MONOTONIC) to the exception."""
    spec = ServerSpec("command", command=(sys.executable, "-c", CODE, "{port}"))
    incident = partial(command, artifacts=place / "artifacts", rounds=1)
    try:
        start(
            spec,
            get_engine("command"),
            parent=place,
            limits=Limits(startup=60.0, grace=2.0),
            incident=lambda directory, reason: incident(directory, reason=reason),
        )
    except ServerStartError as error:
        now = time.monotonic()
        if "exited with code 3" not in str(error) or "no such flag" not in str(error):
            raise SystemExit(f"told as something else: {error}") from error
        newest = max(place.glob("*/events.jsonl"), key=os.path.getmtime)
        events = [json.loads(line) for line in newest.read_text().splitlines()]
        return now - next(float(e["monotonic"]) for e in events if e["event"] == "exited")
    raise SystemExit("it became ready")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--limit", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["GPUSERVE_STATE"] = f"{name}/state"
        place = Path(name) / "servers"
        place.mkdir()
        seconds = [one(place) for _ in range(arguments.runs)]
    load = os.getloadavg()[0]
    print(
        f"{arguments.runs} exits told after {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (worst); "
        f"load {load:.1f}"
    )
    return 0 if max(seconds) <= arguments.limit else 1


if __name__ == "__main__":
    raise SystemExit(main())
