"""What is judged from which evidence, and how it is said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpuserve.diagnose import ras
from pytest_gpuserve.diagnose.evidence import Departure, Evidence, LockFact, LogFact, Memory, Progress, Witness
from pytest_gpuserve.diagnose.model import Judgement
from pytest_gpuserve.diagnose.parse import read_dumps
from pytest_gpuserve.diagnose.verdict import judge
from pytest_gpuserve.engines.base import Rank
from pytest_gpuserve.gpu import Gpu
from pytest_gpuserve.phases.reader import RankPhase
from pytest_gpuserve.report.blame import Witnesses, decide

DATA = Path(__file__).parent.parent / "data"
HUNG = Progress("hung", still=41.0, window=30.0, last="log")
KIMI = Memory(resident=33 * 10**9, virtual=425 * 10**9, limit=449 * 10**9, oom_kills=0)


def at(phase: str, *labels: str) -> dict[str, RankPhase]:
    return {label: RankPhase(phase, 0.0) for label in labels}  # type: ignore[arg-type]


def hung(*rounds, number: int = 0, **more) -> Judgement:
    """Judge rounds of which the watcher says that nothing moved."""
    labels = tuple(f"TP{n}" for n in range(number or len([d for d in rounds[0] if d.role.rank])))
    values = {"reason": "no_progress", "progress": HUNG, "expected": labels, "tp": len(labels), **more}
    return judge(Evidence(rounds=rounds, **values))


# --- the rank that others wait for


def test_the_sentence_of_the_tool(dumps):
    """Ranks wait in a collective, one for a lock whose writer is gone: rank, lock, advice, what it is not."""
    path = "/home/ci/.cache/torch_extensions/py312_cu128/ext/lock"
    found = hung(
        dumps.same(8, dumps.COLLECTIVE, r3=dumps.BATON),
        phases=at("cuda_graph", *(f"TP{n}" for n in range(8))),
        locks=(LockFact(path, ("TP3",), holder=812, holder_alive=False, kind="file"),),
        memory=KIMI,
        axes={"spec_decode": "eagle3", "cuda_graph": "on"},
    )
    assert (found.verdict, found.culprits, found.phase) == ("hang", ("TP3",), "cuda_graph")
    assert found.text == (
        "hang in cuda_graph after 41 s without progress: TP0-2,4-7 wait in a collective (all_reduce at "
        "distributed_c10d.py:3252); TP3 waits for the torch extension lock "
        f"{path}, which is stale: its writer (pid 812) is gone (wait at file_baton.py:50). Remove the lock. "
        "Known: pytorch/pytorch#189245, fixed in torch 2.14. Not out of memory (33 of 449 GB resident, no oom_kill; "
        "425 GB are address space). EAGLE-3 is not involved: no draft frame in any stack."
    )
    assert ("out of memory", "33 of 449 GB resident, no oom_kill") in found.ruled_out
    assert ("EAGLE-3", "no draft frame in any stack") in found.ruled_out
    assert ("slow", "nothing moved for 41 s") in found.ruled_out
    assert found.confidence >= 0.9
    assert any("TP3 waits for the torch extension lock" in claim for claim, _ in found.facts)


def test_the_json_of_a_judgement(dumps):
    found = hung(dumps.same(4, dumps.COLLECTIVE, r3=dumps.BATON), phases=at("warmup", "TP0")).to_json()
    assert found["schema"] == "gpuserve.verdict/1"
    assert found["verdict"] == "hang"
    assert found["culprits"] == ["TP3"]
    assert found["missing"] == []
    assert found["phase"] == "warmup"
    classes = {tuple(c["ranks"]): c for c in found["classes"]}
    assert classes[("TP3",)]["kind"] == "cause"
    assert classes[("TP3",)]["signature"] == "torch-extension-lock"
    assert set(classes[("TP3",)]) == {"role", "group", "ranks", "kind", "path", "signature", "moving"}
    assert json.loads(json.dumps(found)) == found


def test_the_odd_one_out_of_unknown_code(dumps):
    found = hung(dumps.same(4, "turn eng/wheel.py:3 | step eng/r.py:1", r2=dumps.ELSEWHERE))
    assert (found.verdict, found.culprits) == ("hang", ("TP2",))


def test_two_odd_ranks_of_eight(dumps):
    found = hung(dumps.same(8, dumps.COLLECTIVE, r2=dumps.ELSEWHERE, r5="f eng/y.py:2 | g eng/z.py:3"))
    assert found.culprits == ("TP2", "TP5")


def test_a_waiting_rank_is_a_victim(dumps):
    """The lone rank in the collective waits for those that are elsewhere: no rank can be named."""
    found = hung(dumps.same(4, dumps.ELSEWHERE, r1=dumps.COLLECTIVE))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "desync" in found.text


def test_a_lone_waiter_beside_two_other_places_names_nobody(dumps):
    odd = {"r0": dumps.COLLECTIVE, "r1": "f eng/y.py:2 | g eng/z.py:3"}
    assert hung(dumps.same(8, dumps.ELSEWHERE, **odd)).culprits == ()


def test_half_and_half_names_those_who_do_not_wait(dumps):
    odd = {"r2": dumps.ELSEWHERE, "r3": dumps.ELSEWHERE}
    assert hung(dumps.same(4, dumps.COLLECTIVE, **odd)).culprits == ("TP2", "TP3")


def test_three_different_places_name_nobody(dumps):
    texts = {0: "a eng/x.py:1 | s eng/r.py:1", 1: "b eng/y.py:1 | s eng/r.py:1", 2: "c eng/z.py:1 | s eng/r.py:1"}
    found = hung(dumps.ranks(texts))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "no majority" in found.text


def test_mismatched_collectives_are_a_desync(dumps):
    other = dumps.COLLECTIVE.replace("all_reduce", "broadcast").replace("step eng/runner.py:7", "sync eng/sync.py:4")
    found = hung(dumps.same(4, dumps.COLLECTIVE, r1=other))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "desync" in found.text
    assert "may be the victim" in found.text


def test_the_same_primitive_from_different_callers_is_a_desync_in_any_engine(dumps):
    one, other = "pull eng/wire.py:5 | step eng/r.py:1", "pull eng/wire.py:5 | poll_work eng/loop.py:9"
    members = [dumps.dump(n, other if n == 1 else one, wchan="unix_stream_read_generic") for n in range(4)]
    found = hung(members)
    assert found.culprits == ()
    assert "desync" in found.text


def test_an_idle_worker_is_never_the_culprit(dumps):
    found = hung(dumps.same(4, dumps.COLLECTIVE, r1=dumps.IDLE_WORKER))
    assert found.culprits == ()
    assert hung(dumps.same(4, dumps.IDLE_WORKER, r1=dumps.ELSEWHERE)).culprits == ("TP1",)


def test_a_cause_far_up_the_stack_of_a_waiting_rank_accuses_nobody(dumps):
    inside = "all_reduce torch/distributed/distributed_c10d.py:1 | load_weights eng/m.py:1 | load_model eng/m.py:2"
    assert hung(dumps.same(4, inside)).culprits == ()


def test_a_compile_on_one_rank_while_nothing_moves_is_a_hang_of_that_rank(dumps):
    compiling = "compile triton/compiler/compiler.py:324 | run triton/runtime/jit.py:720 | step eng/r.py:1"
    found = hung(dumps.same(4, dumps.COLLECTIVE, r0=compiling))
    assert (found.verdict, found.culprits) == ("hang", ("TP0",))


# --- dead, missing, stopped


def test_a_dead_rank_outranks_every_stack(dumps):
    members = dumps.same(4, dumps.COLLECTIVE, r3=dumps.BATON)
    members[1] = dumps.dump(1, None, state="Z", exit=-9)
    found = hung(members)
    assert (found.verdict, found.culprits) == ("crash", ("TP1",))
    assert "TP1 is gone (killed by SIGKILL)" in found.text


def test_a_missing_rank_outranks_every_stack(dumps):
    members = dumps.same(4, dumps.COLLECTIVE, r3=dumps.BATON)
    del members[1]
    found = hung(members, number=4)
    assert (found.verdict, found.culprits, found.missing) == ("crash", ("TP1",), ("TP1",))
    assert "still wait for it" in found.text


def test_ranks_without_their_titles_yet_are_not_missing(dumps):
    members = [dumps.dump("other", "_call_with_frames_removed <frozen importlib._bootstrap>:488") for _ in range(2)]
    found = hung([dumps.dump("api", "recv multiprocessing/connection.py:1 | f eng/x.py:1"), *members], number=2)
    assert found.missing == ()
    assert found.verdict != "crash"


def test_a_rank_that_has_printed_and_is_gone_is_missing_though_somebody_is_nameless(dumps):
    members = [*dumps.same(1, dumps.COLLECTIVE), dumps.dump("other", "f eng/x.py:1")]
    found = hung(members, number=2, phases=at("weight_load", "TP0", "TP1"))
    assert found.missing == ("TP1",)


@pytest.mark.parametrize("others", [1, 2])
def test_a_rank_without_its_title_is_no_part_of_every_rank(dumps, others):
    """It stands in its first import while its peers wait for it: "every rank has entered" would be false."""
    members = [dumps.dump(n, dumps.COLLECTIVE) for n in (0, 2, 3)]
    members += [dumps.dump("other", "f <frozen importlib._bootstrap>:488", pid=77 + n) for n in range(others)]
    found = hung(members, number=4)
    assert (found.verdict, found.culprits, found.missing) == ("hang", (), ())
    assert not re.search(r"(?i)every rank has|all \d ranks", found.text + str((found.ruled_out, found.facts)))
    sure = "pid 77 is probably it" if others == 1 else "pid 77, 78 may be it"
    assert f"this is not every rank: TP1 has not told its name yet ({sure})" in found.text
    nameless = [dumps.dump("other", "f <frozen importlib._bootstrap>:488") for _ in range(3)]
    lone = hung([dumps.dump(0, dumps.ELSEWHERE), *nameless], number=4, tp=4)
    assert (lone.culprits, lone.text.count("have not told their names yet")) == ((), 1)
    assert "TP1-3 have not" in lone.text
    whole = hung(dumps.same(4, dumps.COLLECTIVE))
    assert "every rank has entered the collective" in whole.text
    assert ("a dead rank", "all 4 ranks are alive") in whole.ruled_out


def test_workers_without_a_rank_in_their_titles_are_not_missing(dumps):
    """vLLM sets the rank's title after its device is up; the log has named all ranks before."""
    members = [dumps.dump("worker", dumps.COLLECTIVE) for _ in range(4)]
    found = hung(members, number=4, phases=at("distributed_init", "TP0", "TP1", "TP2", "TP3"))
    assert found.missing == ()
    assert found.verdict == "hang"


