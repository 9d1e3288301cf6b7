"""The data file, and how frames are matched against it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pytest_gpuserve.diagnose import signatures
from pytest_gpuserve.diagnose.model import Frame, ThreadStack
from pytest_gpuserve.diagnose.parse import read_dumps
from pytest_gpuserve.diagnose.signatures import FramePattern, Signature, folded, last_name, match

PACKAGE = Path(signatures.__file__).parent.parent


def found(dumps, text: str, **facts) -> str | None:
    hit = match(dumps.thread(text, **facts))
    return hit.signature.id if hit else None


def test_every_entry_of_the_data_file_is_whole():
    entries = signatures.load()
    assert len({e.id for e in entries}) == len(entries) >= 60
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.id)
        assert entry.sources, entry.id
        assert all(url.startswith("https://") for url in entry.sources)
        assert entry.title.split()[0].endswith("s"), f"{entry.id}: a title follows 'rank 3': {entry.title}"
        assert entry.explanation
        assert entry.advice or entry.kind == "idle", entry.id
        assert entry.layer or entry.kind == "idle", entry.id


REFERENCE = [
    (row["number"], row["stack"], row["kind"], row["signature"])
    for row in json.loads((Path(__file__).parent.parent / "data" / "stacks" / "reference.json").read_text())
]
"""(number in the table of known hangs, stack leaf first, kind, signature)"""


@pytest.mark.parametrize(("number", "text", "kind", "signature"), REFERENCE, ids=lambda v: str(v)[:40])
def test_the_reference_table_is_recognised(dumps, number, text, kind, signature):
    hit = match(dumps.thread(text))
    assert hit, f"number {number} matches nothing"
    assert (hit.signature.kind, hit.signature.id) == (kind, signature)


def test_all_numbers_of_the_reference_table_are_covered():
    assert {number for number, *_ in REFERENCE} | {25} == set(range(1, 29))


def test_the_gil_counts_only_for_its_owner(dumps):
    text = "cuModuleLoadData libcuda.so.1 | launch eng/x.py:1"
    assert found(dumps, text, owns_gil=True) == "gil-in-cuda"
    assert found(dumps, text, owns_gil=False) != "gil-in-cuda"


def test_a_cause_far_from_the_leaf_is_none(dumps):
    deep = " | ".join(f"layer{n} eng/x.py:{n}" for n in range(9))
    assert found(dumps, f"{deep} | wait torch/utils/file_baton.py:50") is None
    collective = "all_reduce torch/distributed/distributed_c10d.py:1 | load_weights eng/x.py:1 | load_model eng/x.py:2"
    assert found(dumps, collective) == "c10d-collective"


def test_native_frames_are_how_a_python_frame_waits(dumps):
    """The depth counts Python frames for a Python frame: ``--native`` makes a stack no deeper."""
    native = " | ".join(f"inside{n} libnccl.so.2" for n in range(12))
    assert found(dumps, f"{native} | all_reduce torch/distributed/distributed_c10d.py:1") == "c10d-collective"
    far = " | ".join(f"inside{n} own/a.py:1" for n in range(8))
    assert found(dumps, f"{far} | all_reduce torch/distributed/distributed_c10d.py:1") is None
    assert found(dumps, f"{far} | cudaStreamSynchronize libcudart.so.12") is None
    deep = " | ".join(f"inside{n} libx.so" for n in range(8))
    assert found(dumps, f"{deep} | cudaStreamSynchronize libcudart.so.12") is None


def test_ordinary_work_matches_nothing(dumps):
    for text in ("forward eng/model.py:3 | step eng/runner.py:9", "wait eng/queue_of_mine.py:3", "load eng/store.py:9"):
        assert found(dumps, text) is None


@pytest.mark.parametrize(
    ("pattern", "frame", "expected"),
    [
        ("wait @ torch/utils/file_baton.py", Frame("FileBaton.wait", "/v/torch/utils/file_baton.py"), True),
        ("wait @ torch/utils/file_baton.py", Frame("wait", "utils/file_baton.py"), True),
        ("wait @ torch/utils/file_baton.py", Frame("wait", "/v/mytorch/utils/file_baton.py"), False),
        ("wait @ torch/utils/file_baton.py", Frame("waits", "torch/utils/file_baton.py"), False),
        ("run @ process.py", Frame("run", "subprocess.py"), False),
        ("a|b @ x.py|y.py", Frame("b", "/z/y.py"), True),
        ("* @ flashinfer/*.py", Frame("anything", "/v/flashinfer/autotuner.py"), True),
        ("* @ flashinfer/*.py", Frame("anything", "/v/flashinfer/jit/core.py"), False),
        ("*deep_gemm* @ *", Frame("m.compile_deep_gemm_now", "q.py"), True),
        ("waitRecv @ libtorch_cpu.so", Frame("gloo::B::waitRecv", "x.cpp", None, "/v/libtorch_cpu.so"), True),
        ("f @ libcuda.so*", Frame("f", "", None, "/usr/lib/libcuda.so.1"), True),
    ],
)  # fmt: skip
def test_frame_patterns(pattern, frame, expected):
    assert FramePattern.parse(pattern).matches(frame) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Scheduler.run.<locals>.step", "step"),
        ("wait", "wait"),
        ("c10d::Work::wait", "wait"),
        ("std::vector<int, std::allocator<int>>::push_back(int&&)", "vector"),
        ("<module>", "<module>"),
        ("0x7f0000487d71", "0x7f0000487d71"),
        ("pthread_cond_wait@@GLIBC_2.3.2", "pthread_cond_wait"),
        ("clock_nanosleep@GLIBC_2.2.5", "clock_nanosleep"),
        ("do_futex_wait.constprop.1", "do_futex_wait"),
        ("_PyEval_EvalFrameDefault.cold", "_PyEval_EvalFrameDefault"),
        ("Model.part", "part"),
    ],
)
def test_last_names(name, expected):
    assert last_name(name) == expected


def test_boot_and_helper_frames_are_folded(dumps):
    text = "step a/b.py:1 | decorate_context torch/utils/_contextlib.py:124 | run multiprocessing/process.py:108 | "
    text += "_bootstrap multiprocessing/process.py:1 | spawn_main multiprocessing/spawn.py:1 | <module> <string>:1"
    assert [f.name for f in folded(dumps.frames(text))] == ["step"]
    kept = "run subprocess.py:550 | run triton/runtime/jit.py:3"
    assert len(folded(dumps.frames(kept))) == 2
    only = "run threading.py:1 | _bootstrap threading.py:2"
    assert len(folded(dumps.frames(only))) == 2, "a stack of nothing but helpers stays"


def test_the_most_telling_signature_wins(dumps):
    specific = "acquire filelock/_api.py:1 | build flashinfer/jit/core.py:2"
    assert found(dumps, specific) == "flashinfer-build-lock"
    weak_at_the_leaf = "wait subprocess.py:1 | compile triton/compiler/compiler.py:3"
    assert found(dumps, weak_at_the_leaf) == "triton-compile"


def test_entries_that_cannot_be_are_refused():
    good = {"id": "x", "kind": "cause", "title": "waits", "frames": ["f @ g.py"]}
    assert Signature.from_mapping(good).id == "x"
    with pytest.raises(ValueError, match="kind"):
        Signature.from_mapping({**good, "kind": "culprit"})
    with pytest.raises(ValueError, match="frames"):
        Signature.from_mapping({**good, "frames": []})
    with pytest.raises(TypeError):
        Signature.from_mapping({**good, "colour": "red"})


def test_a_thread_without_frames_matches_nothing():
    assert match(ThreadStack(1, None, True, ())) is None


def test_a_match_is_independent_of_the_dumper(dumps):
    pyspy = 'Process 7: VLLM::Worker_TP0\n\nThread 7 (idle): "MainThread"\n    B.wait (torch/utils/file_baton.py:50)\n'
    faulthandler = 'Thread 0x00007f (most recent call first):\n  File "/v/torch/utils/file_baton.py", line 50 in wait\n'
    for text in (pyspy, faulthandler):
        (one,) = read_dumps(text)
        assert one.main
        assert match(one.main).signature.id == "torch-extension-lock"


@pytest.mark.parametrize("room", ["diagnose", "watch"])
def test_no_rule_names_the_embedded_engine(room):
    """What decides must work for any engine: no signature, regex or code may know the one the tests use."""
    for path in sorted((PACKAGE / room).rglob("*")):
        if path.suffix in (".py", ".toml"):
            assert not re.search(r"\bsim\b|\bsim[_./]|_sim\b", path.read_text()), path
