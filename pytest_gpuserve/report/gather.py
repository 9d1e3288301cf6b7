"""What an incident knows beside the stacks: the log, the machine, the GPUs, what others saw. Everything has a limit."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from .. import gpu, procfs
from ..diagnose import flight, locks, machine, ras, triage
from ..diagnose.evidence import Evidence, LogFact, Progress, Witness
from ..diagnose.merge import Merged, merge, relabel
from ..diagnose.model import ProcessDump
from ..diagnose.roles import rank_in
from ..engines.base import Engine, LogGrammar, ProcessRole, Rank
from ..server import inflight
from ..server.record import ServerRecord
from ..watch.phases import RankPhase, read_log

T = TypeVar("T")

_TAIL_BYTES = 256 << 10
_FATAL = frozenset({"crash", "oom", "config", "unsupported_arch", "port", "leak", "infra"})
_FRESH = 60.0  # seconds that what the watcher wrote is believed
_BROKEN = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


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


@dataclass(frozen=True, slots=True)
class Log:
    """A server's log. ``lines``: the last lines of every rank by label; ``server`` for lines without a rank. ``pids``:
    ranks of processes whose titles may not tell them yet."""

    phases: Mapping[str, RankPhase] = field(default_factory=dict)
    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tail: str = ""
    pids: Mapping[int, Rank] = field(default_factory=dict)


def tree(record: ServerRecord, alive: Sequence[procfs.Stat]) -> list[procfs.Stat]:
    """The live processes and the zombies among their children: a dead rank is what a hang is often about."""
    pids = {entry.pid for entry in alive} | ({record.supervisor.pid} if record.supervisor else set())
    dead = [entry for entry in procfs.snapshot().values() if entry.state == "Z" and entry.ppid in pids]
    return [*alive, *(entry for entry in dead if entry.pid not in pids)]


def log(record: ServerRecord, grammar: LogGrammar | None) -> Log:
    """Phases from the whole log, last lines from its end."""
    phases: Mapping[str, RankPhase] = {}
    pids: Mapping[int, Rank] = {}
    if grammar is not None:
        with suppress(OSError):
            reader = read_log(record.log, grammar)
            phases, pids = reader.ranks(), reader.pids
    tail = _tail(record.log)
    return Log(phases, _by_rank(tail, grammar), tail, pids)


def log_facts(record: ServerRecord) -> tuple[LogFact, ...]:
    """What the log says of a failure."""
    found = triage.explain([str(record.log)], record.engine)
    facts = [LogFact(hint, "log") for hint in (*found.degraded, *found.hints) if "gpuserve " not in hint]  # no how-to
    if found.cause is not None and found.verdict in _FATAL:
        witness = f"{record.log.name}, line {found.cause.number}"
        facts.insert(0, LogFact(found.cause.line, witness, found.verdict, found.cause.rank))
    return tuple(facts)


def gpus(record: ServerRecord, pids: Iterable[int], limit: float = 5.0) -> tuple[gpu.Gpu, ...]:
    """A reading of the GPUs that the server's processes have open; none are asked when it uses none."""
    minors = {minor for pid in pids for minor in _devices(pid)}
    if not minors:
        return ()
    found = gpu.query(limit).gpus
    used = tuple(g for g in found if g.minor in minors)
    return used or gpu.visible(found, ",".join(record.gpus) or None)


def progress(directory: Path) -> Progress | None:
    """What the watcher saw; None when none watches, or none has of late."""
    try:
        found = json.loads((directory / "progress.json").read_bytes())
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
    except (OSError, ValueError, KeyError, TypeError):
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