def test_an_exit_code_says_how_a_rank_ended(dumps):
    members = dumps.same(4, dumps.COLLECTIVE)[:3]
    assert "exit code 1" in hung(members, number=4, exits={"TP3": 1}).text


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ({"TP0": 1, "TP1": 1, "TP2": -9}, ("TP2",)),
        ({"TP0": -6, "TP1": -11, "TP2": -6}, ("TP1",)),
        ({"TP0": -15, "TP1": 1, "TP2": -15}, ("TP1",)),
        ({"TP0": -6, "TP1": 1, "TP2": -6}, ()),
        ({"TP0": 1, "TP1": 1, "TP2": 1}, ()),
        ({"TP0": -9, "TP1": -9, "TP2": -9}, ()),
    ],
)
def test_of_several_that_ended_the_first_to_die_is_named(dumps, codes, first):
    found = hung([dumps.dump("api", "f x.py:1")], number=3, exits=codes)
    assert (found.verdict, found.culprits) == ("crash", first)
    assert all(label in found.text for label in codes)


def test_two_that_were_killed_while_others_live_are_both_named(dumps):
    found = hung(dumps.same(2, dumps.COLLECTIVE), number=4, exits={"TP2": -9, "TP3": -9})
    assert (found.verdict, found.culprits) == ("crash", ("TP2", "TP3"))


