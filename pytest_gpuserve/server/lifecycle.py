"""Start a server: directory, port, supervisor, and the wait until it is ready."""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest_gpuserve

from .. import foreign, procfs
from ..engines.base import Engine, Launch
from ..engines.fatbin import Capability
from ..engines.kernels import unsupported
from ..engines.settled import HEAD, downgrades
from ..errors import EngineError, GpuserveError, ServerStartError, SpecError
from ..procfs import ProcessId
from ..spec import ServerSpec
from ..text import escape
from ..vocabulary import LOG_LIMIT
from . import ports
from .api_key import authorise
from .control import Control, sweep_cookie
from .handle import Server
from .loop import STARVED
from .paths import STATE_VARIABLE, server_directory
from .readiness import EXITED, Waiting, shown_tail, wait
from .record import ServerRecord, boot_id, redactor_of
from .witness_env import witness_environment

Incident = Callable[[Path, str], list[str]]
"""(directory of the server, reason) -> argv that takes the incident; [] takes none."""

STARTUP_ALARM = "startup_budget"
READY = "ready"
"""File in a server's directory: its start-up is over. Before that, an idle server is one that hangs."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. ``startup``: from launch to ready. ``grace``: from SIGTERM to SIGKILL. ``dump``: for one incident.

    ``log``: bytes of the server's log: never more than a quarter above it stay on the disk; 0: no limit.
    """

    startup: float = 1800.0
    grace: float = 10.0
    dump: float = 30.0
    log: int = 1 << 30


def start(
    spec: ServerSpec,
    engine: Engine,
    *,
    parent: Path,
    limits: Limits,
    incident: Incident,
    gpus: Sequence[str] = (),
    capabilities: Sequence[Capability] = (),
    host: str = "127.0.0.1",
    port: int | None = None,
    owners: Sequence[ProcessId] = (),
    pass_fds: Sequence[int] = (),
    progress: Callable[[str], None] | None = None,
    tick: Callable[[ServerRecord], None] | None = None,
) -> Server:
    """Start a server and wait until it is ready. When this raises, nothing of the server is left.

    Args:
        parent: where the server's directory is made.
        incident: what the supervisor runs when the start-up budget is over or the log reaches its limit, and the handle
            when a request times out.
        gpus: become CUDA_VISIBLE_DEVICES; empty: that stays as it is.
        capabilities: compute capabilities of the GPUs that it will have; empty: not known, so nothing is refused.
        port: None: a free one.
        owners: beside this process, those that the server must not outlive (the xdist controller); with one that is
            dead already, the server is ended at once.
        pass_fds: descriptors that the supervisor keeps open until nothing of the server is left (GPU leases); the
            server does not get them.
        progress: called with a short text whenever the wait knows something new.
        tick: called in this thread every second or more often while the wait lasts, for those who show how far it is.

    Raises:
        ServerStartError: it did not become ready; ``verdict`` and the message say why.
        EngineError, SpecError: there can be no such server.
    """
    python = spec.python or sys.executable
    cwd = Path(spec.cwd or ".").absolute()
    if not cwd.is_dir():
        raise SpecError(f"cwd {spec.cwd!r} is no directory. Correct cwd in the gpuserve mark.")
    ports.reachable(host)
    attempt = _Attempt(ports.hold(host, port))
    try:
        launch = engine.launch(spec, host=host, port=attempt.port.number, python=python)
        if not launch.argv:
            raise EngineError(f"engine {spec.engine} has no command to start {spec.id}.")
        if why := unsupported(spec, engine, python=python, capabilities=capabilities):
            raise ServerStartError(f"server {spec.id} was not started: {why}", verdict="unsupported_arch")
        where = (host, attempt.port.number)
        record = _record(spec, engine, launch, server_directory(parent, spec), where, gpus, python)
        launch, api_key = authorise(spec, launch, record.directory)
        record = replace(record, api_key=api_key)
        record.save()
        attempt.record = record
        (record.directory / "markers").mkdir(mode=0o700)
        argv = incident(record.directory, STARTUP_ALARM)
        budget_over = time.monotonic() + limits.startup
        alarm = {"name": STARTUP_ALARM, "deadline": budget_over, "argv": argv, "limit": limits.dump}
        config: dict[str, Any] = {
            "directory": str(record.directory),
            "cookie": record.cookie,
            "owners": [[one.pid, one.start] for one in (record.owner, *owners)],
            "grace": limits.grace,
            "argv": list(launch.argv),
            "env": environment(spec, launch, gpus, record.directory / "markers"),
            "cwd": str(cwd),
            "log": str(record.log),
            "log_limit": limits.log,
            "log_alarm": {"name": LOG_LIMIT, "argv": incident(record.directory, LOG_LIMIT), "limit": limits.dump},
            "keep": list(pass_fds),
            "alarms": [alarm],
        }
        path = config["env"].get("PATH") or os.environ.get("PATH")
        if not shutil.which(launch.argv[0], path=path) and os.sep not in launch.argv[0]:
            raise _no_program(record, f"{launch.argv[0]}: not found in PATH")
        attempt.port.hand_over()
        record = attempt.spawn(config, limits)
        control = Control(record.directory, record.supervisor)
        assert attempt.process is not None
        server = Server(record, control, engine, attempt.process, attempt.port, limits.grace, limits.dump, incident)
        attempt.server = server
        wait(
            Waiting(
                record=record,
                control=control,
                probe=engine.ready(spec),
                model=server.model,
                budget=limits.startup,
                incident_limit=(1 + STARVED) * limits.dump + limits.grace + 30.0,
                rearm=lambda: control.arm(STARTUP_ALARM, time.monotonic() + limits.startup, argv, limits.dump),
                disarm=lambda: control.disarm(STARTUP_ALARM),
                progress=progress or (lambda _: None),
                tick=partial(tick, record) if tick is not None else (lambda: None),
                post_mortem=lambda: server.dump(EXITED),
            )
        )
        _check_settings(record, launch)
        (record.directory / READY).touch(mode=0o600)  # the log of an engine that we do not know never says it
    except BaseException as error:
        attempt.abandon(limits.grace)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise ServerStartError(
                f"server {spec.id} was not started: {escape(str(error.filename or parent))}: {error.strerror}. Make "
                f"room there, or set {STATE_VARIABLE} to a directory elsewhere.",
                verdict="infra",
            ) from None
        if isinstance(error, GpuserveError):  # whoever asked for the server: a person is told
            (attempt.record.redactor if attempt.record else redactor_of(spec)).conceal(error)
        raise
    return server


