"""Collectives over a ring of sockets. They block in recvfrom for as long as a rank does not take part, as NCCL's do."""

from __future__ import annotations

from .link import Link, PeerClosed, pair

MASK = (1 << 64) - 1

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class Ring:
    """One rank's place: receives from its left neighbour, sends to its right one.

    A message carries the name of its collective. One that belongs to another collective is kept until that is called,
    so ranks that call different collectives wait for each other for ever, each inside its own.
    """

    def __init__(self, rank: int, size: int, left: Link | None, right: Link | None) -> None:
        self.rank = rank
        self.size = size
        self._left = left
        self._right = right
        self._early: dict[tuple[str, int], Any] = {}

    def barrier(self, name: str) -> None:
        """Return when every rank has called it."""
        self.all_reduce((name, -1), ())

    def broadcast(self, tag: tuple[str, int], value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.rank:
            value = self.recv(tag)
        if self.rank < self.size - 1:
            self.send(tag, value)
        return value

    def all_reduce(self, tag: tuple[str, int], values: Sequence[int]) -> Sequence[int]:
        """The element-wise sum over all ranks, modulo 2**64, on every rank.

        Partial sums travel from rank 0 to the last one, the total on from there: 2 (size - 1) messages, none of which
        can be sent before every rank to the left has come.
        """
        last = self.size - 1
        if not last:
            return values
        if self.rank:
            values = [(a + b) & MASK for a, b in zip(self.recv(tag), values, strict=True)]
        self.send(tag, values)
        if self.rank < last:
            total: Sequence[int] = self.recv(tag)
            if self.rank < last - 1:
                self.send(tag, total)
            return total
        return values

    def send(self, tag: tuple[str, int], value: object) -> None:
        assert self._right is not None
        try:
            self._right.send((tag, value))
        except PeerClosed:
            raise self._lost((self.rank + 1) % self.size) from None

    def recv(self, tag: tuple[str, int]) -> Any:
        assert self._left is not None
        while tag not in self._early:
            try:
                name, value = self._left.recv()
            except PeerClosed:
                raise self._lost((self.rank - 1) % self.size) from None
            if name == tag:
                return value
            self._early[name] = value
        return self._early.pop(tag)

    def _lost(self, peer: int) -> RuntimeError:
        return RuntimeError(
            f"Connection closed by peer [TP{peer}]. This is typically caused by a remote worker crashing. "
            f"Check the logs of the remote worker."
        )


def ring_links(size: int) -> list[tuple[Link | None, Link | None]]:
    """(left, right) of every rank."""
    if size == 1:
        return [(None, None)]
    pairs = [pair() for _ in range(size)]
    return [(pairs[rank - 1][1], pairs[rank][0]) for rank in range(size)]