def test_the_server_that_ended_is_a_crash_whatever_the_code():
    found = judge(Evidence(server_exit=0))
    assert found.verdict == "crash"
    assert "exit code 0" in found.text
    assert judge(Evidence(server_exit=-9)).text.startswith("crash: the server is gone (killed by SIGKILL)")


def test_killed_for_memory_is_oom_only_when_the_kernel_says_so(dumps):
    members = dumps.same(4, dumps.COLLECTIVE)[:3]
    killed = hung(members, number=4, exits={"TP3": -9}, memory=Memory(resident=10**9, limit=2 * 10**9, oom_kills=1))
    assert (killed.verdict, killed.culprits) == ("oom", ("TP3",))
    somebody = hung(members, number=4, exits={"TP3": -9}, memory=Memory(resident=10**9, limit=2 * 10**9, oom_kills=0))
    assert somebody.verdict == "crash"
    assert "SIGKILL came from outside" in somebody.text


def test_the_first_error_in_the_log_beats_the_exit_code(dumps):
    fact = LogFact("no kernel image is available for sm_120", "log line 88", "unsupported_arch", "TP1")
    found = hung(dumps.same(2, dumps.COLLECTIVE)[:1], number=2, exits={"TP1": 1}, log=(fact,))
    assert (found.verdict, found.culprits) == ("unsupported_arch", ("TP1",))
    assert "TP1: no kernel image is available for sm_120" in found.text
    assert ("no kernel image is available for sm_120", "log line 88") in found.facts


def test_an_error_of_one_rank_hidden_by_the_others_wait(dumps):
    """sgl-project/sglang#11275: the exception waits behind the collective at the end of the capture."""
    fact = LogFact("RuntimeError: cudaErrorInvalidValue", "log line 7", "crash", "TP2")
    found = hung(dumps.same(4, dumps.COLLECTIVE), log=(fact,))
    assert (found.verdict, found.culprits) == ("crash", ("TP2",))


def test_an_error_that_a_server_outlived_is_a_fact_and_no_verdict(dumps):
    """It answered a request with 400, printed the traceback, served on, and hangs: every process lives."""
    fact = LogFact("ValueError: max_tokens must be at least 1, got 0", "server.log, line 31", "config")
    alone = [dumps.dump("worker", dumps.ELSEWHERE)]
    found = hung(alone, expected=(), log=(fact,), ready=True, answers=False)
    assert found.verdict == "hang"
    assert (fact.claim, fact.witness) in found.facts
    assert hung(alone, expected=(), log=(fact,), ready=False).verdict == "config"
    died = (Departure("engine_core", 9, 1.0, 1),)
    assert hung(alone, expected=(), log=(fact,), ready=True, departures=died).verdict == "config"


def test_a_stopped_rank_outranks_an_error_in_the_log(dumps):
    members = [dumps.dump(n, dumps.COLLECTIVE, state="T" if n == 1 else "S") for n in range(4)]
    found = hung(members, log=(LogFact("RuntimeError: retried", "log line 7", "crash", "TP2"),))
    assert (found.verdict, found.culprits) == ("hang", ("TP1",))


def test_a_stopped_rank_outranks_the_stacks_also_at_tp_2(dumps):
    members = [dumps.dump(0, dumps.COLLECTIVE), dumps.dump(1, dumps.ELSEWHERE, state="T", pid=77)]
    found = hung(members)
    assert (found.verdict, found.culprits) == ("hang", ("TP1",))
    assert "SIGCONT to pid 77" in found.text
    assert found.confidence > 0.9


def test_a_stopped_rank_is_a_hang_though_others_still_work(dumps):
    busy = dumps.dump("compiler", None, title="ptxas", cpu_seconds=1.0)
    found = judge(Evidence(rounds=[[dumps.dump(0, dumps.COLLECTIVE), dumps.dump(1, dumps.ELSEWHERE, state="T"), busy]]))
    assert (found.verdict, found.culprits) == ("hang", ("TP1",))


def test_a_stopped_front_end_is_named(dumps):
    members = [*dumps.same(2, dumps.IDLE_WORKER), dumps.dump("api", "f eng/x.py:1", state="T")]
    assert hung(members).culprits == ("api",)


