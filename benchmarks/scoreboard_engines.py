"""The verdict on real engines: workers of vLLM's and SGLang's CPU builds that are stopped, killed, slowed or wait for a
stale lock, while they load and while they serve, under the real supervisor, watcher and incident.

Run: ``python benchmarks/scoreboard_engines.py --engine vllm --python PYTHON [--only stopped_serving,...]``, where
PYTHON is an interpreter that ``examples/vllm_cpu/install.sh`` or ``examples/sglang_cpu/install.sh`` made. One start a
case, half a minute each on two quiet cores.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
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
from typing import IO, Any

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.errors import GpuserveError, ServerError
from pytest_gpuserve.report import incident
from pytest_gpuserve.server.handle import Server
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.record import load, processes
from pytest_gpuserve.spec import ServerSpec
from pytest_gpuserve.watch import watcher

MAKE_MODEL = Path(__file__).parent.parent / "examples" / "vllm_cpu" / "make_tiny_model.py"
RANK_1 = {"vllm": "Worker_TP1", "sglang": "scheduler_TP1"}


@dataclass(frozen=True)
class Case:
    """``who``: the title's end of the process that is treated (None: rank 1); ``named``: who a perfect tool names
    (None: nobody). Without ``signals`` rank 1 finds the lock of a torch extension whose writer is gone."""

    signals: tuple[signal.Signals, ...]
    loading: bool
    verdict: str
    named: str | None
    who: str | None = None
    engines: tuple[str, ...] = ("vllm", "sglang")


STOP, KILL, CONT = signal.SIGSTOP, signal.SIGKILL, signal.SIGCONT
CASES = {
    "stopped_serving": Case((STOP,), False, "hang", "TP1"),
    "killed_serving": Case((KILL,), False, "crash", "TP1"),
    "slowed_serving": Case((STOP, CONT), False, "none", None),
    "core_stopped_serving": Case((STOP,), False, "hang", "engine_core", "EngineCore", ("vllm",)),
    "stopped_loading": Case((STOP,), True, "hang", "TP1"),
    "killed_loading": Case((KILL,), True, "crash", "TP1"),
    "slowed_loading": Case((STOP, CONT), True, "none", None),
    "stale_lock_loading": Case((), True, "hang", "TP1"),
}

COMMON: dict[str, dict[str, Any]] = {
    "vllm": {
        "args": {"served-model-name": "tiny", "dtype": "float32", "max-model-len": 256, "enforce-eager": True},
        "env": {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "TORCHDYNAMO_DISABLE": "1",
        },
    },
    "sglang": {
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "cuda_graph": "off",
        "overlap": "off",
        "args": {
            "served-model-name": "tiny",
            "device": "cpu",
            "dtype": "float32",
            "context-length": 256,
            "max-total-tokens": 4096,
            "max-running-requests": 8,
            "enable-metrics": True,
        },
        "env": {
            "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
        },
    },
}
"""The servers of examples/vllm_cpu and examples/sglang_cpu."""

OPS = """
import torch
from torch.utils.cpp_extension import load
from {base} import LlamaForCausalLM as Base

class {name}(Base):
    def load_weights(self, *args, **kwargs):
        if torch.distributed.get_rank() == 1:
            load(name="ops", sources=[{source!r}], build_directory={build!r})
        return super().load_weights(*args, **kwargs)

EntryClass = {name}
"""
"""A model of the user's own with an operator of its own, as both engines take one: by a plugin, by a package."""


def spec(engine: str, python: str, model: Path, extra: dict[str, str]) -> ServerSpec:
    """The example's server, with these variables too."""
    values = dict(COMMON[engine])
    env = {**values["env"], **extra}
    if engine == "sglang":
        env["LD_LIBRARY_PATH"] = str(Path(python).parent.parent / "driver")
    return ServerSpec.from_mapping(
        {**values, "engine": engine, "model": str(model), "tp": 2, "python": python, "env": env}
    )


