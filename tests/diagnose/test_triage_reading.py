"""How logs are read: tracebacks in a tangle, launches, several logs, packed and broken files, floods."""

from __future__ import annotations

import bz2
import gc
import gzip
import itertools
import lzma
import random
import shutil
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.diagnose import triage_shapes
from pytest_gpuserve.diagnose.logfile import LogError
from pytest_gpuserve.diagnose.tracebacks import Chain, Raised, Tracebacks
from pytest_gpuserve.diagnose.triage import explain
from pytest_gpuserve.diagnose.triage_events import Complaint
from pytest_gpuserve.diagnose.triage_lines import parse, pieces
from pytest_gpuserve.diagnose.triage_reader import Reader
from pytest_gpuserve.diagnose.triage_rules import load

READY = "[2026-02-11 10:00:57] The server is fired up and ready to roll!\n"
BEGIN = "[2026-02-11 10:00:00] server_args=ServerArgs(model_path='/m', tp_size=2)\n"
OOM = (
    "[2026-02-11 10:00:44 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/opt/x.py", line 431, in load_model\n'
    "    model = make(\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB.\n"
    "\n"
    "[2026-02-11 10:00:44] Received sigquit from a child process. It usually means the child failed.\n"
)


@pytest.fixture
def read(tmp_path):
    def read(text: str | bytes, **options):
        path = tmp_path / "server.log"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return explain([str(path)], **options)

    return read


def chains(text: str):
    """All chains of exceptions in a text, as lists of types."""
    reader, found = Tracebacks(), {}
    for number, raw in enumerate(text.encode().split(b"\n"), 1):
        for piece in pieces(raw):
            _, chain = reader.feed(parse(number, piece))
            if chain is not None:
                found[chain.begin] = chain
    return list(found.values())


# --- tracebacks


def test_a_direct_cause_and_a_context_are_one_chain():
    found = chains(
        "Traceback (most recent call last):\n"
        '  File "a.py", line 1, in a\n    x()\n'
        "OSError: first\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "b.py", line 2, in b\n    y()\n'
        "ValueError: second\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "c.py", line 3, in c\n    z()\n'
        "RuntimeError: third\n"
    )
    assert [[raised.name for raised in chain.raised] for chain in found] == [["OSError", "ValueError", "RuntimeError"]]
    assert found[0].raised[1].file == "b.py"
    assert found[0].raised[1].function == "b"


def test_tracebacks_of_two_processes_line_by_line():
    head = "(Worker_TP{n} pid=60{n}) ERROR 06-05 08:04:26 [multiproc_executor.py:857] "
    bodies = [
        [
            "Traceback (most recent call last):",
            f'  File "rank{n}.py", line 1, in run',
            "    go()",
            "    ^^^^",
            f"{kind}: of rank {n}",
        ]
        for n, kind in ((0, "KeyError"), (1, "ValueError"))
    ]
    tangled = [head.format(n=n) + line for pair in zip(*bodies, strict=True) for n, line in enumerate(pair)]
    found = chains("\n".join(tangled))
    assert {(chain.rank, chain.raised[0].name, chain.raised[0].file) for chain in found} == {
        ("TP0", "KeyError", "rank0.py"),
        ("TP1", "ValueError", "rank1.py"),
    }


def test_a_traceback_without_prefixes_belongs_to_the_record_that_opened_it():
    found = chains(
        "[2026-02-11 10:00:44 TP3] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "a.py", line 1, in a\n'
        "[2026-02-11 10:00:44 TP0] Decode batch, #running-req: 1\n"
        "    x()\n"
        "ValueError: late\n"
    )
    assert [(chain.rank, chain.raised[0].number) for chain in found] == [("TP3", 5)]


def test_an_exception_group_and_a_bare_exception():
    found = chains(
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "a.py", line 1, in a\n'
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        "Traceback (most recent call last):\n"
        '  File "b.py", line 1, in b\n'
        "AssertionError\n"
    )
    assert [chain.raised[0].text for chain in found] == [
        "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
        "AssertionError",
    ]