def test_a_server_that_is_stopped_as_a_whole_was_paused(dumps):
    members = [dumps.dump(n, dumps.COLLECTIVE, state="T") for n in range(4)]
    found = hung(members)
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "every process" in found.text


def test_the_recorded_start_with_a_stopped_rank(dumps):
    found = judge(Evidence(reason="no_progress", rounds=dumps.rounds("init_hang"), expected=("TP0", "TP1"), tp=2))
    assert (found.verdict, found.culprits) == ("hang", ("TP1",))
    assert "TP0 waits in the barrier after loading weights" in found.text


# --- two ranks


def test_two_ranks_have_no_majority(dumps):
    found = hung(dumps.ranks({0: dumps.COLLECTIVE, 1: dumps.ELSEWHERE}))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "undecided" in found.text


def test_two_ranks_in_different_collectives_are_a_desync(dumps):
    found = hung(dumps.ranks({0: dumps.COLLECTIVE, 1: dumps.IDLE_WORKER}))
    assert "desync" in found.text


def test_two_ranks_and_a_known_cause(dumps):
    assert hung(dumps.ranks({0: dumps.COLLECTIVE, 1: dumps.BATON})).culprits == ("TP1",)


@pytest.mark.parametrize("wchan", ["do_wait", "folio_wait_bit_common", "rpc_wait_bit_killable"])
def test_two_ranks_and_the_kernel_as_witness(dumps, wchan):
    members = [
        dumps.dump(0, "turn eng/wheel.py:3 | s eng/r.py:1", wchan="unix_stream_read_generic"),
        dumps.dump(1, dumps.ELSEWHERE, wchan=wchan),
    ]
    assert hung(members).culprits == ("TP1",)
    members[1] = dumps.dump(1, dumps.ELSEWHERE, wchan="pipe_read")
    assert hung(members).culprits == (), "a pipe may lead to a peer"


def test_nccl_ras_decides_two_ranks(dumps):
    """Real answers of NCCL 2.28.9 on a server whose rank 1 (pid 869) was stopped while serving."""
    report = ras.parse((DATA / "witnesses" / "ras_hung.txt").read_text())
    seen = ras.witnesses(report, None, {868: "TP0", 869: "TP1"})
    found = judge(Evidence(reason="request_timeout", expected=("TP0", "TP1"), tp=2, witnesses=seen, requests=1))
    assert (found.verdict, found.culprits) == ("hang", ("TP1",))
    assert any(source == "NCCL RAS" for _, source in found.facts)
    stacks = dumps.ranks({0: dumps.COLLECTIVE, 1: dumps.ELSEWHERE})
    assert hung(stacks, witnesses=seen).culprits == ("TP1",)
    assert hung(stacks).culprits == ()


def gpus(*readings: tuple[int, float]) -> tuple[Gpu, ...]:
    return tuple(Gpu(n, utilisation=u, power=w, memory_total=140 << 30) for n, (u, w) in enumerate(readings))


def test_the_idle_gpu_decides_two_ranks(dumps):
    stacks = dumps.ranks({0: dumps.COLLECTIVE, 1: dumps.ELSEWHERE})
    found = hung(stacks, gpus=gpus((100, 150.0), (0, 70.0)))
    assert found.culprits == ("TP1",)
    assert hung(stacks, gpus=gpus((100, 150.0), (100, 150.0))).culprits == ()
    assert hung(stacks, gpus=gpus((60, 150.0), (0, 70.0))).culprits == (), "60 % is no spin"


def test_witnesses_that_contradict_the_stacks_lower_the_confidence(dumps):
    stacks = dumps.same(4, dumps.COLLECTIVE, r2=dumps.ELSEWHERE)
    alone = hung(stacks)
    agree = hung(stacks, witnesses=(Witness("NCCL RAS", "TP2 lags", ("TP2",)),))
    against = hung(stacks, witnesses=(Witness("NCCL RAS", "TP1 lags", ("TP1",)),))
    assert against.confidence < alone.confidence < agree.confidence
    assert agree.culprits == ("TP2",)


def test_a_witness_that_accuses_every_rank_accuses_none(dumps):
    everyone = (Witness("NCCL RAS", "no data", ("TP0", "TP1")),)
    assert hung(dumps.ranks({0: dumps.COLLECTIVE, 1: dumps.COLLECTIVE}), witnesses=everyone).culprits == ()


# --- all alike


@pytest.mark.parametrize(
    ("text", "layer"),
    [
        ("tree_speculative_sampling_target_only sgl_kernel/speculative.py:36 | s eng/r.py:1", "GPU"),
        ("ncclCommInitRank e/pynccl_wrapper.py:3 | __init__ e/pynccl.py:1", "NCCL"),
        ("_create_c10d_store torch/distributed/rendezvous.py:1 | f e/x.py:1", "rendezvous"),
        ("synchronize torch/cuda/streams.py:5 | s eng/r.py:1", "GPU"),
    ],
)
def test_a_symmetric_hang_names_the_layer_and_no_rank(dumps, text, layer):
    found = hung(dumps.same(8, text))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert f"no rank stands out, so look at {'the ' if layer != 'NCCL' else ''}{layer}" in found.text


def test_a_symmetric_hang_of_unknown_code_names_what_the_kernel_says(dumps):
    members = [dumps.dump(n, dumps.ELSEWHERE, wchan="futex_do_wait") for n in range(4)]
    found = hung(members)
    assert found.culprits == ()
    assert "each one waits for another thread or process (futex)" in found.text


