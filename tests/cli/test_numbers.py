"""Numbers on the command line: a limit that is never reached is refused, in every command."""

from __future__ import annotations

from importlib import import_module

import pytest

from pytest_gpuserve.cli import COMMANDS, Parser


def options(command: str) -> tuple[Parser, list[str]]:
    parser = Parser()
    import_module(f"pytest_gpuserve.cli.{command}").configure(parser)
    return parser, [action.option_strings[0] for action in parser._actions if action.type is float]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "-1", "1e999"])
def test_a_number_that_is_no_limit(command: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser, names = options(command)
    for name in names:
        with pytest.raises(SystemExit):
            parser.parse_args([f"{name}={number}"])
        assert f"argument {name}: {number!r} is no finite number" in capsys.readouterr().err


def test_there_are_such_options() -> None:
    assert "--grace" in options("reap")[1]
    parser, _ = options("reap")
    assert parser.parse_args(["--grace", "0"]).grace == 0.0