def test_an_exception_whose_message_begins_on_the_next_line(read):
    found = read(
        "Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/a.py", line 1, in <module>\n'
        "    import sgl_kernel\n"
        "ImportError: \n"
        "[sgl_kernel] CRITICAL: Could not load any common_ops library!\n"
        "Attempted locations:\n"
        "- ImportError: /opt/sgl_kernel/sm100/common_ops.abi3.so: undefined symbol: _ZNK3c106SymInt6sym_neERKS0_\n"
    )
    assert found.verdict == "infra"
    assert found.cause.kind == "missing_library"
    assert found.cause.line.startswith("ImportError: [sgl_kernel] CRITICAL")


def test_a_lookup_that_led_to_a_telling_error_is_not_the_cause(read):
    found = read(
        BEGIN + "Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/models/registry.py", line 1, in get\n    table[name]\n'
        "KeyError: 'FooForCausalLM'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/models/registry.py", line 5, in get\n    raise ValueError(\n'
        "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.\n"
    )
    assert (found.verdict, found.cause.kind) == ("config", "not_supported_combination")


def test_a_failure_that_a_wrapper_repeats_is_named_at_its_origin(read):
    found = read(
        BEGIN + "[2026-02-11 10:00:44 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/kernel.py", line 1, in get\n    run()\n'
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/graph.py", line 5, in get\n    raise Exception(\n'
        "Exception: Capture cuda graph failed: mat1 and mat2 shapes cannot be multiplied\n"
    )
    assert found.cause.line.startswith("RuntimeError: mat1")
    assert found.cause.number == 5


# --- what a complaint is worth


def test_a_complaint_that_the_server_outlived_is_not_the_cause_of_a_later_death(read):
    steps = "".join(f"[2026-02-11 10:01:{n:02d} TP1] Decode batch, #running-req: 1, #token: {n}\n" for n in range(20))
    found = read(
        BEGIN + READY + "[2026-02-11 10:00:58 TP1] Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/a.py", line 1, in a\n    b()\n'
        "ValueError: of an old request\n" + steps + OOM
    )
    assert found.verdict == "oom"
    assert found.cause.line.startswith("torch.OutOfMemoryError")


def test_a_helper_that_died_is_forgiven_when_the_server_became_ready(read):
    found = read(BEGIN + "compile worker process 12 terminated with exit code 1\n" + READY)
    assert found.verdict == "ready"


def test_the_number_in_a_death_notice_is_never_taken_for_another(read):
    """Lines of one shape are judged once; an exit code makes a difference all the same."""
    first = "[2026-02-11 10:00:20] Subprocess helper_0 exited with code 0\n"
    last = "[2026-02-11 10:00:21] Subprocess helper_0 exited with code 137\n"
    assert read(BEGIN + first).verdict == "stalled"
    assert read(BEGIN + first + last).cause.kind == "killed"


def test_a_progress_bar_with_an_exception_behind_it(read):
    found = read(
        BEGIN + "[AutoTuner]: Tuning fp4:   0%|          | 0/21 [00:00<?, ?profile/s]"
        "[2026-02-11 10:00:29 TP3] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/x.py", line 1, in run\n    f()\n'
        "RuntimeError: cooperative launch failed\n"
    )
    assert (found.verdict, found.cause.rank) == ("crash", "TP3")


def test_a_phase_behind_a_progress_bar_begins_once(read):
    """Weights that are loaded a second time would be the draft's."""
    found = read(
        BEGIN + "Loading: 9% Completed | 1/9\r[2026-02-11 10:00:19 TP0] Load weight begin. avail mem=92.10 GB\n"
    )
    assert found.ranks["TP0"].phase == "weight_load"


# --- launches and engines


def test_the_last_launch_is_judged_and_the_others_are_told_of(read):
    found = read(BEGIN + OOM + BEGIN + READY)
    assert found.verdict == "ready"
    assert any("more than one launch" in hint and "ended as oom" in hint for hint in found.hints)
    assert read(BEGIN + READY + BEGIN + OOM).verdict == "oom"


def test_two_engines_in_one_file(read):
    vllm = (
        "(APIServer pid=410) INFO 02-11 09:14:02 [api_server.py:1839] vLLM API server version 0.15.1\n"
        "(APIServer pid=410) INFO:     Application startup complete.\n"
    )
    found = read(BEGIN + OOM + vllm)
    assert (found.engine, found.version, found.verdict) == ("vllm", "0.15.1", "ready")
    assert any("(sglang) ended as oom" in hint for hint in found.hints)


def test_several_logs_of_one_server(tmp_path):
    """The rank that printed its error an hour later is not the cause, whatever the order of the files."""
    early, late = tmp_path / "node1.log", tmp_path / "node0.log"
    late.write_text(
        "[2026-02-11 11:00:00 TP0] Init torch distributed begin.\n"
        "[2026-02-11 11:00:44 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/x.py", line 431, in a\n    b()\n'
        "RuntimeError: of rank 0\n"
    )
    early.write_text(
        "[2026-02-11 10:00:00 TP8] Init torch distributed begin.\n"
        "[2026-02-11 10:00:44 TP8] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/x.py", line 431, in a\n    b()\n'
        "RuntimeError: of rank 8\n"
    )
    for order in ([late, early], [early, late]):
        found = explain([str(path) for path in order])
        assert set(found.ranks) == {"TP0", "TP8"}
        assert found.cause.rank == "TP8"
        assert found.to_json()["cause"]["log"] == str(early)


def test_one_log_a_rank_without_tags(tmp_path):
    """Two logs that both speak of the only rank: neither hides the other."""
    for name, text in (("rank0.log", READY), ("rank1.log", "")):
        (tmp_path / name).write_text("[2026-02-11 10:00:19] Load weight begin. avail mem=92.10 GB\n" + text)
    found = explain([str(tmp_path / "rank0.log"), str(tmp_path / "rank1.log")])
    assert set(found.ranks) == {"TP0 of rank0.log", "TP0 of rank1.log"}
    assert (found.verdict, found.lagging) == ("ready", ())  # only the first node says that it is ready


def test_an_engine_that_is_named_but_did_not_write_the_log(read):
    assert read("GET /index.html 200\nerror: no such page\n", engine="sglang").verdict == "undecided"


# --- ranks


def test_ranks_that_never_spoke_or_stopped_earlier(read):
    found = read(
        "[2026-02-11 10:00:00] server_args=ServerArgs(model_path='/m', tp_size=4)\n"
        + "".join(f"[2026-02-11 10:00:14 TP{n}] Init torch distributed begin.\n" for n in (0, 1, 3))
        + "".join(f"[2026-02-11 10:00:18 TP{n}] Init torch distributed ends. mem usage=1 GB\n" for n in (0, 1))
    )
    assert found.lagging == ("TP3", "TP2")
    assert found.ranks["TP2"].phase is None
    assert found.ranks["TP3"].last_time == "2026-02-11 10:00:14"


def test_of_a_server_that_works_no_rank_is_missing(read):
    found = read(BEGIN + "[2026-02-11 10:00:14 TP0] Init torch distributed begin.\n" + READY)
    assert found.verdict == "ready"
    assert found.lagging == ()
    assert set(found.ranks) == {"TP0"}


def test_the_last_line_of_a_rank_is_kept_however_much_the_others_say(read):
    chatter = "".join(f"[2026-02-11 11:{n // 60 % 60:02d}:{n % 60:02d} TP0] step {n}\n" for n in range(20000))
    found = read(BEGIN + "[2026-02-11 10:00:14 TP1] step 7 of rank 1\n" + chatter)
    assert found.ranks["TP1"].last_line.endswith("step 7 of rank 1")
    assert found.ranks["TP0"].last_line.endswith("step 19999")


# --- files


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, bytes], ids=["gz", "bz2", "xz", "plain"])
def test_packed_logs_are_read_whatever_they_are_called(tmp_path, pack):
    path = tmp_path / "server.log"
    path.write_bytes(pack((BEGIN + OOM).encode()))
    assert explain([str(path)]).cause.number == 5