def test_a_lost_message_is_not_a_rank(dumps):
    members = [dumps.dump("engine_core", dumps.ENGINE_WAITS), *dumps.same(4, dumps.IDLE_WORKER)]
    found = hung(members, requests=1)
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "was lost" in found.text


def test_nothing_is_lost_before_anything_was_asked(dumps):
    """A front end that is deaf before it is ready: the completion that we try is not in flight."""
    members = [dumps.dump("engine_core", dumps.ENGINE_IDLE), *dumps.same(4, dumps.IDLE_WORKER)]
    for asked in ({"answers": False, "ready": False}, {"requests": 0}):
        found = hung(members, **asked)
        assert found.verdict == "hang"
        assert "was lost" not in found.text
        assert "look at the front end" in found.text
    assert "was lost" in hung(members, answers=False, ready=True).text


def test_no_time_at_all_is_no_stillness(dumps):
    seen = Progress("suspect", still=0.2, window=30.0)
    found = hung(dumps.same(4, dumps.IDLE_WORKER), reason="request_timeout", requests=1, progress=seen, after=12.0)
    assert "without progress" not in found.text
    assert "nothing moved" not in str((found.ruled_out, found.facts))
    assert found.text.startswith("hang after 12 s")


def test_symmetric_spinning_gpus(dumps):
    found = hung(dumps.same(2, dumps.ELSEWHERE), gpus=gpus((100, 120.0), (100, 118.0)))
    assert found.culprits == ()
    assert "a kernel spins" in found.text


def test_one_rank_alone(dumps):
    found = hung([dumps.dump("engine_core", "f eng/x.py:1 | g eng/y.py:2")], expected=())
    assert (found.verdict, found.culprits) == ("hang", ("engine_core",))


def test_groups_are_judged_apart(dumps):
    members = [
        dumps.dump(Rank(tp=tp, pp=pp), dumps.COLLECTIVE if (pp, tp) != (1, 2) else dumps.ELSEWHERE)
        for pp in range(2)
        for tp in range(4)
    ]
    found = judge(Evidence(reason="no_progress", progress=HUNG, rounds=[members]))
    assert found.culprits == ("PP1 TP2",)


# --- roles


def test_ranks_that_are_idle_because_the_engine_core_is_stuck(dumps):
    members = [dumps.dump("engine_core", "advance xg/fsm.py:9 | step e/c.py:1"), *dumps.same(2, dumps.IDLE_WORKER)]
    found = hung(members)
    assert found.culprits == ("engine_core",)


def test_a_detokenizer_that_waits_for_input_is_not_stuck(dumps):
    idle = dumps.dump("detokenizer", "pull eng/wire.py:5 | run eng/d.py:1", wchan="unix_stream_read_generic")
    assert hung([idle, *dumps.same(2, dumps.IDLE_WORKER)], requests=1).culprits == ()
    locked = dumps.dump("detokenizer", "pull eng/wire.py:5 | run eng/d.py:1", wchan="folio_wait_bit_common")
    assert hung([locked, *dumps.same(2, dumps.IDLE_WORKER)], requests=1).culprits == ("detokenizer",)


def test_an_engine_core_that_waits_is_no_culprit_when_a_rank_is_stuck(dumps):
    members = [dumps.dump("engine_core", dumps.ENGINE_WAITS), *dumps.same(4, dumps.IDLE_WORKER, r2=dumps.ELSEWHERE)]
    assert hung(members).culprits == ("TP2",)


# --- locks


def test_the_holder_of_a_kernel_lock_is_the_culprit_not_who_waits(dumps):
    waiting = [dumps.dump(n, dumps.ELSEWHERE, wchan="locks_lock_inode_wait") for n in (1, 2, 3)]
    holder = dumps.dump(0, dumps.COLLECTIVE)
    lock = LockFact("/c/x.lock", ("TP1", "TP2", "TP3"), holder=9, holder_label="TP0", holder_alive=True, kind="flock")
    found = hung([holder, *waiting], locks=(lock,))
    assert found.culprits == ("TP0",)
    assert "held by TP0" in found.text


def test_a_lock_held_by_a_stranger(dumps):
    lock = LockFact("/c/x.lock", ("TP3",), holder=812, holder_alive=True, holder_title="python train.py", kind="flock")
    found = hung(dumps.same(4, dumps.COLLECTIVE, r3=dumps.BATON), locks=(lock,))
    assert found.culprits == ("TP3",)
    assert "held by pid 812, python train.py" in found.text
    assert "Remove the lock" not in found.text


def test_a_lock_for_which_every_rank_waits_accuses_no_rank(dumps):
    lock = LockFact("/c/lock", tuple(f"TP{n}" for n in range(4)), holder_alive=False, kind="file")
    found = hung(dumps.same(4, dumps.BATON), locks=(lock,))
    assert found.culprits == ()
    assert "Remove the lock." in found.text


# --- slow is not hung


