"""``gpuserve run -- CMD…``: any server command, watched from its launch to its end, without pytest."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from ..engines import engine_names, get_engine
from ..engines.base import Engine
from ..engines.features import features_of
from ..errors import GpuserveError, ServerError, ServerStartError
from ..isolation.deltas import Command, environment, split
from ..report.incident import command as incident_command
from ..server.control import Control
from ..server.handle import Server
from ..server.lifecycle import Limits, start
from ..server.paths import session_directory, state_root
from ..server.readiness import EXITED, exit_text, settle
from ..server.reaper import sweep_dead_sessions
from ..server.record import ServerRecord
from ..spec import ServerSpec
from ..text import escape, one_line
from ..watch.starting import Starting
from ..watch.watcher import start as start_watcher
from .attach import HUNG, attach
from .canary import Canary
from .isolate import recognise
from .launches import DUMP, Given
from .screen import Screen
from .signals import as_interrupt

_PORTS = {"sglang": 30000, "vllm": 8000, "sim": 30000}
"""Where an engine listens that is not told."""

_EXIT_CODES = (
    "its own    the server ended by itself (128+N: by signal N; 1 for a code 0 before it was ready or after a crash)",
    "2          usage, or there can be no such server",
    f"{HUNG}          it hung: dumped, named, ended (--attach: it was hung when it ended)",
    "130, 143   Ctrl-C, SIGTERM: nothing of it is left, or it is said what is (--attach: it runs on)",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = (
        "gpuserve run [options] -- [NAME=VALUE…] CMD…\n       gpuserve run [options] --attach URL [--pid PID]"
    )
    parser.epilog = "exit codes:\n" + "\n".join(f"  {line}" for line in _EXIT_CODES)
    parser.add_argument("words", nargs="*", metavar="CMD", help="the server's command, after --; no shell")
    parser.add_argument("--attach", metavar="URL", help="watch a server that runs already: dump and tell, never end it")
    parser.add_argument("--pid", type=int, help="with --attach: its first process (default: who listens at URL)")
    parser.add_argument("--log", type=Path, help="with --attach: where its output goes, to know its phases")
    parser.add_argument("--engine", choices=engine_names(), help="default: told by the command; command: any server")
    parser.add_argument("--port", type=int, help="default: as the command says, else the engine's own")
    parser.add_argument("--ready", metavar="PATH", help="URL path that answers 200 when the server is ready")
    parser.add_argument("--soft", action="store_true", help="dump and tell, never end it")
    parser.add_argument("--startup-timeout", type=float, default=1800.0, metavar="S", help="default %(default)g")
    parser.add_argument("--stall-timeout", type=float, metavar="S", help="seconds without progress (default: by phase)")
    parser.add_argument(
        "--log-limit",
        type=int,
        default=1024,
        metavar="MB",
        help="megabytes of its log: there it is dumped, and ended if it prints one line over and over; of another only "
        "the beginning and the newest stay; 0: no limit (default %(default)s)",
    )
    parser.add_argument("--grace", type=float, default=10.0, metavar="S", help="from SIGTERM to SIGKILL (default 10)")
    parser.add_argument(
        "--probe-every",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between completions of one token, which show a hang where nobody's requests are seen; 0: none "
        "(default %(default)g)",
    )
    parser.add_argument("--output", type=Path, default=Path("gpuserve-artifacts"), metavar="DIR", help="for incidents")


def run(arguments: argparse.Namespace) -> int:
    """See the epilog for exit codes.

    Raises:
        GpuserveError: there can be no such server.
    """
    if bool(arguments.attach) == bool(arguments.words):
        raise GpuserveError("give either the server's command, after --, or --attach URL.")
    screen = Screen()
    received: list[int] = []
    own: _Run | None = None
    with as_interrupt(received):
        try:
            if arguments.attach:
                return attach(arguments, screen)
            own = _Run(arguments, screen)
            return own.run()
        except KeyboardInterrupt:
            ended = own.left() if own else "nothing of it is left."
            screen.say("the watch has ended; the server runs on." if arguments.attach else ended)
            return 128 + received[0]


class _Run:
    """One server from its launch to its end."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen) -> None:
        self._arguments = arguments
        self._screen = screen
        self._starting: Starting | None = None
        self._directory: Path | None = None
        self._note = ""
        self._due = self._launched = 0.0
        self._told = 0
        self._incidents = 0
        words = list(arguments.words)
        name = arguments.engine or recognise(words)
        parts = split(words, features_of(name))
        variables, argv = environment(words)
        self._adapter = get_engine(name)
        self._engine: Engine = Given(self._adapter, Command(tuple(argv), tuple(variables)), arguments.ready)
        self._host = parts.host or "127.0.0.1"
        self._port = self._which_port(name, parts.port, argv)
        self._spec = ServerSpec(
            name,
            model=parts.model,
            tp=parts.tp,
            command=tuple(argv),
            env=tuple(sorted(variables)),
            python=argv[0] if Path(argv[0]).is_absolute() and "python" in Path(argv[0]).name else None,
            cwd=str(Path.cwd()),
        )

    def _which_port(self, engine: str, said: str | None, argv: list[str]) -> int | None:
        """None: a free one, filled in where the command says ``{port}``."""
        if self._arguments.port:
            return int(self._arguments.port)
        if said is not None and said.isdigit():
            return int(said)
        if any("{port}" in word for word in argv):
            return None
        if engine in _PORTS:
            return _PORTS[engine]
        raise GpuserveError(
            "the command does not say where its server listens. Say it with --port N before the --, or write {port} in "
            "the command where a free one is to be filled in."
        )

    def run(self) -> int:
        """Start, wait, watch. Returns the exit code; nothing of the server is left."""
        given, screen = self._arguments, self._screen
        if text := sweep_dead_sessions().text:
            screen.say(text)
        watcher = start_watcher(session_directory(), self._watch())
        self._launched = time.monotonic()
        server: Server | None = None
        try:
            try:
                server = start(
                    self._spec,
                    self._engine,
                    parent=session_directory(),
                    limits=Limits(given.startup_timeout, given.grace, DUMP, max(0, given.log_limit) << 20),
                    incident=self._incident,
                    host=self._host,
                    port=self._port,
                    progress=self._noted,
                    tick=self._tick,
                )
            except ServerStartError as error:
                screen.say(escape(str(error)))
                return self._failed()
            finally:
                self._end_display()
            return self._serve(server)
        finally:
            try:
                if server is not None:  # wherever Ctrl-C came since
                    _stop(server)
            finally:
                _end(watcher)

    def left(self) -> str:
        """What is left of a server that was to end, in words."""
        events = Control(self._directory).events() if self._directory else []
        left = [f"{event.data['pid']} (state {event.data['state']})" for event in events if event.kind == "left"]
        if not left:
            return "nothing of it is left."
        return f"of its processes {', '.join(left)} would not die. `gpuserve reap` tells when they are gone."

    def _serve(self, server: Server) -> int:
        """From ready to its end."""
        took = time.monotonic() - self._launched
        self._screen.say(f"{server.spec.id} is ready after {took:.0f} s at {server.url}; Ctrl-C ends it.")
        canary = Canary(server.record, self._engine.ready(server.spec), self._arguments.probe_every, self._screen.say)
        try:
            canary.start()
            while server.control.alive() and not server.control.last("exited", "killing"):
                self._tell(server)
                time.sleep(0.2)
            return self._fate(server)
        finally:
            canary.stop()

    def _fate(self, server: Server) -> int:
        """It has ended: how, in words and as exit code."""
        control = server.control
        settle(control, 0, DUMP + self._arguments.grace + 30.0)
        if (ended := control.last("exited")) is not None and not self._killed(control):
            with contextlib.suppress(ServerError):
                server.dump(EXITED)
            self._screen.say(f"{server.spec.id} {exit_text(int(ended.data['code']))}.")
            self._tell(server)
            crashed = any(entry.get("verdict") not in ("ready", "undecided") for entry in server.incidents()[-1:])
            return shell_code(int(ended.data["code"]), crashed)
        self._tell(server)
        if self._killed(control):
            self._screen.say(f"{server.spec.id} hung, and was ended.")
            return HUNG
        self._screen.say(f"{server.spec.id} lost its supervisor: somebody killed it.")
        return 1

    def _failed(self) -> int:
        """It never became ready."""
        if self._directory is None:
            return 1
        control = Control(self._directory)
        ended = control.last("exited")
        if self._killed(control) or ended is None:
            return HUNG if self._killed(control) else 1
        return shell_code(int(ended.data["code"]), True)

    @staticmethod
    def _killed(control: Control) -> bool:
        """An alarm ended it."""
        first = next((event for event in control.events() if event.kind in ("killing", "exited")), None)
        return first is not None and first.kind == "killing" and first.data.get("why") == "alarm"

    # What is shown

    def _noted(self, text: str) -> None:
        self._note = text

    def _tick(self, record: ServerRecord) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + 0.25
        if self._starting is None:
            gpus = dict(record.spec.env).get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            self._starting = Starting(record, gpus if getattr(self._adapter, "uses_gpus", True) else None)
            self._screen.say(f"{record.spec.id}: pid {record.root.pid if record.root else '?'}, log {record.log}")
        self._screen.show(self._starting.look(self._note))

    def _end_display(self) -> None:
        self._screen.clear()
        if self._starting is not None:
            self._starting.close()

    def _tell(self, server: Server) -> None:
        """Incidents that are complete and have not been told."""
        done = sum(event.kind == "dumped" for event in server.control.events())
        if done <= self._told:
            return
        self._told = done
        for entry in server.incidents()[self._incidents :]:
            self._incidents += 1
            self._screen.say(escape(str(entry.get("text") or entry.get("verdict")).rstrip()))
            self._screen.say(f"evidence: {one_line(str(entry.get('incident')))}")

    # What is run at a deadline

    def _incident(self, directory: Path, reason: str) -> list[str]:
        self._directory = directory
        rounds = 1 if reason == EXITED else None
        return incident_command(
            directory, self._arguments.output, reason, soft=self._arguments.soft, limit=0.68 * DUMP, rounds=rounds
        )

    def _watch(self) -> dict[str, Any]:
        """The watcher's configuration."""
        argv = incident_command(
            Path("{server}"), self._arguments.output, "{reason}", soft=self._arguments.soft, limit=0.68 * DUMP
        )
        stall = self._arguments.stall_timeout
        return {
            "incident": [*argv, "--after", "{after}"],
            "limit": 0.8 * DUMP,
            "budgets": {"window": stall} if stall else {},
            "cache": str(state_root() / "stillness"),
            "others": True,
        }


def shell_code(code: int, crashed: bool) -> int:
    """As a shell has it; a server that crashed and says 0 (vLLM after a worker's death) is none that is well."""
    return 128 - code if code < 0 else code or int(crashed)


def _stop(server: Server) -> None:
    try:
        server.stop()
    except KeyboardInterrupt:  # a second Ctrl-C: now
        server.stop(0.0)
        raise


def _end(watcher: subprocess.Popen[bytes]) -> None:
    watcher.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        watcher.wait(5.0)
    if watcher.poll() is None:
        watcher.kill()
        watcher.wait()