def zstd(data: bytes, tmp_path) -> bytes:
    if shutil.which("zstd") is None:
        pytest.skip("needs the zstd program to pack")
    return subprocess.run(["zstd", "-q", "-c"], input=data, stdout=subprocess.PIPE, check=True, timeout=30).stdout


def test_zstandard(tmp_path):
    path = tmp_path / "server.log.zst"
    path.write_bytes(zstd((BEGIN + OOM).encode(), tmp_path))
    assert explain([str(path)]).verdict == "oom"


def test_zstandard_without_anything_that_unpacks_it(tmp_path, monkeypatch):
    path = tmp_path / "server.log.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 20)
    monkeypatch.setenv("PATH", str(tmp_path))
    for module in ("compression.zstd", "backports.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LogError, match="install the zstandard package"):
        explain([str(path)])


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
def test_a_damaged_archive_is_read_as_far_as_it_goes(tmp_path, kind):
    chance = random.Random(3)
    text = BEGIN + OOM + "".join(f"line {chance.random()}\n" for _ in range(40000))
    whole = {"gz": gzip.compress, "xz": lzma.compress, "zst": lambda data: zstd(data, tmp_path)}[kind](text.encode())
    path = tmp_path / "server.log"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    found = explain([str(path)])
    assert found.verdict == "oom"
    assert any("damaged or incomplete" in hint for hint in found.hints)


def test_what_is_no_log_at_all(tmp_path):
    with pytest.raises(LogError, match="there is no such file"):
        explain([str(tmp_path / "missing.log")])
    with pytest.raises(LogError, match="is a directory"):
        explain([str(tmp_path)])


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\x00" * 5000, random.Random(1).randbytes(200_000), b"\xff\xfe\r\r\r\n"]
)
def test_nothing_to_read(read, content):
    found = read(content)
    assert found.verdict == "undecided"
    assert found.cause is None


