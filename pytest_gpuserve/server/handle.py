"""A running server as a test sees it."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.base import Engine
from ..errors import ServerError, ServerExitedError, ServerHungError
from ..spec import ServerSpec
from ..text import escape
from .control import Control, Event, SupervisorGoneError
from .inflight import Requests
from .ports import Port
from .prometheus import Sample, parse_metrics
from .readiness import (
    EXITED,
    Why,
    exit_text,
    incidents,
    log_tail,
    lost_supervisor,
    post_mortem,
    settle,
    shown_tail,
    where_it_is,
)
from .record import ServerRecord, processes

if TYPE_CHECKING:
    import requests

    from ..phases.rank_phase import RankPhase
    from ..vocabulary import Phase
    from .greedy import Difference, Greedy
    from .spec_decode import SpecDecode
    from .throughput import Throughput

TIMEOUT = (10.0, 300.0)
"""Seconds for a connection, and between two pieces of an answer, unless the test says otherwise."""

REQUEST_ALARM = "request_timeout"
QUIET = 60.0
"""Seconds after an incident that spared the server during which another timed-out request takes none."""

DYING = 1.0
"""Seconds after an answer of 500, 502, 503 or 504 within which the server's end is taken for the reason."""

ORPHAN_GRACE = 0.5
"""Seconds that the processes get which a server left that ended by itself."""

_ENDS = ("killing", "exited")
_GIVE_UP = 20.0  # seconds after SIGKILL until the supervisor reports what would not die, and a margin


def _lost() -> tuple[type[requests.RequestException], ...]:
    """What requests raises for a server that is gone, or silent."""
    import requests

    return (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)


def _silent(error: Exception) -> bool:
    """Whether it is a timeout; requests calls one in the middle of an answer a ConnectionError."""
    import requests

    return isinstance(error, requests.Timeout) or "Read timed out" in str(error)


