"""One server under watch: its sensors, its monitor, and what it tells others (``progress.json``)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import gpu, procfs
from ..engines import get_engine
from ..engines.base import LogGrammar, ProcessRole
from ..errors import EngineError
from ..phases.log_follower import LogFollower
from ..phases.reader import PhaseReader
from ..server import inflight
from ..server.control import Control
from ..server.record import ServerRecord, current_test
from ..vocabulary import PHASES, Phase
from . import budgets as learning
from .budgets import Budgets
from .exits import Exits
from .metrics import Poller
from .proc_tree import ProcessTable, ProcTree, RoleOf
from .progress import Monitor, Reading
from .sample import GpuSample, Sample
from .samples import NAME as SAMPLES
from .samples import SampleFile

HISTORY = 40
"""Samples kept for the report."""

TELL = 5.0
"""Seconds between writes of progress.json while nothing changes."""

ASK_AFTER = 1.5
"""Seconds without any other sign after which the engine's counters are asked for."""

_OVER = frozenset({"killing", "stopped", "exited"})


@dataclass(frozen=True, slots=True)
class Settings:
    """How servers are watched. Times in seconds.

    Attributes:
        interval: between looks; a suspect is looked at four times as often.
        budgets: see :meth:`Budgets.from_settings`.
        cache: directory of what was learned; None: nothing is learned.
        metrics, gpus: ask the engine's /metrics while a request is in flight; read the GPUs.
        others: others than we send requests, so that only /metrics knows of them: it is asked all the time.
    """

    interval: float = 1.0
    budgets: Mapping[str, Any] | None = None
    cache: Path | None = None
    metrics: bool = True
    gpus: bool = True
    others: bool = False


class GpuReader:
    """Reads all GPUs in a thread of its own, so that a wedged driver holds nobody up. One for all servers."""

    def __init__(self, every: float = 5.0) -> None:
        self._every = every
        self._lock = threading.Lock()
        self._last: tuple[gpu.Gpu, ...] = ()
        self._busy = False
        self._next = 0.0
        self._closed = False
        self._sampler: gpu.Sampler | None = None

    @property
    def last(self) -> tuple[gpu.Gpu, ...]:
        """The last reading; empty without a driver."""
        with self._lock:
            return self._last

    def ask(self) -> None:
        """Start reading, unless it is too early or a reading is under way."""
        with self._lock:
            if self._busy or self._closed or time.monotonic() < self._next:
                return
            self._busy = True
        threading.Thread(target=self._run, name="gpuserve-gpus", daemon=True).start()

    def _run(self) -> None:
        found: tuple[gpu.Gpu, ...] = ()
        try:
            self._sampler = self._sampler or gpu.Sampler(events=False)
            found = self._sampler.sample(limit=5.0).gpus
        finally:
            with self._lock:
                self._busy, self._last = False, found
                self._next = time.monotonic() + (self._every if found else 60.0)
                closed = self._closed
            if closed and self._sampler is not None:
                self._sampler.close()

    def close(self) -> None:
        """End the helper process; a reading under way ends it itself, since its pipes are in that thread's hands."""
        with self._lock:
            self._closed = True
            busy = self._busy
        if not busy and self._sampler is not None:
            self._sampler.close()