def test_colours_do_not_hide_anything_and_are_not_kept(read):
    coloured = (BEGIN + OOM).replace("[2026", "\x1b[36m[2026").replace("] ", "]\x1b[0m ")
    found = read(coloured)
    assert (found.verdict, found.cause.rank) == ("oom", "TP1")
    assert "\x1b" not in found.cause.line


def test_a_line_without_end(read):
    found = read(BEGIN.encode() + b"x" * 8_000_000 + b"\n" + OOM.encode())
    assert (found.verdict, found.cause.number) == ("oom", 6)
    found = read(BEGIN.encode() + b"Loading: 1% Completed | 1/9 [00:00<00:01]\r" * 20_000 + b"\n" + OOM.encode())
    assert (found.verdict, found.cause.number) == ("oom", 6)


def test_line_numbers_count_newlines_only(read):
    text = BEGIN + "a\rb\rc\x0bd\x0ce\x85f\u2028g\n" + OOM
    found = read(text)
    assert found.cause.line in text.split("\n")[found.cause.number - 1]


def read_chunks(chunks) -> Reader:
    reader = Reader(load(), 0)
    reader.read(chunks)
    return reader


def alive(*types: type) -> list:
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, types)]


def test_of_many_complaints_some_are_kept():
    """Complaints, each of its own: neither more of them nor more of each is kept, whichever way they came."""

    waiting = []

    def log():
        for n in range(1500):
            name = f"{n:011b}".replace("0", "g").replace("1", "h")
            head = f"(EngineCore pid=512) ERROR 02-11 {10 + n // 3600:02d}:{n // 60 % 60:02d}:{n % 60:02d} [core.py:7] "
            yield f"{head}RuntimeError: {name} failed {'' if n % 500 else 'x' * 9000}\n".encode()
            yield f'{head}Traceback (most recent call last):\n{head}  File "x.py", line 1, in {name}\n'.encode()
            yield f"{head}ValueError: {name}\n".encode()
            if n % 500 == 499:
                other = head.replace("512", "513")
                yield f"{other}CUDA out of memory. Tried to allocate {name} {'x' * 3000}\n".encode()
        waiting.append(len(alive(Complaint)))

    reader = read_chunks(log())
    assert waiting[0] < 600
    kept = alive(Complaint)
    assert {found.number for found in kept} >= {1, 4}  # the first, and the latest
    assert max(found.number for found in kept) == 6003
    assert len(kept) < 600
    assert max(len(found.line) for found in kept) <= 2000
    assert len(alive(Chain)) < 200
    assert reader.session.end == 6003


def test_a_chain_without_end():
    link = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: of a loop\n'
    link += "During handling of the above exception, another exception occurred:\n"
    reader = read_chunks(link.encode() for _ in range(2000))
    assert reader.session.complaints[0].number == 3
    assert len(alive(Raised)) < 200


def test_shapes_that_are_remembered(monkeypatch):
    monkeypatch.setattr(triage_shapes, "_MEMO", 100)
    words = ["".join(letters) for letters in itertools.product("ghijk", repeat=4)]
    reader = read_chunks(f"{word}\n".encode() for word in words)
    assert len(reader.session.shapes._memo) <= 100


