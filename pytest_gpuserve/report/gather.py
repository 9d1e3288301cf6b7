"""What an incident knows beside the stacks: the machine, the GPUs, what others saw. Everything has a limit."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from .. import gpu, procfs
from ..diagnose import coredump, flight, locks, machine, ras
from ..diagnose.evidence import Departure, Evidence, Front, LockFact, LogFact, Progress, Witness
from ..diagnose.merge import Merged, label_order, merge, relabel
from ..diagnose.model import ProcessDump
from ..diagnose.roles import rank_in
from ..engines.base import Engine, ProcessRole, Rank
from ..server import inflight
from ..server.control import Control
from ..server.lifecycle import READY
from ..server.record import ServerRecord
from ..vocabulary import LOG_LIMIT
from ..watch.exits import NAME as EXITS
from . import logs

T = TypeVar("T")

_FRESH = 60.0  # seconds that what the watcher wrote is believed


class Later(Generic[T]):
    """A call under way in a daemon thread; :meth:`get` gives up on it in time and takes the default."""

    def __init__(self, call: Callable[[], T], default: T) -> None:
        self._value = default
        self.problem: str | None = None

        def run() -> None:
            try:
                self._value = call()
            except Exception as error:  # evidence that cannot be had must not cost the rest
                self.problem = f"{type(error).__name__}: {error}"

        self._thread = threading.Thread(target=run, name="gpuserve-evidence", daemon=True)
        self._thread.start()

    def get(self, limit: float) -> T:
        self._thread.join(max(0.0, limit))
        return self._value


def tree(record: ServerRecord, alive: Sequence[procfs.Stat]) -> list[procfs.Stat]:
    """The live processes and the zombies among their children: a dead rank is what a hang is often about."""
    pids = {entry.pid for entry in alive} | ({record.supervisor.pid} if record.supervisor else set())
    dead = [entry for entry in procfs.snapshot().values() if entry.state == "Z" and entry.ppid in pids]
    return [*alive, *(entry for entry in dead if entry.pid not in pids)]


def environment(record: ServerRecord) -> dict[str, str]:
    """The server's environment; of one that is gone, what it was asked to have."""
    found = procfs.environ(record.root.pid) if record.root and procfs.same(record.root) else {}
    if found:
        return dict(found)
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(record.gpus)} if record.gpus else {}
    return {**chosen, **{name: value for name, value in record.spec.env if value is not None}}


def gpus(record: ServerRecord, pids: Iterable[int], limit: float = 5.0) -> tuple[gpu.Gpu, ...]:
    """A reading of the GPUs that the server's processes have open; none are asked when it uses none."""
    minors = {minor for pid in pids for minor in _devices(pid)}
    if not minors:
        return ()
    found = gpu.query(limit).gpus
    used = tuple(g for g in found if g.minor in minors)
    return used or gpu.visible(found, ",".join(record.gpus) or None)


def watcher_notes(directory: Path) -> Any:
    """The object of ``progress.json``, or something of another shape where none watches, or none is whole."""
    try:
        return json.loads((directory / "progress.json").read_bytes())
    except (OSError, ValueError):
        return {}


