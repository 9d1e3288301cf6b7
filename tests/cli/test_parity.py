"""Isolate's comparison with the base's completions, with launches in memory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.cli.isolate_run import Isolation, Result
from pytest_gpuserve.cli.isolate_state import State, open_state
from pytest_gpuserve.cli.launches import Seen
from pytest_gpuserve.cli.parity import BROKEN, judged
from pytest_gpuserve.engines.features import features_of
from pytest_gpuserve.isolation.deltas import split
from pytest_gpuserve.isolation.signature import Signature
from pytest_gpuserve.isolation.variants import CommandLine
from pytest_gpuserve.report.redact import Redactor
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

    def __init__(self, path: Path, answer: Callable[[Sequence[str]], Seen], width: int = 1) -> None:
        self.state: State = open_state(path, "mark", "cmd", Redactor.of({}), fresh=True)
        self.lines: list[str] = []

        def launch(spec: Any, engine: Any, say: Any) -> Seen:
            return answer(engine.launch(spec, host="h", port=1, python="p").argv)

        given = argparse.Namespace(calibrate=2, budget=20, one=True, minutes=None, remedies=0, ready=None)
        variants = CommandLine(split(COMMAND, features_of("command")), "command", str(path))
        launcher: Any = launch
        self._isolation = Isolation(
            variants, self.state, launcher, given, self.lines.append, width, path / "cold", probe=()
        )

    def run(self) -> Result:
        return self._isolation.run([])


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
