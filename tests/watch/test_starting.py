"""The line that says how far a start-up is."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuserve.phases.rank_phase import RankPhase
from pytest_gpuserve.watch.starting import Status, summarise


def rank(phase: Any, done: int | None = None, total: int | None = None) -> RankPhase:
    return RankPhase(phase=phase, since=0.0, done=done, total=total)


def test_ranks_in_one_phase_with_the_least_progress() -> None:
    ranks = {f"TP{n}": rank("weight_load", 12 + n, 64) for n in range(8)}
    status = summarise("sglang-tp8", ranks, 34.4, memory=76_100_000_000, gpus=8)
    assert status.text == "sglang-tp8: weight_load 12/64 shards (TP0-7), 34 s, 76.1 GB on 8 GPUs"
    assert status.phase == "weight_load"


def test_a_rank_that_lags_comes_first() -> None:
    ranks = {"TP0": rank("cuda_graph", 3, 20), "TP1": rank("cuda_graph", 3, 20), "TP2": rank("weight_load", 63, 64)}
    status = summarise("s", ranks, 61.0)
    assert status.text == "s: weight_load 63/64 shards (TP2), cuda_graph (TP0-1), 61 s"
    assert status.phase == "weight_load"


@pytest.mark.parametrize(
    ("status", "text", "phase"),
    [
        (Status("s", seconds=2.0), "s: no line of a rank yet, 2 s", ""),
        (
            Status("s", note="GET /health answered 503", seconds=2.0),
            "s: GET /health answered 503, 2 s",
            "GET /health answered 503",
        ),
        (
            Status("s", (("kv_cache", ("TP0",)),), seconds=9.6, gpus=1, memory=5),
            "s: kv_cache (TP0), 10 s, 0.0 GB on 1 GPU",
            "kv_cache",
        ),
        (Status("s", note="a\x1b[2J\nb"), r"s: a\x1b[2J b, 0 s", "a\x1b[2J\nb"),
    ],
)
def test_before_a_rank_has_spoken_and_without_gpus(status: Status, text: str, phase: str) -> None:
    assert status.text == text
    assert status.phase == phase
