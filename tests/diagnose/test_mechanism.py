"""How a rank is held up, by witnesses that every program has, and what a verdict makes of it. Pure, but for one trace.

Mutations that these tests caught: the rule ``spinning`` left out, its window ignored, a pair named, strong signs passed
over, ``stays`` always true, weak signatures kept, the wake-ups of the dumper counted, the GIL of a busy process, the
kernel's place of the last round alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpuserve.diagnose.evidence import Departure, Evidence, LockFact, LogFact, Progress
from pytest_gpuserve.diagnose.locks import asked_for
from pytest_gpuserve.diagnose.mechanism import mechanism
from pytest_gpuserve.diagnose.merge import merge
from pytest_gpuserve.diagnose.model import Judgement
from pytest_gpuserve.diagnose.verdict import judge
from pytest_gpuserve.phases.reader import RankPhase

LOADS = "crunch eng/layers.py:88 | load_weights eng/runner.py:9 | loop eng/main.py:3"
TIMES = (0.0, 2.0, 4.0)


def looks(dumps, text, *, number=4, odd=3, state="S", gil=False, **per_second):
    """Three rounds: all but one rank wait in a collective; the odd one's counters grow a second by what is given."""
    words = {k: v for k, v in per_second.items() if isinstance(v, str)}
    rates = {k: v for k, v in per_second.items() if not isinstance(v, str)}
    rounds = []
    for taken in TIMES:
        found = []
        for n in range(number):
            if n == odd:
                counters = {k: type(v)(100 + v * taken) for k, v in rates.items()}
                threads = [dumps.thread(text, owns_gil=gil)]
                dump = dumps.dump(n, threads, pid=n + 1, taken=taken, state=state, **counters, **words)
            else:
                dump = dumps.dump(n, dumps.COLLECTIVE, pid=n + 1, taken=taken, cpu_seconds=1.0, switches=4)
            found.append(dump)
        rounds.append(found)
    return rounds


def kind(rounds, label="TP3"):
    found = mechanism(merge(rounds).by_label[label])
    return found.kind if found else None


def after(rounds, still, *, moving=("(CPU of TP3)",), state="moving", window=90.0, reason="test_timeout", **more):
    progress = Progress(state, still=still, window=window, moving=moving, last="log")
    labels = tuple(d.label for d in rounds[0])
    return judge(Evidence(reason=reason, rounds=rounds, progress=progress, expected=labels, tp=len(labels), **more))


ASLEEP = {"wchan": "hrtimer_nanosleep", "cpu_seconds": 0.0}


