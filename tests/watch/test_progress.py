"""Signs of progress, the states made of them, and recordings of real servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuserve.procfs import ProcessId
from pytest_gpuserve.watch.budgets import Budgets
from pytest_gpuserve.watch.compilers import is_compiler
from pytest_gpuserve.watch.progress import Monitor, movement
from pytest_gpuserve.watch.sample import GpuSample, ProcessSample, Sample

MIB = 1 << 20
WINDOW = 20.0


def process(pid=1, role="worker", label=None, *, compiler=False, state="S", rank=None, **counters) -> ProcessSample:
    return ProcessSample(
        ProcessId(pid, 1),
        label or f"TP{pid - 1}",
        role,
        state,
        counters.pop("cpu", 0.0),
        compiler=compiler,
        rank=role == "worker" if rank is None else rank,
        **counters,
    )


def sample(at=0.0, *processes, phase="weight_load", **more) -> Sample:
    members = processes or (process(1), process(2), process(9, "api", "api"))
    return Sample(at=at, processes={p.process: p for p in members}, phase=phase, **more)


def monitor(**settings) -> Monitor:
    return Monitor(Budgets.from_settings({"window": WINDOW, **settings}), interval=1.0)


def run(watch: Monitor, *samples: Sample):
    """Feed samples; the last reading."""
    reading = None
    for one in samples:
        reading = watch.feed(one)
    return reading


def still(seconds: float, begin: float = 0.0, **more):
    """Samples, one a second, in which nothing moves."""
    return [sample(begin + n, **more) for n in range(int(seconds) + 1)]


# --- signs


def moved(before=(), after=(), *, serving=False, seconds=1.0, **more):
    first, second = dict(more), dict(more)
    first.update({k: v[0] for k, v in more.items() if isinstance(v, list)})
    second.update({k: v[1] for k, v in more.items() if isinstance(v, list)})
    return movement(sample(0.0, *before, **first), sample(seconds, *after, **second), serving=serving)


@pytest.mark.parametrize(
    ("counters", "sign"),
    [
        ({"read": 100_000}, "reads of TP0"),
        ({"chars": 2 * MIB, "calls": 100}, "reads of TP0"),
        ({"majflt": 50}, "page faults of TP0"),
        ({"minflt": 500}, "memory of TP0"),
        ({"rss": 10 * MIB}, "memory of TP0"),
    ],
)
def test_signs_of_a_process(counters, sign):
    assert moved([process(1)], [process(1, **counters)]).strong == (sign,)


@pytest.mark.parametrize(
    "counters",
    [
        {"chars": 20 * MIB, "calls": 2_500_000},  # a poll loop on an eventfd
        {"chars": 300, "calls": 2},  # a monitor thread reading /proc
        {"minflt": 3},
        {"rss": 100_000},
        {"majflt": 1},
        {"cpu": 0.03},
    ],
)
def test_what_idle_processes_do_is_no_sign(counters):
    found = moved([process(1)], [process(1, **counters)])
    assert (found.strong, found.weak) == ((), ())


def test_rates_are_per_second():
    assert moved([process(1)], [process(1, minflt=50)], seconds=1.0).strong
    assert not moved([process(1)], [process(1, minflt=50)], seconds=10.0).strong


def test_memory_that_shrinks_is_a_sign_too():
    assert moved([process(1, rss=100 * MIB)], [process(1)]).strong == ("memory of TP0",)


def test_cpu_of_a_rank_is_a_weak_sign():
    found = moved([process(1)], [process(1, cpu=0.9)])
    assert (found.strong, found.weak) == ((), ("CPU of TP0",))
    front_end = moved([process(9, "api", "api")], [process(9, "api", "api", cpu=0.9)])
    assert front_end.weak == ()


def test_a_runnable_rank_on_a_crowded_machine_is_a_weak_sign():
    starved = process(1, state="R")
    assert moved([starved], [replace(starved, cpu=0.04)]).weak == ("CPU of TP0",)
    assert moved([process(1)], [starved]).weak == (), "once runnable is nothing"


def test_the_main_thread_decides_where_it_was_read():
    found = moved([process(1, main=1.0)], [process(1, cpu=0.9, main=1.0)])
    assert found.weak == (), "busy side threads do not count"


def test_a_process_in_uninterruptible_sleep_is_a_weak_sign():
    assert moved([process(1)], [process(1, state="D")]).weak == ("storage of TP0",)


def test_a_compiler_with_cpu_is_a_sign_and_an_idle_one_is_none():
    quiet = process(5, "compiler", "ptxas", compiler=True, cpu=3.0)
    assert moved([quiet], [replace(quiet, cpu=3.5)]).strong == ("compiler ptxas",)
    assert moved([quiet], [quiet]).strong == ()
    assert moved([quiet], [replace(quiet, minflt=10_000)]).strong == (), "its CPU counts, nothing else"


def test_new_compilers_and_ranks_are_signs_other_helpers_are_none():
    assert moved([process(1)], [process(1), process(5, "compiler", "cicc", compiler=True)]).strong == (
        "new compiler cicc",
    )
    assert moved([process(1)], [process(1), process(2)]).strong == ("new process TP1",)
    assert moved([process(1)], [process(1), process(6, "other", "nvidia-smi")]).strong == ()


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({"log": [10, 90]}, "log"),
        ({"phases": [{"TP0": "weight_load 1/4"}, {"TP0": "weight_load 2/4"}]}, "phase"),
        ({"tokens": [5.0, 6.0]}, "tokens"),
        ({"ended": [1, 2]}, "requests"),
        ({"gpus": [(GpuSample(0),), (GpuSample(64 * MIB),)]}, "memory of GPU 0"),
    ],
)
def test_signs_of_a_server(change, sign):
    assert moved([process(1)], [process(1)], **change).strong == (sign,)


def test_counters_that_were_not_read_are_no_sign():
    assert moved([process(1)], [process(1)], tokens=[None, 6.0]).strong == ()
    assert moved([process(1)], [process(1)], gpus=[(), (GpuSample(5),)]).strong == ()
    assert moved([process(1)], [process(1)], gpus=[(GpuSample(None, 100),), (GpuSample(None, 100),)]).weak == ()


def test_a_gpu_that_is_partly_busy_is_a_weak_sign():
    assert moved([process(1)], [process(1)], gpus=[(GpuSample(1, 30),), (GpuSample(1, 45),)]).weak == ("GPU 0",)


def test_a_front_end_that_answers_health_checks_is_no_sign_while_serving():
    api = process(9, "api", "api")
    busy = replace(api, minflt=5000, rss=50 * MIB)
    assert moved([api], [busy], serving=True).strong == ()
    assert moved([api], [busy], serving=False).strong == ("memory of api",)
    rank = process(1)
    assert moved([rank], [replace(rank, minflt=5000)], serving=True).strong == ("memory of TP0",)


# --- states


def test_still_suspect_hung():
    watch = monitor()
    states = [watch.feed(one).state for one in still(25)]
    assert states[:10] == ["moving"] * 10
    assert states[10:20] == ["suspect"] * 10
    assert set(states[20:]) == {"hung"}
    last = watch.feed(sample(26.0))
    assert "nothing moved for 26 s in weight_load (window 20 s" in last.why


def test_a_sign_begins_the_window_anew():
    watch = monitor()
    run(watch, *still(18))
    assert watch.feed(sample(19.0, log=50)).state == "moving"
    assert run(watch, *still(18, 20.0, log=50)).state == "suspect"
    assert watch.stillness["weight_load"] == 18.0


def test_spinning_doubles_the_window():
    """Work in one C call or a spin: nobody can tell, so it gets more time, but not for ever."""
    watch = monitor()
    samples = [sample(float(n), process(1, cpu=n * 0.9), process(2)) for n in range(45)]
    states = [watch.feed(one).state for one in samples]
    assert states[25] != "hung"
    assert states[41] == "hung"


def test_a_dead_server():
    assert run(monitor(), sample(0.0), sample(1.0, root=False)).state == "dead"


def test_a_rank_that_is_gone_shortens_the_wait():
    watch = monitor(window=60)
    both = [process(1), process(2), process(9, "api", "api")]
    run(watch, sample(0.0, *both), sample(1.0, *both))
    readings = [watch.feed(sample(2.0 + n, both[0], both[2])) for n in range(20)]
    hung = next(n for n, r in enumerate(readings) if r.state == "hung")
    assert 13 <= hung <= 17
    assert "TP1 is gone" in readings[hung].why


def test_ready_and_not_asked_is_idle_for_ever():
    watch = monitor()
    readings = [watch.feed(sample(float(n), phase="serving", requests=0)) for n in range(100)]
    assert {r.state for r in readings[1:]} == {"idle"}
    assert watch.feed(sample(101.0, phase="serving", requests=None)).state == "idle"


def test_a_hang_after_ready_is_caught():
    """Health says 200 and tokens stand still; the front end is busy with health checks."""
    watch = monitor(first_request=20)
    run(watch, sample(0.0, phase="serving", requests=0), sample(1.0, phase="serving", requests=0))

    def asked(n):
        api = process(9, "api", "api", minflt=n * 1000, cpu=n * 0.2)
        return sample(2.0 + n, process(1), process(2), api, phase="serving", requests=1, oldest=float(n), tokens=7.0)

    states = [watch.feed(asked(n)).state for n in range(24)]
    assert states[19] != "hung"
    assert states[22] == "hung"


def test_idle_spinning_of_an_engine_hides_no_hang():
    """SGLang's ranks spin while they wait for requests: with counters at hand, CPU proves nothing."""
    watch = monitor(first_request=20)
    samples = [
        sample(float(n), process(1, cpu=n * 0.9), phase="serving", requests=1, oldest=float(n), tokens=7.0)
        for n in range(30)
    ]
    assert run(watch, *samples).state == "hung"