def stale_lock(engine: str, model: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """Write the model, and the lock of a build that nobody finishes: its folder, and the variables that make the engine
    take it. Up to torch 2.13 a file that is there blocks, from 2.14 on only a lock with a living holder: us."""
    build, package = folder / "build", folder / "site" / "scoreboard_models"
    build.mkdir(parents=True)
    package.mkdir(parents=True)
    HELD.append((build / "lock").open("w"))
    fcntl.flock(HELD[-1], fcntl.LOCK_EX)
    (folder / "ops.cpp").write_text("#include <torch/extension.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}\n")
    base = {"vllm": "vllm.model_executor.models.llama", "sglang": "sglang.srt.models.llama"}[engine]
    name = {"vllm": "LlamaForCausalLM", "sglang": "LlamaWithOps"}[engine]  # SGLang's own come back over a known name
    shutil.copytree(model, folder / "model")
    config = json.loads((model / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    text = OPS.format(name=name, base=base, source=str(folder / "ops.cpp"), build=str(build))
    (package / "__init__.py").write_text(PLUGIN if engine == "vllm" else "")
    (package / "llama_ops.py").write_text(text)
    info = folder / "site" / "scoreboard_models-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scoreboard_models\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nscoreboard = scoreboard_models:register\n")
    env = {"PYTHONPATH": str(folder / "site"), "SGLANG_EXTERNAL_MODEL_PACKAGE": "scoreboard_models"}
    return folder / "model", env


HELD: list[IO[str]] = []
"""Locks of builds, held to the end."""

PLUGIN = """
def register():
    from vllm import ModelRegistry
    ModelRegistry.register_model("LlamaForCausalLM", "scoreboard_models.llama_ops:LlamaForCausalLM")
"""


def treat(case: Case, who: str, session: Path, before: set[Path], over: threading.Event, done: list[float]) -> None:
    """Find the process and send the signals: once, or in bursts of 0.3 s in every half second until all is over."""
    pid = None
    while pid is None and not over.wait(0.05):
        for directory in sorted(set(session.iterdir()) - before):
            with suppress(GpuserveError, OSError):
                pid = next((p.pid for p in processes(load(directory)) if title(p.pid).endswith(who)), pid)
    if case.signals:
        done.append(time.time())
    while pid is not None and case.signals and not over.is_set():
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
    who = case.who or RANK_1[options.engine]
    thread = threading.Thread(target=treat, args=(case, who, session, before, over, done), daemon=True)
    model, extra = options.model, dict[str, str]()
    if not case.signals:
        model, extra = stale_lock(options.engine, options.model, options.folder / name)
    server: Server | None = None
    said = "none"
    try:
        if case.loading:
            thread.start()
        limits = Limits(startup=600.0, grace=2.0, dump=40.0)
        launch = spec(options.engine, options.python, model, extra)
        server = start(launch, get_engine(options.engine), parent=session, limits=limits, incident=argv)
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
    parser.add_argument("--engine", choices=sorted(COMMON), default="vllm")
    parser.add_argument("--python", required=True)
    parser.add_argument("--window", type=float, default=15.0, help="seconds without progress that make a hang")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    right = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GPUSERVE_STATE", str(Path(folder) / "state"))
        options.folder, options.model = Path(folder), Path(folder) / "tiny"
        subprocess.run([options.python, str(MAKE_MODEL), str(options.model)], check=True)
        session, artifacts = Path(folder) / "session", Path(folder) / "artifacts"
        session.mkdir(mode=0o700)
        budgets = {"window": options.window, "first_request": 2.5 * options.window}
        config = {
            "incident": incident.command("{server}", artifacts, "{reason}", limit=30.0),
            **{"gpus": False, "limit": 40.0, "budgets": budgets},
        }
        process = watcher.start(session, config)
        print("| case | verdict | named | right | seconds | dumps |\n|---|---|---|---|---|---|")
        try:
            for name in CASES:
                if options.engine in CASES[name].engines and (not options.only or name in options.only.split(",")):
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
