"""What issue.md says of every fault of the embedded engine: recorded bundles, judged and written anew by this version.

Each zip is the redacted bundle of one real run with four ranks (``benchmarks/record_faults.py``). What is expected
comes from the fault that was injected: its phase and rank from the command line in the bundle, its mechanism from the
table below, which follows ``python -m pytest_gpuserve.sim --help``.

Mutations that these tests caught: a mechanism's words swapped or left out, the culprit of a spin dropped, the order of
deaths ignored, the health page not asked for, weak signatures not contradicted (of culprits, of all ranks together, of
a rank in flock), the lock file not looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_gpuserve.report.again import judge_again, written_again
from pytest_gpuserve.report.bundle_check import check
from pytest_gpuserve.report.bundle_reader import Bundle, open_bundles
from pytest_gpuserve.report.issue import issue
from pytest_gpuserve.sim.faults import KINDS

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "tests" / "data" / "bundles"

NOBODY = "none stands out"


def struck(rank: int) -> str:
    return f"TP{rank}"


def holder(rank: int) -> str:
    """Of the lock: the next rank takes it, and waits in the collective."""
    return f"TP{(rank + 1) % 4}"


def nobody(rank: int) -> str:
    return NOBODY


def front(rank: int) -> str:
    return "api"


@dataclass(frozen=True)
class Told:
    """``mechanism``: words of the cause, with {who} for the struck rank; ``helps``: of the advice; ``never``: words
    that would tell of another fault."""

    verdict: str
    who: Callable[[int], str]
    mechanism: str
    helps: str
    never: str = r"copies weights|pin the pages|read_bytes"


FAULTS = {
    "sleep": Told(
        "hang", struck, r"{who} sleeps \(.*one sleep call that did not end", r"{who} waits for in that sleep"
    ),
    "spin": Told(
        "hang", struck, r"{who} runs without end .*% of a core, outside Python", r"burns CPU.*may be slow and not"
    ),
    "gil": Told("hang", struck, r"{who} holds the GIL in a C call", r"{who} can run until that C call returns"),
    "flock": Told(
        "hang", holder, r"deadlock: {who} waits for the lock .*waits in a collective for {who}", r"the lock back"
    ),
    "stale_lock": Told(
        "hang", struck, r"{who} polls for the file \S+\.baton, which is stale", r"\.baton is a lock.*remove it"
    ),
    "pipe": Told(
        "hang", struck, r"{who} reads from a pipe to which nobody writes", r"other end of the pipe that {who} reads"
    ),
    "stop": Told("hang", struck, r"{who} is stopped \(SIGSTOP", r"Send SIGCONT to pid \d+"),
    "die": Told("crash", struck, r"{who} was gone first \(killed by SIGKILL\)", r"who sent SIGKILL to {who}"),
    "exit": Told(
        "crash", struck, r"{who} was gone first \(exit code 3\)", r"{who}: it ended by itself and printed no error"
    ),
    "raise": Told(
        "crash", struck, r"{who}: RuntimeError: CUDA error: an illegal memory access", r"CUDA_LAUNCH_BLOCKING=1"
    ),
    "oom": Told("oom", struck, r"{who}: torch.OutOfMemoryError: CUDA out of memory", r"lower the memory fraction"),
    "skip_collective": Told("hang", nobody, r"collectives do not match", r"order and count of collectives"),
    "symmetric": Told("hang", nobody, r"TP0-3 wait for a lock or an event .*does not come", r"what the ranks share"),
    "slow": Told(
        "slow", struck, r"{who} has a compiler at work .*(cicc|ptxas) below it uses CPU", r"{who} finish its build"
    ),
    "deaf": Told(
        "hang", front, r"accepts connections, but nothing is answered there, not even GET /health", r"front end"
    ),
    "wedge": Told("hang", nobody, r"GET /health answers 200 while tokens stand still", r"Follow one request"),
}
"""Kind of fault to what a report of it says."""

RECORDED = (*FAULTS, "flock_weight_load", "symmetric_weight_load", "sleep_kv_cache", "pipe_kv_cache", "gil_compile")
"""Names of bundles; a phase follows where a kind is there twice: under the loader weak signatures match, too, the pool
is announced by the first rank alone, and SGLang announces no compilation at all."""

SILENT = {"gil_compile": "kv_cache is over; which came next is not known"}
"""What is said of a phase that neither log nor stack names."""


def kind_of(name: str) -> str:
    return name if name in FAULTS else next(kind for kind in FAULTS if name.startswith(f"{kind}_"))


def read(name: str) -> tuple[Bundle, str, int]:
    """The bundle, and the phase and rank of the fault in the command line of its server."""
    (bundle,) = open_bundles(BUNDLES / f"{name}.zip")
    argv = bundle.json("server.json")["argv"]
    (fault,) = (re.fullmatch(r"--fault=(\w+)@(\w+)(.*)", word) for word in argv if word.startswith("--fault="))
    assert fault is not None
    assert fault[1] == kind_of(name)
    rank = re.search(r":rank=(\d+)", fault[3])
    return bundle, fault[2], int(rank[1]) if rank else 0


def rows(text: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^\| ([a-z ]+) \| (.+) \|$", text))


def test_every_kind_of_fault_is_here() -> None:
    incidents = set(KINDS) - {"garble"}  # a server that answers, and answers wrongly, has none
    assert set(FAULTS) == incidents
    assert {path.stem for path in BUNDLES.glob("*.zip")} == set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_phase_rank_cause_and_advice_are_those_of_the_fault(name: str) -> None:
    bundle, phase, rank = read(name)
    assert check(bundle).whole, list(check(bundle).lines())
    assert judge_again(bundle) is not None
    text = issue(written_again(bundle))
    told, table = FAULTS[kind_of(name)], rows(text)
    who = told.who(rank)
    assert (table["verdict"], table["phase"], table["rank"]) == (told.verdict, SILENT.get(name, phase), who)
    assert re.search(told.mechanism.format(who=struck(rank)), table["cause"]), table["cause"]
    assert re.search(told.helps.format(who=struck(rank)), table["what helps"]), table["what helps"]
    assert not re.search(told.never, text)
    named = f", {who}" if who != NOBODY else ""
    where = f"past {SILENT[name].partition(' ')[0]}" if name in SILENT else f"in {phase}"
    assert text.startswith(f"**Title:** [Bug] {told.verdict} {where}{named} (")


@pytest.mark.parametrize("name", RECORDED)
def test_the_struck_rank_has_a_row_that_tells_how_it_is(name: str) -> None:
    kind, (bundle, phase, rank) = kind_of(name), read(name)
    text = issue(written_again(bundle))
    if kind in ("die", "exit"):
        how = "killed by SIGKILL" if kind == "die" else "exit code 3"
        assert f"{struck(rank)}: {how}, first of all, last phase {phase}" in rows(text)["gone"]
        assert f"gone: {struck(rank)}: {how}" in text
    elif kind in ("raise", "oom"):
        assert struck(rank) in rows(text)["gone"] or f"TP0-{rank}" in rows(text)["gone"]
    elif kind not in ("symmetric", "deaf", "wedge"):
        (row,) = re.findall(rf"(?m)^ +{struck(rank)}  .*$", text)
        pace = {"spin": r"  spins$", "slow": r"  moving \((cicc|ptxas) below it uses CPU\)$"}.get(kind, r"  frozen$")
        assert re.search(pace, row), row


@pytest.mark.parametrize("name", RECORDED)
def test_what_the_bundle_was_written_with_and_what_is_judged_now_agree(name: str) -> None:
    """The same evidence, the same verdict: nothing that the judgement rests on is missing from a bundle."""
    (bundle,) = open_bundles(BUNDLES / f"{name}.zip")
    then = bundle.json("incident.json")
    found = judge_again(bundle)
    assert found is not None
    assert (found[0].verdict, found[0].phase, list(found[0].culprits), found[0].cause) == (
        then["verdict"],
        then["phase"],
        then["culprits"],
        then["cause"],
    )


def test_no_rule_knows_the_embedded_engine() -> None:
    """Its functions, files and lock names are in no signature, pattern or rule: what is said holds for any program."""
    stalls = (ROOT / "pytest_gpuserve" / "sim" / "stalls.py").read_text()
    names = set(re.findall(r"(?m)^def (\w{8,})", stalls)) - {"synchronize", "wait_event"}  # torch.cuda has both
    assert len(names) >= 8
    words = re.compile(
        rf"\b(?:{'|'.join(sorted(names))}|stalls|BuildBaton|pytest_gpuserve[./]sim|sim/toy|gpuserve-sim)\b"
    )
    for room in ("diagnose", "watch"):
        for path in (ROOT / "pytest_gpuserve" / room).rglob("*"):
            if path.suffix in (".py", ".toml"):
                found = words.search(path.read_text())
                assert found is None, f"{path}: {found and found[0]}"