class TestWitnesses:
    def test_cpu_in_one_place_is_a_spin(self, dumps):
        assert kind(looks(dumps, dumps.ELSEWHERE, state="R", cpu_seconds=1.0)) == "spin"
        assert kind(looks(dumps, dumps.ELSEWHERE, state="R", cpu_seconds=0.15)) == "spin", "of a crowded machine"
        assert kind(looks(dumps, dumps.ELSEWHERE, state="S", cpu_seconds=0.15)) is None
        assert kind(looks(dumps, dumps.ELSEWHERE, state="R", cpu_seconds=1.0, read_bytes=5e7)) == "reads"

    def test_another_place_every_time_is_no_spin(self, dumps):
        rounds = looks(dumps, dumps.ELSEWHERE, state="R", cpu_seconds=1.0)
        for n, taken in enumerate(TIMES):
            rounds[n][3] = dumps.dump(3, f"f{n} eng/a.py:1", pid=4, taken=taken, state="R", cpu_seconds=taken)
        assert kind(rounds) is None

    @pytest.mark.parametrize("place", ["hrtimer_nanosleep", "futex_do_wait", ""])
    def test_the_gil_in_a_call_that_uses_no_cpu(self, dumps, place):
        facts = {"wchan": place} if place else {}
        assert kind(looks(dumps, dumps.ELSEWHERE, gil=True, cpu_seconds=0.0, **facts)) == "gil"
        assert kind(looks(dumps, dumps.ELSEWHERE, gil=True, cpu_seconds=0.3, **facts)) != "gil"
        assert kind(looks(dumps, dumps.ELSEWHERE, gil=False, cpu_seconds=0.0, **facts)) != "gil"

    @pytest.mark.parametrize("numbered", [True, False])
    def test_a_side_thread_that_keeps_the_gil_is_the_one_that_tells(self, dumps, numbered):
        rounds = looks(dumps, dumps.ELSEWHERE, cpu_seconds=0.0)
        for n, taken in enumerate(TIMES):
            threads = [
                dumps.thread("step eng/runner.py:9"),
                dumps.thread("decode eng/lib.py:7", main=False, name="tokenizer", owns_gil=True),
            ]
            ids = [{"tid": i} if numbered else {"tid": None, "ident": 0x7F00 + i} for i in (10, 11)]
            threads = [replace(thread, **known) for thread, known in zip(threads, ids, strict=True)]
            rounds[n][3] = dumps.dump(3, threads, pid=4, taken=taken, cpu_seconds=1.0, wchan="futex_do_wait")
        member = merge(rounds).by_label["TP3"]
        assert member.frames[0].name == "decode"
        assert kind(rounds) == "gil"

    def test_one_sleep_and_a_loop_that_sleeps(self, dumps):
        assert kind(looks(dumps, dumps.ELSEWHERE, switches=1, **ASLEEP)) == "sleep", "what taking the stacks costs"
        assert kind(looks(dumps, dumps.ELSEWHERE, switches=3, **ASLEEP)) == "sleep"
        assert kind(looks(dumps, dumps.ELSEWHERE, switches=11, **ASLEEP)) == "poll"

    def test_without_the_kernels_word_nothing_is_invented(self, dumps):
        assert kind(looks(dumps, dumps.ELSEWHERE, cpu_seconds=0.0)) is None
        assert kind(looks(dumps, dumps.ELSEWHERE, cpu_seconds=0.0, wchan="0")) is None
        one_round = looks(dumps, dumps.ELSEWHERE, switches=1, **ASLEEP)[:1]
        assert kind(one_round) is None

    def test_a_sleep_that_a_dumper_interrupted_is_still_one(self, dumps):
        rounds = looks(dumps, dumps.ELSEWHERE, switches=1, **ASLEEP)
        for dumps_ in rounds[1:]:
            dumps_[3].facts.update(wchan="do_syscall_64", syscall="restart_syscall")
        assert kind(rounds) == "sleep"

    def test_where_the_kernel_function_tells_half_an_earlier_look_tells_the_rest(self, dumps):
        rounds = looks(dumps, dumps.ELSEWHERE, switches=1, wchan="do_sys_poll", syscall="poll of no descriptors")
        for dumps_ in rounds[1:]:
            dumps_[3].facts.update(syscall="restart_syscall")
        assert kind(rounds) == "sleep"
        rounds[-1][3].facts.update(wchan="do_epoll_wait")
        assert kind(rounds) is None, "it went on in another call"

    def test_pipes_and_events(self, dumps):
        assert kind(looks(dumps, dumps.ELSEWHERE, cpu_seconds=0.0, wchan="anon_pipe_read")) == "pipe"
        assert kind(looks(dumps, dumps.ELSEWHERE, cpu_seconds=0.0, wchan="pipe_write")) is None
        assert kind(looks(dumps, dumps.ELSEWHERE, cpu_seconds=0.0, wchan="futex_do_wait")) == "futex"
        assert kind(looks(dumps, dumps.COLLECTIVE, cpu_seconds=0.0, wchan="futex_do_wait")) is None, "a victim"

    def test_a_compiler_however_far_below(self, dumps):
        rounds = looks(dumps, dumps.ELSEWHERE, cpu_seconds=0.0, wchan="do_wait")
        for found, taken in zip(rounds, TIMES, strict=True):
            found.append(dumps.dump("compiler", None, pid=50, taken=taken, title="/bin/ninja", ppid=4, cpu_seconds=0.0))
            cicc = {"title": "/opt/cicc -arch=sm_120", "ppid": 50, "cpu_seconds": taken}
            found.append(dumps.dump("compiler", None, pid=51, taken=taken, state="R", **cicc))
        assert kind(rounds) == "build"
        text = merge(rounds).text()
        assert "moving (cicc below it uses CPU)" in text


def told(found: Judgement) -> tuple[str, tuple[str, ...]]:
    return found.verdict, found.culprits