class Watched:
    """Sensors and monitor of one server. Not thread-safe."""

    def __init__(self, record: ServerRecord, settings: Settings, gpus: GpuReader | None) -> None:
        assert record.root is not None
        self.record = record
        self.directory = record.directory
        self._settings = settings
        self._gpus = gpus if record.gpus else None
        role_of: RoleOf = _nobody
        grammar: LogGrammar | None = None
        with suppress(EngineError):
            engine = get_engine(record.engine)
            role_of, grammar = engine.process_role, engine.grammar
        supervisor = record.supervisor.pid if record.supervisor else None
        self.tree = ProcTree(record.root, supervisor, record.cookie or None, role_of)
        self._reader = PhaseReader(grammar) if grammar else None
        self._log = LogFollower(record.log, self._reader) if self._reader else None
        self._log_seen = (-1, -1)
        self._phases: dict[str, str] = {}
        self._phase: Phase | None = None
        self._key = learning.key(record.engine, record.spec.model, record.spec.tp)
        seen = learning.learned(settings.cache, self._key) if settings.cache else {}
        self.monitor = Monitor(
            Budgets.from_settings(settings.budgets or {}, seen=seen, own_timeout=record.own_timeout), settings.interval
        )
        self._poller = Poller(record.url, headers=record.headers) if settings.metrics else None
        self.control = Control(record.directory, record.supervisor)
        self._events = 0
        self.history: deque[Sample] = deque(maxlen=HISTORY)
        self.samples = SampleFile(record.directory / SAMPLES, every=max(1.0, settings.interval))
        self.exits = Exits(record.directory)
        self._doing: tuple[str | None, bool] = (None, False)  # the test in progress; requests are under way
        self.reading: Reading | None = None
        self.fired: float | None = None
        self.ready = False
        self.over = False
        self._told: tuple[str, float] = ("", 0.0)
        self._oom = _oom_kills()

    def look(self, table: ProcessTable | None = None) -> Reading:
        """Sample once and judge."""
        suspect = self.reading is not None and self.reading.state in ("suspect", "hung")
        self._read_events()
        requests = inflight.read(self.directory)
        asked = requests.count > 0 or self._settings.others
        if self._poller and (self._settings.others or (requests.count and self.monitor.still >= ASK_AFTER)):
            self._poller.ask()  # the last sign, asked for only where there is no other
        if self._gpus:
            self._gpus.ask()
        counters = self._poller.last if self._poller and asked else None
        now = time.monotonic()
        self._read_log(now)
        sample = Sample(
            at=now,
            processes=self.tree.sample(table, closely=suspect),
            phase=self._phase,
            phases=self._phases,
            log=self._log_bytes(),
            gpus=self._gpu_samples(),
            tokens=counters.tokens if counters else None,
            running=counters.running if counters else None,
            requests=requests.count if requests.begun else None,
            oldest=requests.oldest,
            ended=requests.ended,
            root=procfs.same(self.record.root) if self.record.root else False,
        )
        self.exits.follow(sample.processes.values())
        if sample.phase in ("ready", "serving") and not self.ready:
            self.ready = True
            self._learn()
        self.history.append(sample)
        self.reading = self.monitor.feed(sample)
        self.samples.add(sample, self.reading, time.time() - (time.monotonic() - now))
        self._note_doings(requests)
        return self.reading

    def spared(self) -> None:
        """An incident found the server healthy."""
        self.fired = None
        self.monitor.spared()

    def close(self, *, healthy: bool) -> None:
        """End the watch; what was learned of a healthy run is kept."""
        if healthy and self.ready:
            self._learn()
        self.tree.close()
        self.exits.close()
        self.samples.close()
        if self._log:
            self._log.close()

    def tell(self, *, now: bool = False) -> None:
        """Write ``progress.json``, when the state changed or some time has passed, or ``now``."""
        reading = self.reading
        if reading is None:
            return
        state, when = self._told
        if not now and state == reading.state and time.monotonic() - when < TELL:
            return
        self._told = (reading.state, time.monotonic())
        kept = list(self.history) if reading.state in ("suspect", "hung", "dead", "paused") else list(self.history)[-3:]
        content = {
            "schema": "gpuserve.progress/1",
            "time": time.time(),
            "monotonic": time.monotonic(),
            "state": reading.state,
            "still": round(reading.still, 2),
            "window": round(reading.window, 2),
            "phase": reading.phase,
            "last": reading.last,
            "moving": list(reading.moving),
            "why": reading.why,
            "requests": self.history[-1].requests if self.history else None,
            "oom_before": self._oom,
            "history": [sample.to_json() for sample in kept],
        }
        path = self.directory / "progress.json"
        draft = path.with_name(".progress.json")
        with suppress(OSError):
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
                json.dump(content, file)
            draft.replace(path)

    def _note_doings(self, requests: inflight.InFlight) -> None:
        """What the clients do: a test that began, requests after none."""
        test, asking = current_test(self.directory), bool(requests.count)
        before, self._doing = self._doing, (test, asking)
        if test and test != before[0]:
            self.samples.note(f"test {test} began", time.time())
        if asking and not before[1]:
            self.samples.note("requests began", time.time() - (requests.oldest or 0.0))

    # --- sensors

    def _read_log(self, now: float) -> None:
        if self._log is None or self._reader is None:
            self._phase = "serving" if self._marked_ready() else None
            return
        self._log.poll(now, limit=8 << 20)
        seen = (self._reader.progress_bytes, self._reader.heartbeats)
        if seen == self._log_seen and not (
            self._phase not in ("ready", "serving", "shutdown") and self._marked_ready()
        ):
            return
        self._log_seen = seen
        ranks = self._reader.ranks()
        self._phases = {label: f"{p.phase} {p.done}/{p.total}" for label, p in ranks.items()}
        known = [p.phase for p in (*ranks.values(), self._reader.server) if p.phase in PHASES]
        phase: Phase | None = min(
            (p.phase for p in ranks.values()), key=PHASES.index, default=self._reader.server.phase
        )
        if "shutdown" in known:
            phase = "shutdown"
        elif self._marked_ready() and phase not in ("ready", "serving"):
            phase = "serving"
        self._phase = phase

    def _marked_ready(self) -> bool:
        """The start-up is over by the word of those who started it, whatever the log says."""
        return self.ready or (self.directory / "ready").exists()

    def _log_bytes(self) -> int:
        if self._reader is not None:
            return self._reader.progress_bytes
        try:
            return self.record.log.stat().st_size
        except OSError:
            return 0

    def _gpu_samples(self) -> tuple[GpuSample, ...]:
        if self._gpus is None:
            return ()
        mine = gpu.visible(self._gpus.last, ",".join(self.record.gpus))
        return tuple(GpuSample(g.memory_used, g.utilisation, g.power) for g in mine)

    def _read_events(self) -> None:
        fresh = self.control.events(self._events)
        self._events += len(fresh)
        for event in fresh:
            if event.kind in _OVER:
                self.over = True
            elif event.kind == "spared":
                self.spared()

    def _learn(self) -> None:
        if self._settings.cache is not None and self.monitor.stillness:
            learning.learn(self._settings.cache, self._key, self.monitor.stillness)


def _nobody(_cmdline: Sequence[str], _comm: str) -> ProcessRole | None:
    return None


def _oom_kills() -> int | None:
    """The machine's count, to tell later whether it rose."""
    for line in procfs.read("/proc/vmstat").splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return None
