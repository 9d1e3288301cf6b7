"""Random SIGKILLs of everything that takes part in a run, and what is left afterwards.

    python benchmarks/chaos.py [--kills 200] [--seed 1] [--workers 0,2,4] [--engine sim] [--json FILE]

Real runs of pytest with the embedded engine (SGLang's and vLLM's process trees, files in /dev/shm that only their owner
unlinks). At random moments one of pytest, an xdist worker, a supervisor, the watcher, a front end or a rank is killed,
or pytest and a supervisor together. After each run: what is left at grace + 1 s, and what the next session's sweep does
not free: processes (everything that a run starts inherits a tag), leases, files in /dev/shm, ports.

Decoys live all along: same command lines and titles as the engines' processes, same user, cookies that are nearly those
of real servers, and processes with the numbers of pytests that were killed (where the kernel lets us choose). None of
them may die. Exit code 1 when anything is left, or a decoy died.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpuserve import procfs
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.errors import GpuserveError, ServerStartError
from pytest_gpuserve.procfs import ProcessId
from pytest_gpuserve.server import lease_files, ports
from pytest_gpuserve.server.control import Control
from pytest_gpuserve.server.reaper import sweep_dead_sessions
from pytest_gpuserve.server.record import ServerRecord, load, processes

TAG = "GPUSERVE_CHAOS_RUN"
GRACE = 1.0
KINDS = ("pytest", "worker", "supervisor", "watcher", "front end", "rank", "pytest and supervisor")
WORKERS = 30.0  # seconds in which a worker of xdist must notice that its controller is gone (5 on an idle machine)
WATCHER = " -m pytest_gpuserve.watch.watcher --session "
LIMIT = 240.0  # seconds that a run may take after its last kill

SIM = """
import pytest

def ask(server):
    body = {"model": server.model, "prompt": "x", "max_tokens": 4}
    for _ in range(3):
        server.post("/v1/completions", json=body, timeout=30).raise_for_status()

@pytest.mark.gpuserve(engine="sim", tp=2, args={"leak_shm": True})
class TestOne:
    def test_a(self, server): ask(server)
    def test_b(self, server): ask(server)

@pytest.mark.gpuserve(engine="sim", tp=3, args={"leak_shm": True, "flavor": "vllm"})
class TestTwo:
    def test_a(self, server): ask(server)
    def test_b(self, server): ask(server)

@pytest.mark.gpuserve(engine="sim", tp=2, args={"leak_shm": True, "load_seconds": 1})
def test_slow_start(server): ask(server)
"""

OTHER = """
import os, pytest

@pytest.mark.gpuserve(
    engine=os.environ["CHAOS_ENGINE"], model=os.environ["CHAOS_MODEL"], python=os.environ["CHAOS_PYTHON"], tp=2
)
class TestReal:
    @pytest.mark.parametrize("n", range(3))
    def test_a(self, server, n):
        body = {"model": server.model, "prompt": "x", "max_tokens": 4}
        server.post("/v1/completions", json=body, timeout=120).raise_for_status()
