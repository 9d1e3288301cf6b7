"""Is it hung, where, and whose fault? Injected faults against what the tool says, and healthy slow starts.

The embedded engine runs with its real processes under the real supervisor, watcher and incident.

Run: ``python benchmarks/scoreboard.py --faults 60 --healthy 60 [--jobs 3] [--seed 1] [--markdown FILE]``. ``--smoke``
is the small seeded subset of CI. Exit code 0: the targets that the run can show are met.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pytest_gpuserve.diagnose.evidence import Evidence
from pytest_gpuserve.diagnose.verdict import judge
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.errors import GpuserveError, ServerError
from pytest_gpuserve.report import incident, logs
from pytest_gpuserve.server.control import Control
from pytest_gpuserve.server.handle import Server
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.record import load, processes
from pytest_gpuserve.spec import ServerSpec
from pytest_gpuserve.watch import watcher

START_UP = ("distributed_init", "weight_load", "kv_cache", "cuda_graph", "warmup")
KINDS = (
    "sleep", "spin", "gil", "flock", "stale_lock", "pipe", "stop", "die", "exit", "raise", "oom", "skip_collective",
    "symmetric", "wedge",
)  # fmt: skip
CRASHES = frozenset({"die", "exit", "raise", "oom"})
SMOKE_SEED = 5
HEALTHY = ("cold_compile", "slow_disk", "slow_compile", "slow_cpu", "paused", "long_first_request")


@dataclass(frozen=True)
class Case:
    """One server with one fault (or none): what is injected, and what a perfect tool says."""

    kind: str
    phase: str
    tp: int
    flavor: str
    loaded: bool
    rank: int

    @property
    def fault(self) -> str:
        rank = "" if self.kind in ("symmetric", "wedge") else f":rank={self.rank}"
        return f"{self.kind}@{self.phase}{rank}" + (":code=3" if self.kind == "exit" else "")

    @property
    def verdicts(self) -> set[str]:
        if self.kind in HEALTHY:
            return {"none", "slow", "ready"}  # no alarm; or one whose incident found it healthy and spared it
        return {"oom"} if self.kind == "oom" else {"crash"} if self.kind in CRASHES else {"hang"}

    @property
    def culprit(self) -> str | None:
        """The rank to name; None where no rank is to blame (or, with two ranks, none can be told)."""
        if self.kind in ("symmetric", "wedge", "skip_collective"):
            return None
        if self.kind == "flock":
            return f"TP{(self.rank + 1) % self.tp}"  # who holds the lock, not who waits for it
        return f"TP{self.rank}"


@dataclass
class Result:
    """What the tool said of a case."""

    case: Case
    verdict: str = "none"
    culprits: tuple[str, ...] = ()
    seconds: float | None = None
    complete: bool | None = None
    text: str = ""
    problem: str = ""

    @property
    def right(self) -> bool:
        return self.verdict in self.case.verdicts

    @property
    def rank(self) -> str:
        """right, wrong, undecided, or - where there is nothing to name."""
        wanted = self.case.culprit
        if self.case.kind in HEALTHY or self.case.kind in CRASHES:
            return "-"
        if not self.culprits:
            return "right" if wanted is None else "undecided"
        if wanted is None:
            return "wrong"
        return "right" if self.culprits == (wanted,) else "wrong"


@dataclass
class Bench:
    """Where servers run, and what they are given."""

    session: Path
    artifacts: Path
    window: float
    results: list[Result] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def incident(self, directory: Path, reason: str) -> list[str]:
        return incident.command(directory, self.artifacts, reason, limit=25.0)


def fault_cases(number: int, seed: int) -> list[Case]:
    """A seeded sample in which every pair of values of two axes occurs, as far as ``number`` goes."""
    dice = random.Random(seed)
    every = [
        Case(kind, phase, tp, flavor, loaded, dice.randrange(tp))
        for kind, phase, tp, flavor, loaded in itertools.product(
            KINDS, (*START_UP, "serving"), (2, 4, 8), ("sglang", "vllm"), (False, True)
        )
        if _possible(kind, phase, loaded)
    ]
    dice.shuffle(every)
    chosen: list[Case] = []
    seen: set[tuple[object, object]] = set()
    while len(chosen) < number and every:
        best = max(every[:200], key=lambda case: len(_pairs(case) - seen))
        every.remove(best)
        chosen.append(best)
        seen |= _pairs(best)
    return chosen


def smoke_cases(seed: int) -> list[Case]:
    """A minute's worth: hangs of four kinds, two deaths, two slow starts, small servers; drawn by the seed."""
    dice = random.Random(seed)
    every = [case for case in fault_cases(400, seed) if case.tp < 8 and case.phase != "warmup"]
    dice.shuffle(every)
    hangs = [k for k in KINDS if k not in CRASHES and k not in ("spin", "gil")]  # those take a window more
    kinds = [*dice.sample(hangs, 4), *dice.sample(sorted(CRASHES), 2)]
    chosen = [next(case for case in every if case.kind == kind) for kind in kinds]
    return chosen + healthy_cases(len(HEALTHY), seed)[::4]


