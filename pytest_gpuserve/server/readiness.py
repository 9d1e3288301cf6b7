"""From launched to ready: who listens, what it answers, whether it still lives; and what to say when it does not."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import foreign, shell
from ..engines.base import ReadyProbe
from ..errors import GpuserveError, ServerStartError
from ..vocabulary import LOG_LIMIT
from . import ports
from .control import Control, Event, SupervisorGoneError, sweep_cookie
from .record import ServerRecord, processes

EXITED = "exited"
"""Reason of the incident of a server that ended by itself."""

TAIL_BYTES = 64 << 10
"""What is ever read of a log from its end, whatever its size or the length of its lines."""

_ANSWER_LIMIT = 60.0
"""Seconds that one request of ours may take; the start-up budget is the real limit."""

_EXITS = ("crash", "oom", "config", "unsupported_arch", "port", "infra")
"""Verdicts that can be true of a server that exited before it was ready."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def end_of_log(path: Path, most: int) -> tuple[list[str], bool]:
    """Lines of the last ``most`` bytes, and whether the log is longer, so that the first of them may be a piece.

    Colours are removed; carriage returns of progress bars end a line too, and of the bars only the newest is kept.
    """
    try:
        with foreign.opened(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read(most)
    except OSError:
        return [""], False
    text = _ANSI.sub("", data.decode(errors="replace"))
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")], size > most


def log_tail(path: Path, lines: int = 50) -> str:
    """The last lines of a log, as they are (foreign text). At most 64 KiB of the file are read, at its end."""
    found, _ = end_of_log(path, TAIL_BYTES)
    while found and not found[-1].strip():
        found.pop()
    return "\n".join(found[-lines:])


def shown_tail(record: ServerRecord, path: Path | None = None, lines: int = 20) -> str:
    """The end of its log, or of another one of it, for an error message: redacted, escaped, long lines cut."""
    path = path or record.log
    tail = record.shown(log_tail(path, lines), 300)
    return f"Last lines of {path}:\n{tail}" if tail else f"Its log {path} is empty."


def exit_text(code: int) -> str:
    """``exited with code 1``, or by which signal it was killed."""
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name} (signal {-code}), not by us"
    return f"was killed by signal {-code}, not by us"


def incidents(directory: Path) -> list[dict[str, Any]]:
    """The lines of ``incidents.jsonl``, oldest first."""
    found = []
    with suppress(OSError), (directory / "incidents.jsonl").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    found.append(entry)
    return found


def where_it_is(incident: str | None, text: str) -> str:
    """The line that names an incident's directory, unless ``text`` does already."""
    return f"\nEvidence: {incident}" if incident and Path(incident).name not in text else ""


@dataclass(frozen=True, slots=True)
class Why:
    """Of a server that exited by itself: the verdict and cause of its last incident, and the end of its log."""

    tail: str
    cause: str = ""
    verdict: str = "crash"
    incident: str | None = None

    def told(self, advice: str = "") -> str:
        """The cause, then ``advice``, then where it can be seen."""
        text = " ".join(filter(None, (self.cause, advice, self.tail)))
        return text + where_it_is(self.incident, text)


def why_it_exited(record: ServerRecord, reason: str = EXITED) -> Why:
    """What the last incident for ``reason`` knows; without one, the end of the log alone."""
    tail = shown_tail(record)
    found = [entry for entry in incidents(record.directory) if entry.get("reason") == reason]
    if not found:
        return Why(tail)
    said, directory, verdict = str(found[-1].get("text") or ""), found[-1].get("incident"), found[-1].get("verdict")
    cause = said.splitlines()[0] if said else ""
    return Why(tail, cause, str(verdict) if verdict in _EXITS else "crash", directory)


def post_mortem(record: ServerRecord, control: Control, dump: Callable[[], object], limit: float) -> Why:
    """Why a server exited by itself, by the incident that ``dump`` takes, or that of an alarm which went off just
    then. What is armed is disarmed: nobody is left to be ended, and a second incident would only take time."""
    with suppress(GpuserveError, OSError):
        for name in control.status()["armed"]:
            control.disarm(name)
        settle(control, 0, limit)
        if _went_off_since_exit(control) is None:
            dump()
    return why_it_exited(record, _went_off_since_exit(control) or EXITED)


def _went_off_since_exit(control: Control) -> str | None:
    events = control.events()
    exited = next((n for n, event in enumerate(events) if event.kind == "exited"), len(events))
    return next((str(event.data.get("name")) for event in events[exited:] if event.kind == "fired"), None)


