"""Start one server from a command line, check it, say what became of it: what isolate does again and again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ..engines import uses_gpus
from ..engines.base import Engine, Launch
from ..errors import EngineError, GpuserveError, ServerError
from ..isolation.deltas import Command
from ..isolation.signature import Signature
from ..report.failure import read_incident, signature
from ..report.incident import command as incident_command
from ..server.gpu_pool import GpuPool
from ..server.greedy import Greedy, ask, differences
from ..server.handle import Server
from ..server.leases import acquire
from ..server.lifecycle import Limits, start
from ..server.paths import session_directory
from ..server.readiness import shown_tail
from ..server.record import load, processes
from ..spec import ServerSpec
from ..text import one_line
from ..watch.watcher import start as start_watcher
from . import parity
from .user_command import end_group
from .user_command import start as start_command

Say = Callable[[str], None]

DUMP = 30.0
"""Seconds for one incident; the alarm gets 0.8 of it, the incident itself a little less."""

_LONG = 288
"""Tokens of the longest completion: there are hangs at 227 tokens that 128 do not show."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One launch and what became of it.

    Attributes:
        text: what happened, already escaped.
        log: raw and private.
        outputs: completions at temperature 0, to compare with those of another launch.
        mute: the user's check said that it cannot tell: the same launch once more would tell nothing either.
    """

    signature: Signature
    seconds: float
    text: str = ""
    incident: str | None = None
    log: str | None = None
    outputs: tuple[Greedy, ...] = ()
    mute: bool = False


@dataclass(frozen=True, slots=True)
class Checked:
    """What a ready server did when it was used; as of :class:`Seen`."""

    signature: Signature
    text: str = ""
    outputs: tuple[Greedy, ...] = ()
    mute: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """How a ready server is checked.

    Attributes:
        argv: the user's command, with ``{url}``, ``{port}`` and ``{model}``; empty: the built-in check.
        timeout: seconds for it.
        request_timeout: seconds for one request of the built-in check.
    """

    argv: tuple[str, ...] = ()
    timeout: float = 1800.0
    request_timeout: float = 300.0


class StoppedError(GpuserveError):
    """What was launched is not wanted any more."""


class Given:
    """An engine whose command line is given: everything else is the adapter's."""

    def __init__(self, adapter: Engine, command: Command, ready: str | None) -> None:
        self._adapter = adapter
        self._command = command
        self._ready = ready
        self.name = adapter.name
        self.axes = adapter.axes
        self.grammar = adapter.grammar

    def launch(self, spec: ServerSpec, *, host: str, port: int, python: str) -> Launch:
        command = self._command.at(host, str(port))
        return Launch(command.argv, dict(command.env))

    def ready(self, spec: ServerSpec) -> Any:
        return self._adapter.ready(replace(spec, ready=self._ready))

    def served_model(self, spec: ServerSpec) -> str:
        return spec.model or ""

    def process_role(self, cmdline: Sequence[str], comm: str) -> Any:
        return self._adapter.process_role(cmdline, comm)

    def own_timeout(self, launch: Launch) -> float | None:
        return self._adapter.own_timeout(launch)


