"""Isolate with launches in memory: what it compares with the base, when it stops asking, what it says of a guess."""

from __future__ import annotations

import argparse
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.cli.isolate_run import Isolation, Result
from pytest_gpuserve.cli.isolate_state import State, open_state
from pytest_gpuserve.cli.isolate_text import report
from pytest_gpuserve.cli.launches import Seen
from pytest_gpuserve.cli.parity import BROKEN, judged
from pytest_gpuserve.engines.features import features_of
from pytest_gpuserve.isolation.deltas import split
from pytest_gpuserve.isolation.signature import Signature
from pytest_gpuserve.isolation.support import Support, support
from pytest_gpuserve.isolation.variants import CommandLine
from pytest_gpuserve.redaction.redact import Redactor
from pytest_gpuserve.server.greedy import Greedy, differences

COMMAND = ["server", "--quantize", "fp8", "--overlap", "on", "--compile", "on"]


def said(*words: str, gap: float | None = 2.0) -> Greedy:
    tokens = tuple(f" {word}" for word in words)
    top = tuple({token: -0.1, " other": -0.1 - gap} for token in tokens) if gap is not None else ()
    return Greedy("p", "".join(tokens), tokens if gap is not None else (), top)


@pytest.mark.parametrize(
    ("gap", "signature", "words"),
    [
        (2.0, BROKEN, "top-2 logprob gap 2.000"),
        (0.05, None, ""),
        (None, None, "which is reported and not counted as a failure"),
    ],
)
def test_only_a_token_of_which_the_base_was_sure_proves_a_fault(
    gap: float | None, signature: Signature | None, words: str
) -> None:
    found, text = judged(differences([said("a", "b", gap=gap)], [said("a", "c")]), "it differs")
    assert found == signature
    assert words in text
    assert bool(text) == bool(words)
    assert judged(differences([said("a", gap=gap)], [said("a")]), "it differs") == (None, "")


class Run:
    """An isolation whose launches are answered by ``answer(words of the command)``."""

    def __init__(
        self,
        path: Path,
        answer: Callable[[Sequence[str]], Seen],
        width: int = 1,
        command: Sequence[str] = COMMAND,
        calibrate: int = 2,
        minutes: float | None = None,
    ) -> None:
        self.state: State = open_state(path, "mark", "cmd", Redactor.of({}), fresh=True)
        self.lines: list[str] = []
        self.launched = 0
        self._answer = answer
        given = argparse.Namespace(calibrate=calibrate, budget=20, one=True, minutes=minutes, remedies=0, ready=None)
        self._variants = CommandLine(split(command, features_of("command")), "command", str(path))
        launcher: Any = self
        self._isolation = Isolation(
            self._variants, self.state, launcher, given, self.lines.append, width, path / "cold", probe=()
        )

    def __call__(self, spec: Any, engine: Any, say: Any) -> Seen:
        self.launched += 1
        return self._answer(engine.launch(spec, host="h", port=1, python="p").argv)

    def stop(self) -> None:
        raise AssertionError("nothing went wrong")

    def stopped(self) -> bool:
        return False

    def run(self) -> Result:
        return self._isolation.run([])

    def report(self, result: Result) -> str:
        return "\n".join(report(self._variants, self.state, result, 1.0))


def ready(*outputs: Greedy) -> Seen:
    return Seen(Signature("ready"), 1.0, outputs=outputs)


def test_an_axis_that_changes_the_text_is_found(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda argv: ready(said("a", "b") if "--quantize" not in argv else said("a", "c")))
    result = run.run()
    assert (result.status, result.sets) == ("found", (("--quantize",),))
    assert run.state.target == BROKEN
    assert "not what the base says at temperature 0" in "\n".join(run.lines)
    back = open_state(tmp_path, "mark", "cmd", Redactor.of({}), fresh=False)
    assert back.base == (said("a", "b"),), "a later run compares with the same launch"


@pytest.mark.parametrize("gap", [0.05, None])
def test_what_proves_nothing_is_no_failure(tmp_path: Path, gap: float | None) -> None:
    run = Run(tmp_path, lambda argv: ready(said("a", "b", gap=gap) if "--quantize" not in argv else said("a", "c")))
    assert run.run().status == "not_reproduced"
    assert ("reported and not counted" in "\n".join(run.lines)) == (gap is None)


def test_a_base_that_does_not_repeat_itself_proves_nothing(tmp_path: Path) -> None:
    texts = iter("abcdefghijklmnopqrstuvwxyz")
    run = Run(tmp_path, lambda argv: ready(said(next(texts))))
    assert run.run().status == "not_reproduced"
    assert run.state.base == ()
    assert "the base does not repeat itself" in "\n".join(run.lines)


def test_a_base_that_differs_now_and_then_fails_as_the_whole_command_does(tmp_path: Path) -> None:
    """Equal requests to one server already differ, base or not: known only once the whole command failed so."""
    run = Run(tmp_path, lambda argv: Seen(BROKEN, 1.0, "two equal requests differ"))
    assert run.run().status == "base_fails"