def environment(spec: ServerSpec, launch: Launch, gpus: Sequence[str], markers: Path) -> dict[str, str | None]:
    """What a server's environment has that pytest's has not; None removes. The spec is stronger than the engine, and
    what we cannot do without is stronger than the spec."""
    env: dict[str, str | None] = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **launch.env, **dict(spec.env)}
    inject = str(Path(pytest_gpuserve.__file__).parent / "diagnose" / "inject")
    path = env["PYTHONPATH"] if "PYTHONPATH" in env else os.environ.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join([inject, path] if path else [inject])
    env["GPUSERVE_MARKERS"] = str(markers)
    # setproctitle otherwise writes titles over the environment, and with it over the cookie (seen with 1.3.7)
    env["SPT_NOENV"] = "1"
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the numbers are NVML's
        env.update(witness_environment(markers.parent, {**os.environ, **env}))
    return env


def _record(
    spec: ServerSpec,
    engine: Engine,
    launch: Launch,
    directory: Path,
    where: tuple[str, int],
    gpus: Sequence[str],
    python: str,
) -> ServerRecord:
    owner = procfs.process_id(os.getpid())
    assert owner is not None
    host, port = ports.reachable(where[0]), where[1]
    return ServerRecord(
        spec=spec,
        engine=engine.name,
        argv=launch.argv,
        url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        host=host,
        port=port,
        gpus=tuple(gpus),
        python=python,
        cookie=f"{owner.pid}:{owner.start}:{uuid.uuid4().hex}",
        owner=owner,
        supervisor=None,
        root=None,
        directory=directory,
        log=directory / "server.log",
        started=time.time(),
        boot=boot_id(),
        own_timeout=engine.own_timeout(launch),
    )


def _check_settings(record: ServerRecord, launch: Launch) -> None:
    """Refuse a server that came up with other settings than its spec's.

    Raises:
        ServerStartError: its log says so (``config``).
    """
    try:
        with foreign.opened(record.log) as file:
            head = file.read(HEAD)
    except OSError:  # a server may rename its log, or remove it: then nothing is known against it
        return
    if found := downgrades(record.spec, head, launch.env):
        raise ServerStartError(
            f"server {record.spec.id} is ready, but not as it was asked for: {'; '.join(found)}. A test on it would "
            f"test something else, so it has been ended. Ask in the mark for what runs, or find out in {record.log} "
            f"why the engine did not do as told.",
            verdict="config",
        )


@dataclass(slots=True)
class _Attempt:
    """What a start has made so far: whatever interrupts it, all of it goes again."""

    port: ports.Port
    record: ServerRecord | None = None
    process: subprocess.Popen[bytes] | None = None
    server: Server | None = None

    def spawn(self, config: Mapping[str, Any], limits: Limits) -> ServerRecord:
        """Start the supervisor and wait until it has started the server's process.

        Raises:
            EngineError: there is no such program, or it cannot be executed.
            ServerStartError: the supervisor did not come up.
        """
        assert self.record is not None
        directory = self.record.directory
        path = directory / "supervisor.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config), encoding="utf-8")
        with open(directory / "supervisor.log", "ab", opener=_private) as log:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-E", str(_SUPERVISOR), str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C of the terminal must not reach it
                pass_fds=config["keep"],
            )
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            ready, _, _ = select.select([pipe], [], [], limits.startup + limits.dump + 30.0)
            said = os.read(pipe.fileno(), 65536) if ready else b""
        found = json.loads(said) if said else {}
        if "error" in found:
            raise _no_program(self.record, f"{found['what']}: {found['error']}")
        if not found:
            tail = shown_tail(self.record, directory / "supervisor.log")
            raise ServerStartError(f"the supervisor of {self.record.spec.id} did not start. {tail}", verdict="infra")
        supervisor = procfs.process_id(self.process.pid)
        self.record = replace(self.record, supervisor=supervisor, root=ProcessId(found["pid"], found["start"]))
        self.record.save()
        return self.record

    def abandon(self, grace: float) -> None:
        """End everything."""
        if self.server is not None:
            self.server.stop(grace)
        elif self.process is not None and self.record is not None:
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process.kill()  # the server's process dies with it
            self.process.wait()
            sweep_cookie(self.record.cookie, self.record.directory)
        self.port.release()


def _no_program(record: ServerRecord, what: str) -> EngineError:
    command = record.shown(" ".join(record.argv), 300)
    return EngineError(
        f"{record.spec.id} cannot be started: {record.shown(what)}. Its command is {command}; "
        f"change command, args, env, python or cwd in the gpuserve mark, or install the engine."
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
