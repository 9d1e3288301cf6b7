"""server.json: everything that another process needs to look at one server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import foreign, procfs, shape
from ..errors import GpuserveError
from ..procfs import ProcessId
from ..redaction.redact import Redactor
from ..spec import ServerSpec
from ..text import escape

ALARM_VARIABLE = "GPUSERVE_ALARM"
"""Environment of what an alarm runs (its value is the server's cookie): never taken for the server's own."""


COOKIE = re.compile(r"([1-9][0-9]*):([0-9]+):[0-9a-f]{32}")
"""What every process of a server carries: pid and start time of the owner, and the server's number."""


@dataclass(frozen=True)
class ServerRecord:
    """What was launched.

    Attributes:
        engine: name of the adapter.
        gpus: the GPUs that it may see, as CUDA_VISIBLE_DEVICES names them; empty: not limited by us.
        python: interpreter of the engine.
        cookie: ``ownerpid:ownerstart:uuid``, in the environment of everything that the server starts.
        owner: the process that started it; the server ends with it.
        supervisor: None until it runs.
        root: the process of ``argv``; None until it runs.
        directory: where this record is. log: the server's output.
        started: wall clock.
        boot: the kernel's boot id, since pids and start times mean nothing after a reboot or on another machine.
        own_timeout: seconds after which the engine's own watchdog destroys the evidence; None when it has none.
        api_key: what requests must carry as a bearer token; None: nothing. argv does not show one that we made.
    """

    spec: ServerSpec
    engine: str
    argv: tuple[str, ...]
    url: str
    host: str
    port: int
    gpus: tuple[str, ...]
    python: str
    cookie: str
    owner: ProcessId
    supervisor: ProcessId | None
    root: ProcessId | None
    directory: Path
    log: Path
    started: float
    boot: str = ""
    own_timeout: float | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """What every request to it must carry."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @cached_property
    def redactor(self) -> Redactor:
        """Knows what is secret of this server: one for all that a message quotes of it."""
        return redactor_of(self.spec, self.argv, self.api_key)

    def shown(self, text: str, width: int | None = None) -> str:
        """What it was started with, printed or answered, as people may be told it: redacted, then escaped and cut."""
        return escape(self.redactor.redact(text), width)

    def save(self) -> None:
        """Write ``server.json``, whole or not at all."""
        path = self.directory / "server.json"
        draft = path.with_name(".server.json")
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        draft.replace(path)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "gpuserve.server/1",
            "spec": self.spec.to_json(),
            "engine": self.engine,
            "argv": list(self.argv),
            "url": self.url,
            "host": self.host,
            "port": self.port,
            "gpus": list(self.gpus),
            "python": self.python,
            "cookie": self.cookie,
            "owner": _pair(self.owner),
            "supervisor": _pair(self.supervisor),
            "root": _pair(self.root),
            "directory": str(self.directory),
            "log": str(self.log),
            "started": self.started,
            "boot": self.boot,
            "own_timeout": self.own_timeout,
            "api_key": self.api_key,
        }


def redactor_of(spec: ServerSpec, argv: Iterable[str] = (), api_key: str | None = None) -> Redactor:
    """One that knows the secrets of a server by what it is, or was, to be started with."""
    flags = (f"--{name.lstrip('-')}={value}" for name, value in spec.args)
    known = (os.environ, dict(spec.env), {"API_KEY": api_key or ""})
    return Redactor.of(*known, argv=(*flags, *(spec.command or ()), *argv))


def boot_id() -> str:
    """Changes with every boot."""
    return procfs.read("/proc/sys/kernel/random/boot_id").decode().strip()


def load(directory: Path) -> ServerRecord:
    """Read ``server.json``.

    Raises:
        GpuserveError: there is none, or it is broken.
    """
    path = directory / "server.json"
    try:
        found = json.loads(foreign.whole(path))
        owner = _process(found["owner"])
        if owner is None:
            raise ValueError("it has no owner")
        return ServerRecord(
            spec=ServerSpec.from_mapping(found["spec"], source=str(path)),
            engine=found["engine"],
            argv=tuple(found["argv"]),
            url=found["url"],
            host=found["host"],
            port=found["port"],
            gpus=tuple(found["gpus"]),
            python=found["python"],
            cookie=found["cookie"],
            owner=owner,
            supervisor=_process(found["supervisor"]),
            root=_process(found["root"]),
            directory=directory,
            log=directory / Path(found["log"]).name,
            started=found["started"],
            boot=found["boot"],
            own_timeout=found["own_timeout"],
            api_key=found.get("api_key"),
        )
    except OSError as error:
        raise GpuserveError(f"{directory} is no directory of a server: {path.name}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise GpuserveError(f"{path} cannot be read: {error}.") from error


def proof(directory: Path) -> tuple[str, ProcessId | None]:
    """Cookie and supervisor of a server: all that proves what is its own. Also of a record that is broken or of another
    version, by what its supervisor was told.

    Raises:
        FileNotFoundError: nothing was launched there.
        GpuserveError: there is something, and no cookie in it.
    """
    found = [read for name in ("server.json", "supervisor.json") if (read := _mapping(directory / name)) is not None]
    if not found:
        raise FileNotFoundError(directory)
    cookies = (entry.get("cookie") for entry in found)
    cookie = next((text for text in cookies if isinstance(text, str) and COOKIE.fullmatch(text)), None)
    if cookie is None:
        raise GpuserveError(
            f"{directory / 'server.json'} cannot be read, so nothing here tells which processes were its own (gpuserve "
            "reap lists what carries the cookie of a dead session)"
        )
    match found[0].get("supervisor"):
        case [int(pid), int(start)]:
            return cookie, ProcessId(pid, start)
    return cookie, None


def _mapping(path: Path) -> dict[str, Any] | None:
    """None: there is no such file; {}: it is broken."""
    try:
        found: dict[str, Any] = shape.read(path, shape.OBJECT)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found


def processes(record: ServerRecord) -> list[procfs.Stat]:
    """The live tree, parents before children: descendants of the supervisor, carriers of the cookie and descendants of
    those, less the supervisor and what it runs for itself (its session is its own; the server's are others).

    The environment is read only where it must be: that can block on a process stuck in a driver.
    """
    table = procfs.snapshot()
    supervisor, root, oldest = record.supervisor, record.root, record.owner.start
    present = supervisor is not None and (found := table.get(supervisor.pid)) is not None and found.id == supervisor
    session = supervisor.pid if present and supervisor else -1
    family = procfs.descendants(session, table) if present else []
    hidden = {pid for pid, entry in table.items() if entry.session == session}
    roots = set(family) - hidden
    for pid, entry in table.items():
        plain = pid in roots and root is not None and entry.session == root.pid
        if pid in hidden or plain or entry.start < oldest:
            continue
        environment = procfs.environ(pid)
        if environment.get(procfs.COOKIE_VARIABLE) == record.cookie:
            roots.add(pid)
        elif environment.get(ALARM_VARIABLE) == record.cookie:
            hidden.update([pid, *procfs.descendants(pid, table)])
    members = set(roots)
    for pid in roots.difference(family):
        members.update(procfs.descendants(pid, table))
    order = {pid: n for n, pid in enumerate(family)}
    live = [table[pid] for pid in members - hidden if table[pid].alive]
    return sorted(live, key=lambda entry: (order.get(entry.pid, len(order)), entry.start, entry.pid))


def current_test(directory: Path) -> str | None:
    """The test in progress at the server of ``directory``, as pytest told; None between tests."""
    try:
        found = json.loads((directory / "current_test.json").read_bytes())
        return str(found["test"]) if found.get("test") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _pair(process: ProcessId | None) -> list[int] | None:
    return [process.pid, process.start] if process else None


def _process(found: Any) -> ProcessId | None:
    return ProcessId(int(found[0]), int(found[1])) if found else None