class Launcher:
    """Starts servers, several at a time where it is asked by several threads; a watcher looks at all of them."""

    def __init__(
        self, artifacts: Path, limits: Limits, check: Check, pool: GpuPool, *, stall: float | None = None
    ) -> None:
        self._artifacts = artifacts
        self._limits = limits
        self._check = check
        self._pool = pool
        self._stall = stall
        self._watcher: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._ready: set[Server] = set()

    def __enter__(self) -> Launcher:
        argv = incident_command(Path("{server}"), self._artifacts, "{reason}", limit=0.68 * DUMP)
        config: dict[str, Any] = {"incident": [*argv, "--after", "{after}"], "limit": 0.8 * DUMP}
        config["budgets"] = {"window": self._stall} if self._stall else {}
        self._watcher = start_watcher(session_directory(), config)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watcher is not None:
            self._watcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watcher.wait(5.0)
            if self._watcher.poll() is None:
                self._watcher.kill()
                self._watcher.wait()

    def stop(self) -> None:
        """End what other threads launched, and let them launch nothing more."""
        self._stopped = True
        for server in list(self._ready):
            with contextlib.suppress(GpuserveError, OSError):
                server.control.stop(self._limits.grace)

    def stopped(self) -> bool:
        return self._stopped

    def _still_wanted(self, _: object = None) -> None:
        if self._stopped:
            raise StoppedError("nothing more is launched")

    def __call__(self, spec: ServerSpec, engine: Engine, say: Say) -> Seen:
        """Launch, check, stop. Never raises for what a server did.

        Raises:
            GpuserveError: there can be no such server (no program, no GPUs).
            StoppedError: another thread called :meth:`stop`.
        """
        self._still_wanted()
        begin = time.monotonic()
        where: list[Path] = []

        def incident(directory: Path, reason: str) -> list[str]:
            where.append(directory)
            return incident_command(directory, self._artifacts, reason, limit=0.68 * DUMP)

        def seen(signature: Signature, text: str = "", incident: str | None = None) -> Seen:
            log = str(where[0] / "server.log") if where else None
            return Seen(signature, time.monotonic() - begin, text, incident, log)

        with self._gpus(spec, say) as (gpus, fds, pids):
            try:
                server = start(
                    spec,
                    engine,
                    parent=session_directory(),
                    limits=self._limits,
                    incident=incident,
                    gpus=gpus,
                    pass_fds=fds,
                    progress=say,
                    tick=self._still_wanted,
                )
                self._ready.add(server)
            except ServerError as error:
                pids.extend(_pids(where[0]) if where else ())
                text = _text(error)
                if where and spec.engine == "command":  # whose logs nobody can read for a cause
                    text += f"\n{shown_tail(load(where[0]), lines=5)}"
                return seen(_signature(error, where[0] if where else None, spec), text, error.incident)
            try:
                say("ready; checking")
                found = check(server, self._check)
                incident_of = _last_incident(server) if not found.signature.passed else None
                return replace(seen(found.signature, found.text, incident_of), outputs=found.outputs, mute=found.mute)
            except ServerError as error:
                return seen(_signature(error, server.directory, spec), _text(error), error.incident)
            finally:
                self._ready.discard(server)
                pids.extend(entry.pid for entry in processes(server.record))
                server.stop()

    @contextlib.contextmanager
    def _gpus(self, spec: ServerSpec, say: Say) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], list[int]]]:
        pids: list[int] = []
        if not self._pool.counted or not uses_gpus(spec):
            yield (), (), pids
            return
        lease = acquire(spec.tp, self._pool, on_wait=say, evict_idle=lambda: False, limit=3600.0, label=spec.id)
        try:
            yield lease.gpus, lease.fds, pids
        finally:
            for bad in lease.give_back(lambda: pids, label="gpuserve isolate"):
                say(bad.text)


def check(server: Server, how: Check) -> Checked:
    """What a ready server does when it is used.

    Raises:
        ServerError: it hung or ended meanwhile.
    """
    return _run_probe(server, how) if how.argv else _complete(server, how.request_timeout)


