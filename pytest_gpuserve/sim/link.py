"""Whole messages between two processes over a socket pair."""

from __future__ import annotations

import marshal
import select
import socket

LIMIT = 1 << 16
"""Largest message in bytes. A batch of 256 requests with long drafts stays below 16 KiB."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class PeerClosed(Exception):
    """The process at the other end is gone."""


class Link:
    """One end. Sequenced packets: one receive is one message, and a dead peer is an end of file at once.

    Messages are tuples, lists, numbers, strings and None, packed by marshal: both ends are the same program, started by
    us, and marshal runs no code when it reads.
    """

    __slots__ = ("_socket",)

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Any) -> None:
        """Raises:
        PeerClosed: nobody will ever read it.
        """
        data = marshal.dumps(message)
        if len(data) > LIMIT:
            raise ValueError(f"a message of {len(data)} bytes; at most {LIMIT} travel between two processes")
        try:
            self._socket.send(data)
        except (BrokenPipeError, ConnectionResetError):
            raise PeerClosed from None

    def recv(self) -> Any:
        """The next message; blocks in recvfrom until there is one.

        Raises:
            PeerClosed: there never will be one.
            TimeoutError: a timeout was set and has passed.
        """
        try:
            data = self._socket.recv(LIMIT)
        except ConnectionResetError:
            data = b""
        if not data:
            raise PeerClosed
        return marshal.loads(data)

    def waiting(self) -> bool:
        """True when :meth:`recv` would not block."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def pair() -> tuple[Link, Link]:
    """Two connected ends; either may be handed to a spawned process."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Link(left), Link(right)