def progress(found: Any) -> Progress | None:
    """What the watcher saw, by its notes; None when none watches, or none has of late."""
    try:
        if time.monotonic() - found["monotonic"] > _FRESH:
            return None
        return Progress(
            state=found["state"],
            still=found["still"],
            window=found["window"],
            last=str(found.get("last") or ""),
            moving=tuple(map(str, found.get("moving") or ())),
            history=tuple(found.get("history") or ()),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def expected(record: ServerRecord, labels: Iterable[str]) -> tuple[str, ...]:
    """Labels of the ranks there should be, once any rank has shown itself in a title or in the log."""
    known = {label for label in labels if re.search(r"\b[TPDE]P\d+", label)}
    if not known:
        return ()
    if all(re.fullmatch(r"TP\d+", label) for label in known):
        known |= {f"TP{n}" for n in range(record.spec.tp)}
    return tuple(sorted(known, key=lambda label: [int(n) for n in re.findall(r"\d+", label)]))


def name_the_dead(dumps: Sequence[ProcessDump], scene: Scene) -> list[ProcessDump]:
    """Give zombies, which have lost their titles, the ranks that are missing: by their number, in the order of pids.

    All that the kernel keeps of a zombie's name are 15 characters, as the living ranks have them too.
    """
    ranks = [d for d in dumps if d.role.rank is not None]
    names = {_comm(d.process.pid) for d in ranks}
    alike = sorted((d for d in dumps if d.state == "Z" and d.title in names), key=lambda d: d.process.start)
    missing = [
        label
        for label in expected(scene.record, [*(d.label for d in ranks), *scene.log.phases])
        if label not in {d.label for d in ranks}
    ]
    if not alike or len(alike) != len(missing):
        return list(dumps)
    kind = next(d.role.role for d in ranks)
    named = {
        dump.process: replace(dump, role=ProcessRole(kind, rank_in(label)))
        for dump, label in zip(alike, missing, strict=True)
    }
    return [named.get(d.process, d) for d in dumps]


def exits(dumps: Sequence[ProcessDump]) -> dict[str, int]:
    """Exit codes of zombies by label and by pid."""
    dead = [d for d in dumps if d.state == "Z" and isinstance(d.facts.get("exit"), int)]
    found = {str(d.process.pid): int(d.facts["exit"]) for d in dead}
    return {**found, **{d.label: int(d.facts["exit"]) for d in dead if d.role.rank is not None}}


def departures(record: ServerRecord, ranks: Mapping[int, Rank]) -> tuple[Departure, ...]:
    """Who ended by itself, in the order that the watcher saw; what came after we began to end the server is ours.

    ``ranks``: of processes whose titles did not tell them.
    """
    killing = Control(record.directory, record.supervisor).last("killing")
    found: list[Departure] = []
    for line in procfs.read(str(record.directory / EXITS)).splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a torn last line
            raw = json.loads(line)
            rank = ranks.get(raw["pid"])
            if raw["role"] == "other" and rank is None:
                continue
            label = rank.label if rank and rank_in(raw["label"]) is None else str(raw["label"])
            found.append(Departure(label, int(raw["pid"]), float(raw["monotonic"]), raw["code"]))
    return tuple(entry for entry in found if killing is None or entry.at < killing.monotonic)


def _comm(pid: int) -> str:
    found = procfs.stat(pid)
    return found.comm if found else ""


def witnesses(merged: Merged, limit: float) -> tuple[Witness, ...]:
    """What NCCL's own services say, where the ranks run with them; nothing is asked that could harm a rank."""
    deadline = time.monotonic() + limit
    ranks = {m.process.pid: m.label for m in merged.ranks if m.condition != "dead"}
    if not any(_devices(pid) for pid in ranks):
        return ()
    environments = {pid: procfs.environ(pid) for pid in ranks}
    found: list[Witness] = []
    where = ras.address(next(iter(environments.values()), {}))
    first = ras.ask(where, min(3.0, limit / 3)) if where else None
    if first is not None and where is not None:
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic()) / 3))
        second = ras.ask(where, min(3.0, max(0.1, deadline - time.monotonic())))
        found += ras.witnesses(ras.parse(first), ras.parse(second) if second else None, ranks)
    records = {}
    for number, (pid, label) in enumerate(ranks.items()):
        if (left := deadline - time.monotonic()) <= 0.5:
            break
        if raw := flight.dump(environments[pid], number, min(2.0, left)):
            with suppress(Exception):  # somebody else's file
                records[label] = flight.read(raw)
    return (*found, *(flight.witnesses(records) if records else ()))


def cores(merged: Merged, culprits: Sequence[str], limit: float) -> tuple[Witness, ...]:
    """A CUDA core of one rank, the first suspect, where the server was launched for it. It kills that rank."""
    deadline = time.monotonic() + limit
    ranks = sorted(merged.ranks, key=lambda m: (m.label not in culprits, label_order(m.label)))
    for member in ranks:
        pid = member.process.pid
        if member.condition or not _devices(pid):
            continue
        core = coredump.take(pid, procfs.environ(pid), 0.7 * limit)
        if core is None:
            continue
        executable = coredump.debugger()
        left = deadline - time.monotonic()
        text = coredump.read(core, executable, left) if executable and left > 0.5 else None
        found = coredump.witness(member.label, core, text)
        return (found,) if found else ()
    return ()


