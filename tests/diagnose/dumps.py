"""Dumps made by hand, and recorded ones, for tests of what is concluded from them."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gpuserve.diagnose.model import Frame, ProcessDump, ThreadStack
from pytest_gpuserve.engines.base import ProcessRole, Rank
from pytest_gpuserve.procfs import ProcessId

DATA = Path(__file__).parent.parent / "data"
_pids = itertools.count(1000)

COLLECTIVE = "all_reduce torch/distributed/distributed_c10d.py:3252 | step eng/runner.py:7 | loop eng/main.py:3"
BATON = "wait torch/utils/file_baton.py:50 | load torch/utils/cpp_extension.py:1 | step eng/runner.py:5"
NINJA = "wait subprocess.py:1280 | run_ninja flashinfer/jit/cpp_ext.py:346 | build flashinfer/jit/core.py:260"
FLASHINFER_LOCK = "acquire filelock/_api.py:316 | __enter__ filelock/_api.py:356 | build flashinfer/jit/core.py:256"
IDLE_WORKER = (
    "poll zmq/sugar/poll.py:106 | wait vllm/distributed/device_communicators/shm_broadcast.py:221 | "
    "acquire_read vllm/distributed/device_communicators/shm_broadcast.py:893 | "
    "dequeue vllm/distributed/device_communicators/shm_broadcast.py:990 | "
    "worker_busy_loop vllm/v1/executor/multiproc_executor.py:1159"
)
ENGINE_WAITS = (
    "poll zmq/sugar/poll.py:106 | acquire_read vllm/distributed/device_communicators/shm_broadcast.py:893 | "
    "dequeue vllm/distributed/device_communicators/shm_broadcast.py:990 | "
    "get_response vllm/v1/executor/multiproc_executor.py:380 | execute_model vllm/v1/executor/multiproc_executor.py:300"
)
ENGINE_IDLE = "wait threading.py:327 | get queue.py:171 | _process_input_queue vllm/v1/engine/core.py:1588"
ELSEWHERE = "crunch eng/layers.py:88 | step eng/runner.py:9 | loop eng/main.py:3"


def frames(text: str) -> tuple[Frame, ...]:
    """``name file:line | ...``, leaf first; a file that is a library makes a native frame."""
    found = []
    for part in text.split("|"):
        name, place = part.strip().rsplit(" ", 1)
        file, _, line = place.partition(":")
        module = file if ".so" in file else None
        found.append(Frame(name, file, int(line) if line else None, module))
    return tuple(found)


def thread(text: str, *, main: bool = True, name: str | None = None, **facts: Any) -> ThreadStack:
    return ThreadStack(next(_pids), name or ("MainThread" if main else "Thread-1"), main, frames(text), **facts)


def dump(
    who: str | Rank | int,
    text: str | Sequence[ThreadStack] | None,
    *,
    role: str = "worker",
    state: str = "S",
    pid: int | None = None,
    problem: str | None = None,
    taken: float = 0.0,
    dumper: str = "py-spy",
    title: str = "",
    **facts: Any,
) -> ProcessDump:
    """One process: a TP rank by number, a rank, or a role by name."""
    rank = Rank(tp=who) if isinstance(who, int) else who if isinstance(who, Rank) else None
    kind = role if rank is not None else str(who)
    threads = (thread(text),) if isinstance(text, str) else tuple(text or ())
    return ProcessDump(
        ProcessId(pid or next(_pids), 1),
        ProcessRole(kind, rank),  # type: ignore[arg-type]
        title or f"{kind} {who}",
        state,
        dumper,  # type: ignore[arg-type]
        threads,
        problem,
        facts,
        taken,
    )


def ranks(texts: Mapping[int, str | None], **more: Any) -> list[ProcessDump]:
    return [dump(number, text, **more) for number, text in texts.items()]


def same(number: int, text: str, **odd: str) -> list[ProcessDump]:
    """``number`` ranks in one place, but ``r3="..."`` in others."""
    return ranks({n: odd.get(f"r{n}", text) for n in range(number)})


def rounds(name: str) -> list[list[ProcessDump]]:
    """Three recorded rounds of a real SGLang server at TP=2."""
    with gzip.open(DATA / "stacks" / f"rounds_sglang_{name}.json.gz", "rt") as file:
        return [[_recorded(entry) for entry in entries] for entries in json.load(file)]


def _recorded(entry: dict[str, Any]) -> ProcessDump:
    title = entry["cmd"]
    rank = re.search(r"scheduler_TP(\d+)", title)
    role = "scheduler" if rank else "detokenizer" if "detokenizer" in title else "api"
    threads = tuple(
        ThreadStack(
            t["os_thread_id"],
            t["thread_name"],
            t["os_thread_id"] == entry["pid"],
            tuple(Frame(name, file, line or None, module) for name, file, line, module in t["frames"]),
            t["active"],
            t["owns_gil"],
        )
        for t in entry["stacks"] or ()
    )
    return ProcessDump(
        ProcessId(entry["pid"], 1),
        ProcessRole(role, Rank(tp=int(rank[1])) if rank else None),  # type: ignore[arg-type]
        title,
        entry["state"],
        "py-spy --nonblocking",
        threads,
        None if threads else entry["stderr"].splitlines()[0],
    )