"""


@dataclass
class Figures:
    """What is counted. ``left``, ``stuck`` and ``decoys_killed`` must be nothing."""

    sessions: int = 0
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: list[float] = field(default_factory=list)  # until nothing was left without a sweep
    swept: int = 0  # sessions that needed the next one's sweep
    unnoted: list[str] = field(default_factory=list)  # shared memory, see Run.unnoted
    late_workers: int = 0  # sessions in which workers of xdist alone, without a server, were left for a while
    decoys: int = 0
    reused: int = 0  # decoys that got the number of a killed process
    left: list[str] = field(default_factory=list)
    stuck: int = 0
    decoys_killed: int = 0

    def text(self) -> str:
        kinds = ", ".join(f"{kind} {number}" for kind, number in self.kills.items())
        took = sorted(self.seconds) or [0.0]
        lines = [
            f"{sum(self.kills.values())} kills in {self.sessions} sessions: {kinds}",
            f"gone by itself: median {took[len(took) // 2]:.2f} s, worst {took[-1]:.2f} s (grace {GRACE:g} s)",
            f"sessions that needed the next one's sweep: {self.swept}",
            f"files in /dev/shm made too shortly before a kill to be noted as the server's: {len(self.unnoted)}",
            f"sessions whose xdist workers, and nothing else, noticed later than that: {self.late_workers}",
            f"decoys: {self.decoys}, of them with the number of a killed process {self.reused}; "
            f"killed: {self.decoys_killed}",
            f"runs that did not end: {self.stuck}",
            f"left after the sweep: {len(self.left)}",
            *(f"  {what}" for what in self.left[:20]),
        ]
        return "\n".join(lines)

    @property
    def good(self) -> bool:
        return not self.left and not self.stuck and not self.decoys_killed


class Decoys:
    """Processes that look like ours and are not."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[bytes]] = []

    def add(self, *words: str, title: str = "", **env: str) -> subprocess.Popen[bytes]:
        code = "import sys, time\n"
        if title:
            code += f"import setproctitle; setproctitle.setproctitle({title!r})\n"
        argv = [sys.executable, "-c", code + "while True: time.sleep(60)", *words]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUSERVE")}
        process = subprocess.Popen(argv, env={**kept, **env}, start_new_session=True)
        self.running.append(process)
        return process

    def usual(self) -> None:
        self.add("-m", "pytest_gpuserve.sim", "--tp=2")
        self.add(title="sglang::scheduler_TP0")
        self.add(title="VLLM::Worker_TP1")
        self.add("-m", "pytest_gpuserve.watch.watcher", "--session", "x")

    def near(self, cookie: str) -> None:
        """Cookies that are nearly that one, at most a dozen of them alive."""
        if len(self.running) < 12:
            for nearly in (cookie[:-1], cookie + "0", cookie.rpartition(":")[0]):
                self.add(GPUSERVE_COOKIE=nearly)

    def heir(self, pid: int) -> bool:
        """A process with the number of one that is gone; False where the kernel does not let us."""
        for _ in range(5):
            try:
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
            except OSError:
                return False
            process = self.add("has the number of a killed process")
            if process.pid == pid:
                return True
            self.running.remove(process)
            process.kill()
            process.wait()
        return False

    def dead(self) -> int:
        return sum(process.poll() is not None for process in self.running)

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