def test_a_compiler_with_cpu_time_is_slow(dumps):
    lock = LockFact("/c/f.lock", ("TP0",), holder=9, holder_label="TP1", holder_alive=True, kind="flock")

    def round_(cpu, taken):
        return [
            dumps.dump(0, dumps.FLASHINFER_LOCK, pid=1),
            dumps.dump(1, dumps.NINJA, pid=2),
            dumps.dump("compiler", None, pid=3, title="/usr/local/cuda/bin/cicc --c++17", cpu_seconds=cpu, taken=taken),
        ]

    found = judge(Evidence(reason="startup_budget", rounds=[round_(5.0, 0.0), round_(6.9, 2.0)], locks=(lock,), tp=2))
    assert (found.verdict, found.culprits) == ("slow", ())
    assert "cicc below the server used CPU" in found.text
    stuck = judge(Evidence(reason="startup_budget", rounds=[round_(5.0, 0.0), round_(5.0, 2.0)], locks=(lock,), tp=2))
    assert stuck.verdict == "hang", "a compiler that uses no CPU proves nothing"


def test_the_recorded_vllm_pair_is_slow_from_its_stacks_alone():
    """vLLM 0.24 on two cold H200: one rank builds FlashInfer, the other waits for its lock, then Triton compiles."""
    for name in ("recorded_vllm_filelock.txt", "recorded_vllm_triton_warmup.txt"):
        stacks = read_dumps((DATA / "stacks" / name).read_text())
        found = judge(Evidence(rounds=[stacks], foreign=True, expected=("TP0", "TP1")))
        assert (found.verdict, found.culprits) == ("slow", ())
        assert "Not dumped: TP1." in found.text


def test_bytes_from_storage_are_slow(dumps):
    loading = "get_tensor safetensors/torch.py:1 | safetensors_weights_iterator e/w.py:1"
    rounds = [
        [dumps.dump(n, loading, pid=n + 1, taken=t, read_bytes=int(t * 28e6)) for n in range(2)] for t in (0.0, 2.0)
    ]
    found = judge(Evidence(reason="startup_budget", rounds=rounds, tp=2))
    assert found.verdict == "slow"
    assert "read 56 MB/s from storage" in found.text


def test_what_the_watcher_saw_moving_is_slow(dumps):
    progress = Progress("moving", still=0.0, moving=("memory of TP1",))
    found = judge(Evidence(reason="startup_budget", rounds=[dumps.same(4, dumps.COLLECTIVE)], progress=progress))
    assert found.verdict == "slow"
    assert "memory of TP1" in found.text


def test_a_spin_is_not_progress(dumps):
    rounds = [
        [
            dumps.dump(n, dumps.ELSEWHERE if n == 1 else dumps.COLLECTIVE, pid=n + 1, taken=t, cpu_seconds=t)
            for n in range(4)
        ]
        for t in (0.0, 2.0)
    ]
    found = hung(*rounds)
    assert (found.verdict, found.culprits) == ("hang", ("TP1",))
    assert "using a whole core" in found.text


# --- healthy


def test_a_server_that_answers_is_not_to_blame(dumps):
    found = judge(
        Evidence(reason="test_timeout", test="t.py::test_x", rounds=[dumps.same(2, dumps.IDLE_WORKER)], answers=True)
    )
    assert found.verdict == "ready"
    assert "t.py::test_x is stuck in its own code" in found.text


def test_idle_and_not_asked_is_ready(dumps):
    members = [dumps.dump("engine_core", dumps.ENGINE_IDLE), *dumps.same(2, dumps.IDLE_WORKER)]
    assert judge(Evidence(reason="test_timeout", rounds=[members], requests=0)).verdict == "ready"
    assert judge(Evidence(rounds=[members])).verdict == "ready"
    assert judge(Evidence(reason="test_timeout", rounds=[members], requests=1)).verdict == "hang"
    assert judge(Evidence(reason="test_timeout", rounds=[members], requests=0, answers=False)).verdict == "hang"


def test_the_recorded_idle_server(dumps):
    assert judge(Evidence(rounds=dumps.rounds("idle"), expected=("TP0", "TP1"), tp=2)).verdict == "ready"
    hang = judge(Evidence(reason="request_timeout", rounds=dumps.rounds("idle"), expected=("TP0", "TP1"), requests=1))
    assert (hang.verdict, hang.culprits) == ("hang", ())


# --- little evidence


def test_no_evidence_is_undecided():
    found = judge(Evidence())
    assert (found.verdict, found.culprits) == ("undecided", ())
    assert found.confidence < 0.5


def test_without_any_stack_gpus_and_counters_decide(dumps):
    """rwlove/home-ops#13342: no ptrace; frozen counters, busy GPU, sleeping threads."""
    member = dumps.dump("engine_core", None, problem="Operation not permitted", wchan="futex_do_wait")
    found = hung([member], expected=(), gpus=gpus((100, 90.0)))
    assert found.verdict == "hang"
    assert "a kernel spins" in found.text
    assert judge(Evidence(rounds=[[member]])).verdict == "undecided"


def test_no_stack_of_one_rank_is_said(dumps):
    members = dumps.same(4, dumps.COLLECTIVE)
    members[2] = dumps.dump(2, None, problem="py-spy: timeout", wchan="x")
    found = hung(members)
    assert "TP2 has no stack (py-spy: timeout)" in found.text


REPORTED = json.loads((DATA / "stacks" / "reported.json").read_text())
ALLOWED = {"hang": {"hang"}, "slow-but-alive": {"slow"}, "ready": {"ready"}}


@pytest.mark.parametrize("slug", REPORTED)
def test_stacks_from_public_reports(slug):
    """Reconstructed stacks of public bug reports, judged alone. One report's watchdog called the hang."""
    case = REPORTED[slug]
    called = (LogFact("watchdog timeout", "log", "stalled"),) if slug == "sglang-triton-jit-one-rank" else ()
    found = judge(Evidence(rounds=[read_dumps(case["stack"])], foreign=True, log=called))
    allowed = set().union(*(ALLOWED.get(v, {v}) for v in case["expected"]))
    assert found.verdict in allowed, found.text


