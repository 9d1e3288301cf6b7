"""The session's watcher: ``python -m pytest_gpuserve.watch.watcher --session DIR --config FILE``.

A process of its own, so that it works when pytest is wedged. Every second or so it looks at each server under the
session's directory, new ones included; one that is hung it hands to its supervisor, which runs the incident and ends
the server unless the incident spares it. It ends with its owner, on SIGTERM, or when the run was
interrupted (``server/owned.py``).

Configuration, a JSON object: ``owner`` [pid, start]; ``incident``, an argv in which ``{server}``, ``{reason}`` and
``{after}`` are filled in; ``limit``, ``spare`` and ``kill`` of the alarm; ``interval``, ``budgets``, ``cache``,
``metrics``, ``gpus``, ``others`` as in :class:`pytest_gpuserve.watch.watched.Settings`.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import procfs
from ..errors import GpuserveError
from ..procfs import ProcessId
from ..server.owned import INTERRUPTED
from ..server.record import boot_id, load
from .budgets import Budgets
from .proc_tree import ProcessTable
from .watched import GpuReader, Settings, Watched

NAME = "no_progress"
"""Name of the alarm, and reason of the incident."""

_PATIENCE = 60.0
"""Seconds beyond the alarm's limit after which an incident that left no trace is asked for again."""


@dataclass(frozen=True, slots=True)
class Config:
    """The watcher's configuration, checked."""

    settings: Settings
    owner: ProcessId | None = None
    incident: tuple[str, ...] = ()
    limit: float = 30.0
    spare: tuple[int, ...] = (75,)
    kill: bool = True

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Config:
        """Raises ValueError or TypeError for values that cannot be."""
        owner = raw.get("owner")
        Budgets.from_settings(raw.get("budgets") or {})
        settings = Settings(
            interval=min(60.0, max(0.05, float(raw.get("interval", 1.0)))),
            budgets=raw.get("budgets"),
            cache=Path(raw["cache"]) if raw.get("cache") else None,
            metrics=bool(raw.get("metrics", True)),
            gpus=bool(raw.get("gpus", True)),
            others=bool(raw.get("others", False)),
        )
        return cls(
            settings=settings,
            owner=ProcessId(int(owner[0]), int(owner[1])) if owner else None,
            incident=tuple(map(str, raw.get("incident", ()))),
            limit=float(raw.get("limit", 30.0)),
            spare=tuple(int(code) for code in raw.get("spare", (75,))),
            kill=bool(raw.get("kill", True)),
        )


