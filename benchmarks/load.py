"""Eight servers whose 64 ranks print 10,000 log lines a second: does the watcher keep up, and what does it cost?

    python benchmarks/load.py [--servers 8] [--tp 8] [--lines 10000] [--seconds 60] [--json FILE]

Real processes of the embedded engine, which talk from their first phase to their last, and a real watcher process at
its usual interval. Measured: lines a second that really came; CPU of the watcher with all its threads; how old the log
was of which it told (``samples.jsonl`` against the size of the file, noted every 50 ms); and whether a change of phase
was lost: by the watcher, whose samples must show every phase in order, and by the reader, which is fed the log in
the pieces that the watcher had and must find each rank in the phases whose lines the rank printed (counted by other,
plainer means). Exit code 1 when something was lost, the log was ever older than two looks, or CPU is above ``--most``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from watcher_cost import cpu, serve

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.phases.reader import PhaseReader
from pytest_gpuserve.server.handle import Server
from pytest_gpuserve.vocabulary import PHASES
from pytest_gpuserve.watch import watcher

STRETCHED = ("distributed_init", "weight_load", "autotune", "cuda_graph")
"""Phases that last long enough for a sample; of their KV cache SGLang's ranks say only that it is there."""
MARKS = {
    "distributed_init": rb"TP(\d+)\] Init torch distributed begin",
    "weight_load": rb"TP(\d+)\] Load weight begin",
    "kv_cache": rb"TP(\d+)\] KV Cache is allocated",
    "autotune": rb"TP(\d+)\] Running FlashInfer autotune",
    "cuda_graph": rb"TP(\d+)\] Capture cuda graph begin",
}
"""The line with which the embedded engine, playing SGLang, enters each of these phases."""


@dataclass
class Growth:
    """How a log grew: its size at moments, and how many bytes of progress the reader finds in that much of it."""

    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)

    def age(self, told: int, at: float) -> float:
        """Seconds by which a reader that has told of so many bytes at that time is behind; 0 within the resolution."""
        first = bisect_left(self.progress, told + 1)  # then the log had more than that
        return max(0.0, at - self.times[first]) if first < len(self.times) else 0.0


def note_sizes(growths: dict[Path, Growth], over: threading.Event) -> None:
    while not over.wait(0.05):
        for path, growth in growths.items():
            if path.exists():
                growth.sizes.append(path.stat().st_size)
                growth.times.append(time.time())


def replay(data: bytes, growth: Growth, looks: Iterable[float]) -> PhaseReader:
    """Read the log as it came: progress at each moment noted, and the phases from the pieces that the looks had."""
    fine, coarse = (PhaseReader(get_engine("sim").grammar) for _ in range(2))
    read = 0
    for at, size in zip(growth.times, growth.sizes, strict=True):
        fine.feed(data[read:size], at)
        read = size
        growth.progress.append(fine.progress_bytes)
    read = 0
    for at in looks:
        there = bisect_left(growth.times, at)
        if there < len(growth.sizes) and growth.sizes[there] > read:
            coarse.feed(data[read : growth.sizes[there]], at)
            read = growth.sizes[there]
    coarse.feed(data[read:], growth.times[-1])
    return coarse


def lost(server: Server, data: bytes, reader: PhaseReader, seen: list[str]) -> list[str]:
    """Phases that a rank printed and the reader does not know, and those that no sample of the watcher showed."""
    wrong = []
    truth = {phase: {int(found[1]) for found in re.finditer(mark, data)} for phase, mark in MARKS.items()}
    for label, rank in reader.ranks().items():
        entered = [phase for phase, _, _ in rank.history] + [rank.phase]
        number = int(label.removeprefix("TP"))
        printed = [phase for phase in MARKS if number in truth[phase]]
        if [phase for phase in PHASES if phase in entered and phase in MARKS] != printed or len(printed) < len(MARKS):
            wrong.append(f"{label} of {server.directory.name} printed {printed}, read were {entered}")
    order = [phase for phase, _ in groupby(seen) if phase in STRETCHED or phase in ("ready", "serving")]
    if [phase for phase in order if phase in STRETCHED] != list(STRETCHED) or order[-1] not in ("ready", "serving"):
        wrong.append(f"the samples of {server.directory.name} show {order}")
    return wrong


def samples(server: Server) -> list[dict[str, Any]]:
    lines = (server.directory / "samples.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["kind"] == "sample"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--lines", type=int, default=10_000, help="lines a second, of all servers together")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured once all servers are ready")
    parser.add_argument("--phase", type=float, default=5.0, help="seconds of each phase of the start-up")
    parser.add_argument("--most", type=float, default=10.0, help="percent of one core")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    args = {
        "chatter": options.lines // options.servers,
        "load_seconds": options.phase,
        "phase_seconds": ";".join(f"{phase}={options.phase}" for phase in STRETCHED if phase != "weight_load"),
    }
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        session = Path(folder) / "session"
        session.mkdir()
        growths: dict[Path, Growth] = {}
        over, servers = threading.Event(), list[Server]()
        process = watcher.start(session, {"gpus": False, "interval": 1.0, "budgets": {"window": 600.0}})
        starting = threading.Thread(target=lambda: servers.extend(serve(session, options.servers, options.tp, args)))
        starting.start()
        noting = threading.Thread(target=note_sizes, args=(growths, over))
        while len(growths) < options.servers and starting.is_alive():
            time.sleep(0.05)
            growths.update({path.parent / "server.log": Growth() for path in session.glob("*/server.json")})
        noting.start()
        try:
            starting.join()
            before, began = cpu(process.pid), time.monotonic()
            sizes = {server: server.log_path.stat().st_size for server in servers}
            time.sleep(options.seconds)
            share = 100.0 * (cpu(process.pid) - before) / (time.monotonic() - began)
            ends = {server: server.log_path.stat().st_size for server in servers}
            length = time.monotonic() - began
            over.set()
            noting.join()
            result, ages, wrong, lines = {}, list[float](), list[str](), 0
            for server in servers:
                data, growth = server.log_path.read_bytes(), growths[server.log_path]
                told = samples(server)
                reader = replay(data, growth, (entry["t"] for entry in told))
                ages += [growth.age(entry["log"], entry["t"]) for entry in told if entry["t"] < growth.times[-1]]
                wrong += lost(server, data, reader, [entry["phase"] for entry in told])
                lines += data[sizes[server] : ends[server]].count(b"\n")
            result = {
                "servers": len(servers),
                "ranks": len(servers) * options.tp,
                "lines_per_second": round(lines / length),
                "watcher_percent_of_a_core": round(share, 2),
                "log_age_seconds": {"median": round(statistics.median(ages), 3), "most": round(max(ages), 3)},
                "samples": len(ages),
                "phases_of_ranks_checked": len(servers) * options.tp * len(MARKS),
                "lost": wrong,
                "load": os.getloadavg(),
            }
        finally:
            over.set()
            process.terminate()
            process.wait()
            for server in servers:
                server.stop(0.0)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong or max(ages) > 2.0 or share > options.most else 0


if __name__ == "__main__":
    sys.exit(main())
