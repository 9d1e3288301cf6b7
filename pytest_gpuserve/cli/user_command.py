"""What the user gives in options: commands as one text (``--probe``, ``--build``; no shell takes part), and limits."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ..errors import GpuserveError
from ..isolation.deltas import environment
from ..text import one_line

_TIED = Path(__file__).with_name("exec_tied.py")


def words_of(option: str, text: str) -> tuple[str, ...]:
    """A command that an option gives as one text.

    Raises:
        GpuserveError: its quotes do not match, or there is nothing in it.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise GpuserveError(f"{option} {one_line(text, 200)} is no command: {error}. Correct its quotes.") from None
    command = environment(words)[1]
    if not command or not command[0]:
        raise GpuserveError(f"{option} names no command. Write one, or leave {option} out.")
    return words


def start(
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, so that Ctrl-C reaches it once, from us; SIGTERM tells it of our death.

    Words NAME=VALUE before it are variables. Its output goes where ours goes, or to a file.

    Raises:
        OSError: it cannot be run.
    """
    assigned, words = environment(argv)
    read, write = os.pipe()
    with open(read, "rb") as told:
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_TIED), str(os.getpid()), str(write), *words],
                env={**os.environ, **dict(assigned), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                pass_fds=(write,),
                start_new_session=True,
            )
        finally:
            os.close(write)
        try:
            said = told.read()
            if said != b"+":
                number = int(said[1:] or errno.ECANCELED)
                raise OSError(number, os.strerror(number) if said else f"{_TIED} did not run it")
        except BaseException:
            end_group(child)
            raise
    return child


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
    assigned, words = environment(argv)
    name = words[0] if words else ""
    if shutil.which(name, path=dict(assigned).get("PATH")) is not None:
        return
    path = Path(name)
    if "/" not in name or not path.exists():
        what = "there is no such program"
    elif path.is_dir():
        what = "it is a directory"
    else:
        what = "it is not executable: chmod +x, or write its interpreter before it"
    raise GpuserveError(f"{option}: {one_line(name, 200)} cannot be run: {what}. Correct {option}.")