def settle(control: Control, since: int, limit: float) -> None:
    """Wait until no alarm that fired after the first ``since`` events is still without its end."""

    def over(events: list[Event]) -> bool:
        kinds = [event.kind for event in events[since:]]
        return "stopped" in kinds or kinds.count("spared") >= kinds.count("fired")

    control.wait(over, limit)


def lost_supervisor(record: ServerRecord, control: Control) -> str:
    """End what a server left whose supervisor was killed, and say so."""
    left = sweep_cookie(record.cookie, record.directory)
    pid = control.supervisor.pid if control.supervisor else "?"
    unkillable = f" Processes {left} could not be ended." if left else ""
    trouble = log_tail(record.directory / "supervisor.log", 20)  # silent unless it failed by itself
    how = f"somebody killed pid {pid}"
    if "Traceback" in trouble:
        how = f"pid {pid} failed, please report it: {record.shown(trouble.splitlines()[-1], 200)}"
    return f"lost its supervisor ({how}), so what was left of it has been ended.{unkillable}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """What :func:`wait` needs to know.

    Attributes:
        budget: seconds of start-up after which the supervisor acts; only named in messages here.
        incident_limit: seconds that an incident, and the end of the tree after it, may take.
        rearm: called when the budget is over and the incident spared the server (``--gpuserve-mode=soft``).
        disarm: called when the server is ready; False: the budget was over at that very moment.
        progress: called with a short text whenever something new is known. tick: called every second or more often.
        post_mortem: takes the incident of a server that has exited by itself.
    """

    record: ServerRecord
    control: Control
    probe: ReadyProbe
    model: str
    budget: float
    incident_limit: float
    rearm: Callable[[], None]
    disarm: Callable[[], bool]
    progress: Callable[[str], None]
    tick: Callable[[], None]
    post_mortem: Callable[[], object]


def wait(waiting: Waiting) -> None:
    """Return when the server is ready.

    Raises:
        ServerStartError: it exited (``crash``, within moments), somebody else answers on its port (``port``), its
            budget is over (the incident's verdict, else ``hang``), it refuses a one-token request (``config``), or
            its supervisor is gone (``infra``).
    """
    _Wait(waiting).run()


class _Wait:
    """One wait; keeps what was seen last, for the message."""

    def __init__(self, waiting: Waiting) -> None:
        self._w = waiting
        self._record = waiting.record
        self._begun = time.monotonic()
        self._seen = 0  # a command that exits at once may have done so before this wait began
        self._said = ""
        self._last = "nothing has listened there yet"
        self._answered = False
        self._unknown: int | None = None  # the last answer to the ready path, where it says that there is no such path
        self._overdue = 0  # budgets that are over

    def run(self) -> None:
        probe = self._w.probe
        self._until(self._listens, 0.25)
        self._until(lambda: self._asked("GET", probe.path, None), 0.5)
        if probe.generate is not None:
            body = {"model": self._w.model, **probe.generate}
            self._until(lambda: self._asked("POST", probe.generate_path, body), 1.0)
        self._until(self._listens, 0.25)  # it was ours that answered
        self._check()  # its first process runs
        self._until(self._disarmed, 0.25)

    def _until(self, reached: Callable[[], bool], longest_pause: float) -> None:
        pause = 0.02
        while not reached():
            self._check()
            time.sleep(pause)
            pause = min(pause * 1.3, longest_pause)

    def _disarmed(self) -> bool:
        try:
            return self._w.disarm()
        except SupervisorGoneError:
            return False

    # What may be true of the port

    def _listens(self) -> bool:
        if other := self._intruder():
            raise self._port_error(other)
        if not ports.answering(self._record.host, self._record.port):
            return False
        self._tell(f"port {self._record.port} is open")
        return True

    def _intruder(self) -> ports.Listener | None:
        """Somebody who is not of our tree and listens on the server's port."""
        other = None
        for _ in range(2):  # the tree and the listeners are not read at one moment
            found = ports.answering(self._record.host, self._record.port)
            other = ports.foreign(found, [entry.pid for entry in processes(self._record)]) if found else None
            if other is None:
                return None
        return other

    def _port_error(self, other: ports.Listener) -> ServerStartError:
        record = self._record
        return ServerStartError(
            f"server {record.spec.id} cannot be reached: {ports.port_taken(record.host, record.port, other)} It is not "
            f"what we started ({record.shown(' '.join(record.argv), 300)}), so none of its answers is believed.",
            verdict="port",
        )

    def _asked(self, method: str, path: str, body: Mapping[str, object] | None) -> bool:
        """One request; True for 200. While it waits for the answer it keeps an eye on the server."""
        connection = http.client.HTTPConnection(self._record.host, self._record.port, timeout=5.0)
        try:
            data = json.dumps(body).encode() if body is not None else None
            kind = {"Content-Type": "application/json"} if data else {}
            connection.request(method, path, data, {**kind, **self._record.headers})
            patience = time.monotonic() + _ANSWER_LIMIT
            while not select.select([connection.sock], [], [], 0.1)[0]:
                self._check()
                if data is None and time.monotonic() > patience:
                    raise TimeoutError(f"no answer in {_ANSWER_LIMIT:.0f} s")
            answer = connection.getresponse()
            text = answer.read(2000).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            if not self._answered:
                self._last = f"{method} {path}: {str(error) or type(error).__name__}"
            return False
        finally:
            connection.close()
        self._last, self._answered = f"{method} {path} answered {answer.status}", True
        self._tell(self._last)
        if data is None:
            self._unknown = answer.status if answer.status in (404, 405) else None
        elif 400 <= answer.status < 500 and answer.status not in (408, 425, 429):
            raise self._error(f"refuses a one-token request: {self._record.shown(text, 300)[:600]}", "config")
        return answer.status == 200

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._w.progress(text)

    # What may have happened to the server

    def _check(self) -> None:
        """Raise when the server cannot become ready any more."""
        self._w.tick()
        alive = self._w.control.alive()  # first: what it did last is in the events then
        events = self._w.control.events(self._seen)
        first = next((event for event in events if event.kind in ("fired", "exited", "killing")), None)
        if first and first.kind == "fired":
            self._ended_by_alarm(str(first.data.get("name")))
        elif first and first.kind == "exited":
            what = exit_text(int(first.data["code"]))
            if first.data["code"] == 0 and processes(self._record):
                what += " and left processes behind (a server must stay in the foreground: look for a daemon option)"
            raise self._exited(what)
        elif first:
            why = {"owner": "because a process that owns it is gone"}.get(first.data["why"], f"({first.data['why']})")
            raise self._error(f"was ended {why}", "infra")
        elif not alive:
            raise self._error(lost_supervisor(self._record, self._w.control), "infra")

    def _exited(self, what: str) -> ServerStartError:
        """It exited by itself: the incident may know which rank died first, and why."""
        after = time.monotonic() - self._begun
        why = post_mortem(self._record, self._w.control, self._w.post_mortem, self._w.incident_limit)
        command = self._record.shown(shell.line(self._record.argv), 300)
        advice = f"Its command was {command}; the gpuserve mark decides it (engine, model, command, args, env, python)."
        return self._error(what, why.verdict, why.told(advice), why.incident, after)

    def _ended_by_alarm(self, alarm: str) -> None:
        """The start-up budget is over, or the watcher saw no progress: the incident says what is wrong."""
        control, record = self._w.control, self._record
        settle(control, self._seen, self._w.incident_limit)
        budget = f"its start-up budget of {self._w.budget:g} s (startup_timeout)"
        if any(event.kind == "spared" for event in control.events(self._seen)):
            self._seen = len(control.events())
            if alarm != "startup_budget":
                self._tell(f"the alarm {alarm!r} went off; the server is spared")
                return
            self._overdue += 1
            if self._overdue == 1:
                self._tell("the start-up budget is over; the server is spared and has as much again")
                self._w.rearm()
                return
            budget = f"twice {budget}, and was spared the first time"
        verdict, directory = "hang", None
        text = f"No incident was written; {record.directory / 'supervisor.log'} may say why. {shown_tail(record)}"
        if found := incidents(record.directory):
            verdict, directory = str(found[-1].get("verdict") or "hang"), found[-1].get("incident")
            text = str(found[-1].get("text") or text)
            text += where_it_is(directory, text)
        what = "stopped making progress"
        if alarm in (LOG_LIMIT, "session_deadline"):
            what = f"was ended ({alarm})"
        if alarm == "startup_budget":
            what = f"was not ready within {budget}"
            if self._unknown is not None:
                text = (
                    f"It answered GET {self._w.probe.path} with {self._unknown}, to the end: change ready= in the "
                    f"gpuserve mark to a path that it answers with 200 once it can serve. {text}"
                )
        raise self._error(what, verdict, text, directory)

    def _error(
        self, what: str, verdict: str, text: str = "", incident: str | None = None, after: float | None = None
    ) -> ServerStartError:
        after = time.monotonic() - self._begun if after is None else after
        where = f"{after:.1f} s after its launch, before it was ready ({self._record.url}: {self._last})"
        message = f"server {self._record.spec.id} {what}, {where}.{' ' if text else ''}{text}"
        return ServerStartError(message, verdict=verdict, incident=incident)
