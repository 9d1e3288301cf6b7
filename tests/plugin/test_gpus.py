"""``sm`` marks and the number of GPUs: skipped with the reason, or failed under --gpuserve-strict-arch."""

from __future__ import annotations

import contextlib
import json

import pytest

from pytest_gpuserve.gpu import Gpu, Reading
from pytest_gpuserve.isolation.judge import BROKEN, Report, Session, judge_session
from pytest_gpuserve.plugin import checks

pytestmark = pytest.mark.usefixtures("toys")


def gpus(*capabilities: tuple[int, int]) -> Reading:
    return Reading(tuple(Gpu(n, f"GPU-{n}", "Toy X", capability=c) for n, c in enumerate(capabilities)))


@pytest.fixture
def machine(monkeypatch, project, no_servers):
    """Say which GPUs there are; how often they were asked for is counted."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    project.write(conftest=no_servers)
    asked = []

    def install(*capabilities: tuple[int, int], problem: str | None = None) -> list[float]:
        reading = gpus(*capabilities) if problem is None else Reading((), problem)
        monkeypatch.setattr(checks, "query", lambda limit: asked.append(limit) or reading)
        return asked

    return install


def module(*marks: str, tp: int = 1, **more: str) -> str:
    extra = "".join(f", {key}={value}" for key, value in more.items())
    decorators = [f"@mark.{name}" for name in marks]
    lines = ["from pytest import mark", *decorators, f"@mark.gpuserve(engine='toy', tp={tp}{extra})"]
    return "\n".join([*lines, "def test_it(server): pass"])


HOPPER, BLACKWELL, CONSUMER = (9, 0), (10, 0), (12, 0)


@pytest.mark.parametrize(
    ("present", "marks", "tp", "runs"),
    [
        ([CONSUMER] * 2, ["sm120"], 2, True),
        ([CONSUMER] * 2, ["sm120"], 4, False),
        ([HOPPER] * 8, ["sm120"], 1, False),
        ([HOPPER] * 8, ["sm120", "sm90"], 8, True),
        ([(12, 1)], ["sm120"], 1, False),
        ([HOPPER, CONSUMER], ["sm120"], 1, True),
        ([HOPPER, CONSUMER], ["sm120"], 2, False),
        ([HOPPER, CONSUMER], ["sm_min(90)"], 2, True),
        ([(8, 9)], ["sm_min(90)"], 1, False),
        ([(8, 9)], ["sm_min(90)", "sm89"], 1, True),
        ([(10, 3)], ["sm103"], 1, True),
        ([], ["sm120"], 1, False),
        ([], [], 8, True),
    ],
)
def test_several_marks_mean_any_and_capability_is_exact(project, machine, present, marks, tp, runs):
    machine(*present)
    project.write(test_it=module(*marks, tp=tp))
    project.here().assert_outcomes(passed=int(runs), skipped=int(not runs))


def test_the_reason_names_what_is_needed_and_what_was_found(project, machine):
    machine(HOPPER, HOPPER, CONSUMER)
    project.write(test_it=module("sm120", tp=2))
    result = project.here("-rs")
    result.stdout.fnmatch_lines(
        ["SKIPPED * test_it.py:2: needs 2 GPUs of compute capability sm120; found 2 x Toy X (sm90), 1 x Toy X (sm120)"]
    )


def test_the_mark_says_that_any_program_uses_gpus(project, machine):
    """An engine that needs none (as `command`, which knows nothing of its program) may be told otherwise."""
    machine(HOPPER)
    test = """
    from pytest import mark
    @mark.gpuserve(engine="doll", tp=2, uses_gpus=True)
    def test_it(server): pass
    """
    project.write(test_it=test)
    project.here("-rs").stdout.fnmatch_lines(["*needs 2 GPUs; found 1 x Toy X (sm90)*"])


def test_without_a_driver_the_reason_says_why(project, machine):
    machine(problem="No NVIDIA driver was found.")
    project.write(test_it=module("sm_min(90)"))
    project.here("-rs").stdout.fnmatch_lines(["*sm90 or later; found none (No NVIDIA driver was found)"])


def test_strict_arch_fails_instead(project, machine):
    machine(HOPPER)
    project.write(test_it=module("sm120"))
    result = project.here("--gpuserve-strict-arch")
    result.assert_outcomes(errors=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["needs 1 GPU of compute capability sm120; found 1 x Toy X (sm90)*--gpuserve-strict-arch*"]
    )


def test_visible_devices_hide_the_others(project, machine, monkeypatch):
    machine(CONSUMER, CONSUMER)
    project.write(test_it=module("sm120", tp=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    project.here().assert_outcomes(skipped=1)
    project.write(test_it=module("sm120", tp=2, env="{'CUDA_VISIBLE_DEVICES': '0,1'}"))
    project.here().assert_outcomes(passed=1)


PLAIN = """
from pytest import fixture, mark
@fixture
def server(): return 1
@mark.sm120
def test_plain(): pass
@mark.sm120
def test_own(server): pass
@mark.sm120
def test_by_hand(gpuserve_pool): pass
@mark.sm_min(100)
class TestLeast:
    def test_it(self): pass