@dataclass
class Scene:
    """Everything that was collected of one incident; :meth:`evidence` puts it into the form that is judged."""

    record: ServerRecord
    engine: Engine | None
    reason: str
    test: str | None = None
    after: float | None = None
    rounds: list[list[ProcessDump]] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    facts: tuple[LogFact, ...] = ()
    gpus: tuple[gpu.Gpu, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    answers: bool | None = None
    server_exit: int | None = None
    log_size: int | None = None  # bytes, when the incident began
    before: Progress | None = None  # what the watcher had seen when the incident began
    began: float = 0.0  # CLOCK_MONOTONIC seconds

    @property
    def known(self) -> list[list[ProcessDump]]:
        """The rounds, with the ranks that only the log knows."""
        return relabel(self.rounds, self.log.pids)

    @property
    def merged(self) -> Merged:
        return merge(self.known)

    def still(self, merged: Merged) -> bool:
        """Nothing moved while we looked, for more than one round: no stack, no CPU, no reads, no log."""
        if len(self.rounds) < 2 or self.log_size is None or said_more(self.record.log, self.log_size, self.engine):
            return False
        busy = [m for m in merged.members if (m.cpu or 0) > 0.05 or (m.read or 0) > 1e6]
        return not merged.moving and not busy

    def evidence(self, merged: Merged) -> Evidence:
        record = self.record
        rounds = self.known
        last = rounds[-1] if rounds else []
        pids = [d.process.pid for d in last if d.state not in "ZX"]
        labels = {d.label for d in last if d.role.rank is not None} | set(self.log.phases)
        wanted = expected(record, labels)
        seen = progress(record.directory)
        since, before = time.monotonic() - self.began, self.before
        if seen and before and seen.last == "log" and (seen.still or 0.0) < since:
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
            server_exit=self.server_exit,
            engine=record.engine,
            axes={axis: value.name for axis, value in record.spec.axes},
            tp=record.spec.tp,
            log=self.facts,
            memory=machine.memory(pids, oom_before=oom_before(record.directory)),
            gpus=self.gpus,
            shm_free=machine.shm_free(),
            nccl=machine.nccl_variables(environment),
            locks=locks.locks(merged, limit=2.0),
            witnesses=self.witnesses,
            progress=seen,
            answers=self.answers,
            requests=requests_in_flight(record.directory),
            test=self.test,
        )


def said_more(path: Path, since: int, engine: Engine | None) -> bool:
    """The log has lines after byte ``since`` that are no heartbeats (the watcher's own GET /metrics is one)."""
    try:
        with path.open("rb") as log:
            log.seek(since)
            lines = log.read(1 << 20).splitlines()
    except OSError:
        return True
    beats = engine.grammar.heartbeats if engine else ()
    return any(line.strip() and not any(beat.search(line) for beat in beats) for line in lines)


def size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def requests_in_flight(directory: Path) -> int | None:
    """Requests of our clients that are under way; None when none of them ever sent one."""
    found = inflight.read(directory)
    return found.count if found.begun else None


def current_test(directory: Path) -> str | None:
    """The test in progress, as pytest told."""
    try:
        found = json.loads((directory / "current_test.json").read_bytes())
        return str(found["test"]) if found.get("test") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def oom_before(directory: Path) -> int | None:
    """The kernel's count of kills for memory when the watch began."""
    try:
        value = json.loads((directory / "progress.json").read_bytes())["oom_before"]
        return int(value) if value is not None else None
    except (OSError, ValueError, KeyError, TypeError):
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


def _tail(path: Path) -> str:
    """The end of a log: of progress bars only the newest, colours removed."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError:
        return ""
    text = _BROKEN.sub("", data.decode(errors="replace"))
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join(lines[1:] if size > _TAIL_BYTES and len(lines) > 1 else lines)


def _by_rank(tail: str, grammar: LogGrammar | None, keep: int = 3) -> dict[str, list[str]]:
    """The last lines of each rank. Heartbeats are folded: a wait loop must not hide what was said before it."""
    found: dict[str, list[str]] = defaultdict(list)
    beats: Counter[str] = Counter()
    for line in reversed(tail.split("\n")):
        if not line.strip():
            continue
        raw = line.encode(errors="replace")
        label, begin = _label(line, grammar)
        if grammar is not None and any(beat.search(raw) for beat in grammar.heartbeats):
            beats[label] += 1
            if beats[label] > 1:
                continue
        if len(found[label]) < keep:
            found[label].insert(0, line[begin:])
    return dict(sorted(found.items()))


def _label(line: str, grammar: LogGrammar | None) -> tuple[str, int]:
    """Whose line it is, and where it begins: a progress bar may be glued in front."""
    found = grammar.rank.search(line.encode(errors="replace")) if grammar is not None else None
    if found is None:
        return "server", 0
    groups = {name: int(value) for name, value in found.groupdict().items() if value and value.isdigit()}
    numbers = {name: groups[name] for name in ("tp", "pp", "dp", "ep") if name in groups}
    if not numbers and "world" in groups:
        numbers = {"tp": groups["world"]}
    begin = len(found.string[: found.start()].decode(errors="replace"))
    return (Rank(**numbers).label, begin) if numbers else ("server", 0)
