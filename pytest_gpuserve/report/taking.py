"""The work on one incident, in the order in which evidence is lost.

It may be killed at any moment: what is known is on disk as soon as it is known, and a clock of its own ends it, with
all that it has, before the supervisor's limit does.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..diagnose import coredump, evidence_json
from ..diagnose.evidence import Evidence, Witness
from ..diagnose.merge import Merged
from ..diagnose.model import Judgement
from ..diagnose.verdict import judge
from ..engines import get_engine
from ..engines.base import Engine
from ..gpu import Gpu
from ..redaction.redact import Redactor
from ..server.control import Control
from ..server.loop import STARVED, waited
from ..server.record import ServerRecord, current_test, processes
from . import gather, incident_json, incident_text, log_parts, logs, timeline
from .blame import EXIT_KILL, EXIT_SPARE, Decision, Witnesses, decide
from .bundle import prune
from .files import incident_name, open_stores, put_line
from .gather import Later, Scene
from .probe import Probe, ask, test_waits
from .stack_rounds import StackRounds, pause_before
from .surroundings import Surroundings


@dataclass(frozen=True, slots=True)
class Incident:
    """``path``: the directory to tell people; ``raw``: the private one. ``text``: redacted and escaped."""

    path: Path
    raw: Path
    verdict: str
    text: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. ``after``: seconds since what led here began. ``limit``: seconds for everything. ``keep``:
    so many incidents may be among the artifacts, older ones go; 0: all stay."""

    reason: str
    test: str | None = None
    after: float | None = None
    soft: bool = False
    limit: float = 22.0
    rounds: int = 3
    keep: int = 0


