"""``gpuserve run --attach URL``: watch a server that somebody else started. It is dumped, and never ended."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from .. import procfs
from ..diagnose.evidence import Progress
from ..engines import get_engine
from ..engines.features import features_of
from ..errors import GpuserveError, SpecError
from ..isolation.deltas import split
from ..procfs import ProcessId
from ..redaction.redact import shown_command
from ..server import ports
from ..server.paths import server_directory, session_directory
from ..server.record import ServerRecord, boot_id
from ..spec import ServerSpec
from ..text import one_line
from ..watch.proc_tree import ProcessTable
from ..watch.progress import Reading
from ..watch.watched import Settings, Watched
from . import dump
from .canary import Canary
from .isolate import recognise
from .screen import Screen

HUNG: Final = 3
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def attach(arguments: argparse.Namespace, screen: Screen) -> int:
    """Watch until the server's first process is gone. 0: it ended, and was not hung; 3: it was.

    Raises:
        GpuserveError: there is no such server, or not on this machine.
    """
    record = _record(arguments)
    assert record.root is not None
    budgets = {"window": arguments.stall_timeout} if arguments.stall_timeout else {}
    watched = Watched(record, Settings(budgets=budgets, others=True), None)
    probe = get_engine(record.engine).ready(replace(record.spec, ready=arguments.ready))
    canary = Canary(record, probe, arguments.probe_every, screen.say)
    title = one_line(shown_command(record.argv), 100)
    screen.say(f"watching pid {record.root.pid} ({title}) at {record.url}, engine {record.engine}. It is never ended.")
    canary.start()
    try:
        return _watch(watched, arguments, screen)
    finally:
        canary.stop()
        watched.close(healthy=False)


def _watch(watched: Watched, arguments: argparse.Namespace, screen: Screen) -> int:
    record, table = watched.record, ProcessTable()
    assert record.root is not None
    hung = ready = False
    while True:
        table.refresh()
        reading = watched.look(table)
        if watched.ready and not ready:
            ready = True
            screen.say(f"{record.spec.id} is ready.")
        if reading.state == "dead":
            screen.say(f"{record.spec.id}: pid {record.root.pid} is gone{', and was hung before' if hung else ''}.")
            return HUNG if hung else 0
        if reading.state == "hung":
            hung = True
            _report(record, reading, arguments, screen)
            watched.spared()
        elif hung and (reading.state == "idle" or any(not sign.startswith("(") for sign in reading.moving)):
            hung = False
            screen.say(f"{record.spec.id} moves again ({', '.join(reading.moving) or reading.state}).")
        time.sleep(0.25 if reading.state == "suspect" else 1.0)


def _report(record: ServerRecord, reading: Reading, arguments: argparse.Namespace, screen: Screen) -> None:
    """Dump it, print what the stacks say, keep them."""
    assert record.root is not None
    screen.say(f"{record.spec.id}: {reading.why}. Its stacks are taken; it is left alone.")
    stamp = time.strftime("%Y%m%dT%H%M%S")
    output = arguments.output / f"{stamp}-{record.spec.id}-no_progress"
    how = argparse.Namespace(
        target=f"pid:{record.root.pid}", native=False, rounds=2, limit=20.0, json=False, output=output
    )
    seen = Progress(reading.state, reading.still, reading.window, reading.last, tuple(reading.moving))
    try:
        target = dump.resolve(how.target)
        if isinstance(target, dump.Target):
            dump.report(target, how, seen)
    except GpuserveError as error:  # it ended meanwhile, or the disk is full: the watch goes on
        screen.say(one_line(str(error)))


def _record(arguments: argparse.Namespace) -> ServerRecord:
    """What is known of it, in the form in which everything else reads it."""
    host, port = _where(arguments.attach)
    root = _root(host, port, arguments.pid)
    argv = tuple(procfs.cmdline(root.pid))
    if arguments.log is not None and not arguments.log.is_file():
        raise GpuserveError(f"--log: there is no file {one_line(str(arguments.log))}.")
    engine = arguments.engine or recognise(argv)
    spec = ServerSpec(engine, command=argv)
    with suppress(SpecError):  # a title instead of a command line
        parts = split(argv, features_of(engine))
        spec = replace(spec, model=parts.model, tp=parts.tp)
    directory = server_directory(session_directory(), spec)
    me = procfs.process_id(os.getpid())
    assert me is not None
    return ServerRecord(
        spec=spec,
        engine=engine,
        argv=argv,
        url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        host=host,
        port=port,
        gpus=(),
        python=argv[0] if argv and "python" in Path(argv[0]).name else "python3",
        cookie="",
        owner=me,
        supervisor=None,
        root=root,
        directory=directory,
        log=arguments.log or directory / "server.log",
        started=time.time(),
        boot=boot_id(),
    )


def _where(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        host, port = parts.hostname or "127.0.0.1", parts.port
    except ValueError:
        port = None
    if port is None:
        raise GpuserveError(f"--attach: {one_line(url)} names no port. Write http://127.0.0.1:8000.")
    if host not in _LOOPBACK:
        raise GpuserveError(
            f"--attach: {one_line(host)} is not this machine (127.0.0.1, localhost, ::1). Processes can be watched "
            f"only where they run: start gpuserve there."
        )
    return "127.0.0.1" if host == "localhost" else host, port


def _root(host: str, port: int, pid: int | None) -> ProcessId:
    """The server's first process: the one that was named, else the topmost of those that listen."""
    found = ports.answering(host, port)
    table = procfs.snapshot()
    if pid is None:
        holders = {holder for one in found for holder in ports.holders(one.inode)}
        if not holders:
            who = "a process that cannot be seen from here listens" if found else "nobody listens"
            raise GpuserveError(f"--attach: {who} at port {port}. Name the server's first process with --pid.")
        pid = next(p for p in sorted(holders) if table[p].ppid not in holders)
    root = procfs.process_id(pid)
    if root is None or pid not in table:
        raise GpuserveError(f"--pid: there is no process {pid} on this machine.")
    if os.getpid() in (pid, *procfs.descendants(pid, table)):
        raise GpuserveError(
            f"--pid: process {pid} is this command's own shell or parent, and no server. Correct --pid."
        )
    other = ports.foreign(found, [pid, *procfs.descendants(pid, table)]) if found else None
    if other is not None:
        raise GpuserveError(
            f"--attach: port {port} belongs to {ports.describe(other)}, which is no process of pid {pid}. "
            f"Correct --pid or the URL."
        )
    return root