def test_the_age_of_the_request_counts_not_the_idle_time_before():
    watch = monitor()
    run(watch, *[sample(float(n), phase="serving", requests=None, running=1.0) for n in range(15)])
    assert watch.feed(sample(15.0, phase="serving", requests=1, oldest=0.5)).still == 0.5


def test_ready_is_not_warm():
    """The first request has a window of its own; later ones the usual."""
    watch = monitor(first_request=60)

    def asked(begin, number, ended=0):
        return [
            sample(begin + n, phase="serving", requests=1, oldest=float(n), tokens=7.0, ended=ended)
            for n in range(number)
        ]

    assert run(watch, sample(0.0, phase="serving", requests=0), *asked(1.0, 50)).state in ("moving", "suspect")
    run(watch, sample(51.0, phase="serving", requests=0, ended=1, tokens=9.0))
    assert run(watch, *asked(52.0, 23, ended=1)).state == "hung"


def test_a_pause_of_the_whole_server_is_no_hang_until_it_lasts():
    watch = monitor()
    stopped = [process(1, state="T"), process(2, state="T")]
    run(watch, sample(0.0), sample(1.0))
    short = [watch.feed(sample(2.0 + n, *stopped)) for n in range(9)]
    assert {r.state for r in short} == {"paused"}
    after = watch.feed(sample(11.0))
    assert (after.state, after.still) == ("moving", 0.0)
    long = [watch.feed(sample(12.0 + n, *stopped)) for n in range(25)]
    assert long[-1].state == "hung"
    assert "stopped" in long[-1].why


