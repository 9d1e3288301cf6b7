"""The ``gpuserve`` command: one file a subcommand, each with ``configure(parser)`` and ``run(arguments) -> int``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from .. import __version__
from ..errors import GpuserveError
from ..text import escape

COMMANDS: dict[str, str] = {
    "run": "start any server command, show how far it is, and watch it: a hang is dumped and named",
    "explain": "read a log, stack dumps or a bundle, and say what happened",
    "dump": "take the stacks of every process of a live server",
    "doctor": "say whether this machine and the installed engines are fit for its GPUs",
    "page": "write one HTML file of an incident, or of a session's artifacts",
    "reap": "free what dead sessions left; --devices lists who holds the GPUs",
    "isolate": "find the smallest part of a failing command line that fails, and the smallest way around",
    "judge": "say what a test run means, in the exit codes of git bisect run",
    "bisect": "find the commit that broke a test, and say what both sides of it do",
}
"""Subcommand and its line of help; the module of the same name beside this one does the work."""


class Parser(argparse.ArgumentParser):
    """Its errors repeat what was typed, or came from a file's name: nothing of it is obeyed by the terminal.

    An option of ``type=float`` takes numbers from 0 on: a limit of NaN would never be reached.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        super().error(escape(message))


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number from 0 on")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code; 2 is a usage error."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(prog="gpuserve", description="Test, watch and diagnose GPU inference servers.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in argv if word in COMMANDS), None)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == wanted:  # only the module that will run is imported
            module = import_module(f".{name}", __name__)
            module.configure(sub)
            sub.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except GpuserveError as error:
        print(f"gpuserve: {escape(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 141
