"""Many starts and stops of one server in one process: what grows?

    python benchmarks/soak.py [--cycles 500] [--tp 8] [--json FILE]

Every ``--every`` cycles: our descriptors (claims of ports among them), threads, children, resident memory, the servers'
files in /dev/shm, files in a temporary directory of the run's own. The first sample after a warm-up is compared with
the last: counts may not grow at all, memory not by more than ``--memory`` MiB. Exit code 1 when something grew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from pytest_gpuserve import procfs
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.paths import session_directory
from pytest_gpuserve.spec import ServerSpec


def sample(temporary: Path, roots: set[int]) -> dict[str, int]:
    """What there is now. ``roots``: pids of all front ends so far, which name their files in /dev/shm."""
    me = procfs.stat(os.getpid())
    status = procfs.read("/proc/self/status").decode()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    ours = tuple(f"gpuserve_sim_loads_{pid}-" for pid in roots)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": me.threads if me else 0,
        "children": len(procfs.descendants(os.getpid())),
        "shared memory": sum(path.name.startswith(ours) for path in Path("/dev/shm").iterdir()),
        "temporary files": sum(len(files) + len(folders) for _, folders, files in os.walk(temporary)),
        "memory KiB": rss,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--memory", type=float, default=8.0, help="MiB that the process may grow by")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    spec = ServerSpec.from_mapping({"engine": "sim", "tp": options.tp, "args": {"leak_shm": True}})
    body = {"prompt": "x", "max_tokens": 2}
    samples: list[dict[str, int]] = []
    begin, roots = time.monotonic(), set[int]()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        home = Path(name)
        (home / "tmp").mkdir()
        os.environ.update(GPUSERVE_STATE=str(home / "state"), TMPDIR=str(home / "tmp"))
        tempfile.tempdir = None
        for cycle in range(1, options.cycles + 1):
            server = start(
                spec,
                get_engine("sim"),
                parent=session_directory(),
                limits=Limits(startup=120, grace=5.0, dump=10),
                incident=lambda directory, reason: [],
            )
            roots.update([server.record.root.pid] if server.record.root else [])
            try:
                server.post("/v1/completions", json={"model": server.model, **body}).raise_for_status()
            finally:
                server.stop()
            if server.left:
                print(f"cycle {cycle} left {server.left}")
                return 1
            del server
            if cycle == options.warm_up or cycle % options.every == 0 or cycle == options.cycles:
                samples.append({"cycle": cycle, **sample(home / "tmp", roots)})
                pace = (time.monotonic() - begin) / cycle
                print(json.dumps(samples[-1]), f"{pace:.2f} s a cycle", flush=True)
    first = next((one for one in samples if one["cycle"] >= options.warm_up), samples[0])
    last = samples[-1]
    grown = [key for key in last if key not in ("cycle", "memory KiB") and last[key] > first[key]]
    if last["memory KiB"] - first["memory KiB"] > options.memory * 1024:
        grown.append("memory KiB")
    print(f"{options.cycles} cycles of TP={options.tp}: " + (f"grown: {', '.join(grown)}" if grown else "nothing grew"))
    if options.json:
        options.json.write_text(json.dumps({"samples": samples, "grown": grown}, indent=1) + "\n")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
