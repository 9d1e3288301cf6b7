"""What the installed but unused plugin costs a pytest session: paired runs with and without it.

``python benchmarks/plugin_load.py [--pairs 40] [--limit 30]``: prints the median of the differences in milliseconds and
exits 1 when it is above the limit. Each pair runs back to back in random order: a busy machine harms both alike.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(directory: Path, *arguments: str) -> tuple[float, float]:
    """Seconds of wall clock and of CPU that one session of a single empty test takes."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_nothing.py"],
        cwd=directory,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cost(arms: list[list[float]]) -> float:
    """Lower quartile with the plugin less that without."""
    bare, plugin = (statistics.quantiles(arm, n=4)[0] for arm in arms)
    return plugin - bare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--limit", type=float, default=30.0, help="milliseconds of CPU")
    arguments = parser.parse_args()
    without = ("-p", "no:gpuserve")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
        (directory / "pytest.ini").write_text("[pytest]\n")
        for warm_up in ((), without):
            run(directory, *warm_up)
        wall: list[list[float]] = [[], []]  # without, with
        cpu: list[list[float]] = [[], []]
        for _ in range(arguments.pairs):
            for with_plugin in random.sample((0, 1), 2):
                seconds = run(directory, *(() if with_plugin else without))
                wall[with_plugin].append(seconds[0] * 1000)
                cpu[with_plugin].append(seconds[1] * 1000)
    result = {
        "pairs": arguments.pairs,
        "cpu_ms": round(cost(cpu), 1),
        "wall_ms": round(cost(wall), 1),
        "cpu_ms_median_of_differences": round(statistics.median(b - a for a, b in zip(*cpu, strict=True)), 1),
        "session_ms": round(statistics.median(wall[0])),
        "limit_ms": arguments.limit,
    }
    print(json.dumps(result))
    return 0 if result["cpu_ms"] <= arguments.limit else 1


if __name__ == "__main__":
    raise SystemExit(main())
