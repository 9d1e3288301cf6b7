"""Who gets which GPUs: alignment, order and fairness, without a file."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.server.lease_policy import Device, Request, candidates, decide

EIGHT = tuple(Device(f"virtual-{n}", n) for n in range(8))
NAMES = {d.name for d in EIGHT}


def _indices(sets: list[tuple[Device, ...]]) -> list[list[int]]:
    return [[d.index for d in chosen] for chosen in sets]


def _of(*indices: int) -> tuple[Device, ...]:
    return tuple(EIGHT[n] for n in indices)


@pytest.mark.parametrize(
    ("count", "devices", "expected"),
    [
        (1, _of(5, 2), [[5], [2]]),
        (2, EIGHT, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, EIGHT, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, EIGHT, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (9, EIGHT, []),
        (2, _of(1, 2, 3, 4), [[2, 3]]),
        (2, _of(1, 2), [[1, 2]]),
        (4, _of(1, 2, 3, 5, 6, 7), [[1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 3, 7]]),
        (3, _of(0, 1, 2, 3, 4), [[0, 1, 2]]),
        (2, (), []),
    ],
)
def test_candidates(count: int, devices: tuple[Device, ...], expected: list[list[int]]) -> None:
    assert _indices(candidates(count, devices))[: len(expected) or None] == expected


def test_one_server_never_mixes_models_or_mig_instances() -> None:
    mixed = (Device("a", 0, "H200"), Device("b", 1, "RTX"), Device("c", 2, "H200"), Device("d", 3, "RTX"))
    assert _indices(candidates(2, mixed)) == [[0, 2], [1, 3]]
    mig = (Device("m1", 0, "mig"), Device("m2", 0, "mig"))
    assert candidates(2, mig) == []
    assert len(candidates(1, mig)) == 2


def _ask(key: str, count: int) -> Request:
    return Request(key, count, EIGHT)


def _free(*indices: int) -> set[str]:
    return {f"virtual-{n}" for n in indices}


def _decide(queue: list[Request], mine: str, free: set[str], usable: set[str] = NAMES) -> list[int] | None:
    chosen = decide(queue, mine, free, usable)
    return None if chosen is None else [d.index for d in chosen]


def test_small_leases_are_packed_so_that_large_blocks_stay_whole() -> None:
    assert _decide([_ask("a", 1)], "a", _free(1, 4, 5, 6, 7)) == [1]
    assert _decide([_ask("a", 2)], "a", _free(2, 3, 4, 5, 6, 7)) == [2, 3]
    assert _decide([_ask("a", 1)], "a", _free(0, 1, 2, 3, 5)) == [5], "4 is taken, 0-3 are whole"
    assert _decide([_ask("a", 2)], "a", _free(0, 1, 2, 3, 6, 7)) == [6, 7]
    assert _decide([_ask("a", 1)], "a", NAMES) == [0]


def test_the_oldest_waiter_reserves_all_that_it_needs() -> None:
    queue = [_ask("1", 8), _ask("2", 1)]
    assert _decide(queue, "2", _free(0, 1, 2)) is None, "TP=1 must not starve the TP=8 that came first"
    assert _decide(queue, "1", NAMES) == list(range(8))


def test_what_the_oldest_waiter_does_not_need_is_used() -> None:
    queue = [_ask("1", 4), _ask("2", 2), _ask("3", 2)]
    free = _free(0, 1, 2, 4, 5)
    assert _decide(queue, "1", free) is None
    assert _decide(queue, "2", free) == [4, 5], "0-3 lack one GPU and are reserved"
    assert _decide(queue, "3", free) is None


def test_a_request_that_strangers_make_impossible_reserves_nothing() -> None:
    queue = [_ask("1", 8), _ask("2", 2)]
    usable = NAMES - {"virtual-0"}
    assert _decide(queue, "2", usable, usable) == [2, 3]


@given(
    st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 4, 8]), st.integers(1, 4)), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_everybody_is_served_once_and_nobody_is_overtaken_for_ever(asks: list[tuple[int, int]], random: object) -> None:
    """Simulated clock: requests arrive one a tick, hold their devices some ticks, in any order of polling."""
    import random as random_module

    assert isinstance(random, random_module.Random)
    waiting: list[Request] = []
    held: dict[str, tuple[int, frozenset[str]]] = {}
    overtaken: dict[str, int] = {}
    pending = list(enumerate(asks))
    for now in range(1000):
        if pending:
            n, (count, _) = pending.pop(0)
            waiting.append(_ask(f"{n:03d}", count))
        held = {key: lease for key, lease in held.items() if lease[0] > now}
        for request in random.sample(waiting, len(waiting)):
            busy = frozenset().union(*(lease[1] for lease in held.values()))
            chosen = decide(waiting, request.key, NAMES - busy, NAMES)
            if chosen is not None:
                names = frozenset(d.name for d in chosen)
                assert len(names) == request.count
                assert not names & busy
                held[request.key] = (now + asks[int(request.key)][1], names)
                waiting.remove(request)
                for older in waiting:
                    if older.key < request.key and older.count == 8:
                        overtaken[older.key] = overtaken.get(older.key, 0) + 1
        if not pending and not waiting:
            break
    assert not waiting
    assert not overtaken, "a request for the whole machine is overtaken by nobody who came later"
