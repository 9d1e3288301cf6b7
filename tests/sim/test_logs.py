"""The log lines: those of the engines, down to the byte where a reader could stumble."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.engines import sglang, vllm
from pytest_gpuserve.engines.sim import GRAMMAR
from pytest_gpuserve.phases.reader import read_phases

STAMP = r"\[20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"

SGLANG = [
    r"\{S\}\] server_args=ServerArgs\(model_path='sim/toy-128', .*tp_size=3, .*attention_backend='flashinfer', "
    r"speculative_algorithm='EAGLE3', .*disable_cuda_graph=False\)",
    r"\{S\} TP2\] Init torch distributed begin\.",
    r"\{S\} TP0\] sglang is using nccl==[\d.]+",
    r"\{S\} TP2\] Init torch distributed ends\. elapsed=[\d.]+ s, mem usage=[\d.]+ GB",
    r"\{S\} TP1\] Load weight begin\. avail mem=[\d.]+ GB",
    r"\{S\} TP1\] Load weight end\. elapsed=[\d.]+ s, type=LlamaForCausalLM, avail mem=[\d.]+ GB, .*",
    r"\{S\} TP1\] KV Cache is allocated\. #tokens: \d+, K size: [\d.]+ GB, V size: [\d.]+ GB",
    r"\{S\} TP1\] Memory pool end\. avail mem=[\d.]+ GB",
    r"\{S\} TP2\] Running FlashInfer autotune\.\.\.",
    r"\{S\} TP2\] Capture cuda graph begin\. This can take up to several minutes\. avail mem=[\d.]+ GB",
    r"\{S\} TP0\] Capture cuda graph bs \[1, 2, 4, 8, 12, 16, 24, 32\]",
    r"\{S\} TP2\] Registering 0 cuda graph addresses",
    r"\{S\} TP2\] Capture cuda graph end\. Time elapsed: [\d.]+ s\. mem usage=[\d.]+ GB\. avail mem=[\d.]+ GB\.",
    r"\{S\} TP2\] Load weight end\. elapsed=[\d.]+ s, type=LlamaForCausalLMEagle3, .*",
    r"\{S\} TP0\] Capture draft cuda graph begin\. .*",
    r"\{S\} TP0\] max_total_num_tokens=\d+, chunked_prefill_size=\d+, .*context_len=4096, available_gpu_mem=[\d.]+ GB",
    r"\{S\}\] INFO:     Started server process \[\d+\]",
    r"\{S\}\] INFO:     Uvicorn running on http://127\.0\.0\.1:\d+ \(Press CTRL\+C to quit\)",
    r"\{S\} TP0\] Prefill batch, #new-seq: 1, #new-token: \d+, #cached-token: 0, token usage: 0\.00, .*",
    r"\{S\}\] The server is fired up and ready to roll!",
    r'\{S\}\] INFO:     127\.0\.0\.1:\d+ - "POST /v1/completions HTTP/1\.1" 200 OK',
    r"\{S\} TP0\] Decode batch, #running-req: 1, .*accept len: [\d.]+, accept rate: 0\.[56]\d, cuda graph: True, .*",
]
VLLM = [
    r"\(APIServer pid=\d+\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[api_utils\.py:273\] non-default args: \{'model_tag': .*",
    r"\(EngineCore pid=\d+\) INFO {T} \[core\.py:\d+\] Initializing a V1 LLM engine \(v[\d.]+\) with config: model='.*'"
    r", speculative_config=SpeculativeConfig\(method='eagle3', .*",
    r"\(Worker pid=\d+\) INFO {T} \[parallel_state\.py:\d+\] world_size=3 rank=2 local_rank=2 "
    r"distributed_init_method=tcp://127\.0\.0\.1:\d+ backend=nccl",
    r"\(Worker pid=\d+\) INFO {T} \[pynccl\.py:\d+\] vLLM is using nccl==[\d.]+",
    r"\(Worker_TP2 pid=\d+\) INFO {T} \[\S+\] Starting to load model sim/toy-128\.\.\.",
    r"\(Worker_TP2 pid=\d+\) INFO {T} \[\S+\] Using AttentionBackendEnum\.FLASH_ATTN backend\.",
    r"\(Worker_TP0 pid=\d+\) INFO {T} \[\S+\] Loading weights took [\d.]+ seconds",
    r"\(Worker_TP1 pid=\d+\) INFO {T} \[\S+\] Loading drafter model\.\.\.",
    r"\(Worker_TP1 pid=\d+\) INFO {T} \[\S+\] Model loading took [\d.]+ GiB and [\d.]+ seconds",
    r"\(Worker_TP0 pid=\d+\) INFO {T} \[\S+\] torch\.compile took [\d.]+ s in total",
    r"\(Worker_TP0 pid=\d+\) INFO {T} \[\S+\] Available KV cache memory: [\d.]+ GiB",
    r"\(EngineCore pid=\d+\) INFO {T} \[\S+\] GPU KV cache size: [\d,]+ tokens",
    r"\(Worker_TP2 pid=\d+\) {L} - INFO - autotuner\.py:\d+ - flashinfer\.jit: \[Autotuner\]: Autotuning process ends",
    r"\(Worker_TP2 pid=\d+\) INFO {T} \[\S+\] Graph capturing finished in \d+ secs, took [\d.]+ GiB",
    r"\(EngineCore pid=\d+\) INFO {T} \[\S+\] init engine \(profile, create kv cache, warmup model\) took [\d.]+ s .*",
    r"\(APIServer pid=\d+\) INFO {T} \[\S+\] Route: /health, Methods: GET",
    r"INFO:     Started server process \[\d+\]",
    r"INFO:     Application startup complete\.",
    r'INFO:     127\.0\.0\.1:\d+ - "POST /v1/completions HTTP/1\.1" 200 OK',
    r"\(APIServer pid=\d+\) INFO {T} \[\S+\] Engine 000: Avg prompt throughput: [\d.]+ tokens/s, Avg generation .*",
    r"\(APIServer pid=\d+\) INFO {T} \[\S+\] SpecDecoding metrics: Mean acceptance length: 2\.\d+, .*",
]


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def flavor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(start_shared: Any, flavor: str) -> Any:
    environ = {"VLLM_LOG_STATS_INTERVAL": "0.3"}
    server = start_shared(
        *("--tp", "3", "--flavor", flavor, "--spec-decode", "eagle3", "--shards", "16"), environ=environ
    ).ready()
    server.complete(max_tokens=200)
    server.logged("SpecDecoding metrics" if flavor == "vllm" else "Decode batch")
    return server


def test_lines(server: Any, flavor: str) -> None:
    lines = re.split(r"[\r\n]", server.log)
    stamp, logger = r"\d\d-\d\d \d\d:\d\d:\d\d", r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    missing = [
        pattern
        for template in (SGLANG if flavor == "sglang" else VLLM)
        if (pattern := template.replace(r"\{S\}", STAMP).replace("{T}", stamp).replace("{L}", logger))
        and not any(re.fullmatch(pattern, line) for line in lines)
    ]
    assert not missing, server.log


def test_every_line_of_a_logger_has_its_prefix(server: Any, flavor: str) -> None:
    prefix = (
        STAMP + r"(?: TP[012])?\] "
        if flavor == "sglang"
        else r"\((?:APIServer|EngineCore|Worker(?:_TP[012])?) pid=\d+\) |INFO:  "
    )
    for line in filter(None, re.split(r"[\r\n]", server.log)):
        assert re.match(prefix, line) or re.search(r"\d+/\d+ \[\d\d:\d\d<", line), line


def test_bars_are_glued(start: Any, flavor: str) -> None:
    """One rank: with more of them, other ranks' lines end up inside the bars."""
    server = start("--flavor", flavor, "--shards", "16").ready()
    raw = server.log_path.read_bytes().decode()
    if flavor == "sglang":
        bar = r"\rMulti-thread loading shards: +\d+% Completed \| \d+/16 \[00:0\d<[\d:?]+, +[\d.?]+(?:it/s|s/it)\]"
        assert re.search(rf"\n(?:{bar}){{17}}\n", raw)
        capture = r"\rCapturing batches \(bs=\d+ avail_mem=[\d.]+ GB\): +\d+%\|[█▏▎▍▌▋▊▉ ]{10}\| \d/8 \[.{5}<[^\]]+\]"
        assert re.search(rf"\r  0%\|          \| 0/8 \[00:00<\?, \?it/s\](?:{capture}){{9}}\n", raw)
    else:
        bar = r"\rLoading safetensors checkpoint shards: +\d+% Completed \| \d+/16 \[00:0\d<[^\]]+\]\n"
        assert re.search(rf"(?:{bar}){{17}}\n", raw)
        capture = r"\rCapturing CUDA graphs \(PIECEWISE\): +\d+%\|.{10}\| \d/8 \[.{5}<[^\]]+\]"
        assert re.search(rf"\(Worker pid=\d+\) (?:{capture}){{9}}\n", raw)


