"""The first process: binds the port, starts the ranks, watches them, serves HTTP, and ends what it started."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import board
from . import options as command_line
from .config import PHASES, Options
from .link import Link, PeerClosed
from .script import emit

if TYPE_CHECKING:
    from .frontend import FrontEnd

HELPER_LIFE = 3600.0
"""Seconds after which a detached helper that nobody has ended ends itself."""


LAST_TO_HEAR = 0.1
"""Seconds: when a child has died, perhaps somebody ends the whole tree and our own signal is still on its way."""


class Stopped(Exception):
    """A polite signal came."""


class ChildGone(Exception):
    """A child has ended, or (None) has asked for the end by SIGQUIT."""

    def __init__(self, child: BaseProcess | None) -> None:
        super().__init__()
        self.child = child


class Server:
    """What both flavors share: the children, the signals, the end."""

    def __init__(self, options: Options, bound: socket.socket) -> None:
        self.options = options
        self.bound = bound
        self.children: list[BaseProcess] = []
        self.ready = False
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN if options.ignore_term else _noted)
        signal.signal(signal.SIGQUIT, _noted)
        self.requests: Link | None = None
        self.deaf = [f.phase for f in options.faults if f.kind == "deaf" and f.phase != "serving"]

    def start(self) -> tuple[Link, Link]:
        """Start the children; returns where requests go and where messages come from."""
        raise NotImplementedError

    def open(self, front: FrontEnd) -> None:
        """All children are ready: open the port."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the children, politely where they are ready for it."""
        raise NotImplementedError

    def fail(self, child: BaseProcess | None) -> int:
        """Say that a child is gone, end the others, return the exit code."""
        raise NotImplementedError

    def message(self, message: Any) -> None:
        """Something that a child says before it is ready."""

    def run(self) -> int:
        """From the first child to the exit code."""
        client = None
        if any(PHASES.index(phase) < PHASES.index("ready") for phase in self.deaf):
            self.bound.listen(128)
        try:
            self.requests, messages = self.start()
            from .client import EngineClient  # imported while the ranks start, which takes as long
            from .frontend import FrontEnd
            from .metrics import Metrics

            self.wait_for_ready(messages)
            metrics = Metrics(self.options)
            client = EngineClient(self.options, metrics, self.requests, messages)
            client.start()
            front = FrontEnd(self.options, self.bound, client, metrics)
            self.ready = True
            self.open(front)
            while True:
                self.wait()
        except Stopped:
            if client:
                client.fail()
            self.stop()
            return 0
        except ChildGone as gone:
            if client:
                client.fail()
                time.sleep(0.1)  # for the answers that say so
            return self.fail(gone.child)

    def spawn(self, target: Any, *arguments: object, name: str) -> None:
        child = get_context("spawn").Process(target=target, args=arguments, name=name)
        self.children.append(child)
        child.start()

    def wait_for_ready(self, messages: Link) -> None:
        """There is no limit, as there is none in the engines."""
        while True:
            self.wait(messages)
            try:
                message = messages.recv()
            except PeerClosed:
                self.wait()
            if message == ("ready",):
                return
            self.message(message)

    def wait(self, messages: Link | None = None) -> None:
        """Block until a message waits; without ``messages``, until the end.

        Raises:
            Stopped, ChildGone: the end.
        """
        sentinels = {child.sentinel: child for child in self.children}
        objects: list[Any] = [self._wake, *sentinels, *([messages] if messages else [])]
        while True:
            ready: list[Any] = list(connection.wait(objects))
            if self._wake in ready:
                self.hear_signals()
            for sentinel in ready:
                if child := sentinels.get(sentinel):
                    child.join()
                    if connection.wait([self._wake], LAST_TO_HEAR):
                        self.hear_signals()
                    raise ChildGone(child)
            if messages in ready:
                return

    def hear_signals(self) -> None:
        signals = set(os.read(self._wake, 64))
        if signal.SIGQUIT in signals and connection.wait([self._wake], LAST_TO_HEAR):
            signals |= set(os.read(self._wake, 64))
        if signals & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
            raise Stopped
        if signal.SIGQUIT in signals:
            raise ChildGone(None)

    def serve(self, front: FrontEnd) -> None:
        """Open the port; whether anybody answers is another matter."""
        if self.deaf:
            self.bound.listen(128)
        else:
            front.serve()

    def tell(self, message: object) -> None:
        """A last word to the process that takes requests, if it still listens."""
        if self.requests:
            with suppress(PeerClosed):
                self.requests.send(message)

    def join_children(self) -> None:
        """Wait for those that end by themselves, but not for long."""
        end = time.monotonic() + self.options.shutdown_timeout
        for child in self.children:
            child.join(max(0.0, end - time.monotonic()))

    def kill_children(self) -> None:
        for child in self.children:
            if child.pid:
                child.kill()
        for child in self.children:
            if child.pid:
                child.join()

    @property
    def address(self) -> str:
        host, port = self.bound.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it ends; returns the exit code."""
    options, daemonize = command_line.parse(argv)
    try:
        bound = bind(options.host, options.port)
    except OSError as error:
        where = (options.host, options.port)
        emit(f"ERROR:    [Errno {error.errno}] error while attempting to bind on address {where}: {error.strerror}\n")
        return 1
    if daemonize:
        detach(bound if daemonize == "helper" else None, options)
    if options.flavor == "vllm":
        from .launch_vllm import VllmServer as Flavor
    else:
        from .launch_sglang import SglangServer as Flavor  # type: ignore[assignment]
    options = options._replace(
        board=board.create(options.tp, named=options.leak_shm), cache=options.cache or private_cache()
    )
    try:
        code = Flavor(options, bound).run()
    finally:
        if options.leak_shm:
            Path(options.board).unlink(missing_ok=True)
        if not options.keep_cache:
            shutil.rmtree(options.cache, ignore_errors=True)
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def private_cache() -> str:
    """Where this server's locks and kernels go, made when first needed; removes those of servers that were killed."""
    parent = Path(tempfile.gettempdir())
    for old in parent.glob("gpuserve-sim-*-*"):
        pid = old.name.split("-")[2]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)  # another user's stays: it is not ours to remove
    return str(parent / f"gpuserve-sim-{os.getpid()}-{os.urandom(4).hex()}")


def bind(host: str, port: int) -> socket.socket:
    """Hold the port from now on; nobody is connected before ``listen``."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    bound = socket.socket(family, kind, proto)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(address)
    return bound


def detach(keep_out: socket.socket | None, options: Options) -> None:
    """Double fork and a session of its own: for this process, or (given the port to leave alone) for a helper."""
    if os.fork():
        if keep_out is None:
            os._exit(0)
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    if keep_out is not None:
        keep_out.close()
        linger(options)


def linger(options: Options) -> NoReturn:
    """What a detached helper does: nothing, for long."""
    if options.ignore_term:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
    time.sleep(HELPER_LIFE)
    sys.exit(0)


def _noted(signum: int, frame: object) -> None:
    """The wake-up descriptor has the news."""