def test_one_stopped_rank_is_no_pause():
    watch = monitor()
    readings = [watch.feed(sample(float(n), process(1), process(2, state="T"))) for n in range(25)]
    assert readings[-1].state == "hung"
    assert "paused" not in {r.state for r in readings}


def test_a_watcher_that_did_not_run_saw_nothing():
    """Suspended laptop, SIGSTOP of the watcher, a starved machine."""
    watch = monitor()
    run(watch, *still(15))
    assert watch.feed(sample(600.0)).state == "moving"
    assert watch.still == 0.0


def test_a_watcher_that_is_late_counts_at_most_twice_its_interval():
    watch = monitor()
    run(watch, sample(0.0), *[sample(4.0 * (n + 1)) for n in range(5)])
    assert watch.still == 10.0


def test_a_spared_server_gets_twice_the_time():
    watch = monitor()
    assert run(watch, *still(21)).state == "hung"
    watch.spared()
    assert run(watch, *still(30, 22.0)).state == "suspect"
    assert run(watch, *still(12, 53.0)).state == "hung"
    assert watch.feed(sample(70.0, log=9)).state == "moving"
    assert run(watch, *still(21, 71.0, log=9)).state == "hung", "a sign ends the indulgence"


def test_no_window_is_above_half_of_the_engines_own_timeout():
    watch = Monitor(Budgets.from_settings({"window": 500}, own_timeout=300.0), interval=1.0)
    assert run(watch, *still(151)).state == "hung"
    watch.spared()
    assert watch.feed(sample(152.0)).window == 150.0


