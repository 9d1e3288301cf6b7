"""The verdict on real vLLM: workers of its CPU build that are stopped, killed or slowed, while they load and while they
serve, under the real supervisor, watcher and incident.

Run: ``python benchmarks/scoreboard_vllm.py --python VLLM_PYTHON [--only stopped_serving,...]``, where VLLM_PYTHON is an
interpreter that ``examples/vllm_cpu/install.sh`` made. One start a case, half a minute each on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.errors import GpuserveError, ServerError
from pytest_gpuserve.report import incident
from pytest_gpuserve.server.handle import Server
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.record import load, processes
from pytest_gpuserve.spec import ServerSpec
from pytest_gpuserve.watch import watcher

EXAMPLE = Path(__file__).parent.parent / "examples" / "vllm_cpu"
VLLM = get_engine("vllm")


@dataclass(frozen=True)
class Case:
    """``who``: the title's end of the process that is treated; ``named``: who a perfect tool names (None: nobody)."""

    who: str
    signals: tuple[signal.Signals, ...]
    loading: bool
    verdict: str
    named: str | None


STOP, KILL, CONT = signal.SIGSTOP, signal.SIGKILL, signal.SIGCONT
CASES = {
    "stopped_serving": Case("Worker_TP1", (STOP,), False, "hang", "TP1"),
    "killed_serving": Case("Worker_TP1", (KILL,), False, "crash", "TP1"),
    "slowed_serving": Case("Worker_TP1", (STOP, CONT), False, "none", None),
    "core_stopped_serving": Case("EngineCore", (STOP,), False, "hang", "engine_core"),
    "stopped_loading": Case("Worker_TP1", (STOP,), True, "hang", "TP1"),
    "killed_loading": Case("Worker_TP1", (KILL,), True, "crash", "TP1"),
    "slowed_loading": Case("Worker_TP1", (STOP, CONT), True, "none", None),
}


def spec(python: str, model: Path) -> ServerSpec:
    """The server of examples/vllm_cpu."""
    return ServerSpec.from_mapping(
        {
            "engine": "vllm",
            "model": str(model),
            "tp": 2,
            "python": python,
            "args": {"served-model-name": "tiny", "dtype": "float32", "max-model-len": 256, "enforce-eager": True},
            "env": {
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "0|1",
                "TORCHDYNAMO_DISABLE": "1",
            },
        }
    )


def treat(case: Case, session: Path, before: set[Path], over: threading.Event, done: list[float]) -> None:
    """Find the process and send the signals: once, or in bursts of 0.3 s in every half second until all is over."""
    pid = None
    while pid is None and not over.wait(0.05):
        for directory in sorted(set(session.iterdir()) - before):
            with suppress(GpuserveError, OSError):
                pid = next((p.pid for p in processes(load(directory)) if title(p.pid).endswith(case.who)), pid)
    done.append(time.time())
    while pid is not None and not over.is_set():
        for number in case.signals:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            if len(case.signals) == 1:
                return
            time.sleep(0.3 if number == STOP else 0.2)


def title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    return ""


def run(name: str, options: argparse.Namespace, session: Path, argv: Callable[[Path, str], list[str]]) -> bool:
    """One case; whether the tool was right."""
    case, over, done = CASES[name], threading.Event(), list[float]()
    before = set(session.iterdir())
    thread = threading.Thread(target=treat, args=(case, session, before, over, done), daemon=True)
    server: Server | None = None
    said = "none"
    try:
        if case.loading:
            thread.start()
        limits = Limits(startup=600.0, grace=2.0, dump=40.0)
        server = start(spec(options.python, options.model), VLLM, parent=session, limits=limits, incident=argv)
        if not case.loading:
            _complete(server, 4)  # the first request compiles
            thread.start()
            time.sleep(0.5)
        _complete(server, 96)
    except ServerError as error:
        said = error.verdict
    except Exception as error:
        said = type(error).__name__
    finally:
        over.set()
        if thread.ident:
            thread.join()
    (directory,) = set(session.iterdir()) - before
    if server is not None:
        server.control.wait(lambda events: any(e.kind in ("killing", "stopped", "exited") for e in events), 30.0)
        server.stop(2.0)
    return _tell(name, case, directory, said, done)


def _complete(server: Server, tokens: int) -> None:
    body = {"model": server.model, "prompt": "2+2=", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    while server.post("/v1/completions", json=body, timeout=240).status_code != 200:
        time.sleep(0.3)  # a front end whose workers died answers 500 for some seconds, then it is gone


def _tell(name: str, case: Case, directory: Path, said: str, done: list[float]) -> bool:
    entries: list[dict[str, Any]] = []
    with suppress(OSError):
        entries = [json.loads(line) for line in (directory / "incidents.jsonl").read_text().splitlines()]
    entry = entries[-1] if entries else {}
    found: dict[str, Any] = {}
    with suppress(OSError, KeyError):
        found = json.loads((Path(entry["incident"]) / "incident.json").read_text())
    verdict, named = entry.get("verdict") or said, ", ".join(found.get("culprits") or ())
    right = verdict == case.verdict and named == (case.named or "")
    took = f"{entry['time'] - done[0]:.1f}" if entry and done else "-"
    keys = ("stack", "frames", "problem", "dumper")  # a stack, or why there is none
    complete = sum(any(map(rank.get, keys)) for rank in (found.get("ranks") or {}).values())
    dumped = f"{complete}/{len(found.get('ranks') or ())}" if found else "-"
    print(f"| {name} | {verdict} | {named or '-'} | {'yes' if right else 'NO'} | {took} | {dumped} |", flush=True)
    if not right:
        print(f"    {entry.get('text') or said}"[:1500], flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("--window", type=float, default=15.0, help="seconds without progress that make a hang")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    right = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GPUSERVE_STATE", str(Path(folder) / "state"))
        options.model = Path(folder) / "tiny"
        subprocess.run([options.python, str(EXAMPLE / "make_tiny_model.py"), str(options.model)], check=True)
        session, artifacts = Path(folder) / "session", Path(folder) / "artifacts"
        session.mkdir(mode=0o700)
        budgets = {"window": options.window, "first_request": 2.5 * options.window}
        config = {
            "incident": incident.command("{server}", artifacts, "{reason}", limit=30.0),  # type: ignore[arg-type]
            **{"gpus": False, "limit": 40.0, "budgets": budgets},
        }
        process = watcher.start(session, config)
        print("| case | verdict | named | right | seconds | dumps |\n|---|---|---|---|---|---|")
        try:
            for name in CASES:
                if not options.only or name in options.only.split(","):
                    right = (
                        run(name, options, session, lambda d, r: incident.command(d, artifacts, r, limit=30.0))
                        and right
                    )
        finally:
            process.terminate()
            process.wait()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
