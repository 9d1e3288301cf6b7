"""Many stacks to few classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpuserve.diagnose.merge import format_ranks, label_order, merge, place, relabel
from pytest_gpuserve.diagnose.model import Frame, ThreadStack
from pytest_gpuserve.diagnose.parse import read_dumps
from pytest_gpuserve.diagnose.telling import is_idle, telling
from pytest_gpuserve.engines.base import Rank

STACKS = Path(__file__).parent.parent / "data" / "stacks"


def classes(merged):
    return [(c.role, c.ranks, c.kind, c.signature) for c in merged.classes]


# --- classes


def test_equal_paths_are_one_class_whatever_the_lines(dumps):
    other_line = dumps.COLLECTIVE.replace(":7", ":9").replace(":3252", ":3260")
    merged = merge([dumps.same(8, dumps.COLLECTIVE, r3=dumps.BATON, r5=other_line)])
    assert classes(merged) == [
        ("worker", ("TP0", "TP1", "TP2", "TP4", "TP5", "TP6", "TP7"), "waits", "c10d-collective"),
        ("worker", ("TP3",), "cause", "torch-extension-lock"),
    ]


def test_the_path_is_root_first(dumps):
    (only,) = merge([dumps.same(2, dumps.COLLECTIVE)]).classes
    assert only.path == ("loop (eng/main.py)", "step (eng/runner.py)", "all_reduce (distributed/distributed_c10d.py)")


def test_class_names_and_directories_make_no_difference(dumps):
    """One rank was dumped by py-spy (qualified names, short paths), one by the fault handler."""
    a = "Ring.wait eng/ring.py:5 | Runner.step eng/runner.py:7"
    b = "wait /opt/venv/lib/python3.12/site-packages/eng/ring.py:5 | step /opt/venv/eng/runner.py:7"
    assert len(merge([dumps.ranks({0: a, 1: b})]).classes) == 1


def test_functions_and_files_make_a_difference(dumps):
    a = "f eng/ring.py:5 | step eng/runner.py:7"
    for other in (a.replace("f eng", "g eng"), a.replace("ring", "king"), f"f x.py:5 | {a}"):
        assert len(merge([dumps.ranks({0: a, 1: other})]).classes) == 2, other


def test_how_a_wait_is_implemented_makes_no_difference(dumps):
    """Below a known frame the path is cut: one worker polls a socket, the other yields the CPU."""
    yielding = dumps.IDLE_WORKER.replace(
        "poll zmq/sugar/poll.py:106 | wait vllm/distributed/device_communicators/shm_broadcast.py:221",
        "sched_yield vllm/distributed/utils.py:9",
    )
    (only,) = merge([dumps.ranks({0: dumps.IDLE_WORKER, 1: yielding})]).classes
    assert (only.kind, only.signature) == ("idle", "vllm-worker-idle")
    assert only.path[-1].startswith("acquire_read")


def test_roles_are_never_compared(dumps):
    merged = merge([[dumps.dump("engine_core", dumps.ENGINE_WAITS), *dumps.same(2, dumps.IDLE_WORKER)]])
    assert [(c.role, len(c.ranks)) for c in merged.classes] == [("engine_core", 1), ("worker", 2)]


def test_pipeline_stages_and_data_parallel_groups_are_groups_of_their_own(dumps):
    members = [
        dumps.dump(Rank(tp=tp, pp=pp, dp=dp), dumps.COLLECTIVE if pp else dumps.ELSEWHERE)
        for dp in range(2)
        for pp in range(2)
        for tp in range(2)
    ]
    merged = merge([members])
    assert [(c.group, c.ranks) for c in merged.classes] == [
        ("DP0 PP0", ("DP0 PP0 TP0", "DP0 PP0 TP1")),
        ("DP0 PP1", ("DP0 PP1 TP0", "DP0 PP1 TP1")),
        ("DP1 PP0", ("DP1 PP0 TP0", "DP1 PP0 TP1")),
        ("DP1 PP1", ("DP1 PP1 TP0", "DP1 PP1 TP1")),
    ]


def test_a_stopped_rank_is_a_class_of_its_own_in_the_same_place(dumps):
    members = dumps.same(3, dumps.COLLECTIVE)
    members.append(dumps.dump(3, dumps.COLLECTIVE, state="T"))
    assert classes(merge([members])) == [
        ("worker", ("TP0", "TP1", "TP2"), "waits", "c10d-collective"),
        ("worker", ("TP3",), "cause", "stopped"),
    ]


def test_a_stop_must_last_over_all_rounds(dumps):
    first, second = (dumps.dump(0, dumps.COLLECTIVE, state=state, pid=7) for state in "TS")
    assert merge([[first], [second]]).members[0].condition == ""
    assert merge([[second], [first]]).members[0].condition == ""
    assert merge([[first], [first]]).members[0].condition == "stopped"


def test_processes_without_a_stack_say_why(dumps):
    merged = merge(
        [[dumps.dump(0, None, problem="no permission", wchan="futex_do_wait"), dumps.dump(1, dumps.COLLECTIVE)]]
    )
    lone = merged.by_label["TP0"]
    assert (lone.has_stack, lone.leaf, lone.kind) == (False, "no permission", "other")
    assert merged.classes[0].path == ("no permission",)
    two = merge([[dumps.dump(n, None, problem=why) for n, why in enumerate(("no permission", "too late"))]])
    assert len(two.classes) == 2


def test_helpers_and_compilers_are_counted_only(dumps):
    merged = merge([[dumps.dump("compiler", None), dumps.dump("compiler", None), dumps.dump("helper", "main x.py:1")]])
    assert merged.counted == {"compiler": 2, "helper": 1}
    assert not merged.members


def test_labels_are_unique(dumps):
    merged = merge([[dumps.dump("api", "f x.py:1", pid=5), dumps.dump("api", "g x.py:1", pid=6)]])
    assert [m.label for m in merged.members] == ["api 5", "api 6"]


def test_processes_whose_pid_nobody_knows_stay_apart(dumps):
    members = [dumps.dump(n, dumps.COLLECTIVE) for n in range(3)]
    members = [type(m)(type(m.process)(0, 0), *[getattr(m, f) for f in m.__slots__[1:]]) for m in members]
    assert merge([members]).classes[0].ranks == ("TP0", "TP1", "TP2")


def test_a_pasted_stack_that_lost_its_outer_frames_is_in_the_same_place(dumps):
    whole = (
        "cuGraphLaunch libcuda.so | replay torch/cuda/graphs.py:111 | forward a/r.py:1 | loop a/s.py:2 | main a/t.py:3"
    )
    part = "cuGraphLaunch libcuda.so | replay torch/cuda/graphs.py:111 | forward a/r.py:1"
    assert len(merge([dumps.ranks({0: whole, 1: part})]).classes) == 1
    elsewhere = "forward a/r.py:1 | other a/s.py:9"
    assert len(merge([dumps.ranks({0: whole, 1: elsewhere})]).classes) == 2


# --- rounds


def test_the_place_seen_most_often_counts(dumps):
    """A sample in the middle of a step does not make an outlier."""
    rounds = [[dumps.dump(0, text, pid=7)] for text in (dumps.COLLECTIVE, dumps.COLLECTIVE, dumps.ELSEWHERE)]
    merged = merge(rounds)
    assert merged.classes[0].signature == "c10d-collective"
    assert merged.moving == ("TP0",)
    assert merged.classes[0].moving


def test_of_equally_frequent_places_the_last_counts(dumps):
    rounds = [[dumps.dump(0, text, pid=7)] for text in (dumps.COLLECTIVE, dumps.ELSEWHERE)]
    assert merge(rounds).classes[0].path[-1] == "crunch (eng/layers.py)"


def test_another_line_is_movement_and_the_same_is_none(dumps):
    still = [[dumps.dump(0, dumps.ELSEWHERE, pid=7)] for _ in range(3)]
    assert merge(still).moving == ()
    moved = [[dumps.dump(0, dumps.ELSEWHERE.replace(":88", f":{88 + n}"), pid=7)] for n in range(3)]
    assert merge(moved).moving == ("TP0",)


def test_another_process_of_the_same_rank_is_another_member(dumps):
    merged = merge([[dumps.dump(0, dumps.ELSEWHERE, pid=7)], [dumps.dump(0, dumps.ELSEWHERE, pid=8)]])
    assert len(merged.members) == 2


def test_rates_are_measured_between_the_first_and_the_last_round(dumps):
    a = dumps.dump(0, dumps.ELSEWHERE, pid=7, taken=10.0, cpu_seconds=5.0, read_bytes=100)
    b = dumps.dump(0, dumps.ELSEWHERE, pid=7, taken=14.0, cpu_seconds=9.0, read_bytes=8_000_100)
    (member,) = merge([[a], [b]]).members
    assert member.cpu == pytest.approx(1.0)
    assert member.read == pytest.approx(2e6)
    assert merge([[a]]).members[0].cpu is None
    half = dumps.dump(0, dumps.ELSEWHERE, pid=7, taken=10.5, cpu_seconds=5.25)
    assert merge([[a], [half]]).members[0].cpu == pytest.approx(0.5)
    assert merge([[a], [half]]).members[0].read is None, "known of the first round alone"
    soon = dumps.dump(0, dumps.ELSEWHERE, pid=7, taken=10.1, cpu_seconds=5.1)
    assert merge([[a], [soon]]).members[0].cpu is None, "too short to say"


# --- threads


def test_idle_side_threads_are_left_out(dumps):
    wait = "wait threading.py:355 | wait threading.py:655 | run tqdm/_monitor.py:60"
    assert is_idle(dumps.thread(wait, main=False, name="tqdm_monitor"))
    assert is_idle(dumps.thread("get queue.py:171 | worker eng/pool.py:3", main=False, name="Thread-9", active=False))
    assert is_idle(ThreadStack(1, "x", False, ()))
    assert not is_idle(dumps.thread(wait, main=True))
    assert not is_idle(dumps.thread(wait, main=False, name="x", owns_gil=True))
    assert not is_idle(dumps.thread("f a.py:1 | g a.py:2", main=False, name="Thread-2", active=True))
    deep = "wait threading.py:355 | a e.py:1 | b e.py:2 | c e.py:3"
    assert not is_idle(dumps.thread(deep, main=False, name="Thread-2", active=False))


def test_a_main_thread_that_waits_for_its_own_worker_thread_hands_over(dumps):
    main = dumps.thread("wait threading.py:355 | get queue.py:171 | resolve_last_batch_result eng/overlap.py:188")
    busy = dumps.thread("replay torch/cuda/graphs.py:88 | forward eng/r.py:1", main=False, name="Thread-4", active=True)
    tqdm = dumps.thread("wait threading.py:359 | run tqdm/_monitor.py:60", main=False, name="Thread-2", active=False)
    thread, found = telling(dumps.dump(0, [busy, tqdm, main]))
    assert thread is busy
    assert found.signature.id == "graph-replay"


def test_a_main_thread_with_something_to_say_keeps_the_word(dumps):
    main = dumps.thread(dumps.COLLECTIVE)
    busy = dumps.thread("crunch a/b.py:1 | telemetry a/c.py:1 | d a/e.py:1", main=False, name="Thread-4", active=True)
    assert telling(dumps.dump(0, [busy, main]))[0] is main


def test_an_idle_engine_is_not_taken_for_its_busy_helper(dumps):
    main = dumps.thread(dumps.ENGINE_IDLE)
    busy = dumps.thread("send a/b.py:1 | pump a/c.py:1", main=False, name="Thread-4", active=True)
    thread, found = telling(dumps.dump("engine_core", [busy, main]))
    assert thread is main
    assert found.signature.kind == "idle"


def test_who_holds_the_gil_inside_the_driver_has_the_word(dumps):
    main = dumps.thread("wait threading.py:355 | join eng/pool.py:3")
    holder = dumps.thread("cuModuleLoadData libcuda.so | load e/x.py:1", main=False, name="Thread-7", owns_gil=True)
    thread, found = telling(dumps.dump(0, [holder, main]))
    assert thread is holder
    assert found.signature.id == "gil-in-cuda"


def side(dumps, text, name="Thread-4", **facts):
    return dumps.thread(text, main=False, name=name, **{"active": True, **facts})


def test_side_threads_are_idle_by_name_or_by_a_short_wait(dumps):
    assert is_idle(side(dumps, "f a.py:1 | g a.py:2", name="tqdm_monitor"))
    assert not is_idle(side(dumps, "f a.py:1 | g a.py:2", name="forward"))
    assert is_idle(side(dumps, "wait threading.py:355 | a e.py:1 | b e.py:2", active=False))
    assert is_idle(side(dumps, "crunch a.py:1", active=False))
    assert not is_idle(side(dumps, "f a.py:1 | g a.py:2", active=False))


def test_who_holds_the_gil_has_the_word_only_where_the_main_thread_may_wait_for_it(dumps):
    """An engine that waits for requests says so, and a main thread that is somewhere of its own keeps the word."""
    holder = side(dumps, "cuModuleLoadData libcuda.so | load e/x.py:1", owns_gil=True)
    for text in (dumps.ENGINE_IDLE, dumps.COLLECTIVE):
        main = dumps.thread(text)
        thread, found = telling(dumps.dump("engine_core", [holder, main]))
        assert thread is main
        assert found


def test_the_thread_that_works_is_chosen_by_what_is_known_then_by_activity_then_by_depth(dumps):
    def chosen(*others, text="wait threading.py:355 | join eng/pool.py:3 | main eng/main.py:1"):
        main = dumps.thread(text)
        thread, _ = telling(dumps.dump(0, [*others, main]))
        return None if thread is main else thread

    known, shallow = side(dumps, dumps.COLLECTIVE, active=False), side(dumps, "f a.py:1 | g a.py:2")
    busy = side(dumps, dumps.COLLECTIVE)
    deep = side(dumps, "f a.py:1 | g a.py:2 | h a.py:3 | i a.py:4")
    resting = side(dumps, "f a.py:1 | g a.py:2 | h a.py:3 | i a.py:4", active=False)
    assert chosen(shallow, known, deep) is known
    assert chosen(known, busy) is busy  # both known, neither holds the GIL
    assert chosen(shallow, deep) is deep
    assert chosen(shallow, resting) is shallow
    assert chosen(resting) is None  # nobody works
    assert chosen(side(dumps, "f a.py:1 | g a.py:2 | h a.py:3", name="tqdm_monitor")) is None
    assert chosen() is None
    assert chosen(deep, text=dumps.ELSEWHERE) is None  # the main thread waits for nobody


def test_native_frames_do_not_split_classes_where_there_are_python_frames(dumps):
    a, b = (f"{leaf} | step eng/runner.py:9 | loop eng/main.py:3" for leaf in ("f libx.so", "g liby.so"))
    assert len(merge([dumps.ranks({0: a, 1: b})]).classes) == 1
    assert len(merge([dumps.ranks({0: "f libx.so | main libc.so", 1: "g liby.so | main libc.so"})]).classes) == 2


def test_places(dumps):
    assert place(Frame("ns::cuCtxSynchronize", "", None, "/usr/lib/libcuda.so.1")).endswith("(libcuda.so.1)")
    assert place(Frame("step", "/venv/eng/runner.py", 7)) == "step (eng/runner.py)"


def test_thread_numbers_do_not_split_classes(dumps):
    def rank(number, name):
        main = dumps.thread("wait threading.py:355 | get queue.py:171 | resolve eng/overlap.py:188")
        busy = dumps.thread("replay torch/cuda/graphs.py:88 | f eng/r.py:1", main=False, name=name, active=True)
        return dumps.dump(number, [busy, main])

    assert len(merge([[rank(0, "Thread-4 (forward)"), rank(1, "Thread-11 (forward)")]]).classes) == 1
    assert len(merge([[rank(0, "Thread-4 (forward)"), rank(1, "Thread-4 (reader)")]]).classes) == 2


# --- recorded and reported stacks


def recorded(name):
    return merge([read_dumps((STACKS / name).read_text())])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "recorded_vllm_cpu_tree.txt",
            [("api", 1, "idle"), ("engine_core", 1, "idle"), ("worker", 2, "idle")],
        ),
        ("recorded_vllm_cpu_idle_native.txt", [("engine_core", 1, "idle"), ("worker", 2, "idle")]),
        ("recorded_sglang_cpu_idle.txt", [("detokenizer", 1, "idle"), ("scheduler", 2, "idle")]),
        ("recorded_vllm_filelock.txt", [("worker", 1, "cause")]),
        ("recorded_vllm_triton_warmup.txt", [("worker", 1, "cause")]),
        ("sglang_decode_cudagraph_replay_thread.txt", None),
        ("sglang_pp2_tp1_native_gloo_waitrecv.txt", [("scheduler", 1, "waits")]),
        ("sglang_tp0_eagle_tree_sampling.txt", [("scheduler", 1, "waits")]),
        ("vllm_dp_rank_waiting_in_dp_allreduce.txt", [("engine_core", 1, "waits")]),
        ("vllm_enginecore_startup_sampler_warmup.txt", [("engine_core", 1, "cause")]),
        ("vllm_worker_tp1_idle_healthy.txt", [("worker", 1, "idle")]),
        ("sglang_dp1_tp3_eagle_draft.txt", [("scheduler", 1, "other")]),
    ],
)
def test_stacks_of_real_engines_merge_to_what_they_show(name, expected):
    merged = recorded(name)
    if expected is None:
        assert [c.signature for c in merged.classes] == ["graph-replay"]
    else:
        assert [(c.role, len(c.ranks), c.kind) for c in merged.classes] == expected


def test_rounds_of_an_idle_server_are_one_class(dumps):
    """TP0 was seen in the broadcast, TP1 also in its idle checks: one loop."""
    merged = merge(dumps.rounds("idle"))
    (ranks,) = [c for c in merged.classes if c.role == "scheduler"]
    assert (ranks.ranks, ranks.kind, ranks.moving) == (("TP0", "TP1"), "idle", True)


def test_the_steps_of_an_idle_loop_are_one_place(dumps):
    loop = "event_loop_overlap sglang/srt/managers/scheduler.py:1 | run eng/x.py:1"
    asks = f"broadcast_pyobj a/common.py:1 | recv_requests a/s.py:1 | {loop}"
    asks = f"broadcast torch/distributed/distributed_c10d.py:1 | {asks}"
    checks = f"_check_req_pool a/checker.py:1 | on_idle a/checker.py:2 | {loop}"
    (only,) = merge([dumps.ranks({0: asks, 1: checks})]).classes
    assert only.kind == "idle"


def test_rounds_of_a_hung_start(dumps):
    merged = merge(dumps.rounds("init_hang"))
    found = {c.ranks: (c.kind, c.signature) for c in merged.classes}
    assert found[("TP1",)] == ("cause", "stopped")
    assert found[("TP0",)] == ("waits", "load-barrier")
    assert found[("api",)] == ("waits", "sglang-front-end-waits")
    assert merged.moving == ()


def test_ranks_that_only_the_log_knows(dumps):
    members = [
        dumps.dump("worker", dumps.COLLECTIVE, pid=71),
        dumps.dump("other", dumps.COLLECTIVE, pid=72),
        dumps.dump("api", dumps.ELSEWHERE, pid=73),
        dumps.dump(3, dumps.ELSEWHERE, pid=74),
    ]
    known = {71: Rank(tp=0), 72: Rank(tp=1), 73: Rank(tp=2), 74: Rank(tp=9)}
    merged = merge(relabel([members], known))
    assert [(m.label, m.role) for m in merged.members] == [
        ("TP0", "worker"), ("TP1", "worker"), ("TP3", "worker"), ("api", "api"),
    ]  # fmt: skip


# --- text


@pytest.mark.parametrize("number", [8, 512])
def test_the_text_is_at_most_sixty_lines(dumps, number):
    deep = " | ".join(f"layer{n} eng/model_{n}.py:{n}" for n in range(60))
    odd = {n: f"f{n} eng/odd.py:{n} | {deep}" for n in range(0, number, 7)}
    members = dumps.ranks({n: odd.get(n, f"{dumps.COLLECTIVE} | {deep}") for n in range(number)})
    members += [dumps.dump("api", deep), dumps.dump("engine_core", deep)]
    text = merge([members]).text()
    assert len(text.splitlines()) <= 60
    assert "api" in text
    assert "TP1" in text


def test_a_small_text_has_everything(dumps):
    text = merge([dumps.same(8, dumps.COLLECTIVE, r3=dumps.BATON)]).text()
    assert "7x TP0-2,4-7  waits  waits in a collective [c10d-collective]" in text
    assert "TP3  CAUSE  waits for the torch extension lock [torch-extension-lock] wait (utils/file_baton.py)" in text
    assert "[TP0-2,4-7] loop (eng/main.py:3)" in text
    assert "distributed/distributed_c10d.py:3252)" in text


def test_rounds_tell_frozen_from_moving_in_the_text(dumps):
    frozen = merge([dumps.ranks({0: dumps.ELSEWHERE}, pid=5), dumps.ranks({0: dumps.ELSEWHERE}, pid=5)])
    assert "frozen" in frozen.text()
    assert "frozen" not in merge([dumps.ranks({0: dumps.ELSEWHERE})]).text()


def test_the_prefix_tree_parts_where_the_ranks_part(dumps):
    lines = (
        merge([dumps.ranks({0: "a x.py:1 | c x.py:3 | d x.py:4", 1: "b x.py:2 | c x.py:9 | d x.py:4"})])
        .text()
        .splitlines()
    )
    tree = lines[lines.index("stacks of worker (root first; ranks are named where they part):") + 1 :]
    assert tree == ["  d (x.py:4)", "  c (x.py:3|9)", "    [TP0] a (x.py:1)", "    [TP1] b (x.py:2)"]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["TP0", "TP1", "TP2"], "TP0-2"),
        (["TP7", "TP0", "TP2"], "TP0,2,7"),
        (["TP9", "TP10", "TP11"], "TP9-11"),
        (["api", "TP3"], "api, TP3"),
        ([f"DP{d} TP{t}" for d in range(64) for t in range(8)], "DP0-63 TP0-7"),
        (["DP0 TP0", "DP0 TP1", "DP1 TP0"], "DP0 TP0-1, DP1 TP0"),
        ([f"DP0 PP{p} TP{t}" for p in range(2) for t in range(2)], "DP0 PP0 TP0-1, DP0 PP1 TP0-1"),
        ([], ""),
    ],
)
def test_ranks_as_text(labels, expected):
    assert format_ranks(labels) == expected


def test_labels_sort_by_number():
    assert sorted(["TP10", "TP9", "TP0"], key=label_order) == ["TP0", "TP9", "TP10"]


def test_many_ranks_merge_quickly(dumps):
    """64 ranks with 60 frames and 20 threads: well under a second (141 ms for five times the threads was measured)."""
    import time

    deep = " | ".join(f"layer{n} eng/model_{n}.py:{n}" for n in range(60))
    side = [dumps.thread(f"wait threading.py:1 | {deep}", main=False, name=f"Thread-{n}") for n in range(20)]
    members = [dumps.dump(n, [*side, dumps.thread(f"{dumps.COLLECTIVE} | {deep}")]) for n in range(64)]
    began = time.process_time()
    merge([members]).text()
    assert time.process_time() - began < 5.0


HANDLER = (
    "do_GET app/main.py:5 | handle_one_request http/server.py:424 | handle http/server.py:436 | "
    "__init__ python3.11/socketserver.py:755 | process_request_thread python3.11/socketserver.py:691"
)
ACCEPTS = "select python3.11/selectors.py:415 | serve_forever python3.11/socketserver.py:233 | main app/main.py:30"
LOOPS = (
    "select selectors.py:468 | _run_once asyncio/base_events.py:1898 | run_forever asyncio/base_events.py:607 | "
    "run uvicorn/server.py:65 | main app/main.py:30"
)
ENDPOINT = "read_items app/main.py:5 | run anyio/_backends/_asyncio.py:976"


@pytest.mark.parametrize(("main", "handler"), [(ACCEPTS, HANDLER), (LOOPS, ENDPOINT)])
def test_the_thread_of_a_stuck_request_speaks_for_a_server_that_accepts_more(dumps, main, handler):
    main = dumps.thread(main, active=False)
    stuck = side(dumps, handler, name="AnyIO worker thread", active=False)
    between = (
        side(dumps, f"readinto socket.py:706 | {HANDLER.partition(' | ')[2]}", active=False),
        side(dumps, "get queue.py:171 | run anyio/_backends/_asyncio.py:967", active=False),
        side(
            dumps,
            "poll app/metrics.py:3 | run concurrent/futures/thread.py:58 | _worker concurrent/futures/thread.py:83",
        ),
    )
    assert telling(dumps.dump("other", [main, *between, stuck]))[0] is stuck
    assert telling(dumps.dump("other", [main, *between]))[0] is main, "nobody asks"
    assert telling(dumps.dump("api", [main, stuck]))[0] is main, "an engine's front end: its ranks say more"
    elsewhere = dumps.thread(dumps.ELSEWHERE)
    assert telling(dumps.dump("other", [elsewhere, stuck]))[0] is elsewhere


@pytest.mark.parametrize(
    "main",
    [
        "sweep app/main.py:9 | service_actions app/main.py:40 | serve_forever python3.11/socketserver.py:240",
        "ask app/link.py:7 | serve_forever app/link.py:3 | main app/main.py:30",
        "accept python3.11/socket.py:294 | get_request python3.11/socketserver.py:502 | main app/main.py:30",
    ],
)
def test_a_main_thread_that_is_in_no_loop_of_a_server_keeps_the_word(dumps, main):
    main = dumps.thread(main, active=False)
    assert telling(dumps.dump("other", [main, side(dumps, HANDLER, active=False)]))[0] is main


def test_a_thread_that_was_not_made_for_a_request_is_none(dumps):
    main = dumps.thread(ACCEPTS, active=False)
    other = side(dumps, f"{ENDPOINT} | serve app/pool.py:3 | spawned app/pool.py:1", active=False)
    assert telling(dumps.dump("other", [main, other]))[0] is main


def test_of_several_requests_one_that_is_known_speaks(dumps):
    main = dumps.thread(ACCEPTS, active=False)
    known = side(dumps, f"{dumps.BATON} | {HANDLER}", active=False)
    thread, found = telling(dumps.dump("other", [main, side(dumps, HANDLER), known]))
    assert thread is known
    assert found.signature.id == "torch-extension-lock"