class Run:
    """One run of pytest, and everything that it starts."""

    def __init__(self, home: Path, workers: int, options: argparse.Namespace) -> None:
        self.tag = uuid.uuid4().hex
        self.state = home / "state"
        self.leases = home / "leases"
        self.path = home / f"project-{self.tag[:8]}"
        self.path.mkdir()
        (self.path / "tox.ini").write_text("[pytest]\n")
        (self.path / "test_chaos.py").write_text(SIM if options.engine == "sim" else OTHER)
        words = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", f"--gpuserve-grace={GRACE:g}"]
        words += [f"-n{workers}"] if workers else ["-p", "no:xdist"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSERVE", "PYTEST"))}
        where = {"GPUSERVE_STATE": str(self.state), "GPUSERVE_LEASES": str(self.leases), TAG: self.tag}
        chosen = {"CHAOS_ENGINE": options.engine, "CHAOS_MODEL": options.model, "CHAOS_PYTHON": options.python}
        with open(self.path / "out.txt", "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *words],
                cwd=self.path,
                env={**kept, **where, **chosen},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.begun, self.engine = time.monotonic(), options.engine
        self.before = set(os.listdir("/dev/shm"))

    def members(self) -> dict[int, str]:
        """Live processes that inherited the tag, with their command line."""
        found = {}
        for pid, entry in procfs.snapshot().items():
            if entry.alive and procfs.environ(pid).get(TAG) == self.tag:
                found[pid] = " ".join(procfs.cmdline(pid))[:150]
        return found

    def records(self) -> Iterator[ServerRecord]:
        """Servers of this run: those launched since it began (runs come one after the other)."""
        for path in self.state.glob("sessions/*/*/server.json"):
            with contextlib.suppress(GpuserveError, OSError):
                if path.stat().st_mtime > time.time() - (time.monotonic() - self.begun) - 1:
                    yield load(path.parent)

    def candidates(self, kind: str) -> list[ProcessId]:
        """Whom a kill of this kind may hit now."""
        found: list[ProcessId | None] = []
        if kind == "pytest":
            found = [procfs.process_id(self.process.pid)]
        elif kind == "worker":
            pids = [p for p, s in procfs.snapshot().items() if s.ppid == self.process.pid]
            words = {p: " ".join(procfs.cmdline(p)) for p in pids}  # pytest-xdist gives a title once tests run
            found = [
                procfs.process_id(p) for p in pids if re.search(r"sys\.stdin\.readline|^\[pytest-xdist ", words[p])
            ]
        elif kind == "watcher":
            found = [procfs.process_id(p) for p, line in self.members().items() if "gpuserve.watch.watcher" in line]
        else:
            for record in self.records():
                if kind == "supervisor":
                    found.append(record.supervisor)
                elif kind == "front end":
                    found.append(record.root)
                elif record.supervisor and procfs.same(record.supervisor):
                    role_of = get_engine(record.engine).process_role
                    for entry in processes(record):
                        role = role_of(procfs.cmdline(entry.pid), entry.comm)
                        if role and role.rank:
                            found.append(entry.id)
        return [one for one in found if one and procfs.same(one)]

    def over(self) -> bool:
        return self.process.poll() is not None

    def what_is_left(self) -> list[str]:
        """Processes, leases, shared memory, ports."""
        left = [f"process {pid}: {line}" for pid, line in self.members().items()]
        for path in self.leases.glob("*") if self.leases.is_dir() else ():
            if path.name.startswith(("lease-", "device-", "ticket-")) and lease_files.locked(path):
                left.append(f"lease {path.name}")
        new = set(os.listdir("/dev/shm")) - self.before
        for record in self.records():
            left += [f"shm {name}" for name in sorted(new & noted(record))]
            try:
                ports.hold("127.0.0.1", record.port).release()
            except ServerStartError as error:
                if any(f"pid {pid} " in str(error) for pid in self.members()):
                    left.append(f"port {record.port}: {error}")
        return left

    def unnoted(self) -> list[str]:
        """Files in /dev/shm that are left since they were made so shortly before the kill that no supervisor saw whose
        they are: not to be unlinked by the rule. Those of the embedded engine tell whose they are and are removed here;
        of another engine all new ones count, whoever made them."""
        if self.engine != "sim":
            known = set[str]().union(*map(noted, self.records()))
            return sorted(set(os.listdir("/dev/shm")) - self.before - known)
        found = []
        for record in self.records():
            for path in Path("/dev/shm").glob(f"gpuserve_sim_loads_{record.root.pid}-*" if record.root else "-"):
                if path.name not in noted(record):
                    found.append(path.name)
                    path.unlink()
        return found


def noted(record: ServerRecord) -> set[str]:
    """Names in /dev/shm that the server's supervisor saw in its hands."""
    return {event.data["name"] for event in Control(record.directory).events() if event.kind == "shm"}


def wait(condition: Callable[[], object], limit: float, pause: float = 0.05) -> float | None:
    """Seconds until it held; None: it did not."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > limit:
            return None
        time.sleep(pause)
    return time.monotonic() - begin


def strike(run: Run, kind: str, dice: random.Random, limit: float) -> list[ProcessId]:
    """Kill one of that kind as soon as there is one; whom it hit."""
    parts = ["supervisor", "pytest"] if kind == "pytest and supervisor" else [kind]
    hit = []
    if wait(lambda: run.candidates(parts[0]) or run.over(), limit) is None:
        return []
    for part in parts:
        found = run.candidates(part)
        victims = [dice.choice(found)] if found and len(parts) == 1 else found
        for victim in victims:
            with contextlib.suppress(OSError):
                os.kill(victim.pid, signal.SIGKILL)
                hit.append(victim)
    return hit


def orphans_go(run: Run, figures: Figures) -> bool:
    """xdist's workers notice after 5 s or more that their controller was killed: no more than they and the watchers
    that end with them may be left."""
    begin = time.monotonic()
    while time.monotonic() - begin < WORKERS:
        left = run.what_is_left()
        if not left:
            figures.late_workers += 1
            return True
        if not all(what.endswith("exec(eval(sys.stdin.readline()))") or WATCHER in what for what in left):
            return False
        time.sleep(0.1)
    return False


def session(
    home: Path, dice: random.Random, figures: Figures, decoys: Decoys, options: argparse.Namespace, kinds: list[str]
) -> None:
    """A run with some kills, then the accounts. ``kinds``: which kills, taken from its end."""
    workers = dice.choice(options.workers)
    run = Run(home, workers, options)
    figures.sessions += 1
    heirs = []
    for _ in range(dice.choice((1, 1, 2, 3))):
        if not kinds or run.over():
            break
        kind = kinds.pop()
        if kind == "worker" and not workers:
            kind = "pytest"
        wait(run.over, dice.uniform(0.0, options.span))
        hit = strike(run, kind, dice, LIMIT)
        if not hit:  # there was none: another time
            kinds.insert(0, kind)
            continue
        figures.kills[kind] += 1
        print(f"[{figures.sessions}] -n {workers}: {kind} {', '.join(str(h.pid) for h in hit)}", flush=True)
        for record in run.records():
            decoys.near(record.cookie)
        heirs += [one.pid for one in hit if one.pid != run.process.pid]
    if wait(run.over, LIMIT) is None:
        figures.stuck += 1
        print((run.path / "out.txt").read_text(errors="replace")[-3000:])
        run.process.kill()
    run.process.wait()
    for pid in [run.process.pid, *heirs]:
        if procfs.stat(pid) is None and decoys.heir(pid):
            figures.reused += 1
    took = wait(lambda: not run.what_is_left(), GRACE + 1.0 + options.slack)
    if took is not None:
        figures.seconds.append(took)
    else:
        before = run.what_is_left()
        swept = sweep_dead_sessions(30.0)
        print(f"[{figures.sessions}] {swept.text}", flush=True)
        figures.swept += 1
        if wait(lambda: not run.what_is_left(), 1.0 + options.slack) is None and not orphans_go(run, figures):
            figures.left += [f"[{figures.sessions}] {what}" for what in run.what_is_left()]
            print("before the sweep:", *before, "after:", *run.what_is_left(), sep="\n  ", flush=True)
            for pid in run.members():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
    figures.unnoted += run.unnoted()
    died = decoys.dead()
    if died > figures.decoys_killed:
        print(f"[{figures.sessions}] {died} decoys are dead", flush=True)
        figures.decoys_killed = died


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", default="0,2,4", help="numbers of xdist workers, one of them a run")
    parser.add_argument("--engine", default="sim", help="sim, or vllm with --model")
    parser.add_argument("--model", default="")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the engine")
    parser.add_argument("--span", type=float, default=8.0, help="a kill comes within this many seconds")
    parser.add_argument("--slack", type=float, default=3.0, help="beyond grace + 1 s, for machines that are busy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.workers = [int(number) for number in options.workers.split(",")]
    dice, figures, decoys = random.Random(options.seed), Figures(), Decoys()
    kinds = [KINDS[n % len(KINDS)] for n in range(options.kills)]
    dice.shuffle(kinds)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        home = Path(name)
        os.environ.update(GPUSERVE_STATE=str(home / "state"), GPUSERVE_LEASES=str(home / "leases"))
        try:
            decoys.usual()
            while kinds:
                session(home, dice, figures, decoys, options, kinds)
            figures.decoys = len(decoys.running)
        finally:
            decoys.end()
    print(figures.text())
    if options.json:
        shown = {**vars(figures), "kills": dict(figures.kills), "seed": options.seed, "good": figures.good}
        options.json.write_text(json.dumps(shown, indent=1) + "\n")
    return 0 if figures.good else 1


if __name__ == "__main__":
    sys.exit(main())
