"""Evidence goes to JSON and back, and is judged alike."""

from __future__ import annotations

import json

import pytest

from pytest_gpuserve.diagnose import evidence_json
from pytest_gpuserve.diagnose.evidence import Departure, Evidence, LockFact, LogFact, Memory, Progress, Witness
from pytest_gpuserve.diagnose.model import Frame, ProcessDump, ThreadStack
from pytest_gpuserve.diagnose.verdict import judge
from pytest_gpuserve.engines.base import ProcessRole, Rank
from pytest_gpuserve.gpu import Gpu, GpuProcess
from pytest_gpuserve.phases.rank_phase import RankPhase
from pytest_gpuserve.procfs import ProcessId


def dump(rank: int, *, known: bool = True) -> ProcessDump:
    frames = (Frame("all_reduce" if rank else "load", "/srv/app/x.py", 7),)
    role = ProcessRole("worker", Rank(tp=rank) if known else None)
    return ProcessDump(ProcessId(10 + rank, 5), role, "w", "S", "py-spy", (ThreadStack(1, "MainThread", True, frames),))


WHOLE = Evidence(
    reason="test_timeout",
    after=12.5,
    rounds=[[dump(0), dump(1), dump(2)]],
    phases={"TP0": RankPhase("cuda_graph", 5.0, 3, 9, "line", (("spawn", 1.0, 5.0),), None, 8.0, True)},
    expected=("TP0", "TP1", "TP2"),
    exits={"TP1": -9},
    departures=(Departure("TP1", 11, 7.5, -9), Departure("TP0", 10, 8.5)),
    engine="sglang",
    axes={"spec_decode": "eagle3"},
    tp=3,
    log=(LogFact("it broke", "log", "crash", "TP1"), LogFact("do this", "log", hint=True)),
    memory=Memory(1, 2, 3, 4, 5, (6,), 7, 0.5),
    gpus=(Gpu(0, "GPU-1", "RTX", (12, 0), 96 << 30, 76 << 30, 0, 88.0, (GpuProcess(7, 1),)),),
    gpu_busy=("GPU 1",),
    shm_free=9,
    nccl={"NCCL_DEBUG": "INFO"},
    locks=(LockFact("/l", ("TP0",), 7, "TP1", True, "t", "flock", 3.0),),
    witnesses=(Witness("RAS", "says", ("TP1",), "nccl"),),
    progress=Progress("hung", 60.0, 45.0, "log", ("(CPU)",), ({"at": 1.0},)),
    answers=False,
    ready=True,
    requests=2,
    test="t::x",
)


def test_there_and_back() -> None:
    raw = json.loads(json.dumps(evidence_json.to_json(WHOLE)))
    again = evidence_json.from_json(raw, WHOLE.rounds)
    assert again == WHOLE
    assert judge(again) == judge(WHOLE)


def test_a_rank_that_only_the_log_knew_is_known_again() -> None:
    raw = json.loads(json.dumps(evidence_json.to_json(WHOLE)))
    nameless = [[dump(0, known=False), dump(1), dump(2)]]
    assert evidence_json.from_json(raw, nameless).rounds == WHOLE.rounds


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "gpuserve.evidence/9"},
        {"phases": {"TP0": {"phase": "no such", "since": 1}}},
        {"log": [{"claim": "x", "witness": "y", "verdict": "no such"}]},
        {"labels": []},
        {"gpus": [5]},
        {"memory": 5},
    ],
)
def test_what_is_none_of_ours_is_a_value_error(change: dict[str, object]) -> None:
    raw = {**json.loads(json.dumps(evidence_json.to_json(WHOLE))), **change}
    with pytest.raises(ValueError, match=r"schema|no evidence of ours"):
        evidence_json.from_json(raw)


def test_what_was_written_before_there_were_departures_is_read() -> None:
    raw = json.loads(json.dumps(evidence_json.to_json(WHOLE)))
    del raw["departures"]
    assert evidence_json.from_json(raw, WHOLE.rounds).departures == ()