def test_the_engines_own_grammar_reads_it_like_ours(server: Any, flavor: str) -> None:
    theirs = read_phases(server.log_path, {"sglang": sglang, "vllm": vllm}[flavor].GRAMMAR)
    ours = read_phases(server.log_path, GRAMMAR)
    assert list(ours) == ["TP0", "TP1", "TP2"]
    assert [[step[0] for step in rank.history] for rank in ours.values()] == [
        [step[0] for step in rank.history] for rank in theirs.values()
    ]
    assert {rank.phase for rank in ours.values()} == {"serving"}
    phases = [step[0] for step in ours["TP0"].history]
    order = ["distributed_init", "weight_load", "kv_cache", "autotune", "cuda_graph", "warmup", "ready"]
    places = [phases.index(phase) for phase in order]
    assert places == sorted(places)
    assert {"draft_load", "draft_cuda_graph"} <= set(phases)


def test_a_log_stops_where_the_rank_does(start: Any, flavor: str) -> None:
    server = start("--tp", "2", "--flavor", flavor, "--shards", "8", "--fault", "sleep@weight_load:rank=0:at=0.5")
    server.logged(r"4/8 \[")
    server.stuck_in(server.rank(0), "synchronize")
    phases = read_phases(server.log_path, GRAMMAR)
    assert (phases["TP0"].phase, phases["TP0"].done, phases["TP0"].total) == ("weight_load", 4, 8)


