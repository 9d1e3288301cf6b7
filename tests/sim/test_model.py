"""The toy model: split over ranks without a trace, drafted for as asked."""

from __future__ import annotations

import threading

import pytest

from pytest_gpuserve.sim.collective import MASK, Ring, ring_links
from pytest_gpuserve.sim.link import LIMIT, Link, PeerClosed, pair
from pytest_gpuserve.sim.model import HEADS, VOCABULARY, WORDS, Shard, advance, detokenize, token_of


@pytest.mark.parametrize("size", [1, 2, 3, 8, HEADS])
def test_shares_add_up_to_the_whole(size: int) -> None:
    whole = Shard(0, 1)
    for state in (0, 1, 12345678901234567890):
        assert sum(Shard(rank, size).partial(state) for rank in range(size)) & MASK == whole.partial(state)


def test_no_share_is_dispensable() -> None:
    shares = [Shard(rank, 8).partial(99) for rank in range(8)]
    assert 0 not in shares
    assert len(set(shares)) == 8


@pytest.mark.parametrize("right", range(5))
def test_a_draft_has_so_many_right_tokens(right: int) -> None:
    shard, state = Shard(1, 2), 7
    proposed = shard.draft(state, 4, right)
    assert len(proposed) == 4
    for position, token in enumerate(proposed):
        true = token_of(Shard(0, 1).partial(state))
        assert (token == true) == (position < right)
        state = advance(state, token)


def test_text() -> None:
    assert len(set(WORDS)) == VOCABULARY
    assert detokenize([0, 1]) == f" {WORDS[0]} {WORDS[1]}"
    tokens, state = set(), 1
    for _ in range(2000):
        token = token_of(Shard(0, 1).partial(state))
        tokens.add(token)
        state = advance(state, token)
    assert len(tokens) > VOCABULARY * 0.9


@pytest.mark.parametrize("size", [2, 3, 5])
def test_collectives(size: int) -> None:
    """Threads instead of processes: the ring knows no difference."""
    links = ring_links(size)
    results: dict[int, object] = {}

    def rank(number: int) -> None:
        ring = Ring(number, size, *links[number])
        ring.barrier("begin")
        total = ring.all_reduce(("sum", 1), [number, MASK])
        results[number] = (list(total), ring.broadcast(("word", 1), "from rank 0" if not number else None))

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    total = [sum(range(size)), (MASK * size) & MASK]
    assert results == dict.fromkeys(range(size), (total, "from rank 0"))
    for ends in links:
        for link in ends:
            assert link
            link.close()


def test_a_dead_peer_is_an_error_that_names_it() -> None:
    (left0, right0), (left1, right1) = ring_links(2)
    for link in (left1, right1):
        assert link
        link.close()
    with pytest.raises(RuntimeError, match=r"Connection closed by peer \[TP1\]"):
        Ring(0, 2, left0, right0).barrier("begin")
    for link in (left0, right0):
        assert link
        link.close()


def test_links() -> None:
    one, other = pair()
    assert not other.waiting()
    one.send(("a", [1, None, "x"]))
    one.send(("b",))
    assert other.waiting()
    assert (other.recv(), other.recv()) == (("a", [1, None, "x"]), ("b",))
    with pytest.raises(ValueError, match="at most"):
        one.send("x" * (LIMIT + 1))
    other.settimeout(0.01)
    with pytest.raises(TimeoutError):
        other.recv()
    one.close()
    with pytest.raises(PeerClosed):
        other.recv()
    with pytest.raises(PeerClosed):
        other.send(1)
    other.close()
    assert isinstance(one, Link)
