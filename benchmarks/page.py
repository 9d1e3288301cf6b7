"""Size and first paint of the page of a large incident: 64 ranks, 30 minutes of samples, 64 GPUs, a log of 200 MB.

    python benchmarks/page.py [--ranks 64] [--minutes 30] [--log-mb 200] [--keep DIR]

First paint is measured where Chromium and chromedriver are installed and selenium can be imported (extra ``browser``).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from pytest_gpuserve.report import html
from pytest_gpuserve.watch.samples import MOST

SWITCHES = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
)
BEGIN = 1_795_990_000.0
PHASES = (("spawn", 12), ("distributed_init", 9), ("weight_load", 240), ("kv_cache", 6), ("compile", 180))
LINE = (
    "[2026-11-29 22:{m:02}:{s:02} TP{rank}] Decode batch, #running-req: {n}, #token: {t}, gen throughput (token/s): "
    "1234.50, <b>&amp;"
)


def incident(directory: Path, ranks: int, minutes: float, log_mb: float) -> None:
    """An incident as the product writes it: rank 3 hangs in CUDA graph capture, the others wait for it."""
    chance = random.Random(1)
    (directory / "stacks").mkdir(parents=True)
    labels = [f"TP{n}" for n in range(ranks)]
    end = BEGIN + 60 * minutes
    with (directory / "timeline.jsonl").open("w") as file:
        for label in labels:
            at = BEGIN + chance.random()
            for phase, spent in PHASES:
                until = at + spent * (1 + 0.05 * chance.random())
                line = {"t": at, "kind": "phase", "rank": label, "phase": phase, "end": until}
                file.write(json.dumps({**line, "done": None, "total": None}) + "\n")
                at = until
            line = {"t": at, "kind": "phase", "rank": label, "phase": "cuda_graph", "end": None}
            file.write(json.dumps({**line, "done": 3, "total": 24}) + "\n")
        for line in samples(labels, end, chance):
            file.write(line)
        file.write(json.dumps({"t": end, "kind": "event", "text": "incident: startup_budget"}) + "\n")
    for n, label in enumerate(labels):
        write_stacks(directory, n, label)
    path = ["run_scheduler_process (srt/scheduler.py)", *(f"call_{n} (srt/model_runner.py)" for n in range(18))]
    classes = [
        {"ranks": [x for x in labels if x != "TP3"], "kind": "waits", "path": [*path, "all_reduce (srt/comm.py)"]},
        {"ranks": ["TP3"], "kind": "cause", "path": [*path, "synchronize (torch/cuda.py)"]},
    ]
    text = f"hang in cuda_graph: TP0-2,4-{ranks - 1} wait in a collective; TP3 waits for its GPU."
    content = {
        "schema": "gpuserve.incident/1",
        "complete": True,
        "reason": "startup_budget",
        "time": end,
        "engine": "sglang",
        "id": f"sglang-tp{ranks}",
        "verdict": "hang",
        "phase": "cuda_graph",
        "culprits": ["TP3"],
        "text": text,
        "kill": True,
        "why": "it was not ready within its start-up budget",
        "classes": [{"role": "scheduler", "group": "", "signature": None, "moving": False, **c} for c in classes],
        "ranks": {
            label: {"pid": 1000 + n, "role": "scheduler", "state": "S", "facts": {}} for n, label in enumerate(labels)
        },
        "argv": ["python", "-m", "sglang.launch_server", f"--tp={ranks}"],
        "gpus": [{"index": n, "memory_total": 98 << 30, "memory_used": 76 << 30} for n in range(ranks)],
    }
    (directory / "incident.json").write_text(json.dumps(content))
    write_log(directory / "log.txt", ranks, log_mb)


def samples(labels: list[str], end: float, chance: random.Random) -> list[str]:
    """As many as watch/samples.py keeps of a watch that looks once a second: every other one, when there are 1500."""
    lines, every = [], 1.0
    at = BEGIN
    while at < end:
        since = at - BEGIN
        busy = since < 450
        lines.append(
            {
                "t": round(at, 2),
                "kind": "sample",
                "state": "moving" if busy or since < 500 else "hung",
                "still": 0.0 if busy else round(since - 450, 1),
                "phase": "cuda_graph",
                "log": int(since * 1000),
                "cpu": {label: round(min(since, 450) * (0.9 + 0.01 * n), 2) for n, label in enumerate(labels)},
                "rss": int(min(since, 300) / 300 * (33 << 30)),
                "gpus": [
                    [
                        int(min(since / 300, 1) * (76 << 30)) + chance.randrange(1 << 30),
                        chance.randrange(100) if busy else 0,
                        90 + chance.randrange(300),
                    ]
                    for _ in labels
                ],
                "tokens": None,
                "requests": None,
            }
        )
        at += every
    while len(lines) > MOST:
        lines = lines[::2]
    return [json.dumps(line) + "\n" for line in lines]


def write_stacks(directory: Path, n: int, label: str) -> None:
    names = ["run_scheduler_process (srt/scheduler.py)", *(f"call_{k} (srt/model_runner.py)" for k in range(18))]
    names.append("synchronize (torch/cuda.py)" if label == "TP3" else "all_reduce (srt/comm.py)")
    frames = [
        {"name": name.partition(" (")[0], "filename": f"/x/{name.partition(' (')[2][:-1]}", "line": 100 + k}
        for k, name in enumerate(names)
    ]
    stack = {
        "pid": 1000 + n,
        "thread_id": 1,
        "os_thread_id": 1000 + n,
        "thread_name": "MainThread",
        "active": False,
        "frames": frames[::-1],
    }
    rounds = [
        {
            "round": r,
            "schema": "gpuserve.stack/1",
            "pid": 1000 + n,
            "start": 7,
            "label": label,
            "title": f"sglang::scheduler_{label}",
            "state": "S",
            "facts": {},
            "stacks": [stack],
        }
        for r in range(3)
    ]
    (directory / "stacks" / f"{label}.{1000 + n}.json").write_text(
        json.dumps({"schema": "gpuserve.stacks/1", "label": label, "rounds": rounds})
    )


def write_log(path: Path, ranks: int, megabytes: float) -> None:
    block = "".join(
        LINE.format(m=n // 60 % 60, s=n % 60, rank=n % ranks, n=n % 9, t=n) + "\n" for n in range(8000)
    ).encode()
    with path.open("wb") as file:
        while file.tell() < megabytes * 1e6:
            file.write(block)


def first_paint(page: Path, runs: int = 5) -> list[float]:
    """Seconds from the start of navigation to the first contentful paint, each in a fresh browser; [] without one."""
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        return []
    if not chromium or not driver_path:
        return []
    found = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as profile:
            options = webdriver.ChromeOptions()
            options.binary_location = chromium
            for switch in (*SWITCHES, f"user-data-dir={profile}"):
                options.add_argument(f"--{switch}")
            driver = webdriver.Chrome(options=options, service=Service(driver_path))
            try:
                driver.get(page.as_uri())
                until = time.monotonic() + 20
                while time.monotonic() < until:
                    painted = driver.execute_script(
                        "return performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)"
                    )
                    if painted:
                        found.append(painted[0] / 1000)
                        break
                    time.sleep(0.05)
            finally:
                driver.quit()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--log-mb", type=float, default=200)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = (given.keep or Path(place)) / "incident"
        incident(directory, given.ranks, given.minutes, given.log_mb)
        began = time.perf_counter()
        page = html.write_page(directory)
        spent = time.perf_counter() - began
        size = page.stat().st_size
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{given.ranks} ranks, {given.minutes:g} min, log of {given.log_mb:g} MB: written in {spent:.2f} s, "
            f"{size / 1e6:.2f} MB, peak {peak:.0f} MiB"
        )
        painted = first_paint(page)
        if painted:
            print(
                f"first paint: median {statistics.median(painted):.2f} s, worst {max(painted):.2f} s of {len(painted)}"
            )
        else:
            print("first paint: no browser here")
    slow = bool(painted) and statistics.median(painted) >= 1.0
    return 1 if size >= 3e6 or slow else 0


if __name__ == "__main__":
    sys.exit(main())
