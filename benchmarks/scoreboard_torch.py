"""The verdict on real code: ranks of torch.distributed that hang for 15 causes, dumped and judged.

Run: ``python benchmarks/scoreboard_torch.py --python TORCH_PYTHON [--tp 4]``, where TORCH_PYTHON is an interpreter with
torch (CPU is enough), filelock and ninja. Each case: start, wait until nothing changes, two rounds of stacks, judge.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pytest_gpuserve import procfs
from pytest_gpuserve.diagnose import locks, machine, stacks
from pytest_gpuserve.diagnose.evidence import Evidence, Progress
from pytest_gpuserve.diagnose.merge import merge, relabel
from pytest_gpuserve.diagnose.model import Judgement
from pytest_gpuserve.diagnose.roles import any_role
from pytest_gpuserve.diagnose.verdict import judge
from pytest_gpuserve.engines.base import Rank

CASES = {
    "late_rank": "sick",
    "late_for_a_barrier": "sick",
    "late_for_a_group": "sick",
    "sleeps": "sick",
    "stopped": "sick",
    "killed": "sick",
    "stale_extension_lock": "sick",
    "waits_for_file_lock": "next",
    "waits_for_kernel_lock": "sick",
    "spins_in_python": "sick",
    "spins_in_torch": "sick",
    "waits_for_a_child": "sick",
    "waits_for_a_queue": "sick",
    "other_collective": "nobody",
    "receive_cycle": "nobody",
    "compiles_an_extension": "slow",
}
"""Cause to whose fault it is: the sick rank, its neighbour that holds the lock, nobody's, or no hang at all."""


def run(python: str, cause: str, tp: int, sick: int, settle: float) -> Judgement:
    """One case."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(__file__).with_name("torch_ranks.py")
        log = Path(folder) / "log"
        stranger = os.open(Path(folder) / "foreign", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(stranger, fcntl.LOCK_EX)  # a lock of a process that is none of the server's: ours
        with log.open("wb") as output:
            path = f"{Path(python).parent}:{os.environ.get('PATH', '')}"
            process = subprocess.Popen(
                [python, str(program), cause, str(tp), str(sick), folder],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PATH": path, "MAX_JOBS": "1"},
            )
        try:
            ranks = _ranks(log, tp)
            return _judge(process.pid, ranks, cause, settle, tp)
        finally:
            for pid in (*procfs.descendants(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            os.close(stranger)


def _ranks(log: Path, tp: int) -> dict[int, Rank]:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        found = dict(re.findall(r"^pid (\d+) (\d+)$", log.read_text(errors="replace"), re.MULTILINE))
        if len(found) == tp:
            return {int(pid): Rank(tp=int(rank)) for rank, pid in found.items()}
        time.sleep(0.2)
    raise TimeoutError(f"the ranks did not start: {log.read_text()[-2000:]}")


def _judge(root: int, ranks: dict[int, Rank], cause: str, settle: float, tp: int) -> Judgement:
    deadline = time.monotonic() + 120
    still = 0.0
    before: float | None = None
    slow = CASES[cause] == "slow"
    while time.monotonic() < deadline and still < settle:
        time.sleep(0.5)
        table = procfs.snapshot()
        mine = [table[pid] for pid in (root, *procfs.descendants(root, table)) if pid in table]
        if slow and any(entry.comm.startswith("cc1plus") for entry in mine):
            break
        used = sum(e.utime + e.stime for e in mine if e.pid in ranks) / 100
        spin = 1.2 if cause.startswith("spins") else 0.1
        still = still + 0.5 if before is not None and used - before < spin else 0.0
        before = used
    rounds = []
    for _ in range(2):
        table = procfs.snapshot()
        tree = [table[pid] for pid in (root, *procfs.descendants(root, table)) if pid in table]
        rounds.append(stacks.take(tree, any_role, limit=15.0))
        time.sleep(1.5)
    known = relabel(rounds, ranks)
    merged = merge(known)
    progress = None if slow else Progress("hung", still=still, window=settle, last="log")
    evidence = Evidence(
        reason="startup_budget" if slow else "no_progress",
        rounds=known,
        expected=tuple(f"TP{n}" for n in range(tp)),
        tp=tp,
        locks=locks.locks(merged),
        memory=machine.memory([m.process.pid for m in merged.members]),
        progress=progress,
    )
    return judge(evidence)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--settle", type=float, default=3.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    sick = options.rank % options.tp
    wrong = 0
    print("| cause | verdict | named | right |\n|---|---|---|---|")
    for cause, fault in CASES.items():
        if options.only and cause not in options.only.split(","):
            continue
        found = run(options.python, cause, options.tp, sick, options.settle)
        wanted = {"sick": (f"TP{sick}",), "next": (f"TP{(sick + 1) % options.tp}",)}.get(fault, ())
        verdict = "slow" if fault == "slow" else "crash" if cause == "killed" else "hang"
        good = found.verdict == verdict and (found.culprits == wanted or (options.tp == 2 and not found.culprits))
        wrong += not good
        print(
            f"| {cause} | {found.verdict} | {', '.join(found.culprits) or '-'} | {'yes' if good else 'NO'} |",
            flush=True,
        )
        if not good or options.only:
            print(f"    {found.text}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
