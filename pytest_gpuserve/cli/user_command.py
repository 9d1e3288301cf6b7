"""What the user gives in options: commands as one text (``--probe``, ``--build``; no shell takes part), and limits."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..errors import GpuserveError
from ..text import one_line


def words_of(option: str, text: str) -> tuple[str, ...]:
    """A command that an option gives as one text.

    Raises:
        GpuserveError: its quotes do not match, or there is nothing in it.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise GpuserveError(f"{option} {one_line(text, 200)} is no command: {error}. Correct its quotes.") from None
    if not words or not words[0]:
        raise GpuserveError(f"{option} names no command. Write one, or leave {option} out.")
    return words


def check_above_zero(arguments: argparse.Namespace, *names: str) -> None:
    """Raises GpuserveError when one of these options is given, and is 0, less, or no number."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise GpuserveError(f"--{name.replace('_', '-')} must be above 0, not {value:g}.")


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a command and what it left in its process group, which we made."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def check_program(option: str, argv: Sequence[str]) -> None:
    """Raises GpuserveError when the command of an option names no program that can be run."""
    name = argv[0]
    if shutil.which(name) is not None:
        return
    path = Path(name)
    if "/" not in name or not path.exists():
        what = "there is no such program"
    elif path.is_dir():
        what = "it is a directory"
    else:
        what = "it is not executable: chmod +x, or write its interpreter before it"
    raise GpuserveError(f"{option}: {one_line(name, 200)} cannot be run: {what}. Correct {option}.")