def test_memory_that_is_short_is_said(dumps):
    short = Memory(
        resident=98 * 10**9, virtual=0, limit=100 * 10**9, current=99 * 10**9, oom_kills=0, swapped=5 * 10**9
    )
    found = hung(dumps.same(4, dumps.COLLECTIVE), memory=short)
    assert "Memory is short (98 of 100 GB resident, 5.0 GB swapped)" in found.text
    assert not any(what == "out of memory" for what, _ in found.ruled_out)


def test_a_draft_frame_involves_the_drafter(dumps):
    text = "draft eng/eagle_worker.py:397 | step eng/r.py:1"
    found = hung(dumps.same(4, text), axes={"spec_decode": "eagle3"})
    assert "EAGLE-3 is involved: draft is in the stack of TP0." in found.text
    assert not any(what == "EAGLE-3" for what, _ in found.ruled_out)
    assert "EAGLE-3" not in hung(dumps.same(4, text), axes={"spec_decode": "base"}).text


def test_a_partial_set_of_stacks_does_not_clear_the_drafter(dumps):
    members = dumps.same(4, dumps.COLLECTIVE)
    members[2] = dumps.dump(2, None, problem="x")
    assert "EAGLE-3" not in hung(members, axes={"spec_decode": "eagle3"}).text


def test_gpus_busy_with_no_process_are_said(dumps):
    assert "GPU 1" in hung(dumps.same(2, dumps.COLLECTIVE), gpu_busy=("GPU 1",)).text


def test_the_phase_is_that_of_the_culprit(dumps):
    phases = {**at("cuda_graph", "TP0", "TP1", "TP2"), **at("compile", "TP3")}
    assert hung(dumps.same(4, dumps.COLLECTIVE, r3=dumps.ELSEWHERE), phases=phases).phase == "compile"
    assert hung(dumps.same(4, dumps.COLLECTIVE), phases=phases).phase == "compile", "else the least far"


# --- deadlocks, and too short a time


def lock(path: str, waiter: str, holder: str) -> LockFact:
    return LockFact(path, (waiter,), holder=812, holder_label=holder, holder_alive=True, kind="flock")


def test_a_holder_that_waits_for_the_waiter_is_a_deadlock(dumps):
    stacks = dumps.same(4, dumps.COLLECTIVE, r1=dumps.FLASHINFER_LOCK)
    found = hung(stacks, locks=(lock("/c/a.lock", "TP1", "TP2"),))
    assert (found.verdict, found.culprits) == ("hang", ("TP2",))
    said = "deadlock: TP1 waits for the lock /c/a.lock, which TP2 holds, and TP2 waits in a collective for TP1"
    assert said in found.text
    assert "before the collective" in found.text


def test_a_holder_that_works_or_waits_for_others_is_no_deadlock(dumps):
    works = dumps.same(4, dumps.COLLECTIVE, r1=dumps.FLASHINFER_LOCK, r2=dumps.ELSEWHERE)
    assert "deadlock" not in hung(works, locks=(lock("/c/a.lock", "TP1", "TP2"),)).text
    other = [dumps.dump(Rank(tp=n, pp=1), dumps.FLASHINFER_LOCK if n else dumps.COLLECTIVE) for n in range(2)]
    mine = [dumps.dump(Rank(tp=n, pp=0), dumps.COLLECTIVE) for n in range(2)]
    waiter, holder = other[1].label, mine[0].label
    found = hung(
        [*mine, *other],
        locks=(lock("/c/a.lock", waiter, holder),),
        expected=tuple(d.label for d in (*mine, *other)),
    )
    assert found.culprits == (holder,)
    assert "deadlock" not in found.text, "another group's collective waits for nobody here"


def test_two_locks_taken_crosswise_blame_both(dumps):
    stacks = dumps.same(4, dumps.COLLECTIVE, r1=dumps.FLASHINFER_LOCK, r2=dumps.FLASHINFER_LOCK)
    found = hung(stacks, locks=(lock("/c/a.lock", "TP1", "TP2"), lock("/c/b.lock", "TP2", "TP1")))
    assert found.culprits == ("TP1", "TP2")
    assert "TP1 waits for the lock /c/a.lock, which TP2 holds" in found.text
    assert "TP2 waits for the lock /c/b.lock, which TP1 holds" in found.text
    assert "same order" in found.text


def brief(rounds, after=2.4, moving=("(CPU of TP1)",), reason="test_timeout", **more) -> Judgement:
    progress = Progress("moving", still=0.4, window=30.0, moving=moving)
    return judge(Evidence(reason=reason, after=after, rounds=rounds, progress=progress, tp=4, **more))


def test_too_short_a_time_is_said_and_who_differs(dumps):
    found = brief([dumps.same(4, dumps.COLLECTIVE, r1=dumps.ELSEWHERE)])
    assert (found.verdict, found.culprits) == ("undecided", ())
    assert (
        "2 s are too short to tell slow from hung (only CPU of TP1 moved); TP1 differs from the other ranks"
        in found.text
    )
    pair = brief([dumps.same(2, dumps.COLLECTIVE, r1=dumps.ELSEWHERE)])
    assert (
        "too short to tell slow from hung (only CPU of TP1 moved); the two ranks are in different places" in pair.text
    )
    assert "differ" not in brief([dumps.same(4, dumps.COLLECTIVE)], moving=()).text