def _possible(kind: str, phase: str, loaded: bool) -> bool:
    if loaded and phase != "serving":
        return False
    if kind == "wedge":
        return phase == "serving"
    if phase == "distributed_init" and kind in ("flock", "skip_collective", "symmetric"):
        return False
    return not (phase == "warmup" and kind == "skip_collective")


def _pairs(case: Case) -> set[tuple[object, object]]:
    values = [
        ("kind", case.kind),
        ("phase", case.phase),
        ("tp", case.tp),
        ("flavor", case.flavor),
        ("load", case.loaded),
    ]
    return set(itertools.combinations(values, 2))


def healthy_cases(number: int, seed: int) -> list[Case]:
    """Slow starts, evenly over the reasons to be slow."""
    dice = random.Random(seed)
    found = []
    for n in range(number):
        phase, tp, flavor = dice.choice(START_UP[1:4]), dice.choice((1, 2, 4)), dice.choice(("sglang", "vllm"))
        found.append(Case(HEALTHY[n % len(HEALTHY)], phase, tp, flavor, False, 0))
    return found


def arguments(case: Case, window: float) -> dict[str, Any]:
    """Flags of the embedded engine."""
    flags: dict[str, Any] = {"flavor": case.flavor}
    long = f"{2.5 * window:g}"
    if case.kind == "cold_compile":
        flags |= {"jit_cache": "cold", "cold_compile": 2.5 * window}
    elif case.kind == "slow_disk":
        flags["fault"] = f"slow@weight_load:rank=0:how=io:for={long}"
    elif case.kind == "slow_compile":
        flags["fault"] = f"slow@{case.phase}:rank=0:how=compile:for={long}"
    elif case.kind == "slow_cpu":
        flags["fault"] = f"slow@{case.phase}:rank=0:how=cpu:for={1.3 * window:g}"
    elif case.kind == "long_first_request":
        flags["fault"] = f"slow@serving:rank=0:how=cpu:for={1.5 * window:g}"
    elif case.kind == "paused":
        flags["load_seconds"] = window
    else:
        flags["fault"] = case.fault
    return flags


def run(bench: Bench, case: Case) -> Result:
    """One case, from launch to the end of its server."""
    result = Result(case)
    spec = ServerSpec.from_mapping({"engine": "sim", "tp": case.tp, "args": arguments(case, bench.window)})
    server: Server | None = None
    error: ServerError | None = None
    over = threading.Event()
    try:
        with _Pause(bench, case, spec, over):
            server = start(
                spec,
                get_engine("sim"),
                parent=bench.session,
                limits=Limits(startup=240.0, grace=0.5, dump=30.0),
                incident=bench.incident,
                progress=lambda text: None,
            )
        if case.phase == "serving" or case.kind in HEALTHY:
            error = _ask(server, case, bench)
    except ServerError as found:
        error = found
    except GpuserveError as found:
        result.problem = str(found)
    finally:
        over.set()
    directory = server.directory if server else _directory(bench, spec, error)
    if case.kind in CRASHES and server is not None:
        server.control.wait(lambda events: any(e.kind in ("exited", "killing") for e in events), 20.0)
    if error is not None:
        result.verdict, result.text = error.verdict, str(error)[:600]
    if directory is not None:
        _read(bench, result, directory)
        if result.verdict == "infra":
            result.problem += f" {_supervisor(directory)}"
    if server is not None:
        server.stop(0.5)
    return result


class _Pause:
    """Stops every process of the server for less than half of the window, once, while it starts."""

    def __init__(self, bench: Bench, case: Case, spec: ServerSpec, over: threading.Event) -> None:
        self._bench, self._case, self._over = bench, case, over
        self._before = set(bench.session.iterdir())
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._case.kind == "paused":
            self._thread = threading.Thread(target=self._run)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        deadline = time.monotonic() + 60
        time.sleep(1.5)
        while time.monotonic() < deadline and not self._over.is_set():
            for directory in sorted(set(self._bench.session.iterdir()) - self._before):
                with suppress(GpuserveError, ProcessLookupError):
                    record = load(directory)
                    pids = [p.pid for p in processes(record)]
                    if record.spec.tp != self._case.tp or not pids:
                        continue
                    for pid in pids:
                        os.kill(pid, signal.SIGSTOP)
                    time.sleep(0.45 * self._bench.window)
                    for pid in pids:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGCONT)
                    return
            time.sleep(0.1)