@dataclass
class Watcher:
    """Looks at every server of a session. ``run`` returns when the owner is gone, on SIGTERM, or when the run was
    interrupted."""

    session: Path
    config: Config
    servers: dict[str, Watched] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _gpus: GpuReader | None = None
    _due: dict[str, float] = field(default_factory=dict)
    _table: ProcessTable = field(default_factory=ProcessTable)

    def run(self) -> None:
        """Until told or alone."""
        told: list[int] = []
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda received, _frame: told.append(received))
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        owner = self.config.owner
        pidfd = -1
        if owner is not None:
            with suppress(OSError):
                pidfd = os.pidfd_open(owner.pid)
            if pidfd < 0 or not procfs.same(owner):
                return
            poll.register(pidfd, select.POLLIN)
        try:
            while not told:
                begin = time.monotonic()
                self.tick()
                if pidfd in self._wait(poll, time.monotonic() + self._pause(begin), told):
                    break
                if not self.session.is_dir() or (self.session / INTERRUPTED).exists():
                    break
        finally:
            for name in list(self.servers):
                self._drop(name, healthy=True)
            if self._gpus:
                self._gpus.close()

    def tick(self) -> None:
        """Look at every server that is due."""
        self._discover()
        now = time.monotonic()
        due = [name for name in self.servers if self._due.get(name, 0.0) <= now + 0.001]
        if not due:
            return
        self._table.refresh()
        for name, watched in list(self.servers.items()):
            if name in due:
                self._look(name)
            else:
                watched.tree.notice(self._table)

    def _wait(self, poll: select.poll, until: float, told: list[int]) -> set[int]:
        """Until then, or something that :meth:`run` waits for happens: its descriptors. Who ends meanwhile is noted at
        once: which rank went first is told by fractions of a second."""
        while True:
            ends = {fd: watched.exits for watched in self.servers.values() for fd in watched.exits.fds}
            for fd in ends:
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(max(1, int((until - time.monotonic()) * 1000)))}
            for fd in ends:
                poll.unregister(fd)
            for exits in {ends[fd] for fd in ready & ends.keys()}:
                exits.ended(fd for fd in ready if ends.get(fd) is exits)
            if told or ready - ends.keys() or time.monotonic() >= until:
                return ready - ends.keys()

    def _pause(self, begin: float) -> float:
        """Seconds to wait: until the next server is due; a suspect is due four times as often."""
        interval = self.config.settings.interval
        coming = begin + interval
        for name, watched in self.servers.items():
            close = watched.reading is not None and watched.reading.state == "suspect"
            self._due[name] = begin + (interval / 4 if close else interval)
            coming = min(coming, self._due[name])
        return max(0.01, coming - time.monotonic())

    def _discover(self) -> None:
        try:
            names = os.listdir(self.session)
        except OSError:
            return
        for name in names:
            if name in self.servers or name in self._done or not (self.session / name / "server.json").exists():
                continue
            try:
                record = load(self.session / name)
            except GpuserveError:
                continue  # being written; or broken, which its owner will notice
            if record.boot and record.boot != boot_id():
                self._done.add(name)
            elif record.root is not None:
                if record.gpus and self.config.settings.gpus and self._gpus is None:
                    self._gpus = GpuReader()
                self.servers[name] = Watched(record, self.config.settings, self._gpus)

    def _look(self, name: str) -> None:
        watched = self.servers[name]
        try:
            reading = watched.look(self._table)
            if watched.fired is None:
                watched.tell()
        except Exception as error:  # one server that cannot be read must not cost the watch over the others
            _log(f"{name}: {type(error).__name__}: {error}")
            return
        if watched.over or reading.state == "dead":
            if watched.fired is None:  # what was told of a hang is evidence
                watched.tell(now=True)
            self._drop(name, healthy=watched.fired is None)
            self._done.add(name)
        elif reading.state == "hung":
            self._fire(name, watched)

    def _fire(self, name: str, watched: Watched) -> None:
        now = time.monotonic()
        if watched.fired is not None and now - watched.fired < self.config.limit + _PATIENCE:
            return
        watched.fired = now
        watched.tell(now=True)
        reading = watched.reading
        assert reading is not None
        _log(f"{name}: hung: {reading.why}")
        if not self.config.incident:
            return
        words = {"{server}": str(watched.directory), "{reason}": NAME, "{after}": f"{reading.still:.1f}"}
        argv = [words.get(word, word) for word in self.config.incident]
        try:
            watched.control.fire(NAME, argv, self.config.limit, self.config.spare, kill=self.config.kill)
        except GpuserveError as error:
            _log(f"{name}: {error}")

    def _drop(self, name: str, *, healthy: bool) -> None:
        watched = self.servers.pop(name)
        self._due.pop(name, None)
        with suppress(Exception):
            watched.close(healthy=healthy)


def _log(text: str) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):
        sys.stderr.write(f"{stamp} {text}\n")
        sys.stderr.flush()


def start(session: Path, config: Mapping[str, Any], *, python: str = sys.executable) -> subprocess.Popen[bytes]:
    """Start the watcher of a session. ``config`` is described above; the caller is the owner where it names none.

    Its troubles, and a line for every hang it called, are in ``watcher.log`` of the session's directory.

    Raises:
        ValueError: a budget or limit that cannot be.
    """
    raw = dict(config)
    me = procfs.process_id(os.getpid())
    if "owner" not in raw and me is not None:
        raw["owner"] = [me.pid, me.start]
    Config.from_json(raw)
    path = session / "watcher.json"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(raw, file)
    environment = {k: v for k, v in os.environ.items() if k != procfs.COOKIE_VARIABLE}
    log = os.open(session / "watcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [python, "-m", __name__, "--session", str(session), "--config", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    finally:
        os.close(log)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the process."""
    parser = argparse.ArgumentParser(prog="python -m pytest_gpuserve.watch.watcher", description=__doc__)
    parser.add_argument("--session", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        config = Config.from_json(json.loads(options.config.read_text()))
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        _log(f"{options.config}: {error}")
        return 2
    Watcher(options.session, config).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