def test_nothing_is_launched_beside_the_first_base(tmp_path: Path) -> None:
    begun: list[Sequence[str]] = []

    def answer(argv: Sequence[str]) -> Seen:
        begun.append(argv)
        if len(begun) == 1:
            time.sleep(0.3)
            assert len(begun) == 1
        return ready(said("a"))

    assert Run(tmp_path, answer, width=3).run().status == "not_reproduced"
    assert len(begun) >= 4


def test_an_interrupt_that_comes_as_a_launch_is_handed_out_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch runs by then, and the end of its threads is waited for."""
    stopped, submit = threading.Event(), ThreadPoolExecutor.submit

    def answer(argv: Sequence[str]) -> Seen:
        assert stopped.wait(30.0)
        return ready(said("a"))

    def interrupted(*words: Any) -> Any:
        submit(*words)
        raise KeyboardInterrupt

    run = Run(tmp_path, answer)
    monkeypatch.setattr(run, "stop", stopped.set)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert stopped.is_set()


def test_a_check_that_can_never_tell_ends_after_the_calibration(tmp_path: Path) -> None:
    """Each launch once: the check has said that it cannot tell, so the machine is not to blame."""
    run = Run(tmp_path, lambda argv: Seen(Signature("undecided"), 1.0, "no test was selected", mute=True), calibrate=3)
    result = run.run()
    assert (result.status, result.sets, run.launched) == ("undecided", (), 6)
    text = run.report(result)
    assert "Undecided: 3 launches of the whole command, and none told whether it fails: no test was selected." in text
    assert "--fresh" in text
    assert "guess" not in text


def test_a_machine_in_trouble_is_asked_again_but_not_for_ever(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda argv: Seen(Signature("infra"), 1.0, "no GPU is free"), calibrate=3)
    result = run.run()
    assert (result.status, run.launched) == ("undecided", 18)
    assert "none told whether it fails: no GPU is free" in run.report(result)


def test_a_base_that_cannot_be_told_does_not_end_the_search(tmp_path: Path) -> None:
    def answer(argv: Sequence[str]) -> Seen:
        if "--quantize" in argv:
            return Seen(Signature("crash"), 1.0)
        return Seen(Signature("undecided"), 1.0, mute=True) if "--overlap" not in argv else ready()

    result = Run(tmp_path, answer).run()
    assert (result.status, result.sets) == ("found", (("--quantize",),))


@pytest.mark.parametrize("seed", range(4))
def test_chance_is_not_said_to_be_found(tmp_path: Path, seed: int) -> None:
    """One delta, and every launch fails by the same chance: there is but one set to believe in, and it is wrong."""
    draws = random.Random(seed)

    def answer(argv: Sequence[str]) -> Seen:
        return Seen(Signature("crash"), 1.0) if draws.random() < 0.4 else ready()

    run = Run(tmp_path, answer, command=["server", "--quantize", "fp8"], calibrate=4)
    result = run.run()
    assert result.status in ("undecided", "base_fails", "not_reproduced"), run.report(result)
    if result.status == "undecided":
        assert "Undecided: " in run.report(result)
        assert result.confidence < 0.5


def test_a_guess_has_the_counts_of_its_launches(tmp_path: Path) -> None:
    """No time is left to prove anything."""
    run = Run(tmp_path, lambda argv: Seen(Signature("crash"), 1.0) if "--quantize" in argv else ready(), minutes=0.08)
    result = run.run()
    assert result.status == "undecided"
    assert result.sets == (("--quantize",),)
    found = re.search(
        r"Best guess \((\d+)%\): --quantize; with it (\d) of \2 launches failed, without it 0 of (\d)\.",
        run.report(result),
    )
    assert found, run.report(result)
    assert int(found[1]) < 95
    assert int(found[2]) + int(found[3]) == run.launched
    assert "Smallest command that fails" not in run.report(result)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_support_is_a_probability_that_failures_raise_and_passes_lower(a: int, b: int, c: int, d: int) -> None:
    counts = Support(a, a + b, c, c + d)
    assert 0 <= counts.probability <= 1
    if not b and not c and a and d:  # nothing speaks against it
        assert Support(a + 1, a + 1, 0, d).probability >= counts.probability
        assert Support(a, a + 1, 0, d).probability <= counts.probability


def test_support() -> None:
    assert Support(5, 5, 0, 6).probability > 0.99
    assert Support(6, 12, 5, 12).probability < 0.05
    assert Support(0, 3, 0, 3).probability < 0.75
    runs = {frozenset({0, 1}): ["fail", "unresolved"], frozenset(): ["pass"], frozenset({2}): ["fail"]}
    assert support([frozenset({0})], [runs]) == Support(1, 1, 1, 2)
    assert support([frozenset({0}), frozenset({2})], [runs, runs]) == Support(4, 4, 0, 2)