def test_a_strong_sign_or_time_enough_is_slow_as_before(dumps):
    stacks = [dumps.same(4, dumps.COLLECTIVE, r1=dumps.ELSEWHERE)]
    assert brief(stacks, moving=("log", "(CPU of TP1)")).verdict == "slow"
    assert brief(stacks, after=31.0).verdict == "slow"
    assert brief(stacks, reason="manual").verdict == "slow"


# --- who went first


def test_the_rank_that_went_while_the_others_were_there_is_the_one(dumps):
    """vLLM 0.32 that loads: the log says "EngineCore failed to start", and of ten processes none is left to be read."""
    fact = LogFact("EngineCore failed to start.", "server.log, line 63", "crash")
    gone = (
        Departure("TP1", 1452, 100.0, -9),
        Departure("TP0", 1451, 109.0, -9),
        Departure("engine_core", 1364, 109.4, 1),
        Departure("api", 1300, 111.0, 1),
    )
    found = judge(Evidence(server_exit=1, departures=gone, expected=("TP0", "TP1"), log=(fact,), reason="exited"))
    assert (found.verdict, found.culprits) == ("crash", ("TP1",))
    assert ("TP1 (pid 1452) was the first to go (killed by SIGKILL); TP0 went 9.0 s later", "watcher") in found.facts


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ([("TP0", 1.0, None), ("TP1", 6.0, 1), ("api", 7.0, 0)], ("TP0",)),  # nobody read its code: still the first
        ([("TP0", 1.0, -9), ("TP1", 1.1, -9), ("api", 1.2, -9)], ()),  # SGLang ends all at once
        ([("TP0", 1.0, 0), ("TP1", 6.0, -9), ("api", 7.0, 0)], ("TP1",)),  # as one that was told to
        ([("TP0", 1.0, -15), ("TP1", 6.0, -11), ("api", 7.0, 0)], ("TP1",)),
        ([("TP0", 6.0, -9), ("api", 7.0, 0)], ()),  # TP1 was never seen
        ([("api", 1.0, -9), ("TP1", 6.0, -9), ("TP0", 9.0, -9)], ()),  # the front end: its ranks followed
    ],
)
def test_who_went_first_is_not_always_to_be_told(gone, named):
    fact = LogFact("EngineCore failed to start.", "server.log, line 63", "crash")
    departures = tuple(Departure(label, 10 + n, at, code) for n, (label, at, code) in enumerate(gone))
    codes = {label: code for label, _, code in gone if code is not None and label != "api"}
    evidence = Evidence(
        server_exit=1, departures=departures, exits=codes, expected=("TP0", "TP1"), log=(fact,), reason="exited"
    )
    assert judge(evidence).culprits == named


def test_who_ended_by_the_way_is_no_crash_of_a_server_that_lives(dumps):
    """A process that read the model's description and ended, long before."""
    members = [dumps.dump("api", "f eng/x.py:1"), *dumps.same(2, dumps.IDLE_WORKER)]
    gone = (Departure("worker", 5, 1.0, 0),)
    assert judge(Evidence(rounds=[members], departures=gone, requests=0)).verdict == "ready"
    lost = (Departure("TP1", 5, 1.0, -9),)
    found = judge(Evidence(rounds=[members[:2]], departures=lost, requests=0))
    assert (found.verdict, found.culprits) == ("crash", ("TP1",))


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "ready"),
        ({"requests": None}, "ready"),
        ({"requests": 1}, "hang"),
        ({"answers": False}, "hang"),
        ({"progress": Progress("hung", still=20.0, window=6.0)}, "hang"),
    ],
)
def test_who_answers_while_its_stacks_are_taken_does_not_hang(dumps, change, verdict):
    """Nothing of it had moved for too long; then its answer came, and nobody has asked for anything since."""
    idle = Progress("idle", still=0.0, window=6.0, last="idle")
    evidence = Evidence(reason="no_progress", rounds=[dumps.same(2, dumps.ELSEWHERE)], progress=idle, requests=0)
    found = judge(replace(evidence, **change))
    assert found.verdict == verdict
    assert ("it answered while its stacks were taken" in found.text) is (verdict == "ready")
    assert decide("no_progress", Witnesses(verdict=found.verdict)).kill is (verdict == "hang")


def test_one_line_over_and_over_is_a_hang(dumps):
    """Its log grows, its CPU is used: all signs of life are that one line. A rank that is gone is the better cause."""
    moving = Progress("moving", still=0.0, window=30.0, last="log", moving=("log", "(CPU of TP0)"))
    evidence = Evidence(reason="log_limit", rounds=[dumps.same(2, dumps.ELSEWHERE)], progress=moving, flood="retry 7")
    found = judge(evidence)
    assert found.verdict == "hang"
    assert found.text.startswith(
        "hang: it prints one line over and over, more than a megabyte a second: 'retry 7'; TP0-1 are in crunch"
    )
    assert not any(what == "slow" for what, _ in found.ruled_out)
    still = judge(replace(evidence, progress=replace(moving, state="suspect", still=7.0)))
    assert still.text == found.text  # nothing but the line moved for 7 s
    assert judge(replace(evidence, flood="")).verdict == "slow"
    assert judge(replace(evidence, answers=True)).verdict == "ready"
    assert judge(replace(evidence, server_exit=1)).verdict == "crash"