class Taking:
    """One incident being taken; :meth:`run` once."""

    def __init__(
        self,
        record: ServerRecord,
        artifacts: Path | None,
        request: Request,
        leave: Callable[[int], object] | None,
        spent: float = 0.0,
    ) -> None:
        self._began = time.monotonic()
        self._deadline = self._began - spent + request.limit
        self._waited_before = 0.0 if spent else waited(os.getpid())
        self._request = request
        self._record = record
        self._artifacts = artifacts
        self._leave = leave
        self._engine: Engine | None = None
        with suppress(Exception):  # an engine that is not installed here, or broken, must not cost the stacks
            self._engine = get_engine(record.engine)
        test = request.test or current_test(record.directory)
        self._scene = Scene(record, self._engine, request.reason, test, request.after)
        self._environment = gather.environment(record)
        self._redactor = Redactor.of(
            os.environ, dict(record.spec.env), self._environment, {"API_KEY": record.api_key or ""}, argv=record.argv
        )
        self._stores = open_stores(
            record.directory, artifacts, incident_name(record.spec.id, request.reason), self._redactor
        )
        self._stacks = StackRounds(record, self._engine, self._stores, self._began)
        self._around = Surroundings(record, self._engine, self._environment, self._stores, self._redactor)
        self._probe: Probe | None = None
        self._problems: list[str] = []
        self._lock = threading.Lock()
        self._done = False
        self._decided = False  # the verdict is there; what comes after it is for the bundle
        self._last: tuple[Incident, Merged, Judgement] | None = None

    def run(self) -> Incident:
        record, scene = self._record, self._scene
        self._announce()
        scene.log_size, scene.before, scene.began = (
            logs.size_of(record.log),
            gather.progress(gather.watcher_notes(record.directory)),
            time.monotonic(),
        )
        if self._leave is not None:
            threading.Thread(target=self._clock, name="gpuserve-clock", daemon=True).start()
        self._control = Control(record.directory, record.supervisor)
        exited = self._control.last("exited")
        scene.server_exit = int(exited.data["code"]) if exited else None
        log = Later(lambda: logs.read(record, self._engine.grammar if self._engine else None), logs.Log())
        probe = self._start_probe()
        said = Later(lambda: logs.said(record), logs.Said())
        self._around.begin()
        self._round(0)
        pids = [d.process.pid for d in scene.rounds[0]]
        gpus: Later[tuple[Gpu, ...]] = Later(lambda: gather.gpus(record, pids, 5.0), ())
        scene.log = log.get(min(3.0, self._left() / 2))
        log_parts.write_tail(self._stores, self._redactor, scene.log.tail)
        self._conclude(complete=False)
        self._write_timeline()
        self._further_rounds(probe)
        if probe is not None:
            self._probe = probe.get(self._patience + 0.5)
            if self._probe is not None:
                scene.answers, scene.front = self._probe.answers, self._probe.front
                scene.responds = self._probe.responds
        scene.waits = test_waits(
            self._stacks.owner, record.owner.pid, record.port, gather.requests_in_flight(record.directory)
        )
        merged = scene.merged
        witnesses: Later[tuple[Witness, ...]] = Later(lambda: gather.witnesses(merged, 6.0), ())
        scene.witnesses = witnesses.get(min(6.5, self._left() - 4))
        scene.gpus = gpus.get(min(5.0, self._left() - 4))
        told = said.get(min(5.0, self._left() - 3))
        scene.facts = told.facts
        late = (("the log", log), ("the log's errors", said), ("the GPUs", gpus))
        self._problems += [f"{what}: {later.problem}" for what, later in late if later.problem]
        self._native(merged)
        self._write_timeline()
        self._last_witness(merged)
        taken = self._conclude(complete=True)
        self._around.finish(told.line, scene.gpus, max(0.5, min(3.0, self._left() - 1.5)))
        with self._lock:
            if not self._done:
                self._around.render()
                self._around.manifest(complete=True)
            self._done = True
        if self._artifacts is not None and self._request.keep and self._left() > 0:
            prune(self._artifacts, self._request.keep, spare=taken.path)
        return taken

    def _last_witness(self, merged: Merged) -> None:
        """Opt-in, and after all other evidence is on disk, since it kills a rank: what runs on a suspect's GPU."""
        if not coredump.asked_for(self._environment) or self._left() < 6.0:
            return
        taken = self._conclude(complete=False)
        if taken.decision.kill and taken.verdict in ("hang", "undecided") and self._last is not None:
            found = gather.cores(merged, self._last[2].culprits, min(20.0, self._left() - 3.0))
            self._scene.witnesses = (*self._scene.witnesses, *found)

    @property
    def _patience(self) -> float:
        """Seconds for one token: with too short a limit, less."""
        return min(3.0, 0.3 * self._request.limit)

    def _left(self) -> float:
        """Seconds; as the supervisor does, we take off what we waited for a CPU."""
        return self._deadline + min(self._waited(), STARVED * self._request.limit) - time.monotonic()

    def _waited(self) -> float:
        return waited(os.getpid()) - self._waited_before

    def _clock(self) -> None:
        """End with what there is, before somebody ends us with less. Reads nothing: what it would read may be stuck."""
        while (left := self._left()) > 0:
            time.sleep(left)
        held = self._lock.acquire(timeout=2.0)
        try:
            if self._done or self._leave is None:
                return
            self._done = True
            self._leave(self._last[0].decision.exit_code if self._decided and self._last else self._out_of_time())
        finally:
            if held:
                self._lock.release()

    def _out_of_time(self) -> int:
        """Tell what was known last; the exit code."""
        note = "the time for this incident was over before everything was read"
        if (starved := self._waited()) >= 1.0:
            note += f" ({starved:.0f} s of it went by in waiting for a CPU: the machine is busy)"
        try:
            if self._last is None:
                decision = decide(self._scene.reason, Witnesses(soft=self._request.soft))
                there, missing = self._stacks.so_far()
                text = f"undecided: {note}.\n{there}\ndumps: {self._stores.path}"
                head = incident_json.head(self._scene, self._began)
                self._stores.write_json("incident.json", {**head, "text": text, "missing": missing})
                self._line("undecided", text, None, decision)
            else:
                taken, merged, judgement = self._last
                decision = decide(self._scene.reason, self._witnesses(merged, judgement))
                self._line(judgement.verdict, f"{taken.text}\n{note}", judgement, decision)
        except Exception:
            traceback.print_exc()
            return EXIT_SPARE if self._request.soft or self._request.reason == "manual" else EXIT_KILL
        return decision.exit_code

    # Stacks

    def _round(self, number: int) -> None:
        """Of the test's own process too, which explains no crash."""
        limit = max(1.0, min(15.0, self._left() * 0.6))
        dumps = self._stacks.take(number, limit, owner=self._scene.server_exit is None)
        self._scene.rounds = [*self._scene.rounds, dumps]

    def _further_rounds(self, probe: Later[Probe | None] | None) -> None:
        """Unless it is known to be healthy, or time is short."""
        first = self._scene.rounds[0]
        seen = probe.get(0.0) if probe is not None and self._scene.reason != "manual" else None
        if seen is not None and seen.answers:
            return
        for number in range(1, self._request.rounds):
            pause = pause_before(number, self._began, first, self._left())
            if pause is None:
                return
            time.sleep(pause)
            self._round(number)

    def _native(self, merged: Merged) -> None:
        """C frames, last of all, and only of a server that hangs."""
        judgement = self._last[2] if self._last else None
        if self._scene.answers or self._left() < 6.0 or judgement is None:
            return
        if judgement.verdict in ("hang", "undecided"):
            self._stacks.native(merged, judgement, min(10.0, self._left() - 4.0))

    # Other evidence

    def _start_probe(self) -> Later[Probe | None] | None:
        """Not of a server that starts, which cannot answer yet, nor of one that is gone to its last process."""
        if self._scene.reason == "startup_budget":
            return None
        if self._scene.server_exit is not None and not processes(self._record):
            return None
        return Later[Probe | None](lambda: ask(self._record, self._engine, self._patience), None)

    def _write_timeline(self) -> None:
        """Before the judgement is read there is one already; it is written again with what the dump itself added."""
        began = time.time() - (time.monotonic() - self._began)
        events = self._control.events()
        try:
            lines = timeline.timeline(self._record, self._scene.log, events, self._scene.reason, began)
        except Exception:  # a picture of the whole must not cost the verdict
            traceback.print_exc()
            return
        self._stores.write_lines(timeline.NAME, lines)

    # What comes of it

    def _announce(self) -> None:
        """Before anything that may take long: that there is an incident, and where."""
        text = f"undecided: the stacks of {self._record.spec.id} were being taken.\ndumps: {self._stores.path}"
        self._stores.write_json("incident.json", {**incident_json.head(self._scene, self._began), "text": text})
        self._around.manifest(complete=False)
        self._stores.publish()
        self._line("undecided", text, None, None)

    def _judge(self, merged: Merged) -> tuple[Evidence, Judgement]:
        evidence = Evidence(reason=self._scene.reason, rounds=self._scene.rounds)
        try:
            evidence = self._scene.evidence(merged)
            return evidence, judge(evidence)
        except Exception as error:
            traceback.print_exc()
            text = f"undecided: the evidence could not be judged ({type(error).__name__}: {error})."
            return evidence, Judgement("undecided", None, (), merged.classes, (), (), 0.0, text)

    def _conclude(self, *, complete: bool) -> Incident:
        """Judge what there is and write it; the last time decides."""
        scene = self._scene
        scene.rounds = [gather.name_the_dead(dumps, scene) for dumps in scene.rounds]
        merged = scene.merged
        evidence, judgement = self._judge(merged)
        decision = decide(scene.reason, self._witnesses(merged, judgement))
        words = incident_text.Words(
            scene=scene,
            evidence=evidence,
            merged=merged,
            judgement=judgement,
            decision=decision,
            owner=self._stacks.owner,
            probe=self._probe.how if self._probe else "",
            redact=self._redactor.redact,
            problems=[*self._problems, *([self._stores.problem] if self._stores.problem else [])],
        )
        text = incident_text.summary(words, str(self._stores.path))
        with self._lock:
            if self._done and self._last is not None:  # the clock was faster
                return self._last[0]
            self._stores.write("stacks.txt", incident_text.stacks_text(merged, scene.rounds, self._stacks.owner))
            content = {
                **incident_json.head(scene, self._began),
                **incident_json.body(words, self._probe, scene.waits, self._redactor.environment(self._environment)),
                "complete": complete,
                "seconds": round(time.monotonic() - self._began, 2),
            }
            self._stores.write_json("incident.json", content)
            self._line(judgement.verdict, text, judgement, decision)
            taken = Incident(self._stores.path, self._stores.raw.path, judgement.verdict, text, decision)
            self._last = taken, merged, judgement
            self._stores.write_json("evidence.json", evidence_json.to_json(evidence))
            self._decided = complete
            if not complete:
                self._around.render()
            return taken

    def _witnesses(self, merged: Merged, judgement: Judgement) -> Witnesses:
        broken = [m.label for m in merged.ranks if m.condition] + list(judgement.missing)
        return Witnesses(
            soft=self._request.soft,
            broken=tuple(dict.fromkeys(broken)),
            answers=self._scene.answers,
            reachable=self._probe.reachable if self._probe else None,
            test_waits=self._scene.waits,
            flood=bool(self._scene.flood),
            verdict=judgement.verdict,
        )

    def _line(self, verdict: str, text: str, judgement: Judgement | None, decision: Decision | None) -> None:
        """The line that the handle and the plugin read; its text is for people: redacted, escaped."""
        entry = {
            "time": time.time(),
            "reason": self._scene.reason,
            "incident": str(self._stores.path),
            "verdict": verdict,
            "text": text,
            "test": self._scene.test,
            "phase": judgement.phase if judgement else None,
            "culprits": list(judgement.culprits) if judgement else [],
            "kill": decision.kill if decision else None,
            "raw": str(self._stores.raw.path),
        }
        with suppress(OSError):
            put_line(self._record.directory / "incidents.jsonl", entry)
