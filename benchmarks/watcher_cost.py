"""What the watcher costs: CPU of one look, and of a second of watching, for servers of 8 ranks up to 64 processes.

Run: ``python benchmarks/watcher_cost.py [--servers 8] [--tp 7] [--seconds 30]``. Real processes of the embedded engine,
a real watcher process; its CPU is read from /proc. The target is less than 1 % of one core at 1 Hz for 64 processes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gpuserve import procfs
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.server import inflight
from pytest_gpuserve.server.handle import Server
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.spec import ServerSpec
from pytest_gpuserve.watch import watcher


def cpu(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    found = procfs.stat(pid)
    return 0.0 if found is None else (found.utime + found.stime) / 100.0


def serve(session: Path, number: int, tp: int, args: Mapping[str, Any] | None = None) -> list[Server]:
    """Start ``number`` servers at once; ``args``: more options of the embedded engine."""
    servers: list[Server] = []

    def one() -> None:
        spec = ServerSpec.from_mapping({"engine": "sim", "tp": tp, "args": {"quiet": True, **(args or {})}})
        limits = Limits(startup=300, grace=1.0, dump=10)
        servers.append(
            start(spec, get_engine("sim"), parent=session, limits=limits, incident=lambda directory, reason: [])
        )

    threads = [threading.Thread(target=one) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return servers


def keep_busy(server: Server, over: threading.Event) -> None:
    """One request after the other."""
    while not over.is_set():
        server.post("/v1/completions", json={"model": server.model, "prompt": "x", "max_tokens": 32})


def throughput(servers: list[Server], watcher_pid: int, pairs: int, seconds: float) -> dict[str, float]:
    """Requests a second with the watcher running and stopped, in turn, on the same servers: medians of the pairs."""
    ratios, rates = [], []
    for pair in range(pairs):
        counts = {}
        for running in (True, False) if pair % 2 else (False, True):
            os.kill(watcher_pid, signal.SIGCONT if running else signal.SIGSTOP)
            before = sum(inflight.read(server.directory).ended for server in servers)
            began = time.monotonic()
            time.sleep(seconds)
            ended = sum(inflight.read(server.directory).ended for server in servers)
            counts[running] = (ended - before) / (time.monotonic() - began)
        ratios.append(counts[True] / counts[False])
        rates.append(counts[True])
    os.kill(watcher_pid, signal.SIGCONT)
    return {
        "pairs": pairs,
        "requests_per_second": round(statistics.median(rates), 1),
        "with_watcher_percent": round(100 * statistics.median(ratios), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--tp", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--pairs", type=int, default=0, help="pairs of throughput runs, with and without the watcher")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        session = Path(folder) / "session"
        session.mkdir()
        servers = serve(session, options.servers, options.tp)
        process = watcher.start(session, {"gpus": False, "interval": 1.0})
        over = threading.Event()
        try:
            time.sleep(12.0)  # imports, first scan, titles
            processes = sum(len(procfs.descendants(s.record.supervisor.pid)) for s in servers if s.record.supervisor)
            rows = []
            for name in ("idle", "one request in flight at each server"):
                if name != "idle":
                    for server in servers:
                        threading.Thread(target=keep_busy, args=(server, over), daemon=True).start()
                    time.sleep(3.0)
                before, began = cpu(process.pid), time.monotonic()
                time.sleep(options.seconds)
                share = (cpu(process.pid) - before) / (time.monotonic() - began)
                rows.append({"state": name, "processes": processes, "percent_of_a_core": round(100 * share, 2)})
            print(json.dumps(rows, indent=1))
            if options.pairs:
                print(json.dumps(throughput(servers, process.pid, options.pairs, 4.0), indent=1))
            return 0 if rows[0]["percent_of_a_core"] < 1.0 * max(1.0, processes / 64) else 1
        finally:
            over.set()
            process.terminate()
            process.wait()
            for server in servers:
                server.stop(0.0)


if __name__ == "__main__":
    sys.exit(main())
