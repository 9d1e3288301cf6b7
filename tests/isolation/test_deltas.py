"""Command lines taken apart and put together again."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve import shell
from pytest_gpuserve.engines.features import GENERIC, SGLANG, VLLM, features_of
from pytest_gpuserve.errors import SpecError
from pytest_gpuserve.isolation.conclude import CellResult
from pytest_gpuserve.isolation.deltas import Command, ordered_remedies, parse_options, split
from pytest_gpuserve.isolation.signature import Signature
from pytest_gpuserve.isolation.variants import CommandLine, from_matrix

KIMI = (
    "NCCL_DEBUG=INFO HF_HOME=/cache python3 -m sglang.launch_server --model-path /models/k2 --tp-size 8 "
    "--trust-remote-code --mem-fraction-static 0.85 --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path /models/draft --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --attention-backend flashinfer --kv-cache-dtype fp8_e4m3 --cuda-graph-max-bs 16 "
    "--host 0.0.0.0 --port 30000 --my-new-flag"
)


def parts_of(text: str, features=SGLANG):
    return split(shlex.split(text), features)


def words_of(command: Command) -> list[str]:
    return [*(f"{name}={value}" for name, value in command.env), *command.argv]


def test_sglang_command() -> None:
    parts = parts_of(KIMI)
    names = [delta.name for delta in parts.deltas]
    assert names == [
        *("spec_decode", "attention_backend", "kv_cache_dtype", "cuda_graph", "--my-new-flag", "nccl"),
        *("custom_all_reduce", "overlap"),
    ]
    assert (parts.tp, parts.model, parts.port) == (8, "/models/k2", "30000")
    base = parts.command(())
    assert shlex.join(base.argv) == (
        "python3 -m sglang.launch_server --model-path /models/k2 --tp-size 8 --trust-remote-code "
        "--mem-fraction-static 0.85 --host '{host}' --port '{port}' --disable-cuda-graph --disable-custom-all-reduce "
        "--disable-overlap-schedule"
    )
    assert dict(base.env) == {"HF_HOME": "/cache"}


def test_everything_on_is_the_users_command() -> None:
    parts = parts_of(KIMI)
    whole = parts.command(range(len(parts.deltas)))
    shown = words_of(parts.typed(whole))
    assert sorted(shown) == sorted(shlex.split(KIMI)), "nothing added, nothing lost"
    assert shown[:5] == ["HF_HOME=/cache", "NCCL_DEBUG=INFO", "python3", "-m", "sglang.launch_server"]


def test_what_the_user_switched_off_is_no_delta() -> None:
    parts = parts_of("python -m sglang.launch_server --model-path m --disable-cuda-graph --lora-paths a b")
    names = [delta.name for delta in parts.deltas]
    assert "cuda_graph" not in names
    assert "--disable-cuda-graph" in parts.command(()).argv
    assert "custom_all_reduce" not in names, "one GPU reduces nothing"
    assert "CUDA graphs off" not in [remedy.name for remedy in parts.remedies]
    assert parts.deltas[0].options[0].values == ("a", "b")


def test_a_delta_is_refined_into_parts() -> None:
    parts = parts_of(KIMI)
    smaller = parts.refined(0, {3})
    assert smaller is not None
    assert [delta.name for delta in smaller.deltas] == [
        "--speculative-num-steps",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
    ]
    core = smaller.command(()).argv
    assert core[core.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert "--speculative-num-steps" not in core
    assert "--cuda-graph-max-bs" in core, "the other delta of the failing set is base now"
    assert "--disable-cuda-graph" not in core
    assert "--attention-backend" not in core
    assert parts.refined(1, ()) is None


def test_json_of_vllm_is_refined_by_key() -> None:
    config = '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 3, "disable_padded_drafter_batch": true}'
    parts = parts_of(f"vllm serve /m -tp 2 --speculative-config '{config}' --kv-cache-dtype fp8", VLLM)
    assert (parts.model, parts.tp, parts.program) == ("/m", 2, ("vllm", "serve", "/m"))
    smaller = parts.refined(0, ())
    assert smaller is not None
    assert [delta.name for delta in smaller.deltas] == ["--speculative-config.disable_padded_drafter_batch"]

    def said(on):
        argv = smaller.command(on).argv
        return json.loads(argv[argv.index("--speculative-config") + 1])

    assert said(()) == {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}
    assert said((0,)) == json.loads(config), "one flag with one object again"


def test_remedies_replace_flags_and_those_that_help_come_first() -> None:
    parts = parts_of(KIMI)
    first = ordered_remedies(parts, {"attention_backend"})[0]
    assert first.name == "attention backend triton"
    argv = parts.command(range(len(parts.deltas)), first).argv
    assert argv.count("--attention-backend") == 1
    assert argv[argv.index("--attention-backend") + 1] == "triton"
    cold = next(remedy for remedy in parts.remedies if remedy.name == "cold caches")
    assert dict(parts.command((), cold, "/empty").env)["TRITON_CACHE_DIR"] == "/empty/triton"


def test_unknown_engine_has_whole_flags_and_variables() -> None:
    parts = parts_of("env A=1 B=2 ./serve.sh --port={port} --x 1 --y=2 -z", GENERIC)
    assert [delta.name for delta in parts.deltas] == ["--x", "--y", "-z", "A", "B"]
    assert parts.command({0, 4}).argv == ("./serve.sh", "--port={port}", "--x", "1")
    assert parts.command({0, 4}).env == (("B", "2"),)
    assert features_of("no_such_engine") is GENERIC
    assert parts_of("./serve.sh", GENERIC).command(()).argv == ("./serve.sh", "--port", "{port}")


@pytest.mark.parametrize("words", [[], ["A=1"], ["env", "A=1"]])
def test_no_command(words: list[str]) -> None:
    with pytest.raises(SpecError, match="no command after --"):
        split(words, GENERIC)


def test_options() -> None:
    found = parse_options(["--a", "-1", "--b=x=y", "pos", "-c", "--d", "e", "f"])
    assert [option.words() for option in found] == [("--a", "-1"), ("--b=x=y",), ("pos",), ("-c",), ("--d", "e", "f")]
    with pytest.raises(SpecError, match="flag is expected"):
        parse_options(["x"])


_WORD = st.from_regex(r"[a-z0-9._/]{1,8}", fullmatch=True)
_OPTION = st.tuples(st.from_regex(r"--[a-z]{2}(-[a-z]{1,4}){0,2}", fullmatch=True), st.lists(_WORD, max_size=2))


@given(st.lists(_OPTION, max_size=8, unique_by=lambda option: option[0]), st.data())
def test_any_choice_of_deltas_is_base_plus_those(options, data) -> None:
    """Property: a command with some deltas holds base and exactly their words; with all, everything the user wrote."""
    words = ["prog", *(word for flag, values in options for word in (flag, *values)), "--port", "1"]
    parts = split(words, GENERIC)
    assert sorted(words_of(parts.typed(parts.command(range(len(parts.deltas)))))) == sorted(words)
    on = data.draw(st.sets(st.integers(0, max(0, len(parts.deltas) - 1)), max_size=len(parts.deltas)))
    chosen = [w for n in on if n < len(parts.deltas) for o in parts.deltas[n].options for w in o.words()]
    assert sorted(parts.command(on).argv) == sorted([*parts.command(()).argv, *chosen])


CELLS = [
    CellResult("base", {"spec_decode": "base", "cuda_graph": "on", "tp": "2"}, "ready"),
    CellResult("eagle3", {"spec_decode": "eagle3", "cuda_graph": "on", "tp": "2"}, "hang", "cuda_graph"),
    CellResult("off", {"spec_decode": "base", "cuda_graph": "off", "tp": "2"}, "ready"),
    CellResult("both", {"spec_decode": "eagle3", "cuda_graph": "off", "tp": "2"}, "hang", "cuda_graph"),
    CellResult("mtp", {"spec_decode": "mtp", "cuda_graph": "off", "tp": "2"}, "hang", "cuda_graph"),
    CellResult("lost", {"spec_decode": "eagle3", "cuda_graph": "off", "tp": "2"}, "infra"),
]
RAW = {
    "base": dict(CELLS[0].values),
    "specs": {
        "base": {"engine": "sim", "tp": 2, "axes": {"cuda_graph": "on", "spec_decode": "base"}},
        "both": {"engine": "sim", "tp": 2, "axes": {"cuda_graph": "off", "spec_decode": {"eagle3": {"num_steps": 3}}}},
    },
}


def test_cells_of_a_matrix_are_evidence() -> None:
    problem, evidence, target = from_matrix(RAW, CELLS, "both")
    assert problem.names == ("spec_decode", "cuda_graph")
    assert target == Signature("hang", "cuda_graph")
    assert [(sorted(t.deltas), t.outcome) for t in evidence] == [
        ([], "pass"),
        ([0], "fail"),
        ([1], "pass"),
        ([0, 1], "fail"),
    ]
    spec = problem.wanted({0}).spec
    assert spec.axis("spec_decode").detail == {"num_steps": 3}
    assert spec.axis("cuda_graph").name == "on"


@pytest.mark.parametrize(
    ("cell", "raw", "message"),
    [
        ("nothing", RAW, "has no cell 'nothing'"),
        ("off", RAW, "did not fail"),
        ("both", {}, "does not say what its cells launched"),
        ("eagle3", RAW, "does not say what its cells launched"),
    ],
)
def test_matrices_that_cannot_be_used(cell: str, raw: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        from_matrix(raw, CELLS, cell)


def test_shown_commands_can_be_pasted() -> None:
    text = "python -m sglang.launch_server --model-path 'a b' --x '{\"k\": 1}' --port 1"
    problem = CommandLine(parts_of(text), "sglang")
    everything = shlex.split(problem.shown(range(len(problem.names))))
    assert sorted(everything) == sorted(shlex.split(text))
    assert "'a b'" in problem.shown(())
    assert "--port 1" in problem.shown(())
    places = parts_of("PORT={port} X=1 ./server --listen {host}:{port} --y", GENERIC)
    base = places.command(())
    assert (base.argv, base.env) == (("./server", "--listen", "{host}:{port}"), (("PORT", "{port}"),)), (
        "never taken away"
    )
    assert not places.port_added
    typed = places.typed(places.command(range(2)))
    assert shell.line(typed.argv, typed.env) == "PORT=30000 X=1 ./server --listen 127.0.0.1:30000 --y"
    assert parts_of("./server --y", GENERIC).port_added
    cold = next(remedy for remedy in problem.remedies(()) if remedy.name == "cold caches")
    typed = problem.typed((), cold)
    assert 'TRITON_CACHE_DIR="$(mktemp -d)"/triton ' in shell.line(typed.argv, typed.env)
    text = "SGLANG_X='a b' python -m sglang.launch_server --port {port} --host={host}"
    problem = CommandLine(parts_of(text), "sglang")
    shown = problem.shown(range(len(problem.names)))
    assert shown.startswith("SGLANG_X='a b' python -m sglang.launch_server --port 30000 --host=127.0.0.1")
    assert "{" not in shown
