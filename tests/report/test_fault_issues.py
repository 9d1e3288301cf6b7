"""What issue.md says of every fault of the embedded engine: recorded bundles, judged and written anew by this version.

Each zip is the redacted bundle of one real run with four ranks (paths and the kernel's name were replaced).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_gpuserve.report.again import judge_again, written_again
from pytest_gpuserve.report.bundle_check import check
from pytest_gpuserve.report.bundle_reader import open_bundles
from pytest_gpuserve.report.issue import issue
from pytest_gpuserve.sim.faults import KINDS

BUNDLES = Path(__file__).parents[1] / "data" / "bundles"

NOBODY = "none stands out"

SAID = {
    # fault: (verdict, phase, rank, cause, what helps)
    "sleep": ("hang", "cuda_graph", "TP2", r"TP2 sleeps \(synchronize at stalls\.py", r"what it waits for"),
    "spin": ("hang", "cuda_graph", "TP1", r"TP1 is in spin_stream", r"TP1 burns CPU outside Python"),
    "gil": ("hang", "weight_load", "TP3", r"TP3 .*\(?load_weights|launch_kernel", r"\w"),
    "flock": ("hang", "cuda_graph", "TP3", r"TP2 waits for .*lock.*TP3", r"lock"),
    "stale_lock": ("hang", "cuda_graph", "TP1", r"TP1 sleeps \(wait at build\.py", r"poll loop"),
    "pipe": ("hang", "distributed_init", "TP2", r"TP2 reads from a pipe", r"other end of that pipe"),
    "stop": ("hang", "weight_load", "TP3", r"TP3 is stopped \(SIGSTOP", r"Send SIGCONT to pid \d+"),
    "die": ("crash", "cuda_graph", NOBODY, r"Connection closed by peer \\\[TP1", r"a rank that printed no error"),
    "exit": ("crash", "weight_load", "TP2", r"Connection closed by peer \\\[TP2", r"a rank that printed no error"),
    "raise": ("crash", "weight_load", "TP1", r"illegal memory access", r"CUDA_LAUNCH_BLOCKING=1"),
    "oom": ("oom", "weight_load", "TP2", r"CUDA out of memory", r"lower the memory fraction"),
    "skip_collective": ("hang", "cuda_graph", NOBODY, r"collectives do not match", r"order and count of collectives"),
    "symmetric": ("hang", "cuda_graph", NOBODY, r"TP0-3 are in wait_event", r"what the ranks share"),
    "slow": ("slow", "weight_load", NOBODY, r"TP1 copies weights", r"read_bytes and page faults"),
    "deaf": ("hang", "serving", NOBODY, r"a request or an answer was lost", r"Follow one request"),
    "wedge": ("hang", "serving", NOBODY, r"a request or an answer was lost", r"Follow one request"),
}


def test_every_kind_of_fault_is_here() -> None:
    incidents = set(KINDS) - {"garble"}  # a server that answers, and answers wrongly, has none
    assert set(SAID) == incidents
    assert {path.stem for path in BUNDLES.glob("*.zip")} == incidents


@pytest.mark.parametrize("kind", SAID)
def test_phase_rank_cause_and_advice_are_those_of_the_fault(kind: str) -> None:
    (bundle,) = open_bundles(BUNDLES / f"{kind}.zip")
    assert check(bundle).whole, list(check(bundle).lines())
    assert judge_again(bundle) is not None
    text = issue(written_again(bundle))
    verdict, phase, rank, cause, helps = SAID[kind]
    rows = dict(re.findall(r"(?m)^\| ([a-z ]+) \| (.+) \|$", text))
    assert (rows["verdict"], rows["phase"], rows["rank"]) == (verdict, phase, rank)
    assert re.search(cause, rows["cause"]), rows["cause"]
    assert re.search(helps, rows["what helps"]), rows["what helps"]
    assert f"--fault={kind}@" in text
    who = f", {rank}" if rank != NOBODY else ""
    assert text.startswith(f"**Title:** [Bug] {verdict} in {phase}{who} (")


@pytest.mark.parametrize("kind", SAID)
def test_what_the_bundle_was_written_with_and_what_is_judged_now_agree(kind: str) -> None:
    """The same evidence, the same verdict: nothing that the judgement rests on is missing from a bundle."""
    (bundle,) = open_bundles(BUNDLES / f"{kind}.zip")
    then = bundle.json("incident.json")
    found = judge_again(bundle)
    assert found is not None
    assert (found[0].verdict, found[0].phase, list(found[0].culprits)) == (
        then["verdict"],
        then["phase"],
        then["culprits"],
    )