# --- recordings of real servers


def states(replay, name, window, **more):
    watch = Monitor(Budgets.from_settings({"window": window}), interval=2.0)
    return [watch.feed(one) for one in replay.samples(name, **more)], watch


@pytest.mark.parametrize("window", [15, 20, 45, 75])
def test_a_cold_start_of_150_seconds_is_never_hung(replay, window):
    readings, watch = states(replay, "cold_start_slow", window)
    assert len(readings) == 74
    assert not any(r.state == "hung" for r in readings)
    assert max(watch.stillness.values()) < 13


def test_compilers_are_what_keeps_the_cold_start_alive(replay):
    signs = {sign for r in states(replay, "cold_start_slow", 45)[0] for sign in r.moving}
    assert {"compiler ptxas", "compiler cicc", "compiler cc1plus"} <= signs


def test_a_start_with_a_stopped_rank_is_hung_in_time(replay):
    readings, _ = states(replay, "init_hang_rank1_stopped", 20)
    recording = replay.recording("init_hang_rank1_stopped")
    stopped = next(e["t"] for e in recording if any(p[1] == "T" for p in e["procs"].values()))
    hung = next(e["t"] for e, r in zip(recording, readings, strict=True) if r.state == "hung")
    assert 18 <= hung - stopped <= 30
    assert readings[-1].state == "hung"
    assert not any(r.state == "hung" for r in readings[: len(readings) // 2])


def test_orphan_compilers_of_the_run_before_are_not_its_progress(replay):
    """The first samples show ninja and its children, left to init by a server that was killed."""
    first = replay.recording("init_hang_rank1_stopped")[0]["procs"]
    assert sum(is_compiler("", p[0].split()) for p in first.values()) >= 4
    (own, *_), _ = [list(replay.samples("init_hang_rank1_stopped")), None]
    assert not any(p.compiler for p in own.processes.values())


def test_a_killed_rank_ends_the_server(replay):
    readings, _ = states(replay, "rank1_killed_in_capture", 20)
    assert readings[-1].state == "dead"
    assert not any(r.state == "hung" for r in readings)


def test_a_healthy_start_with_a_drafter(replay):
    readings, _ = states(replay, "eagle3_ok", 15)
    assert {r.state for r in readings} <= {"moving", "suspect"}


# --- compilers


@pytest.mark.parametrize(
    ("comm", "argv", "expected"),
    [
        ("ptxas", ["/usr/local/cuda/bin/ptxas", "-arch", "sm_90a"], True),
        ("cicc", ["/usr/local/cuda/bin/../nvvm/bin/cicc", "--c++17"], True),
        ("cc1plus", ["/opt/gcc/bin/cc1plus", "-quiet"], True),
        ("x86_64-linux-gn", ["x86_64-linux-gnu-g++-13", "-c", "x.cpp"], True),
        ("g++", ["g++"], True),
        ("ninja", ["ninja", "-v"], True),
        ("python3", ["python3", "/v/torch/_inductor/compile_worker/__main__.py", "--pickler=x"], True),
        ("python3", ["python3", "-m", "sglang.launch_server"], False),
        ("sh", ["/bin/sh", "-c", "nvcc x.cu"], False),
        ("bash", ["bash"], False),
        ("nvidia-smi", ["nvidia-smi"], False),
        ("", [], False),
    ],
)
def test_who_is_a_compiler(comm, argv, expected):
    assert is_compiler(comm, argv) is expected