class TestVerdicts:
    def test_a_spin_for_the_whole_window_is_a_hang_of_that_rank_and_may_be_slow(self, dumps):
        found = after(looks(dumps, dumps.ELSEWHERE, state="R", cpu_seconds=1.0), 46.0)
        assert told(found) == ("hang", ("TP3",))
        assert found.confidence <= 0.6
        assert "TP3 runs without end (crunch at layers.py:88): in the same place in 3 of 3 looks, 100 % of a core" in (
            found.text
        )
        assert "may be slow and not hung" in found.advice
        assert "TP0-2 wait in a collective" in found.text

    def test_of_two_ranks_one_that_spins_may_be_slow_too(self, dumps):
        hung = Progress("hung", still=46.0, window=45.0, last="log")
        for facts, slow in (({"state": "R", "cpu_seconds": 1.0}, True), ({"cpu_seconds": 0.0}, False)):
            rounds = looks(dumps, dumps.ELSEWHERE, number=2, odd=1, **facts)
            found = judge(Evidence(reason="no_progress", rounds=rounds, expected=("TP0", "TP1"), progress=hung))
            assert told(found) == ("hang", ())
            assert ("TP1 may be slow and not hung" in found.advice) == slow

    def test_a_shorter_time_names_the_rank_and_calls_no_hang(self, dumps):
        rounds = looks(dumps, dumps.ELSEWHERE, state="R", cpu_seconds=1.0)
        for reason in ("test_timeout", "startup_budget"):
            found = after(rounds, 20.0, reason=reason)
            assert told(found) == ("undecided", ("TP3",))
            assert "20 s are too short to tell slow from hung, but all others wait for TP3" in found.text

    @pytest.mark.parametrize("sign", ["log", "memory of TP3", "reads of TP3", "compiler cicc"])
    def test_any_other_sign_is_slow(self, dumps, sign):
        rounds = looks(dumps, dumps.ELSEWHERE, state="R", cpu_seconds=1.0)
        assert after(rounds, 46.0, moving=(sign, "(CPU of TP3)")).verdict == "slow"

    def test_a_spin_of_two_ranks_or_beside_one_that_works_names_nobody(self, dumps):
        pair = after(looks(dumps, dumps.ELSEWHERE, number=2, odd=1, state="R", cpu_seconds=1.0), 46.0)
        assert pair.culprits == ()
        rounds = looks(dumps, dumps.ELSEWHERE, state="R", cpu_seconds=1.0)
        for found, taken in zip(rounds, TIMES, strict=True):
            found[0] = dumps.dump(0, "other eng/x.py:1", pid=1, taken=taken, cpu_seconds=0.0)
        assert after(rounds, 46.0).verdict == "slow"

    def test_ranks_that_spin_where_they_wait_are_victims(self, dumps):
        rounds = looks(dumps, dumps.COLLECTIVE, state="R", cpu_seconds=1.0)
        assert after(rounds, 46.0).culprits == ()

    def test_a_weak_signature_that_the_witnesses_contradict_is_dropped(self, dumps):
        found = after(looks(dumps, LOADS, gil=True, cpu_seconds=0.0), 95.0, state="hung", moving=())
        assert told(found) == ("hang", ("TP3",))
        assert "holds the GIL in a C call that does not return (crunch at layers.py:88)" in found.text
        assert "copies weights" not in found.text
        assert found.known == ()
        disk = after(looks(dumps, LOADS, cpu_seconds=0.0, wchan="folio_wait_bit"), 95.0, state="hung", moving=())
        assert "copies weights" in disk.text

    @pytest.mark.parametrize(
        ("place", "words"),
        [
            ("locks_lock_inode_wait", "waits for a file lock"),
            ("unix_stream_read_generic", "waits on a socket"),
            ("do_wait", "waits for a child process"),
        ],
    )
    def test_who_sleeps_elsewhere_in_the_kernel_copies_no_weights(self, dumps, place, words):
        """Mutation that this caught: only the mechanisms, not the kernel's places, speak against a weak signature."""
        found = after(looks(dumps, LOADS, cpu_seconds=0.0, wchan=place), 95.0, state="hung", moving=())
        assert told(found) == ("hang", ("TP3",))
        assert f"TP3 {words}" in found.text
        assert "(crunch at layers.py:88)" in found.text
        assert "copies weights" not in found.text + found.advice

    def test_who_works_while_the_others_wait_is_named_in_a_slow_verdict(self, dumps):
        found = after(looks(dumps, dumps.ELSEWHERE, cpu_seconds=0.1, read_bytes=5e7), 5.0, moving=("reads of TP3",))
        assert told(found) == ("slow", ("TP3",))
        assert "TP3 reads files (crunch at layers.py:88): 50 MB/s from storage" in found.text

    def test_a_file_that_a_loop_polls_for_is_stale_only_when_nobody_else_works(self, dumps):
        lock = LockFact("/c/x.baton", ("TP3",), holder_alive=False, kind="file")
        rounds = looks(dumps, dumps.ELSEWHERE, switches=11, **ASLEEP)
        found = after(rounds, 95.0, state="hung", moving=(), locks=(lock,))
        assert told(found) == ("hang", ("TP3",))
        assert "TP3 polls for the file /c/x.baton, which is stale: it is there and nobody has it open" in found.text
        assert found.advice == "If /c/x.baton is a lock, whoever made it is gone: remove it."
        for dumped, taken in zip(rounds, TIMES, strict=True):
            dumped[0] = dumps.dump(0, "build eng/x.py:1", pid=1, taken=taken, state="R", cpu_seconds=taken)
        assert "stale" not in after(rounds, 95.0, state="hung", moving=(), locks=(lock,)).text