def _complete(server: Server, timeout: float) -> Checked:
    """A short completion and a long one, then several with logprobs, one of them twice; all at temperature 0."""
    texts: list[str] = []
    for tokens in (16, _LONG):
        body: dict[str, Any] = {"model": server.model, "prompt": "The capital of France is", "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        answer = server.post("/v1/completions", json=body, timeout=(10.0, timeout))
        if answer.status_code == 404 and not texts:
            text = "it is ready; it has no /v1/completions, so nothing else was checked (--probe)"
            return Checked(Signature("ready"), text)
        if answer.status_code == 400:  # ignore_eos is not in the standard
            del body["ignore_eos"]
            answer = server.post("/v1/completions", json=body, timeout=(10.0, timeout))
        try:
            texts.append(str(answer.json()["choices"][0]["text"]))
        except (ValueError, LookupError, TypeError):
            verdict = "crash" if answer.status_code >= 500 else "config"
            return Checked(
                Signature(verdict, "serving", frozenset({f"HTTP {answer.status_code}"})),
                f"a completion of {tokens} tokens was answered {answer.status_code} without a text",
            )
    if not texts[1].strip():
        empty = Signature("degraded", "serving", frozenset({"empty"}))
        return Checked(empty, f"a completion of {_LONG} tokens is empty")
    again, *outputs = ask(server, (parity.PROMPTS[0], *parity.PROMPTS), parity.TOKENS, (10.0, timeout))
    broken, text = parity.judged(differences([again], outputs[:1]), "two equal requests at temperature 0 differ")
    return Checked(broken or Signature("ready"), text, tuple(outputs))


def _run_probe(server: Server, how: Check) -> Checked:
    """The user's command: 0 passes, 125 cannot tell, anything else fails; a server that hangs or dies says more.

    Raises:
        EngineError: it cannot be run.
    """
    values = {"{url}": server.url, "{port}": str(server.port), "{model}": server.model}
    argv = [_fill(word, values) for word in how.argv]
    env = {"GPUSERVE_URL": server.url, "GPUSERVE_MODEL": server.model, "GPUSERVE_API_KEY": server.api_key}
    with tempfile.TemporaryFile() as output:
        try:
            child = start_command(argv, env, output=output)
        except OSError as error:
            raise EngineError(f"--probe: {how.argv[0]} cannot be run: {error.strerror}. Correct --probe.") from None
        try:
            deadline = time.monotonic() + how.timeout
            while child.poll() is None and time.monotonic() < deadline and not server.control.last("killing", "exited"):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.2)
            code = child.poll()
        finally:
            end_group(child)
        said = _last_line(output)
    if server.control.last("fired", "killing", "exited"):
        server.get("/health")  # raises what became of the server; one that was spared answers
    if code is None:
        server.dump("probe_timeout")
        found = read_incident(_last_incident(server))
        seen = Signature.from_json(found) if found and found.get("verdict") else None
        if seen is None or seen.passed or seen.verdict == "undecided":  # the dump finds nothing, the probe hangs
            seen = Signature("hang", "serving")
        return Checked(seen, f"--probe did not end within {how.timeout:g} s{said}")
    if code == 0:
        return Checked(Signature("ready"))
    if code in (126, 127):  # a shell's word for it
        raise EngineError(f"--probe cannot be run (exit code {code}){said}. Correct --probe.")
    if code == 125:
        return Checked(Signature("undecided"), f"--probe cannot tell (exit code 125){said}", mute=True)
    return Checked(Signature("probe", None, frozenset({f"exit {code}"})), f"--probe ended with exit code {code}{said}")


def _last_line(output: IO[bytes]) -> str:
    """``: what was printed last``, escaped; empty: nothing was."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
    lines = output.read().decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f": {one_line(last, 300)}" if last else ""


def _fill(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _signature(error: ServerError, directory: Path | None, spec: ServerSpec) -> Signature:
    return signature(error.verdict, read_incident(error.incident), directory, spec.engine)


def _text(error: ServerError) -> str:
    """What the incident says, else the error itself; both are escaped."""
    found = read_incident(error.incident)
    return str(found.get("text") or error) if found else str(error)


def _last_incident(server: Server) -> str | None:
    found = server.incidents()
    return str(found[-1]["incident"]) if found and found[-1].get("incident") else None


def _pids(directory: Path) -> list[int]:
    with contextlib.suppress(GpuserveError):
        return [entry.pid for entry in processes(load(directory))]
    return []