@mark.sm90
def test_here(): pass
def test_none(): pass
"""


@pytest.mark.parametrize("declared", [False, True])
def test_marks_count_for_tests_without_a_server_too(project, machine, declared):
    """Also where the project's file declares the name, as it must have done under --strict-markers without us."""
    machine(HOPPER)
    project.write(test_it=PLAIN)
    if declared:
        project.pytester.makeini("[pytest]\nmarkers =\n    sm120: needs a consumer Blackwell\n")
    result = project.here("-rs")
    result.assert_outcomes(passed=2, skipped=4)
    result.stdout.fnmatch_lines(
        ["SKIPPED * test_it.py:4: needs 1 GPU of compute capability sm120; found 1 x Toy X (sm90)"]
    )
    result = project.here("--gpuserve-strict-arch")
    result.assert_outcomes(passed=2, errors=4)
    result.stdout.fnmatch_lines(["needs 1 GPU of compute capability sm120; found*--gpuserve-strict-arch*"])


def test_marks_that_another_plugin_declares_are_theirs(project, machine, no_servers):
    asked = machine(HOPPER)
    own = """
    def pytest_configure(config):
        config.addinivalue_line("markers", "sm120(reason): compiles for it, on any machine")
    """
    project.write(
        test_it=PLAIN.replace("@mark.sm_min(100)", "@mark.sm120('why')").replace("@mark.sm90", ""), sm_theirs=own
    )
    project.pytester.syspathinsert()
    for option in ((), ("--gpuserve-strict-arch",), ("--strict-markers",)):
        project.here("-p", "sm_theirs", *option).assert_outcomes(passed=6)
    assert not asked
    project.write(test_it=module("sm120"))
    project.here("-p", "sm_theirs").assert_outcomes(skipped=1)


def test_a_wrong_gpu_is_no_bad_commit(project, machine, monkeypatch, tmp_path):
    """What `gpuserve judge` is told: the machine cannot test it, whether the test is skipped or fails for it."""
    machine(HOPPER)
    project.write(test_it=PLAIN)
    for number, option in enumerate(([], ["--gpuserve-strict-arch"])):
        results = tmp_path / f"results{number}.jsonl"
        monkeypatch.setenv("GPUSERVE_RESULTS", str(results))
        monkeypatch.delenv("GPUSERVE_RESULTS_OWNER", raising=False)
        project.here("-k", "test_plain or test_none", *option)
        reports = []
        for line in results.read_text().splitlines():
            with contextlib.suppress(ValueError):
                reports.append(Report.from_json(json.loads(line)))
        judged = judge_session(Session(number, tuple(reports)), None)
        assert judged.code == BROKEN, judged


def test_gpus_are_asked_once_and_not_before_a_test_needs_them(project, machine):
    asked = machine(CONSUMER)
    project.write(test_it=module("sm120"), test_two=module("sm120"), test_no=module())
    project.here("--collect-only", "-m", "sm120").assert_outcomes()
    project.here("-k", "test_no").assert_outcomes(passed=1, deselected=2)
    assert not asked
    project.here().assert_outcomes(passed=3)
    assert asked == [20.0]


def test_sm_min_without_a_number_is_an_error(project, machine):
    machine(CONSUMER)
    project.write(test_it=module("sm_min('sm90')"))
    result = project.here()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_it.py::test_it: sm_min takes one number such as 90*"])


def test_a_cell_excluded_on_this_architecture_is_skipped(project, machine):
    machine(CONSUMER)
    project.write(
        test_it="""
        from pytest import mark
        @mark.gpuserve(engine="toy")
        @mark.gpuserve_matrix(
            axes={"spec_decode": ["base", "eagle3"], "attention_backend": ["triton", "fa3"]},
            exclude=[{"attention_backend": "fa3", "arch": "sm120"}],
        )
        def test_it(server): pass
    """
    )
    result = project.here("-rs")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED *test_it.py:*: excluded on sm120 by the matrix*"])
    machine(HOPPER)
    project.here().assert_outcomes(passed=4)