class TestFrontEnd:
    def idle(self, dumps, front):
        ranks = dumps.same(4, dumps.IDLE_WORKER)
        api = dumps.dump("api", "select selectors.py:1 | _run_once asyncio/base_events.py:2 | run asyncio/runners.py:3")
        phases = {f"TP{n}": RankPhase("serving", 0.0) for n in range(4)}
        return judge(
            Evidence(
                reason="test_timeout", rounds=[[*ranks, api]], answers=False, front=front, requests=1, phases=phases
            )
        )

    def test_a_port_that_answers_nothing_is_the_front_ends(self, dumps):
        found = self.idle(dumps, "silent")
        assert told(found) == ("hang", ("api",))
        assert "nothing is answered there, not even GET /health" in found.text

    def test_a_health_page_that_answers_names_nobody(self, dumps):
        found = self.idle(dumps, "healthy")
        assert told(found) == ("hang", ())
        assert "GET /health answers 200 while tokens stand still" in found.text
        assert ("a completion sent just now got no answer, while GET /health answered 200", "HTTP") in found.facts

    def test_where_it_was_not_asked_nothing_is_said_of_it(self, dumps):
        assert "/health" not in self.idle(dumps, None).text

    def test_a_rank_that_hangs_is_named_before_a_front_end_that_is_silent(self, dumps):
        rounds = looks(dumps, dumps.ELSEWHERE, switches=1, **ASLEEP)
        found = after(rounds, 95.0, state="hung", moving=(), answers=False, front="silent")
        assert found.culprits == ("TP3",)


LOST = LogFact("RuntimeError: Connection closed", "log", "crash", lost=True, silent=("TP0", "TP1"))
RANKS = tuple(f"TP{n}" for n in range(4))


def ended(*gone, log=(LOST,)):
    """All are gone; (label, code, seconds) of each end."""
    phases = {label: RankPhase("cuda_graph", 0.0) for label in RANKS}
    found = tuple(Departure(label, 10 + n, at, code) for n, (label, code, at) in enumerate(gone))
    codes = {label: code for label, code, _ in gone if code is not None}
    return judge(
        Evidence(reason="exited", server_exit=-9, departures=found, exits=codes, log=log, expected=RANKS, phases=phases)
    )


class TestDeaths:
    def test_who_was_first_is_named_and_how_it_ended(self):
        found = ended(("TP1", -9, 1.0), ("TP2", 1, 1.05), ("TP0", -9, 1.1), ("TP3", -9, 1.1))
        assert told(found) == ("crash", ("TP1",))
        assert "TP1 was gone first (killed by SIGKILL), 0.05 s before TP0,2-3" in found.text
        first, *rest = found.gone
        assert (first.ranks, first.words) == (("TP1",), "killed by SIGKILL, first of all, last phase cuda_graph")
        assert [(g.ranks, g.first) for g in rest] == [(("TP0", "TP3"), False), (("TP2",), False)]

    def test_of_two_that_ended_together_the_one_that_printed_no_error(self):
        assert ended(("TP1", -9, 1.0), ("TP2", 1, 1.0), ("TP0", -9, 1.1), ("TP3", -9, 1.1)).culprits == ("TP1",)


LOOP = "import os, sys, time\nprint(1, flush=True)\nwhile os.access(sys.argv[1], os.F_OK): time.sleep(0.05)"


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace")
def test_the_file_that_a_loop_polls_for_is_read_from_its_system_calls(tmp_path: Path) -> None:
    """And the loop goes on as if nothing had been: it ends when the file goes."""
    lock = tmp_path / "x.lock"
    lock.touch()
    with subprocess.Popen([sys.executable, "-S", "-c", LOOP, str(lock)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            found = asked_for(process.pid, sys.executable, 10.0)
            status = Path(f"/proc/{process.pid}/status").read_text()
            if found is None:
                pytest.skip("this kernel lets nobody trace")
            assert found == str(lock)
            assert "TracerPid:\t0\n" in status
            lock.unlink()
            begin = time.monotonic()
            assert process.wait(20.0) == 0
            assert time.monotonic() - begin < 20.0
        finally:
            process.kill()