def _ask(server: Server, case: Case, bench: Bench) -> ServerError | None:
    """Requests, until they answer or the server is ended; the error of the first that failed."""
    errors: list[ServerError] = []

    def post(tokens: int) -> None:
        body = {"model": server.model, "prompt": "2+2=", "max_tokens": tokens}
        try:
            server.post("/v1/completions", json=body, timeout=200)
        except ServerError as error:
            errors.append(error)
        except Exception:  # a broken connection whose cause the first one tells
            pass

    threads = [threading.Thread(target=post, args=(16 + n,)) for n in range(4 if case.loaded else 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors[0] if errors else None


def _directory(bench: Bench, spec: ServerSpec, error: ServerError | None) -> Path | None:
    """The directory of a server whose start failed, by the incident or the log that the error names."""
    text = str(error)
    for directory in bench.session.iterdir():
        if str(directory) in text or (error and error.incident and str(directory) in str(error.incident)):
            return directory
        for entry in _incidents(directory):
            if error and error.incident and entry.get("incident") == error.incident:
                return directory
    return None


def _incidents(directory: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        return [json.loads(line) for line in (directory / "incidents.jsonl").read_text().splitlines()]
    return []


def _read(bench: Bench, result: Result, directory: Path) -> None:
    """Verdict, culprits, time and completeness from the incident; from log and exit code where none was needed."""
    entries = _incidents(directory)
    told = _json(directory / "progress.json")
    if entries:
        entry = entries[0]
        found = _json(Path(entry["incident"]) / "incident.json") if entry.get("incident") else {}
        result.verdict = str(entry.get("verdict"))
        result.culprits = tuple(found.get("culprits") or ())
        result.text = str(entry.get("text"))[:600]
        ranks = found.get("ranks") or {}
        if result.case.kind in CRASHES:
            return  # nobody is left to dump
        result.complete = len(ranks) >= result.case.tp and all(_explained(r) for r in ranks.values())
        fired = Control(directory).last("fired")
        if fired and told.get("still") is not None:
            result.seconds = entry["time"] - fired.time + float(told["still"])
        return
    exited = Control(directory).last("exited")
    if exited and result.case.kind in CRASHES:
        judged = judge(Evidence(server_exit=exited.data.get("code"), log=logs.said(load(directory)).facts))
        result.verdict, result.culprits, result.text = judged.verdict, judged.culprits, judged.text


def _supervisor(directory: Path) -> str:
    """What its supervisor did last, and its own troubles: nobody ends it in this bench."""
    texts = []
    for name in ("events.jsonl", "supervisor.log"):
        with suppress(OSError):
            texts.append(f"{name}: {(directory / name).read_text(errors='replace')[-1500:]}")
    return " ".join(texts)


def _explained(rank: dict[str, Any]) -> bool:
    return bool(rank.get("stack") or rank.get("frames") or rank.get("problem") or rank.get("dumper"))


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


def campaign(bench: Bench, cases: Sequence[Case], jobs: int, deadline: float, say: Callable[[str], None]) -> None:
    """Run the cases, ``jobs`` at a time, until the deadline."""
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)

    def work() -> None:
        while time.monotonic() < deadline:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                result = run(bench, case)
            except Exception as error:  # the bench itself failed: counted apart, never as a verdict
                result = Result(case, verdict="bench", problem=f"{type(error).__name__}: {error}")
            with bench.lock:
                bench.results.append(result)
                good = "ok  " if result.right and result.rank != "wrong" else "BAD "
                took = "" if result.seconds is None else f"{result.seconds:5.1f} s"
                words = f"{good} {case.kind:18} {case.phase:16} tp{case.tp} {case.flavor:6} rank {case.rank} -> "
                say(f"{words}{result.verdict} {','.join(result.culprits)} {result.rank} {took} {result.problem}")
                if good.startswith("BAD"):
                    say(f"     {result.text}")

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def table(results: Iterable[Result]) -> str:
    """Markdown: one line a kind, and the figures that have a target."""
    heads = (
        "fault",
        "cases",
        "right verdict",
        "right rank",
        "wrong rank",
        "undecided",
        "seconds, median (max)",
        "dumps",
    )
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    found = [r for r in results if r.verdict != "bench"]
    for kind in (*KINDS, *HEALTHY, "all faults"):
        mine = [r for r in found if r.case.kind == kind or (kind == "all faults" and r.case.kind in KINDS)]
        if not mine:
            continue
        ranks = Counter(r.rank for r in mine)
        seconds = sorted(r.seconds for r in mine if r.seconds is not None)
        complete = [r.complete for r in mine if r.complete is not None]
        rows.append(
            f"| {kind} | {len(mine)} | {sum(r.right for r in mine)} | {ranks['right']} | {ranks['wrong']} | "
            f"{ranks['undecided']} | "
            + (f"{seconds[len(seconds) // 2]:.1f} ({seconds[-1]:.1f})" if seconds else "-")
            + f" | {f'{sum(complete)}/{len(complete)}' if complete else '-'} |"
        )
    return "\n".join(rows)


def figures(results: Sequence[Result], window: float) -> dict[str, Any]:
    """The figures of merit and whether their targets are met."""
    faults = [r for r in results if r.case.kind in KINDS and r.verdict != "bench"]
    healthy = [r for r in results if r.case.kind in HEALTHY and r.verdict != "bench"]
    named = [r for r in faults if r.case.tp >= 3 and r.case.culprit and r.case.kind not in CRASHES]
    symmetric = [r for r in faults if r.case.culprit is None]
    dumps = [r.complete for r in faults if r.complete is not None]
    late = [r.seconds for r in faults if r.seconds is not None]

    def share(good: int, of: int) -> float | None:
        return round(100.0 * good / of, 1) if of else None

    return {
        "faults": len(faults),
        "right_verdict_percent": share(sum(r.right for r in faults), len(faults)),
        "right_rank_percent_tp3": share(sum(r.rank == "right" for r in named), len(named)),
        "wrong_rank": sum(r.rank == "wrong" for r in faults),
        "wrong_rank_symmetric": sum(r.rank == "wrong" for r in symmetric),
        "dumps_complete_percent": share(sum(map(bool, dumps)), len(dumps)),
        "seconds_max": round(max(late), 1) if late else None,
        "window": window,
        "healthy": len(healthy),
        "false_hangs": sum(r.verdict in ("hang", "undecided", "stalled") for r in healthy),
        "failed_starts": sum(r.verdict not in ("none", "slow", "ready", "hang", "undecided") for r in healthy),
        "alarms_that_spared": sum(r.verdict in ("slow", "ready") for r in healthy),
        "bench_failures": sum(r.verdict == "bench" for r in results),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--healthy", type=int, default=60)
    parser.add_argument("--window", type=float, default=6.0, help="seconds without progress that make a hang")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", default="", help="kinds, comma separated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.window, options.jobs, options.seed = 5.0, 4, SMOKE_SEED
    deadline = time.monotonic() + options.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GPUSERVE_STATE", str(Path(folder) / "state"))
        bench = Bench(Path(folder) / "session", Path(folder) / "artifacts", options.window)
        bench.session.mkdir(mode=0o700)
        argv = incident.command("{server}", bench.artifacts, "{reason}", limit=25.0)
        budgets = {"window": options.window, "first_request": 2.5 * options.window}
        process = watcher.start(
            bench.session, {"incident": argv, "gpus": False, "interval": 0.5, "limit": 30.0, "budgets": budgets}
        )
        cases = fault_cases(options.faults, options.seed) + healthy_cases(options.healthy, options.seed)
        if options.smoke:
            cases = smoke_cases(options.seed)
        if options.only:
            cases = [case for case in cases if case.kind in options.only.split(",")]
        random.Random(options.seed).shuffle(cases)
        try:
            campaign(bench, cases, options.jobs, deadline, lambda line: print(line, flush=True))
        finally:
            process.terminate()
            process.wait()
        found = figures(bench.results, options.window)
        print(table(bench.results))
        print(json.dumps(found, indent=1))
        if options.json:
            rows = [{**asdict(r.case), **asdict(r), "case": None, "rank_named": r.rank} for r in bench.results]
            options.json.write_text(json.dumps({"figures": found, "results": rows}, indent=1))
        if options.markdown:
            options.markdown.write_text(
                table(bench.results) + "\n\n```json\n" + json.dumps(found, indent=1) + "\n```\n"
            )
    good = (
        not found["wrong_rank"]
        and not found["false_hangs"]
        and not found["bench_failures"]
        and (found["right_verdict_percent"] or 100) >= 98
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
