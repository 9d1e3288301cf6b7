"""What the rounds of one process say of how it behaved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuserve.diagnose.conduct import Conduct, asleep_at, conduct, stuck_owner, working_children


def looks(dumps, *switches, every=1.0):
    return [dumps.dump(0, dumps.ELSEWHERE, taken=5.0 + every * n, switches=count) for n, count in enumerate(switches)]


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
    """The thread with the number that is given owns the GIL; 0: none does."""
    threads = [replace(dumps.thread(dumps.ELSEWHERE, owns_gil=bool(tid)), tid=tid) for tid in owns]
    return [dumps.dump(0, [one], taken=float(n), cpu_seconds=1.0 + n * used) for n, one in enumerate(threads)]


@pytest.mark.parametrize(
    ("owns", "used", "owner"),
    [
        ((7,), 0.0, None),
        ((7, 7), 0.0, 7),
        ((7, 7, 7), 0.04, 7),
        ((7, 7), 0.06, None),
        ((7, 0), 0.0, None),
        ((0, 0), 0.0, None),
        ((7, 8), 0.0, None),
    ],
)
def test_a_thread_that_keeps_the_gil_of_a_still_process(dumps, owns, used, owner):
    assert stuck_owner(owned(dumps, *owns, used=used)) == owner


SLEEPS = {"wchan": "poll_schedule_timeout", "syscall": "select of no descriptors"}
INTERRUPTED = {"wchan": "poll_schedule_timeout", "syscall": "restart_syscall"}
POLLS = {"wchan": "poll_schedule_timeout", "syscall": "poll"}


@pytest.mark.parametrize(
    ("earlier", "state", "last", "said"),
    [
        (SLEEPS, "S", INTERRUPTED, SLEEPS),
        (SLEEPS, "S", POLLS, POLLS),
        (SLEEPS, "R", {"wchan": "0", "syscall": "running"}, {"wchan": "0", "syscall": "running"}),
        (SLEEPS, "R", {"wchan": "0", "syscall": None}, {"wchan": "0", "syscall": None}),
    ],
)
def test_a_sleep_that_a_dumper_interrupted_is_known_by_the_look_before(dumps, earlier, state, last, said):
    rounds = [dumps.dump(0, dumps.ELSEWHERE, **earlier), dumps.dump(0, dumps.ELSEWHERE, state=state, **last)]
    assert dict(asleep_at(rounds)) == said


def test_processes_that_are_each_others_parents_end_the_search(dumps):
    """Between two looks at /proc a number may have been given to another process."""
    one = dumps.dump(0, dumps.ELSEWHERE, pid=11, ppid=12)
    other = dumps.dump(1, dumps.ELSEWHERE, pid=12, ppid=11)
    compiler = [
        dumps.dump("compiler", None, pid=13, ppid=11, title="/opt/ptxas a.ptx", taken=float(n), cpu_seconds=n * 0.9)
        for n in range(2)
    ]
    found = working_children([[one, other, compiler[0]], [one, other, compiler[1]]])
    assert found == {one.process: "ptxas", other.process: "ptxas"}