def test_sglang_is_not_ready_before_its_warm_up(start: Any) -> None:
    """uvicorn says "Application startup complete" first, which is vLLM's word for ready."""
    server = start("--tp", "2", "--fault", "sleep@warmup:rank=1")
    server.logged("Uvicorn running")
    server.stuck_in(server.rank(1), "synchronize")
    assert {rank.phase for rank in read_phases(server.log_path, GRAMMAR).values()} == {"warmup"}


def test_slow_phases_move(start: Any, tmp_path: Path) -> None:
    """``--load-seconds`` and ``--phase-seconds`` stretch the work, unit by unit."""
    server = start(
        *("--tp", "2", "--shards", "10", "--load-seconds", "0.5", "--phase-seconds", "cuda_graph=0.4;warmup=0.3")
    ).ready()
    phases = read_phases(server.log_path, GRAMMAR)["TP0"]
    assert phases.phase in ("ready", "serving")
    log = server.log
    assert float(re.findall(r"Load weight end\. elapsed=([\d.]+)", log)[0]) >= 0.5
    assert float(re.findall(r"Time elapsed: ([\d.]+)", log)[0]) >= 0.4
    assert re.search(r"5/10 \[00:00<00:00, (?:1\d|2\d|[ \d]\d)\.", log)


def test_secrets_are_logged_as_the_engines_do(start: Any, flavor: str) -> None:
    """They do log them: what we make of a log has to cope with it."""
    server = start("--flavor", flavor, "--api-key", "s3cret").ready()
    assert "api_key=" in server.log or "'api_key': " in server.log
    assert "s3cret" in server.log


def test_chatter_comes_at_its_rate_and_says_nothing_of_phases(start: Any, flavor: str) -> None:
    """Mutation: the rate for each rank instead of all."""
    server = start("--tp", "2", "--flavor", flavor, "--chatter", "400").ready()
    tag = r"TP(\d)\] MoE layer" if flavor == "sglang" else r"\(Worker_TP(\d) pid=\d+\) INFO .* MoE layer"

    def said() -> list[str]:
        return re.findall(tag, server.log)

    before, began = len(said()), time.monotonic()
    number = before // 2 + 200
    server.logged(f"MoE layer {number % 61}: {number * 7} tokens")
    rate = (len(said()) - before) / (time.monotonic() - began)
    print(f"{rate:.0f} lines a second")
    assert 40 < rate < 700  # late on a busy machine, never ahead by more than a pause that it makes up for
    assert set(said()) == {"0", "1"}
    ranks = read_phases(server.log_path, GRAMMAR)
    assert {rank.phase for rank in ranks.values()} <= {"ready", "serving"}
    assert {"weight_load", "cuda_graph"} <= {phase for phase, _, _ in ranks["TP1"].history}
