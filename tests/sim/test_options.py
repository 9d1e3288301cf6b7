"""The command line of the embedded engine: what it refuses, and with which words."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pytest_gpuserve import vocabulary
from pytest_gpuserve.sim import config, faults, options


def parsed(*argv: str, **environ: str) -> Any:
    return options.parse(argv, environ)[0]


def test_phases_are_those_of_the_package() -> None:
    assert config.PHASES == vocabulary.PHASES


def test_defaults_are_one_healthy_rank() -> None:
    o = parsed()
    assert (o.tp, o.flavor, o.faults, o.host) == (1, "sglang", (), "127.0.0.1")


@pytest.mark.parametrize("kind", faults.KINDS)
def test_every_kind_can_be_asked_for(kind: str) -> None:
    (fault,) = parsed("--tp", "4", "--fault", f"{kind}@serving").faults
    ranks = {"deaf": (), "wedge": (0,), "symmetric": (0, 1, 2, 3)}
    assert (fault.kind, fault.phase, fault.ranks) == (kind, "serving", ranks.get(kind, (3,)))


def test_keys_of_a_fault() -> None:
    (fault,) = parsed("--tp", "8", "--fault", "sleep@cuda_graph:rank=1,3:after=2.5:at=end").faults
    assert (fault.ranks, fault.after, fault.at) == ((1, 3), 2.5, 1.0)
    (fault,) = parsed("--fault", "slow@serving:how=io:for=3:requests=2:tokens=9").faults
    assert (fault.how, fault.seconds, fault.requests, fault.tokens) == ("io", 3.0, 2, 9)
    (fault,) = parsed("--fault", "exit@kv_cache:code=7:rank=all").faults
    assert (fault.code, fault.ranks) == (7, (0,))


def test_faults_come_from_everywhere() -> None:
    o = parsed("--fault", "sleep@ready; gil@serving", "--fault=pipe@warmup", GPUSERVE_SIM_FAULT="stop@kv_cache")
    assert [f.kind for f in o.faults] == ["sleep", "gil", "pipe", "stop"]


def test_conditions_of_a_fault() -> None:
    fault = "sleep@ready:when=spec_decode=eagle3+cuda_graph=on+overlap=off"
    assert not parsed("--fault", fault).faults
    assert not parsed("--fault", fault, "--spec-decode", "eagle3").faults
    assert not parsed("--fault", fault, "--spec-decode", "eagle3", "--overlap", "on").faults
    assert parsed("--fault", fault, "--spec-decode", "eagle3", "--overlap", "off").faults


def test_chance_is_a_share_of_all_starts_and_repeatable_by_seed() -> None:
    hits = [bool(parsed("--fault", "sleep@ready:chance=0.3", "--seed", str(seed)).faults) for seed in range(400)]
    assert 80 <= sum(hits) <= 160
    assert hits == [
        bool(parsed("--fault", "sleep@ready:chance=0.3", "--seed", str(seed)).faults) for seed in range(400)
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--fault", "sleep"], "write sleep@PHASE"),
        (["--fault", "sleep@booting"], "'booting' is no phase"),
        (["--fault", "nap@ready"], "there is no kind 'nap'"),
        (["--fault", "sleep@ready:rank=2", "--tp", "2"], "there is no rank 2 with --tp 2"),
        (["--fault", "sleep@ready:rank=x"], "'x' is no whole number"),
        (["--fault", "sleep@ready:rank"], "write KEY=VALUE"),
        (["--fault", "sleep@ready:requests=1"], "requests=1 means nothing for sleep@ready"),
        (["--fault", "sleep@ready:for=1"], "for=1 means nothing"),
        (["--fault", "wedge@warmup"], "wedge@serving"),
        (["--fault", "deaf@shutdown"], "answers nobody"),
        (["--fault", "deaf@serving:rank=0"], "rank=0 means nothing"),
        (["--fault", "sleep@ready:when=colour=red"], "'colour=red' is no AXIS=VALUE"),
        (["--fault", "sleep@ready:chance=2"], "'2' is no number from 0 to 1"),
        (["--phase-seconds", "serving=1"], "write PHASE=SECONDS"),
        (["--phase-seconds", "warmup=soon"], "'soon' is no number of seconds"),
        (["--tp", "0"], "no whole number from 1 to 64"),
        (["--tp", "65"], "no whole number from 1 to 64"),
        (["--port", "70000"], "no whole number from 0 to 65535"),
        (["--accept-rate", "1.5"], "no number from 0 to 1"),
        (["--load-seconds", "-1"], "no number of seconds"),
        (["--load-seconds", "nan"], "no number of seconds"),
        (["--flavor", "llama"], "invalid choice"),
        (["--spec-topk", "2", "--spec-draft-tokens", "3"], "--spec-draft-tokens must be above --spec-steps"),
        (["--flav", "vllm"], "unrecognized arguments"),
    ],
)
def test_mistakes_are_named(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parsed(*argv)
    assert exit.value.code == 2
    assert words in capsys.readouterr().err


def test_help_says_it_all() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gpuserve.sim", "--help"], capture_output=True, text=True, timeout=30, check=True
    )
    for word in (*faults.KINDS, *config.PHASES, options.FAULT_VARIABLE, "--accept-rate", "--ignore-term"):
        assert word in done.stdout