def test_memory_does_not_grow_with_a_line():
    for chunks in (
        (b"x" * 250_000 for _ in range(100)),
        (b"Loading: 1% Completed | 1/9 [00:00<00:01]\r" * 500 for _ in range(200)),
    ):
        tracemalloc.start()
        try:
            read_chunks(chunks)
            assert tracemalloc.get_traced_memory()[1] < 3_000_000
        finally:
            tracemalloc.stop()


def test_a_traceback_that_was_cut_off():
    """Of a process that said nothing more: what others say is not read for its sake forever."""
    reader = Tracebacks()
    reader.feed(parse(1, b"[2026-02-11 10:00:44 TP1] Traceback (most recent call last):"))
    reader.feed(parse(2, b'  File "/opt/x.py", line 431, in load_model'))
    for number in range(3, 1000):
        reader.feed(parse(number, b"[2026-02-11 10:00:44 TP0] step"))
    assert reader.reading
    for number in range(1000, 4000):
        reader.feed(parse(number, b"[2026-02-11 10:00:44 TP0] step"))
    assert not reader.reading


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 400), max_size=12))
def test_how_a_log_is_cut_into_chunks_makes_no_difference(sizes):
    bars = "Loading: 5% Completed | 1/9 [00:00<00:01]\rLoading: 9% Completed | 2/9 [00:00<00:01]\r\n"
    text = (BEGIN + bars + OOM).encode()
    reader = Reader(load(), 0)
    parts, at = [], 0
    for size in sizes:
        parts.append(text[at : at + size])
        at += size
    reader.read(part for part in (*parts, text[at:]) if part)
    assert [(found.number, found.name) for found in reader.session.complaints][:1] == [(6, "gpu_out_of_memory")]
    assert reader.session.end == 8


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (
            "loss 2.3\ntorch.OutOfMemoryError: CUDA out of memory.\n",
            "a sign of oom (gpu_out_of_memory) is in it, line 2,",
        ),
        (
            "Collecting vllm\nERROR: [Errno 28] No space left on device\n",
            "a sign of infra (disk_full) is in it, line 2,",
        ),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: x\n',
            "an exception is in it, line 3,",
        ),
    ],
)
def test_what_another_programs_log_complains_of_is_a_hint_and_no_verdict(read, text, hint):
    """Mutations that this caught: names of packages counted as marks, any complaint with a rule believed."""
    found = read(text)
    assert (found.verdict, found.engine, found.cause) == ("undecided", None, None)
    assert found.hints[0].startswith(f"{hint} but no server's log was recognised: ")
    assert read(text, engine="vllm").verdict != "undecided"


def test_names_decide_only_between_engines_whose_records_are_there(read):
    record = "INFO 11-02 10:00:00 [utils.py:233] vLLM is using nccl==2.27\n"
    names = "python -m sglang.launch_server sgl_kernel --mem-fraction-static 0.8\n"
    assert read(names).engine is None
    assert read(names * 2 + record).engine == "vllm"


def test_a_draft_of_another_hidden_size_has_a_hint_at_the_draft(read):
    found = read(
        BEGIN + "[2026-02-11 10:00:44 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/models/llama_eagle3.py", line 162, in forward\n'
        "    hidden_states = self.fc(hidden_states)\n"
        '  File "/opt/torch/nn/modules/linear.py", line 134, in forward\n'
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x24576 and 12288x4096)\n"
    )
    assert (found.verdict, found.cause and found.cause.kind) == ("crash", "shapes_do_not_fit")
    assert any("draft" in hint and "hidden size" in hint for hint in found.hints)


@pytest.mark.parametrize("noise", [b"noise\n", b"n" * 3000 + b"\n", b"\n", b"n" * 700_000 + b"\n"])
def test_of_a_very_long_log_both_ends_are_read_and_lines_keep_their_numbers(read, noise):
    filler = noise * (3_000_000 // len(noise))
    text = BEGIN.encode() + filler + OOM.encode()
    whole, ends = read(text), read(text, most=1 << 20)
    assert (ends.engine, ends.verdict, ends.cause) == (whole.engine, "oom", whole.cause)
    assert ends.cause.number == BEGIN.count("\n") + filler.count(b"\n") + 4
    assert read(text, most=len(text)).cause == whole.cause


def test_what_is_left_out_of_a_log_is_not_read(read):
    text = BEGIN + "noise\n" * 200_000 + OOM + "noise\n" * 200_000
    assert read(text).verdict == "oom"
    assert read(text, most=100_000).verdict == "stalled"
