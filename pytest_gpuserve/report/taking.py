"""The work on one incident, in the order in which evidence is lost.

It may be killed at any moment: what is known is on disk as soon as it is known, and a clock of its own ends it, with
all that it has, before the supervisor's limit does.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import procfs
from ..diagnose import parse, stacks
from ..diagnose.evidence import Evidence, LogFact, Witness
from ..diagnose.merge import Merged
from ..diagnose.model import Judgement, ProcessDump
from ..diagnose.roles import any_role
from ..diagnose.verdict import judge
from ..engines import get_engine
from ..engines.base import Engine, ProcessRole
from ..gpu import Gpu
from ..server.control import Control
from ..server.record import ServerRecord, current_test, processes
from ..text import escape
from . import gather, incident_json, incident_text, logs, timeline
from .blame import EXIT_KILL, EXIT_SPARE, Decision, Witnesses, decide
from .files import incident_name, open_stores, put_line, safe_name
from .gather import Later, Scene
from .probe import Probe, ask, test_waits
from .redact import Redactor
from .redact_stream import RedactingWriter

_BETWEEN = 2.0
"""Seconds from one round of stacks to the next: frozen is told from moving by more than one look."""

_STACKS_SCHEMA = "gpuserve.stacks/1"


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
    """What was asked for. ``after``: seconds since what led here began. ``limit``: seconds for everything."""

    reason: str
    test: str | None = None
    after: float | None = None
    soft: bool = False
    limit: float = 22.0
    rounds: int = 3


class Taking:
    """One incident being taken; :meth:`run` once."""

    def __init__(
        self,
        record: ServerRecord,
        artifacts: Path | None,
        request: Request,
        leave: Callable[[int], object] | None,
    ) -> None:
        self._began = time.monotonic()
        self._deadline = self._began + request.limit
        self._request = request
        self._record = record
        self._leave = leave
        self._engine: Engine | None = None
        with suppress(Exception):  # an engine that is not installed here, or broken, must not cost the stacks
            self._engine = get_engine(record.engine)
        test = request.test or current_test(record.directory)
        self._scene = Scene(record, self._engine, request.reason, test, request.after)
        self._environment = procfs.environ(record.root.pid) if record.root else {}
        self._redactor = Redactor.of(os.environ, dict(record.spec.env), self._environment, argv=record.argv)
        self._stores = open_stores(
            record.directory, artifacts, incident_name(record.spec.id, request.reason), self._redactor
        )
        self._owner: ProcessDump | None = None
        self._probe: Probe | None = None
        self._waits: bool | None = None
        self._problems: list[str] = []
        self._kept: dict[procfs.ProcessId, list[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._done = False
        self._last: tuple[Incident, Merged, Judgement] | None = None

    def run(self) -> Incident:
        record, scene = self._record, self._scene
        self._announce()
        scene.log_size, scene.before, scene.began = (
            logs.size_of(record.log),
            gather.progress(record.directory),
            time.monotonic(),
        )
        if self._leave is not None:
            threading.Thread(target=self._clock, name="gpuserve-clock", daemon=True).start()
        self._control = Control(record.directory, record.supervisor)
        exited = self._control.last("exited")
        scene.server_exit = int(exited.data["code"]) if exited else None
        log = Later(lambda: logs.read(record, self._engine.grammar if self._engine else None), logs.Log())
        probe = self._start_probe()
        facts: Later[tuple[LogFact, ...]] = Later(lambda: logs.facts(record), ())
        self._round(0)
        pids = [d.process.pid for d in scene.rounds[0]]
        gpus: Later[tuple[Gpu, ...]] = Later(lambda: gather.gpus(record, pids, 5.0), ())
        scene.log = log.get(min(3.0, self._left() / 2))
        self._write_log_tail()
        self._conclude(complete=False)
        self._write_timeline()
        self._further_rounds(probe)
        if probe is not None:
            self._probe = probe.get(self._patience + 0.5)
            scene.answers = self._probe.answers if self._probe else None
        self._waits = test_waits(
            self._owner, record.owner.pid, record.port, gather.requests_in_flight(record.directory)
        )
        merged = scene.merged
        witnesses: Later[tuple[Witness, ...]] = Later(lambda: gather.witnesses(merged, 6.0), ())
        scene.witnesses = witnesses.get(min(6.5, self._left() - 4))
        scene.gpus = gpus.get(min(5.0, self._left() - 4))
        scene.facts = facts.get(min(5.0, self._left() - 3))
        late = (("the log", log), ("the log's errors", facts), ("the GPUs", gpus))
        self._problems += [f"{what}: {later.problem}" for what, later in late if later.problem]
        self._native(merged)
        self._write_timeline()
        return self._conclude(complete=True)

    @property
    def _patience(self) -> float:
        """Seconds for one token: with too short a limit, less."""
        return min(3.0, 0.3 * self._request.limit)

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _clock(self) -> None:
        """End with what there is, before somebody ends us with less. Reads nothing: what it would read may be stuck."""
        time.sleep(max(0.0, self._left()))
        held = self._lock.acquire(timeout=2.0)
        try:
            if self._done or self._leave is None:
                return
            self._done = True
            self._leave(self._out_of_time())
        finally:
            if held:
                self._lock.release()

    def _out_of_time(self) -> int:
        """Tell what was known last; the exit code."""
        note = "the time for this incident was over before everything was read"
        try:
            if self._last is None:
                decision = decide(self._scene.reason, Witnesses(soft=self._request.soft))
                self._line("undecided", f"undecided: {note}.\ndumps: {self._stores.path}", None, decision)
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
        """One round of the server's processes and, beside them, the test's own (which explains no crash)."""
        record = self._record
        everyone = gather.tree(record, processes(record))
        owner = procfs.stat(record.owner.pid) if self._scene.server_exit is None else None
        if owner is not None and owner.id == record.owner and owner.pid not in {s.pid for s in everyone}:
            everyone.append(owner)
        dumps = stacks.take(
            everyone,
            self._role_of,
            python=record.python,
            markers=record.directory / "markers",
            limit=max(1.0, min(15.0, self._left() * 0.6)),
            on_dump=lambda dump: self._keep(dump, number),
        )
        self._owner = next((d for d in dumps if d.process == record.owner), self._owner)
        self._scene.rounds = [*self._scene.rounds, [d for d in dumps if d.process != record.owner]]

    def _further_rounds(self, probe: Later[Probe | None] | None) -> None:
        """Unless it is known to be healthy, or time is short."""
        first = self._scene.rounds[0]
        seen = probe.get(0.0) if probe is not None and self._scene.reason != "manual" else None
        if seen is not None and seen.answers:
            return
        slowest = max((d.seconds for d in first), default=0.0)
        for number in range(1, self._request.rounds):
            pause = max(0.0, self._began + number * _BETWEEN - time.monotonic())
            if not any(d.threads for d in first) or self._left() < pause + 3 * slowest + 4.0:
                return
            time.sleep(pause)
            self._round(number)

    def _role_of(self, cmdline: Sequence[str], comm: str) -> ProcessRole | None:
        role = None
        with suppress(Exception):
            role = self._engine.process_role(cmdline, comm) if self._engine else None
        return role or any_role(cmdline, comm)

    def _keep(self, dump: ProcessDump, number: int) -> None:
        """Write a process's stacks the moment they are there; later rounds join them."""
        rounds = self._kept.setdefault(dump.process, [])
        rounds.append({"round": number, "after": round(dump.taken - self._began, 3), **parse.to_json(dump)})
        self._write_stacks(dump, rounds, "")

    def _write_stacks(self, dump: ProcessDump, rounds: Sequence[Any], suffix: str) -> None:
        label = "pytest" if dump.process == self._record.owner else dump.label
        name = f"stacks/{safe_name(label)}.{dump.process.pid}{suffix}.json"
        self._stores.write_json(name, {"schema": _STACKS_SCHEMA, "label": label, "rounds": rounds})

    def _native(self, merged: Merged) -> None:
        """C frames of at most three suspects: half a second and more each, so last, and only of a server that hangs."""
        judgement = self._last[2] if self._last else None
        if self._scene.answers or self._left() < 6.0 or judgement is None:
            return
        if judgement.verdict not in ("hang", "undecided"):
            return
        wanted = [label for label in judgement.culprits if label in merged.by_label]
        wanted += [c.ranks[0] for c in merged.classes if merged.by_label[c.ranks[0]].rank]
        members = [merged.by_label[label] for label in dict.fromkeys(wanted)]
        found = [procfs.stat(m.process.pid) for m in members if m.has_stack and not m.condition]
        limit = min(10.0, self._left() - 4.0)
        for dump in stacks.take(
            [s for s in found if s][:3], self._role_of, python=self._record.python, limit=limit, native=True
        ):
            if any(frame.native for thread in dump.threads for frame in thread.frames):
                self._write_stacks(dump, [parse.to_json(dump)], ".native")

    # Other evidence

    def _start_probe(self) -> Later[Probe | None] | None:
        """Not of a server that starts, which cannot answer yet, nor of one that is gone to its last process."""
        if self._scene.reason == "startup_budget":
            return None
        if self._scene.server_exit is not None and not processes(self._record):
            return None
        return Later[Probe | None](lambda: ask(self._record, self._engine, self._patience), None)

    def _write_log_tail(self) -> None:
        tail = "\n".join(self._scene.log.tail.split("\n")[-400:])
        pieces: list[str] = []
        with RedactingWriter(self._redactor, pieces.append) as writer:
            writer.feed(tail)
        with suppress(OSError):
            self._stores.raw.write("log_tail.txt", tail)
        if self._stores.shared is not None:
            with suppress(OSError):
                self._stores.shared.write("log_tail.txt", escape("".join(pieces)), clean=True)

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
            owner=self._owner,
            probe=self._probe.how if self._probe else "",
            redact=self._redactor.redact,
            problems=[*self._problems, *([self._stores.problem] if self._stores.problem else [])],
        )
        text = incident_text.summary(words, str(self._stores.path))
        environment = self._redactor.environment(self._environment)
        with self._lock:
            if self._done and self._last is not None:  # the clock was faster
                return self._last[0]
            self._stores.write("verdict.md", incident_text.verdict_page(words), clean=True)
            self._stores.write("stacks.txt", incident_text.stacks_text(merged, scene.rounds, self._owner))
            content = {
                **incident_json.head(scene, self._began),
                **incident_json.body(words, self._probe, self._waits, environment),
                "complete": complete,
                "seconds": round(time.monotonic() - self._began, 2),
            }
            self._stores.write_json("incident.json", content)
            self._line(judgement.verdict, text, judgement, decision)
            taken = Incident(self._stores.path, self._stores.raw.path, judgement.verdict, text, decision)
            self._last = taken, merged, judgement
            self._done = complete
            return taken

    def _witnesses(self, merged: Merged, judgement: Judgement) -> Witnesses:
        broken = [m.label for m in merged.ranks if m.condition] + list(judgement.missing)
        return Witnesses(
            soft=self._request.soft,
            broken=tuple(dict.fromkeys(broken)),
            answers=self._scene.answers,
            reachable=self._probe.reachable if self._probe else None,
            test_waits=self._waits,
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