class Server:
    """A server that became ready. Made by :func:`lifecycle.start`.

    Attributes:
        spec: what was asked for.
        model: the name that requests must carry.
        url: ``http://127.0.0.1:PORT``.
        api_key: what a client of your own must send as bearer token; ``"EMPTY"`` where the server asks for none, since
            some clients insist on one.
        port: TCP port.
        log_path: its stdout and stderr.
        directory: its raw files.
        record: what was launched.
        control: its supervisor.
    """

    def __init__(
        self,
        record: ServerRecord,
        control: Control,
        engine: Engine,
        process: subprocess.Popen[bytes],
        held: Port,
        grace: float,
        dump_limit: float,
        incident: Callable[[Path, str], list[str]],
    ) -> None:
        self.spec: ServerSpec = record.spec
        self.model = engine.served_model(record.spec)
        self.url = record.url
        self.api_key = record.api_key or "EMPTY"
        self.port = record.port
        self.log_path = record.log
        self.directory = record.directory
        self.record = record
        self.control = control
        self.left: list[tuple[int, str]] = []
        """(pid, state) of what the kernel would not let die, once the server has been stopped."""
        self._engine = engine
        self._process = process
        self._held = held
        self._grace = grace
        self._dump_limit = dump_limit
        self._incident = incident
        self._session: requests.Session | None = None
        self._session_pid = 0
        self._stopped = False
        self._spared_at = float("-inf")
        self._post_mortem = threading.Lock()
        self._why: Why | None = None
        self._requests = Requests(record.directory)

    def __repr__(self) -> str:
        return f"<Server {self.spec.id} at {self.url}>"

    # Requests

    def get(self, path: str, **options: Any) -> requests.Response:
        """GET ``path``, which begins with a slash; options are those of ``requests``."""
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> requests.Response:
        """POST to ``path``; ``json=`` is what most want."""
        return self.request("POST", path, **options)

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        """One request, with :data:`TIMEOUT` unless ``timeout=`` says otherwise, and never through a proxy.

        Raises:
            ServerHungError: we ended the server because it hung; the message is the incident's.
            ServerExitedError: the server ended by itself, also where it could still answer 5xx before it did.
            requests.Timeout: no answer in time from a server that is healthy by its stacks; an incident was written.
            requests.ConnectionError: the connection broke and the server lives.
        """
        import requests

        if self._session is None or self._session_pid != os.getpid():  # a fork must not share its parent's connections
            self._session, self._session_pid = requests.Session(), os.getpid()
            self._session.trust_env = False
            self._session.headers.update(self.record.headers)
        options.setdefault("timeout", TIMEOUT)
        watched = self._requests.one() if method.upper() == "POST" else nullcontext()
        try:
            with watched:
                response = self._session.request(method, self.url + path, **options)
        except _lost() as error:
            raise (self._timed_out if _silent(error) else self._broken)(error) from error
        if response.status_code in (500, 502, 503, 504) and (fate := self._fate_soon(DYING)):
            raise fate
        if options.get("stream"):
            self._guard(response)
        return response

    def _guard(self, response: requests.Response) -> None:
        """A streamed answer breaks, or stops, where the test reads it: it gets the same errors there."""
        read = response.iter_content

        def iter_content(*args: Any, **options: Any) -> Iterator[Any]:
            try:
                with self._requests.one():
                    yield from read(*args, **options)
            except _lost() as error:
                raise (self._timed_out if _silent(error) else self._broken)(error) from error

        response.iter_content = iter_content  # type: ignore[method-assign]

    def _broken(self, error: requests.RequestException) -> Exception:
        """What a broken connection means: look, for a moment, whether the server has ended and why. One that refuses
        connections is about to: after a worker's death vLLM 0.32 stops listening seconds before it exits."""
        return self._fate_soon(15.0 if "Connection refused" in str(error) else 1.0) or error

    def _fate_soon(self, patience: float) -> ServerError | None:
        """The error for a server that has ended, or is being ended, within ``patience`` seconds: a front end that
        answers for dead workers is about to end itself, often within the second."""
        self.control.wait(lambda events: any(event.kind in _ENDS for event in events), patience)
        return self._ended()

    def _fate(self) -> ServerError | None:
        """The error for a server that has ended; None while it runs."""
        alive = self.control.alive()
        settle(self.control, 0, self._dump_limit + _GIVE_UP)
        events = self.control.events()
        found = {event.kind: event for event in reversed(events)}
        end = next((event.kind for event in events if event.kind in _ENDS), None)
        if end == "killing":
            why = found["killing"].data
            if why["why"] == "alarm":
                return self._hung(str(why.get("name")))
            return ServerExitedError(f"server {self.spec.id} was stopped ({why['why']}).", verdict="undecided")
        if end == "exited":
            return self._exited(int(found["exited"].data["code"]))
        if not alive and not self._stopped:
            return ServerExitedError(
                f"server {self.spec.id} {lost_supervisor(self.record, self.control)}", verdict="infra"
            )
        return None

    def _exited(self, code: int) -> ServerExitedError:
        """It ended by itself. The first who asks takes the incident: what died, and why."""
        with self._post_mortem:
            if self._why is None:
                limit = self._dump_limit + _GIVE_UP
                self._why = post_mortem(self.record, self.control, lambda: self.dump(EXITED), limit)
        why = self._why
        text = self.record.redactor.redact(f"server {self.spec.id} {exit_text(code)}. {why.told()}")
        return ServerExitedError(text, verdict=why.verdict, incident=why.incident)

    def _hung(self, name: str) -> ServerHungError:
        found = self.incidents()
        last = found[-1] if found else {}
        directory = last.get("incident")
        text = str(last.get("text") or f"its alarm {name} went off. {shown_tail(self.record)}")
        evidence = where_it_is(directory, text)
        return ServerHungError(
            self.record.redactor.redact(f"server {self.spec.id} was ended ({name}): {text}{evidence}"),
            verdict=str(last.get("verdict") or "hang"),
            incident=directory,
        )

    def _timed_out(self, error: requests.RequestException) -> Exception:
        """A request ran into its timeout: take an incident, which decides whether the server is to blame."""
        if fate := self._ended():
            return fate
        if time.monotonic() - self._spared_at > QUIET:
            argv = self._incident(self.directory, REQUEST_ALARM)
            before = len(self.control.events())
            with suppress(SupervisorGoneError):
                self.control.fire(REQUEST_ALARM, argv, self._dump_limit)
                self.control.wait(lambda events: any(e.kind == "fired" for e in events[before:]), 5.0)
                settle(self.control, before, self._dump_limit + _GIVE_UP)
            if fate := self._ended():
                return fate
            self._spared_at = time.monotonic()
        found = self.incidents()
        last = found[-1] if found else {}
        where = (
            f"; the server was spared (verdict {last.get('verdict')}), evidence: {last.get('incident')}" if last else ""
        )
        return type(error)(f"{error}{where}", request=error.request, response=error.response)

    def _ended(self) -> ServerError | None:
        return self._fate() if self.control.last(*_ENDS) or not self.control.alive() else None

    # What it says of itself

    def metrics(self, path: str = "/metrics") -> dict[str, float]:
        """Every series of the server's Prometheus text by name, summed over its labels."""
        found: dict[str, float] = {}
        for sample in self.samples(path):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def samples(self, path: str = "/metrics") -> list[Sample]:
        """The server's Prometheus text with its labels."""
        response = self.get(path)
        response.raise_for_status()
        return parse_metrics(response.text)

    @property
    def phases(self) -> dict[str, RankPhase]:
        """The phase of every rank, by label, read from the log; empty once the server has renamed or removed that."""
        from ..phases.reader import read_phases

        try:
            return dict(read_phases(self.log_path, self._engine.grammar))
        except OSError:
            return {}

    def assert_phase(self, phase: Phase, *, max_s: float) -> dict[str, float]:
        """Seconds of ``phase`` by rank, such as ``{"TP0": 34.0}``, from the log; none may be above ``max_s``.

        Raises:
            DegradedError: an AssertionError that names the slowest rank, or says that the phase never ran.
            SpecError: there is no such phase.
        """
        from ..phases.limits import within

        return within(self.phases, phase, max_s, self.spec.id)

    @property
    def spec_decode(self) -> SpecDecode:
        """Speculative decoding so far, with ``accept_rate`` and ``accept_length``; ``later - earlier`` is a window.

        Every figure of a server without speculation, or without counters, is None.
        """
        from .spec_decode import ask

        return ask(self)

    def throughput(self, **options: Any) -> Throughput:
        """Tokens a second of a few clients, after a warm-up; options are those of :func:`throughput.measure`."""
        from .throughput import measure

        return measure(self, **options)

    def greedy(self, prompts: Iterable[str], max_tokens: int = 64) -> list[Greedy]:
        """Completions at temperature 0, to compare with another server's: see :meth:`assert_parity`."""
        from .greedy import ask

        return ask(self, prompts, max_tokens)

    def assert_parity(self, base: Sequence[Greedy], *, max_tokens: int = 64, epsilon: float = 0.1) -> list[Difference]:
        """Complete the prompts of ``base``, made by another server's :meth:`greedy`, and compare.

        Returns the differences that prove nothing: where the base's two most likely tokens were within ``epsilon``
        (nats), bfloat16 may have them change places.

        Raises:
            DegradedError: an AssertionError: another text where the base was sure.
        """
        from .greedy import check

        return check(base, self.greedy([one.prompt for one in base], max_tokens), self.spec.id, epsilon)

    def ranks(self) -> dict[str, int]:
        """pid of every rank that runs now, by label (``TP3``); empty for engines that title no process."""
        from .. import procfs

        found = {}
        for entry in processes(self.record):
            role = self._engine.process_role(procfs.cmdline(entry.pid), entry.comm)
            if role and role.rank:
                found[role.label] = entry.pid
        return dict(sorted(found.items(), key=lambda pair: [int(n) for n in re.findall(r"\d+", pair[0])]))

    def log_tail(self, n: int = 50) -> str:
        """The last ``n`` lines of its output, as they are."""
        return log_tail(self.log_path, n)

    def exit_code(self) -> int | None:
        """Exit code of its first process, negative for a signal; None while it runs."""
        event = self.control.last("exited")
        return int(event.data["code"]) if event else None

    def incidents(self) -> list[dict[str, Any]]:
        """What was found wrong with it, oldest first: time, reason, incident (directory), verdict, text."""
        return incidents(self.directory)

    def dump(self, reason: str = "manual") -> Path:
        """Take the stacks of all its processes now, harm nothing, and return the incident's directory.

        Raises:
            ServerError: the server has ended, or no incident came out.
        """
        reason = escape(reason)  # no argument of a program may have a NUL
        before, known = len(self.control.events()), len(self.incidents())
        self.control.fire(reason, self._incident(self.directory, reason), self._dump_limit, kill=False)
        self.control.wait(
            lambda events: any(e.kind in ("spared", "stopped") for e in events[before:]), self._dump_limit + _GIVE_UP
        )
        found = self.incidents()[known:]
        if not found or not found[-1].get("incident"):
            tail = shown_tail(self.record, self.directory / "supervisor.log")
            raise ServerError(f"no incident was written for {self.spec.id}. {tail}")
        return Path(str(found[-1]["incident"]))

    # The end

    def stop(self, grace: float | None = None) -> None:
        """End the server: SIGTERM, SIGKILL after ``grace`` seconds (half a second when its first process has ended by
        itself: the workers of a dead vLLM obey nothing). Returns when nothing of it is left, or what would not die is
        in :attr:`left`. May be called again. A child that a test forked ends nothing: the server is its parent's."""
        if self._stopped or os.getpid() != self.record.owner.pid:
            return
        grace = self._grace if grace is None else grace
        if self.exit_code() is not None:
            grace = min(grace, ORPHAN_GRACE)
        with suppress(ServerError):
            self.control.stop(grace)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace + self._dump_limit + _GIVE_UP)
        if self.control.last("stopped") is None and self._process.poll() != 0:
            # killed by somebody, or wedged itself: its kernel-granted last will (the root's death) is not enough
            self._process.kill()
            self._process.wait()
            lost_supervisor(self.record, self.control)
        self._stopped = True
        events: list[Event] = self.control.events()
        self.left = [(int(e.data["pid"]), str(e.data["state"])) for e in events if e.kind == "left"]
        self._held.release()
        if self._session is not None:
            self._session.close()
