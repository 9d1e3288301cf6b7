"""A port that nobody else takes, and who listens there: a server is believed only when the listener is its own."""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .. import procfs
from ..errors import ServerStartError
from ..redaction.redact import shown_command
from ..text import one_line

FIRST, LAST = 20000, 32767
"""Below the kernel's usual range for outgoing connections (32768-60999), which could take a port under our feet."""

_LISTEN = "0A"
_LOOPBACK = ("127.", "::ffff:127.", "::1")


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket, from /proc/net/tcp or tcp6."""

    address: str
    port: int
    inode: int
    uid: int


class Port:
    """A port that is ours until :meth:`release`.

    Among all gpuserve sessions of the machine, of any user: by an abstract Unix socket named after the number, which
    lives in the network namespace as ports do, and which the kernel frees when its holder dies. Against everybody else:
    by a bound TCP socket, until :meth:`hand_over` just before the server binds the port itself.
    """

    def __init__(self, number: int, claim: socket.socket, bound: socket.socket) -> None:
        self.number = number
        self._claim = claim
        self._bound = bound

    def hand_over(self) -> None:
        """Let go of the TCP port for the server that is about to be started; the claim stays."""
        self._bound.close()

    def release(self) -> None:
        """Let go of everything. May be called again."""
        self._bound.close()
        self._claim.close()


def hold(host: str, number: int | None = None) -> Port:
    """Hold port ``number``, or a free one.

    Raises:
        ServerStartError: verdict ``port``: it is in use, by whom it says; or no port is free. Verdict ``config``:
            ``host`` is no address of this machine.
    """
    if number is not None:
        port = _try(host, number)
        if port is None:
            raise port_taken(host, number)
        return port
    for candidate in random.sample(range(FIRST, LAST + 1), 500):
        if port := _try(host, candidate):
            return port
    raise ServerStartError(f"500 ports between {FIRST} and {LAST} of {host} are all in use.", verdict="port")


def reachable(host: str) -> str:
    """The address at which a server that binds ``host`` is reached from this machine, as a number.

    Raises:
        ServerStartError: verdict ``config``: the name means nothing here.
    """
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ServerStartError(f"host {host!r} is no address of this machine: {error}.", verdict="config") from error
    return "::1" if found == "::" else str(found)


def port_taken(host: str, number: int, listener: Listener | None = None) -> ServerStartError:
    """The error for a port that somebody else has."""
    found = [listener] if listener else list(listeners(number))
    who = "; ".join(describe(one) for one in found) or "another gpuserve session, or a socket that does not listen"
    return ServerStartError(
        f"port {number} of {host} is in use by {who}. End that process, or leave the port out so that a free one is "
        f"chosen.",
        verdict="port",
    )


def listeners(number: int) -> Iterator[Listener]:
    """Sockets that listen on a port, at any address of this network namespace."""
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in procfs.read(f"/proc/net/{name}").decode().splitlines()[1:]:
            part = line.split()
            if len(part) > 9 and part[3] == _LISTEN:
                address, _, port = part[1].rpartition(":")
                if int(port, 16) == number:
                    yield Listener(_address(address, family), number, int(part[9]), int(part[7]))


def open_to_others(number: int, argv: Sequence[str]) -> list[str]:
    """Addresses beyond the loopback interface at which somebody listens on a port, less those that ``argv`` names."""
    named = {word.rpartition("=")[2] for word in argv}
    found = {one.address for one in listeners(number)} - named
    return sorted(address for address in found if not address.startswith(_LOOPBACK))


def answering(host: str, number: int) -> list[Listener]:
    """The listeners that a connection to host:number may reach: at that very address, else at a wildcard."""
    found = list(listeners(number))
    exact = [one for one in found if one.address in (host, f"::ffff:{host}")]
    return exact or [one for one in found if one.address in ("0.0.0.0", "::", "::ffff:0.0.0.0")]


def foreign(found: Collection[Listener], tree: Collection[int]) -> Listener | None:
    """The first of some listeners that no process of ``tree`` holds; None when all are ours.

    A process of the tree whose descriptors may not be read (it changed its user) is given the benefit of the doubt
    where its user owns the socket and no process that can be read holds it.
    """
    sockets: set[str] = set()
    unreadable: set[int] = set()
    for pid in tree:
        try:
            sockets |= _sockets(pid)
        except PermissionError:
            with suppress(OSError):
                unreadable.add(os.stat(f"/proc/{pid}").st_uid)  # noqa: PTH116
        except OSError:
            pass  # gone
    for one in found:
        if f"socket:[{one.inode}]" in sockets or (one.uid in unreadable and not holders(one.inode)):
            continue
        return one
    return None


def holders(inode: int) -> list[int]:
    """Processes that have a socket open, among those that may be looked at."""
    found = []
    for pid in procfs.pids():
        with suppress(OSError):
            if f"socket:[{inode}]" in _sockets(pid):
                found.append(pid)
    return found


def describe(listener: Listener) -> str:
    """Who listens: ``pid 123 (python3 -m http.server)``, on one line."""
    pids = holders(listener.inode)
    if not pids:
        return f"a process of user id {listener.uid} that cannot be seen from here (at {listener.address})"
    return ", ".join(f"pid {pid} ({one_line(shown_command(procfs.cmdline(pid)), 120)})" for pid in pids[:3])


def _try(host: str, number: int) -> Port | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0pytest-gpuserve/port/{number}")
        # Without SO_REUSEADDR a port that is just being left (TIME_WAIT) would look taken; with it a listener still is.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, number))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            raise ServerStartError(f"host {host!r} is no address of this machine.", verdict="config") from error
        if any(listeners(number)):
            raise OSError("somebody listens at another address")
    except (OSError, ServerStartError) as error:
        claim.close()
        bound.close()
        if isinstance(error, ServerStartError):
            raise
        return None
    return Port(number, claim, bound)


def _sockets(pid: int) -> set[str]:
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))  # noqa: PTH115
    return {name for name in found if name.startswith("socket:")}


def _address(text: str, family: socket.AddressFamily) -> str:
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(struct.pack("=I", word) for word in words))
