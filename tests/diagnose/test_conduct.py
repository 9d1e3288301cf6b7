"""What the rounds of one process say of how it behaved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuserve.diagnose.conduct import Conduct, conduct, stuck_owner


def looks(dumps, *switches, every=1.0):
    return [dumps.dump(0, dumps.ELSEWHERE, taken=every * n, switches=count) for n, count in enumerate(switches)]


def test_one_look_says_nothing_of_time(dumps):
    assert conduct(looks(dumps, 10), 1, [], None) == Conduct()
    assert not Conduct().stays


def test_two_looks_at_one_place_are_enough_to_stay(dumps):
    assert conduct(looks(dumps, 10, 10), 2, [], None).stays
    assert not conduct(looks(dumps, 10, 10), 1, [], None).stays


@pytest.mark.parametrize(
    ("switches", "every", "wakes"),
    [
        ((10, 32), 1.0, 20.0),  # two of them are the dump's own
        ((10, 20, 54), 1.0, 20.0),
        ((10, 11), 1.0, 0.0),
        ((10, 12), 1.0, 0.0),
        ((10, 32), 0.1, None),
        ((None, 32), 1.0, None),
        ((10, None), 1.0, None),
    ],
)
def test_wakes_a_second(dumps, switches, every, wakes):
    assert conduct(looks(dumps, *switches, every=every), 1, [], None).wakes == wakes


def owned(dumps, *owns, used=0.0):
    threads = [dumps.thread(dumps.ELSEWHERE, owns_gil=has) for has in owns]
    return [
        dumps.dump(0, [replace(thread, tid=7)], taken=float(n), cpu_seconds=1.0 + n * used)
        for n, thread in enumerate(threads)
    ]


@pytest.mark.parametrize(
    ("owns", "used", "owner"),
    [
        ((True,), 0.0, None),
        ((True, True), 0.0, 7),
        ((True, True, True), 0.04, 7),
        ((True, True), 0.06, None),
        ((True, False), 0.0, None),
        ((False, False), 0.0, None),
    ],
)
def test_a_thread_that_keeps_the_gil_of_a_still_process(dumps, owns, used, owner):
    assert stuck_owner(owned(dumps, *owns, used=used)) == owner
