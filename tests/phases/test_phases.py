"""Phases per rank from logs: every recorded log, every cut, and what a log should not be."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.engines.base import LogGrammar
from pytest_gpuserve.phases.log_follower import LogFollower
from pytest_gpuserve.phases.reader import MAX_LINE, PhaseReader, RankPhase, read_log, read_phases

LOGS = Path(__file__).parent.parent / "data" / "logs"
EXPECTED = json.loads((LOGS / "phases.json").read_text())

SGLANG = get_engine("sglang").grammar
VLLM = get_engine("vllm").grammar


def grammar_of(name: str) -> LogGrammar:
    return VLLM if Path(name).name.startswith("vllm") else SGLANG


def read(data: bytes, grammar: LogGrammar = SGLANG, *, now: float = 0.0) -> PhaseReader:
    reader = PhaseReader(grammar)
    reader.feed(data, now)
    reader.finish(now)
    return reader


def shown(found: RankPhase) -> str:
    numbers = f" {found.done}/{found.total}" if found.done is not None else ""
    return found.phase + numbers + (" over" if found.left is not None else "") + (" assumed" if found.assumed else "")


def sglang(rank: str, text: str, seconds: int = 0) -> bytes:
    return f"[2026-02-11 10:{seconds // 60:02}:{seconds % 60:02}{rank and ' ' + rank}] {text}\n".encode()


def names(found: RankPhase) -> list[str]:
    return [phase for phase, _, _ in found.history]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_log_tells_the_phase_of_each_rank(name: str) -> None:
    reader = read((LOGS / name).read_bytes(), grammar_of(name))
    assert {label: shown(found) for label, found in reader.ranks().items()} == EXPECTED[name]["ranks"]
    assert reader.server.phase == EXPECTED[name]["server"]


def test_no_log_is_left_out() -> None:
    assert sorted(EXPECTED) == sorted(str(path.relative_to(LOGS)) for path in LOGS.glob("*/*.log"))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_anchors_leave_nothing_out(name: str) -> None:
    """A grammar without anchors looks at every line, and finds the same."""
    grammar, data = grammar_of(name), (LOGS / name).read_bytes()
    slow = LogGrammar(grammar.rank, grammar.rules, grammar.heartbeats, grammar.clock)
    fast_reader, slow_reader = read(data, grammar), read(data, slow)
    assert fast_reader.ranks() == slow_reader.ranks()
    assert fast_reader.server == slow_reader.server
    assert fast_reader.progress_bytes == slow_reader.progress_bytes
    assert fast_reader.heartbeats == slow_reader.heartbeats


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
@pytest.mark.parametrize(
    "name",
    [
        "real/vllm-0.24.0-tp2-h200_slow_jit_flashinfer_lock.log",
        "real/sglang-0.5.12.post1-tp2-h200_eagle3_ok.log",
        "reconstructed/vllm_hang_flashinfer_autotune_tp8.log",
        "reconstructed/sglang_ok_eagle3_tp2_v0.5.23.log",
    ],
)
def test_chunks_do_not_matter(name: str, size: int) -> None:
    data = (LOGS / name).read_bytes()
    whole, pieces = read(data, grammar_of(name)), PhaseReader(grammar_of(name))
    for begin in range(0, len(data), size):
        pieces.feed(data[begin : begin + size], 0.0)
    pieces.finish(0.0)
    assert pieces.ranks() == whole.ranks()
    assert pieces.server == whole.server
    assert pieces.progress_bytes == whole.progress_bytes
    assert pieces.last_line == whole.last_line


def test_history_of_a_start_with_eagle3_before_0_5_14() -> None:
    """The target captures its graphs before the draft loads, through the same messages."""
    found = read((LOGS / "reconstructed/sglang_ok_eagle3_tp2_v0.5.9.log").read_bytes()).ranks()["TP1"]
    assert names(found) == [
        *("spawn", "distributed_init", "weight_load", "kv_cache", "cuda_graph"),
        *("draft_load", "kv_cache", "draft_cuda_graph", "draft_cuda_graph", "warmup"),
    ]
    assert found.seconds("weight_load") == pytest.approx(10.0)
    assert found.seconds("draft_cuda_graph") == pytest.approx(14.0)
    assert found.seconds("autotune") is None


def test_history_of_a_start_with_eagle3_from_0_5_14() -> None:
    found = read((LOGS / "reconstructed/sglang_ok_eagle3_tp2_v0.5.23.log").read_bytes()).ranks()["TP0"]
    assert names(found) == [
        *("spawn", "distributed_init", "weight_load", "draft_load", "kv_cache", "kv_cache"),
        *("cuda_graph", "cuda_graph", "draft_cuda_graph", "draft_cuda_graph", "warmup"),
    ]


def test_history_of_vllm_with_a_drafter() -> None:
    found = read((LOGS / "reconstructed/vllm_ok_tp2_eagle3_v015.log").read_bytes(), VLLM).ranks()["TP0"]
    assert names(found) == [
        *("spawn", "distributed_init", "weight_load", "draft_load", "compile"),
        *("kv_cache", "cuda_graph", "warmup", "ready"),
    ]
    assert found.seconds("compile") == pytest.approx(18.0)


def test_seconds_of_a_slow_real_capture() -> None:
    name = "real/sglang-0.5.12.post1-tp2-h200_cold_start_slow.log"
    found = read((LOGS / name).read_bytes(), now=1000.0).ranks()["TP0"]
    assert 60 < (found.seconds("cuda_graph") or 0) < 80
    assert found.phase == "warmup"
    assert found.since <= 1000.0


def test_one_rank_alone_has_no_tag() -> None:
    log = sglang("", "Load weight begin. avail mem=9 GB") + sglang("", "Load weight end. type=Llama", 5)
    found = read(log + sglang("", "Capture cuda graph begin.", 6)).ranks()
    assert {label: shown(rank) for label, rank in found.items()} == {"TP0": "cuda_graph"}
    assert found["TP0"].seconds("weight_load") == 5.0


def test_one_vllm_rank_alone_lives_in_the_engine_core() -> None:
    log = b"(EngineCore pid=5) INFO 05-06 21:10:30 [model_runner.py:2] Starting to load model /m...\n"
    assert {k: shown(v) for k, v in read(log, VLLM).ranks().items()} == {"TP0": "weight_load"}
    log = log.replace(b"EngineCore", b"EngineCore_DP1")
    assert {k: shown(v) for k, v in read(log, VLLM).ranks().items()} == {"DP1": "weight_load"}


@pytest.mark.parametrize(
    ("tag", "label"),
    [
        ("DP1 TP3 EP3", "DP1 TP3"),
        ("DP0 PP1 ATTN_CP0 MOE_DP0 TP7 EP7", "DP0 PP1 TP7"),
        ("DP0 TP2 EP1 PP3", "DP0 PP3 TP2"),  # 0.5.1's order
        ("PP2 TP1", "PP2 TP1"),
        ("TP12", "TP12"),
    ],
)
def test_sglang_tags(tag: str, label: str) -> None:
    assert list(read(sglang(tag, "Load weight begin.")).ranks()) == [label]


@pytest.mark.parametrize(
    ("tag", "label"),
    [
        ("Worker_TP3 pid=7", "TP3"),
        ("Worker_DP1_TP0_EP2 pid=7", "DP1 TP0"),
        ("Worker_PP1_PCP0_TP1_DCP0_EP1 pid=7", "PP1 TP1"),
        ("Worker_TP1 pid=7, ip=10.0.0.3", "TP1"),
        ("VllmWorker rank=2 pid=251", "TP2"),
        ("EngineCore_DP0 pid=1) (Worker_TP2 pid=7", "TP2"),
    ],
)
def test_vllm_tags(tag: str, label: str) -> None:
    log = f"({tag}) INFO 02-11 09:14:32 [gpu_model_runner.py:1] Starting to load model x...\n".encode()
    assert list(read(log, VLLM).ranks()) == [label]


def test_coloured_tags() -> None:
    log = b"\x1b[1;36m(Worker_TP1 pid=4)\x1b[0;0m INFO 02-11 09:14:32 [r.py:1] Starting to load model x...\n"
    log = log.replace(b"TP1 pid=4", b"TP0 pid=3") + log
    log += b"\x1b[1;36m(Worker_TP1 pid=4)\x1b[0;0m \r"
    log += b"Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03]\n"
    found = read(log, VLLM).ranks()
    assert {label: shown(rank) for label, rank in found.items()} == {"TP0": "weight_load", "TP1": "weight_load 1/4"}
    assert found["TP0"].last_line.startswith("(Worker_TP0 pid=3) INFO")


def test_numbers_in_the_world_give_way_to_coordinates() -> None:
    """vLLM 0.15 prints these without a prefix: nothing joins them to the workers' tags."""
    log = b"".join(
        b"INFO 02-11 09:14:28 [p.py:1] world_size=4 rank=%d local_rank=0 backend=nccl\n" % n for n in range(4)
    )
    assert list(read(log, VLLM).ranks()) == ["TP0", "TP1", "TP2", "TP3"]
    log += b"".join(
        b"(Worker_DP%d_TP%d pid=%d) INFO 02-11 09:14:32 [r.py:2] Starting to load model x...\n" % (n // 2, n % 2, n)
        for n in range(4)
    )
    assert list(read(log, VLLM).ranks()) == ["DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1"]


def test_untitled_workers_are_told_by_their_number_until_they_have_a_tag() -> None:
    log = b"".join(
        b"(Worker pid=%d) INFO 08-14 23:43:13 [p.py:1] world_size=4 rank=%d local_rank=0 backend=nccl\n" % (90 + n, n)
        for n in range(4)
    )
    assert list(read(log, VLLM).ranks()) == ["TP0", "TP1", "TP2", "TP3"]
    log += b"".join(
        b"(Worker_DP%d_TP%d pid=%d) INFO 08-14 23:43:15 [r.py:2] Starting to load model x...\n"
        % (n // 2, n % 2, 90 + n)
        for n in range(4)
    )
    found = read(log, VLLM).ranks()
    assert list(found) == ["DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1"]
    assert {shown(rank) for rank in found.values()} == {"weight_load"}
    assert "distributed_init" in names(found["DP1 TP1"])


def test_a_rank_that_lags_is_seen() -> None:
    log = b"".join(sglang(f"TP{n}", "Init torch distributed begin.") for n in range(8))
    log += b"".join(sglang(f"TP{n}", "Init torch distributed ends. elapsed=4 s", 4) for n in range(8))
    log += b"".join(sglang(f"TP{n}", "Load weight begin. avail mem=92 GB", 5) for n in range(8) if n != 5)
    found = read(log).ranks()
    assert [label for label, rank in found.items() if rank.phase != "weight_load"] == ["TP5"]
    assert shown(found["TP5"]) == "distributed_init over"


def test_what_the_first_rank_alone_prints_is_assumed_of_the_others() -> None:
    log = b"".join(
        b"(Worker_TP%d pid=%d) INFO 08-14 23:43:13 [r.py:1] Starting to load model x\n" % (n, n) for n in (0, 1)
    )
    log += b"(Worker_TP0 pid=0) INFO 08-14 23:43:20 [b.py:1] Dynamo bytecode transform time: 3.12 s\n"
    found = read(log, VLLM).ranks()
    assert {k: shown(v) for k, v in found.items()} == {"TP0": "compile", "TP1": "compile assumed"}
    log += b"(Worker_TP1 pid=1) INFO 08-14 23:43:30 [w.py:1] Available KV cache memory: 1 GiB\n"
    found = read(log, VLLM).ranks()
    assert {k: shown(v) for k, v in found.items()} == {"TP0": "compile", "TP1": "kv_cache"}


def test_records_glued_to_bars() -> None:
    log = sglang("TP0", "Capture cuda graph begin.") + sglang("TP1", "Capture cuda graph begin.")
    log += b"\rCapturing batches (bs=8 avail_mem=1.00 GB):  40%|####      | 4/10 [00:01<00:02,  2.00it/s]"
    log += sglang("TP1", "Registering 12 cuda graph addresses", 9)
    found = read(log).ranks()
    assert shown(found["TP0"]) == "cuda_graph 4/10"
    assert shown(found["TP1"]) == "cuda_graph"
    assert "Registering" in found["TP1"].last_line
    assert "4/10" in found["TP0"].last_line


def test_a_bar_counts_before_its_line_ends() -> None:
    """tqdm prints a carriage return first: the newest state is never followed by one while the capture hangs."""
    reader = PhaseReader(SGLANG)
    reader.feed(sglang("TP0", "Capture cuda graph begin."), 0.0)
    reader.feed(b"\rCapturing batches (bs=8 avail_mem=1 GB):  57%|#####     | 30/52 [00:01<00:02,  2.00it/s]", 1.0)
    assert shown(reader.ranks()["TP0"]) == "cuda_graph 30/52"


def test_bars_follow_the_prefix_before_them() -> None:
    head = b"(Worker_TP1 pid=9) INFO 08-14 23:43:13 [k.py:1] Running FlashInfer autotune with 8 tokens\n"
    log = head.replace(b"TP1 pid=9", b"TP0 pid=8") + head
    log += b"(Worker_TP1 pid=9) \r[AutoTuner]: Tuning gemm1:   9%|#   | 2/22 [00:00<?, ?profiles/s]\r"
    log += b"[AutoTuner]: Tuning gemm1:  13%|#   | 3/22 [00:00<00:01,  9.1profiles/s]\r"
    found = read(log, VLLM).ranks()
    assert {k: shown(v) for k, v in found.items()} == {"TP0": "autotune", "TP1": "autotune 3/22"}


def test_a_late_repaint_does_not_reopen_a_phase() -> None:
    log = sglang("TP0", "Load weight begin.") + sglang("TP0", "Load weight end.", 9)
    log += b"Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:09<00:00, 2.0s/it]\n"
    assert shown(read(log).ranks()["TP0"]) == "weight_load over"


def test_a_second_server_in_one_log_starts_over() -> None:
    one = (LOGS / "real/sglang-0.5.23-cpu-tp2_ok.log").read_bytes()
    begun = one[: one.index(b"Memory pool end")]
    found = read(one + begun[: begun.rindex(b"Load weight end")]).ranks()["TP0"]
    assert found.phase == "weight_load"


@pytest.mark.parametrize("name", ["real/sglang-0.5.23-cpu-tp2_ok.log", "real/vllm-0.32.0-cpu-tp2_tp2.log"])
def test_health_checks_are_no_progress(name: str) -> None:
    reader = read((LOGS / name).read_bytes(), grammar_of(name))
    before, beats = reader.progress_bytes, reader.heartbeats
    for line in (
        b'INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK',
        b'INFO:  127.0.0.1:1 - "GET /metrics HTTP/1.1" 200 OK',
    ):
        prefix = b"" if grammar_of(name) is VLLM else b"[2026-11-29 17:38:03] "
        reader.feed(prefix + line + b"\n", 1.0)
        reader.feed(prefix + line + b"\r\n", 1.0)
    assert (reader.progress_bytes, reader.heartbeats) == (before, beats + 4)
    reader.feed(b'[2026-11-29 17:38:03] INFO:  127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n', 1.0)
    assert reader.progress_bytes > before


def test_wait_loops_are_no_progress() -> None:
    reader = PhaseReader(VLLM)
    reader.feed(
        b"(EngineCore pid=3) INFO 05-04 06:36:55 [shm_broadcast.py:681] No available shared memory broadcast block "
        b"found in 60 seconds. This typically happens when some processes are hanging\n"
        b"(APIServer pid=2) DEBUG 08-12 00:12:18 [u.py:9] Waiting for 1 local, 0 remote core engine proc(s) to start.\n"
        b"(APIServer pid=2) INFO 08-12 00:12:18 [loggers.py:335] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg "
        b"generation throughput: 0.0 tokens/s, Running: 2 reqs\n",
        0.0,
    )
    assert (reader.progress_bytes, reader.heartbeats) == (0, 3)
    reader.feed(
        b"(APIServer pid=2) INFO 08-12 00:12:18 [loggers.py:335] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg "
        b"generation throughput: 8.1 tokens/s, Running: 2 reqs\n",
        0.0,
    )
    assert reader.progress_bytes > 0


def test_times_without_stamps_are_arrivals() -> None:
    reader = PhaseReader(SGLANG)
    reader.feed(sglang("TP0", "Load weight begin."), 100.0)
    reader.feed(b"Loading pt checkpoint shards:  50% Completed | 1/2 [00:09<00:09, 9.0s/it]\n", 140.0)
    assert reader.ranks()["TP0"].last == pytest.approx(140.0)
    assert reader.ranks()["TP0"].since == pytest.approx(100.0)


def test_an_old_log_read_at_once_ends_now() -> None:
    log = b"".join(sglang("TP0", "Load weight begin.", n) for n in (0, 300)) + sglang("TP0", "Load weight end.", 400)
    reader = read(log, now=5000.0)
    found = reader.ranks()["TP0"]
    assert found.last == pytest.approx(5000.0)
    assert found.history[0][2] == pytest.approx(4600.0)


def test_a_rank_silent_for_minutes_does_not_turn_the_clock() -> None:
    reader = PhaseReader(SGLANG)
    log = sglang("TP1", "a word", 0) + sglang("TP0", "Load weight begin.", 100) + sglang("TP0", "a word", 300)
    reader.feed(log, 1000.0)
    reader.feed(sglang("TP0", "Load weight end.", 310), 1010.0)
    found = reader.ranks()
    assert found["TP0"].seconds("weight_load") == pytest.approx(210.0)
    assert found["TP1"].last == pytest.approx(700.0)


def test_a_line_without_a_stamp_is_as_old_as_the_one_before_it() -> None:
    """uvicorn's lines of vLLM, in a log that is read at once."""
    log = b"(EngineCore pid=1) INFO 02-11 09:14:10 [core.py:1] init engine (profile, create kv cache) took 3.08 s\n"
    log += b"(APIServer pid=2) INFO 02-11 09:14:50 [x.py:1] a word\nINFO:     Application startup complete.\n"
    log += b"(APIServer pid=2) INFO 02-11 09:15:30 [x.py:1] a word\n"
    assert read(log, VLLM, now=1000.0).server.since == pytest.approx(960.0)


def test_a_worker_without_a_number_is_not_taken_for_another() -> None:
    log = b"(Worker pid=6) INFO 08-12 00:12:08 [p.py:1] world_size=2 rank=1 local_rank=1 backend=nccl\n"
    log += b"(Worker pid=5) INFO 08-12 00:12:09 [p.py:1] vLLM is using nccl==2.28.9\n"
    found = read(log, VLLM).ranks()
    assert list(found) == ["TP1"]
    assert "pid=6" in found["TP1"].last_line


def test_a_clock_set_back_and_a_new_year_do_not_turn_time_back() -> None:
    log = b"(Worker_TP0 pid=1) INFO 12-31 23:59:50 [r.py:1] Starting to load model x\n"
    log += b"(Worker_TP0 pid=1) INFO 01-01 00:00:10 [r.py:1] Model loading took 3 GiB memory and 20 seconds\n"
    log += b"(Worker_TP0 pid=1) INFO 01-01 00:00:40 [r.py:1] Available KV cache memory: 2 GiB\n"
    found = read(log, VLLM, now=100.0).ranks()["TP0"]
    assert [end - begin >= 0 for _, begin, end in found.history] == [True, True]
    assert found.since == pytest.approx(100.0)
    assert found.since - found.history[-1][2] == pytest.approx(30.0)


def test_a_100_mb_line_is_bounded_and_what_follows_is_read() -> None:
    reader = PhaseReader(SGLANG)
    reader.feed(sglang("TP0", "Load weight begin."), 0.0)
    block = b"x" * (1 << 20)
    for _ in range(100):
        reader.feed(block, 0.0)
        assert len(reader._pending) <= MAX_LINE
    reader.feed(b"tail\n" + sglang("TP0", "Load weight end."), 1.0)
    assert shown(reader.ranks()["TP0"]) == "weight_load over"
    assert reader.progress_bytes > 100 << 20


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_noise_breaks_nothing(data: st.DataObject) -> None:
    """Bytes that are no text, in the middle of a log, cut anywhere."""
    name = data.draw(st.sampled_from(sorted(EXPECTED)))
    log = (LOGS / name).read_bytes()
    at = data.draw(st.integers(0, len(log)))
    noise = data.draw(st.binary(max_size=300))
    reader = PhaseReader(grammar_of(name))
    rest = log[:at] + noise + log[at:]
    while rest:
        size = data.draw(st.integers(1, 20_000))
        reader.feed(rest[:size], 0.0)
        rest = rest[size:]
    reader.finish(0.0)
    for label, found in reader.ranks().items():
        assert re.fullmatch(r"[A-Z0-9 ?]+", label)
        assert all(begin <= end for _, begin, end in found.history)


def test_binary_and_empty_logs_have_no_ranks(tmp_path: Path) -> None:
    assert read(random.Random(1).randbytes(3 << 20)).ranks() == {}
    assert read(b"").ranks() == {}
    empty = tmp_path / "log"
    empty.touch()
    assert read_phases(empty, SGLANG) == {}


def test_huge_numbers_are_no_trouble() -> None:
    log = sglang("TP" + "9" * 40, "Load weight begin.") + b"Loading shards:  1% Completed | " + b"9" * 5000 + b"/1 [\n"
    read(log).ranks()


def test_another_programs_log_names_nothing() -> None:
    log = b"2026-01-01 INFO nginx: worker process 7 started (pid=7)\nLoading modules\n" * 100
    assert read(log).ranks() == {}
    assert read(log, VLLM).ranks() == {}


def test_last_lines(tmp_path: Path) -> None:
    log = sglang("TP0", "one") + sglang("TP1", "two") + sglang("TP0", "thr\xff" + "e" * 1000) + b"from the front end"
    path = tmp_path / "log"
    path.write_bytes(log.replace("\xff".encode(), b"\xff\xfe"))
    reader = read(path.read_bytes())
    assert reader.last_lines["TP1"] == "[2026-02-11 10:00:00 TP1] two"
    assert "thr\ufffd" in reader.last_lines["TP0"]
    assert len(reader.last_lines["TP0"]) <= 400
    assert reader.last_line == "from the front end"


def test_of_a_bar_that_was_written_over_the_last_state_is_the_last_line() -> None:
    """Mutation: ``\\r`` not read as an end of a line."""
    bar = "\r".join(f"Loading shards: {n}/60 [00:0{n % 10}<00:01, 9.5it/s]" for n in range(61))
    reader = read(sglang("TP0", "Load weight begin.") + f"{bar}\r\n".encode())
    for line in (reader.last_line, *reader.last_lines.values()):
        assert "\r" not in line
    assert reader.last_line.startswith("Loading shards: 60/60 ")


class TestFollower:
    def test_growth(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        follower = LogFollower(path, PhaseReader(SGLANG))
        assert follower.poll(0.0) == 0
        path.write_bytes(sglang("TP0", "Load weight begin."))
        assert follower.poll(1.0) > 0
        with path.open("ab") as file:
            file.write(sglang("TP0", "Load weight end."))
        assert follower.poll(2.0) > 0
        assert follower.poll(3.0) == 0
        assert shown(follower.reader.ranks()["TP0"]) == "weight_load over"
        follower.close()

    def test_rotation_loses_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_bytes(sglang("TP0", "Load weight begin."))
        follower = LogFollower(path, PhaseReader(SGLANG))
        follower.poll(0.0)
        with path.open("ab") as file:
            file.write(sglang("TP0", "Load weight end."))
        path.rename(tmp_path / "log.1")
        path.write_bytes(sglang("TP0", "Capture cuda graph begin."))
        follower.poll(1.0)
        found = follower.reader.ranks()["TP0"]
        assert names(found) == ["spawn", "weight_load"]
        assert shown(found) == "cuda_graph"
        follower.close()

    def test_truncation(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_bytes(sglang("TP0", "Load weight begin.") + b"Load wei")
        follower = LogFollower(path, PhaseReader(SGLANG))
        follower.poll(0.0)
        os.truncate(path, 0)
        path.write_bytes(sglang("TP0", "Load weight end."))
        follower.poll(1.0)
        assert shown(follower.reader.ranks()["TP0"]) == "weight_load over"
        follower.close()

    def test_a_cut_end(self, tmp_path: Path) -> None:
        """A log that reached its limit loses its end: nothing of its beginning happens again."""
        path = tmp_path / "log"
        begin = sglang("TP0", "Load weight begin.") + sglang("TP0", "Load weight end.") + b"x" * 5000 + b"\n"
        path.write_bytes(begin + b"noise\n" * 100)
        follower = LogFollower(path, PhaseReader(SGLANG))
        follower.poll(0.0)
        os.truncate(path, len(begin))
        follower.poll(1.0)
        with path.open("ab") as file:
            file.write(sglang("TP0", "Capture cuda graph begin."))
        follower.poll(2.0)
        found = follower.reader.ranks()["TP0"]
        assert (names(found), shown(found)) == (["spawn", "weight_load"], "cuda_graph")
        follower.close()

    def test_what_is_written_faster_than_it_is_read_is_passed_over(self, tmp_path: Path) -> None:
        """Its beginning is read, and then its end; how much it grew is known to the byte."""
        path = tmp_path / "log"
        path.write_bytes(sglang("TP0", "Load weight begin.") + b"noise\n" * (4 << 20) + b"half a line")
        follower = LogFollower(path, PhaseReader(SGLANG))
        size = path.stat().st_size
        assert follower.poll(0.0, limit=1 << 20) > size - (2 << 20)
        assert shown(follower.reader.ranks()["TP0"]) == "weight_load"
        follower.poll(1.0, limit=1 << 20)
        with path.open("ab") as file:
            file.write(b"\n" + sglang("TP0", "Load weight end."))
        assert follower.poll(2.0, limit=1 << 20) < 100
        assert shown(follower.reader.ranks()["TP0"]) == "weight_load over"
        follower.close()

    def test_a_burst_loses_nothing(self, tmp_path: Path) -> None:
        """Eight polls' worth at once: every line of it is read."""
        path = tmp_path / "log"
        shard = b"[2026-02-11 10:00:01 TP0] Load weight begin.\n"
        path.write_bytes(b"noise\n" * (1 << 20) + shard + b"noise\n" * (300 << 10))
        follower = LogFollower(path, PhaseReader(SGLANG))
        while follower.poll(0.0, limit=1 << 20):
            pass
        assert shown(follower.reader.ranks()["TP0"]) == "weight_load"
        follower.close()

    def test_a_limit(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_bytes(b"x\n" * (2 << 20))
        follower = LogFollower(path, PhaseReader(SGLANG))
        assert follower.poll(0.0, limit=1 << 20) == 1 << 20
        while follower.poll(0.0, limit=1 << 20):
            pass
        assert follower.reader.progress_bytes == 2 << 20
        follower.close()


def test_of_a_log_of_gigabytes_both_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    begin, middle, end = (sglang(f"TP{n}", "Load weight begin.") for n in range(3))
    path.write_bytes(begin + b"noise\n" * 50_000 + middle + b"noise\n" * 50_000 + end)
    assert list(read_log(path, SGLANG).ranks()) == ["TP0", "TP1", "TP2"]
    assert list(read_log(path, SGLANG, most=100_000).ranks()) == ["TP0", "TP2"]
    assert read_log(path, SGLANG, most=100_000).progress_bytes > 500_000


def test_the_line_in_which_the_end_begins_is_nobodys(tmp_path: Path) -> None:
    """What it says, some rank has said whose tag was not read."""
    path = tmp_path / "log"
    tag = b"(Worker_TP%d pid=%d) INFO 11-30 05:19:00 [a.py:1] "
    loads = tag % (0, 4) + b"Loading model from scratch...\n"
    torn = tag % (1, 5) + b"x" * 40_000 + b" vLLM is using nccl==2\n"
    path.write_bytes(loads + b"noise\n" * 50_000 + torn + b"noise\n" * 5_000)
    ranks = read_log(path, VLLM, most=100_000).ranks()
    assert {label: shown(rank) for label, rank in ranks.items()} == {"TP0": "weight_load"}


@pytest.mark.parametrize("engine", ["sglang", "vllm", "llama_cpp", "sim", "command"])
def test_a_page_that_is_asked_for_is_no_progress_of_any_engine(engine: str) -> None:
    """Our own question for readiness comes every second: a hung start-up would look alive for ever."""
    reader = PhaseReader(get_engine(engine).grammar)
    reader.feed(b'INFO:     127.0.0.1:4 - "GET /ready HTTP/1.1" 503 Service Unavailable\n' * 3, 1.0)
    assert (reader.progress_bytes, reader.heartbeats) == (0, 3)
    reader.feed(b"something else\n", 2.0)
    assert (reader.progress_bytes > 0, reader.heartbeats) == (True, 3)
