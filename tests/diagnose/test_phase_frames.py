"""Where a rank is: the log's word, and what its stack knows better."""

from __future__ import annotations

import pytest

from pytest_gpuserve.diagnose.model import Frame
from pytest_gpuserve.diagnose.phase_frames import Reached, reached
from pytest_gpuserve.phases.rank_phase import RankPhase

SRT = "/opt/sglang/srt"


def stack(*names: str) -> list[Frame]:
    """Leaf first; ``name@file``."""
    parts = [name.partition("@") for name in names]
    return [Frame(name, file or f"{SRT}/model_executor/model_runner.py") for name, _, file in parts]


KV = stack("empty", "MHATokenToKVPool.__init__", "ModelRunner.init_memory_pool", "ModelRunner.initialize")


@pytest.mark.parametrize(
    ("told", "frames", "phase", "over"),
    [
        # announced on one rank alone, or when it is over
        (RankPhase("weight_load", 0, left=1), KV, "kv_cache", False),
        (RankPhase("compile", 0, left=1), stack("zeros", "GPUModelRunner.initialize_kv_cache"), "kv_cache", False),
        (RankPhase("compile", 0, assumed=True), stack("zeros", "initialize_from_config"), "kv_cache", False),
        (RankPhase("autotune", 0, left=1), stack("barrier", "GPUModelRunner.capture_model"), "cuda_graph", False),
        (
            RankPhase("cuda_graph", 0),
            stack("x", "capture_model", f"EAGLEWorker.init_cuda_graphs@{SRT}/speculative/eagle_worker.py"),
            "draft_cuda_graph",
            False,
        ),
        (RankPhase("kv_cache", 0), stack("x", "load_model", f"__init__@{SRT}/speculative/a.py"), "kv_cache", False),
        # the stack agrees, or does not know
        (RankPhase("kv_cache", 0), KV, "kv_cache", False),
        (RankPhase("kv_cache", 0), stack("recv", "event_loop"), "kv_cache", False),
        (RankPhase("weight_load", 0, left=1), stack("recv", "event_loop"), "weight_load", True),
        (RankPhase("weight_load", 0, left=1), [], "weight_load", True),
        # never back: a helper of a later phase may bear an earlier one's name
        (RankPhase("cuda_graph", 0), KV, "cuda_graph", False),
        (RankPhase("cuda_graph", 0, left=1, history=(("kv_cache", 0, 1),)), KV, "cuda_graph", True),
        (RankPhase("serving", 0), stack("x", "capture_model"), "serving", False),
    ],
)
def test_where_a_rank_is(told: RankPhase, frames: list[Frame], phase: str, over: bool) -> None:
    found = reached(told, frames)
    assert (found.phase, found.over) == (phase, over)
    assert (found.by is not None) == (phase != told.phase)


def test_the_frame_nearest_to_the_leaf_decides() -> None:
    frames = stack("x", "capture_model", "initialize_from_config")
    assert reached(RankPhase("weight_load", 0, left=1), frames) == Reached("cuda_graph", by=frames[1])
