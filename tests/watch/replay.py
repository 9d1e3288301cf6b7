"""Recordings of real servers (one JSON object every two seconds) as samples for the monitor."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_gpuserve.procfs import ProcessId
from pytest_gpuserve.watch.compilers import is_compiler
from pytest_gpuserve.watch.sample import GpuSample, ProcessSample, Sample

DATA = Path(__file__).parent.parent / "data" / "real_runs"
TICK, PAGE = 0.01, 4096


def recording(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"sglang-0.5.12-{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def own(processes: dict[str, list[Any]], known: set[str]) -> set[str]:
    """The server's processes: its first one and what descends from it, also when left to somebody else.

    The recorder left shells out, so a compiler below a shell has a parent that is not in the recording; an orphan of
    the run before has init for its parent, or an ancestor that has.
    """
    found = {pid for pid, p in processes.items() if "launch_server" in p[0]} | (known & processes.keys())
    for pid in processes:
        chain = [pid]
        while (parent := str(processes[chain[-1]][2])) in processes:
            chain.append(parent)
        if set(chain) & found or parent != "1":
            found.update(chain)
    return found


def samples(name: str, *, everything: bool = False) -> Iterator[Sample]:
    """``everything``: take every process of the machine for the server's (to show what ownership is good for)."""
    known: set[str] = set()
    for entry in recording(name):
        known = set(entry["procs"]) if everything else own(entry["procs"], known)
        processes = [_process(pid, entry["procs"][pid]) for pid in sorted(known)]
        yield Sample(
            at=entry["t"],
            processes={p.process: p for p in processes},
            phase="weight_load" if entry["log"] else "spawn",
            log=entry["log"],
            gpus=tuple(GpuSample(int(m) << 20, int(u), w) for m, u, w in entry["gpus"]),
            root=any(p.role == "api" for p in processes),
        )


def _process(pid: str, raw: list[Any]) -> ProcessSample:
    title, state, _, utime, stime, minflt, majflt, rss, chars, calls, read = raw
    rank = re.search(r"scheduler_TP(\d)", title)
    role = (
        "scheduler" if rank else "api" if "launch_server" in title else "detokenizer" if "detok" in title else "other"
    )
    compiler = is_compiler(title.split()[0].rpartition("/")[2][:15] if title.split() else "", title.split())
    return ProcessSample(
        process=ProcessId(int(pid), 1),
        label=f"TP{rank[1]}" if rank else (title.split() or ["?"])[0].rpartition("/")[2] if role == "other" else role,
        role=role,  # type: ignore[arg-type]
        state=state,
        cpu=(utime + stime) * TICK,
        majflt=majflt,
        minflt=minflt,
        read=read,
        chars=chars,
        calls=calls,
        rss=rss * PAGE,
        compiler=compiler,
        rank=bool(rank),
    )
