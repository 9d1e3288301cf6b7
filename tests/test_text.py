"""JSON and text that anybody may have written."""

from __future__ import annotations

import sys

import pytest

from pytest_gpuserve.cli import main
from pytest_gpuserve.text import foreign_json


@pytest.mark.parametrize("number", ["1" * 400, "-" + "9" * 60, "1e999", "1e300", "NaN", "-Infinity"])
def test_numbers_that_no_counter_can_hold_are_null(number: str) -> None:
    assert foreign_json(f'{{"a": {number}, "b": 1, "c": 0.5}}') == {"a": None, "b": 1, "c": 0.5}


def test_what_is_no_json_is_told() -> None:
    for data in ("", "{", b"\xff{}", "[1,]"):
        with pytest.raises(ValueError):
            foreign_json(data)


@pytest.mark.parametrize("arguments", [["explain", "no\x1b[31m.log"], ["explain", "--no\x1b[31m", "x"], ["no\x1b[31m"]])
def test_what_was_typed_is_not_obeyed_by_the_terminal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(arguments))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "\\x1b[31m" in said
    assert "\x1b" not in said