@dataclass
class Scene:
    """Everything that was collected of one incident; :meth:`evidence` puts it into the form that is judged."""

    record: ServerRecord
    engine: Engine | None
    reason: str
    test: str | None = None
    after: float | None = None
    rounds: list[list[ProcessDump]] = field(default_factory=list)
    log: logs.Log = field(default_factory=logs.Log)
    facts: tuple[LogFact, ...] = ()
    gpus: tuple[gpu.Gpu, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    answers: bool | None = None
    front: Front | None = None
    server_exit: int | None = None
    log_size: int | None = None  # bytes, when the incident began
    before: Progress | None = None  # what the watcher had seen when the incident began
    responds: bool = False  # one of its pages was answered, with a status of any kind
    waits: bool | None = None  # the test's process waits for an answer; None: cannot be seen
    flood: str = ""  # the line that the log repeats without end, of a server that does nothing else
    began: float = 0.0  # CLOCK_MONOTONIC seconds
    _locks: tuple[int, tuple[LockFact, ...]] = (0, ())

    @property
    def known(self) -> list[list[ProcessDump]]:
        """The rounds, with the ranks that only the log knows."""
        return relabel(self.rounds, self.log.pids)

    @property
    def merged(self) -> Merged:
        return merge(self.known)

    def still(self, merged: Merged) -> bool:
        """Nothing moved while we looked, for more than one round: no stack, no CPU, no reads, no log."""
        if len(self.rounds) < 2 or self.log_size is None or logs.said_more(self.record.log, self.log_size, self.engine):
            return False
        busy = [m for m in merged.members if (m.cpu or 0) > 0.05 or (m.read or 0) > 1e6]
        return not merged.moving and not busy

    def _serves(self, seen: Progress | None) -> bool:
        """It answers, whatever it prints: pages, where no completion can be asked for and nobody waits in vain, or
        tokens come behind which our question has to wait."""
        if self.answers is None:
            return self.responds and (self.waits is False or self.reason == LOG_LIMIT)
        moving = seen.moving if seen is not None and seen.state == "moving" else ()
        return self.answers or (self.responds and any(sign != "log" and not sign.startswith("(") for sign in moving))

    def locks(self, merged: Merged) -> tuple[LockFact, ...]:
        """Looked for once a round, since a loop that polls is traced for that."""
        number, found = self._locks
        if number != len(self.rounds):
            found = locks.locks(merged, limit=4.0, python=sys.executable)
            self._locks = len(self.rounds), found
        return found

    def evidence(self, merged: Merged) -> Evidence:
        record = self.record
        rounds = self.known
        last = rounds[-1] if rounds else []
        pids = [d.process.pid for d in last if d.state not in "ZX"]
        labels = {d.label for d in last if d.role.rank is not None} | set(self.log.phases)
        wanted = expected(record, labels)
        noted = watcher_notes(record.directory)
        seen = progress(noted)
        since, before = time.monotonic() - self.began, self.before
        line = logs.flood(record.log, self.log_size)
        self.flood = "" if self._serves(seen) else line
        if seen and before and not line and seen.last == "log" and (seen.still or 0.0) < since:
            # a line that our own question called forth (SGLang 0.5.12 warns when a probe hangs up) is no progress
            seen = replace(before, still=(before.still or 0.0) + since)
        if seen is not None and seen.state == "moving" and self.still(merged):
            seen = replace(seen, state="suspect", moving=())  # it moved before we came, and has not since
        environment = procfs.environ(pids[0]) if pids else {}
        return Evidence(
            reason=self.reason,
            after=self.after,
            rounds=rounds,
            phases=self.log.phases,
            expected=wanted,
            exits=exits(last),
            departures=departures(record, self.log.pids),
            server_exit=self.server_exit,
            engine=record.engine,
            axes={axis: value.name for axis, value in record.spec.axes},
            tp=record.spec.tp,
            log=self.facts,
            memory=machine.memory(pids, oom_before=oom_before(noted)),
            gpus=self.gpus,
            shm_free=machine.shm_free(),
            nccl=machine.nccl_variables(environment),
            locks=self.locks(merged),
            witnesses=self.witnesses,
            progress=seen,
            answers=self.answers,
            ready=(record.directory / READY).exists(),
            front=self.front,
            requests=requests_in_flight(record.directory),
            test=self.test,
            flood=self.flood,
        )


def requests_in_flight(directory: Path) -> int | None:
    """Requests of our clients that are under way; None when none of them ever sent one."""
    found = inflight.read(directory)
    return found.count if found.begun else None


def oom_before(found: Any) -> int | None:
    """The kernel's count of kills for memory when the watch began, by the watcher's notes."""
    try:
        value = found["oom_before"]
        return int(value) if value is not None else None
    except (ValueError, KeyError, TypeError):
        return None


def _devices(pid: int) -> set[int]:
    """Numbers N of the /dev/nvidiaN that a process has open."""
    found: set[int] = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if device := re.fullmatch(r"/dev/nvidia(\d+)", str(link.readlink())):
                    found.add(int(device[1]))
    return found
