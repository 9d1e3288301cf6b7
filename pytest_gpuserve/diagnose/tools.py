"""The outside dumpers, py-spy and pystack: where they are, one run under a hard limit, what their errors mean."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .model import ThreadStack
from .parse import pyspy_threads, text_threads

Trouble = Literal["refused", "gone", "not-python", "stopped", "race", "too-old", "timeout", "missing", "other"]
"""Why a run gave no stack. ``race``: the target moved while it was read. ``too-old``: the tool lacks an option."""

_TROUBLES: tuple[tuple[Trouble, re.Pattern[str]], ...] = (
    ("too-old", re.compile(r"unexpected argument|wasn't expected|unrecognized arguments")),
    (
        "gone",
        re.compile(r"Failed to get process executable name.*(os error 2|os error 3)|No such process|os error 3\b"),
    ),
    ("stopped", re.compile(r"unexpected waitpid result")),
    ("refused", re.compile(r"Permission [Dd]enied|os error 13\b|Operation not permitted|EPERM")),
    ("not-python", re.compile(r"Failed to find python version|Could not determine python version")),
    ("race", re.compile(r"Failed to copy Py|Failed to get (frame|thread)|os error 14\b|Bad address")),
    ("gone", re.compile(r"Could not read the contents of /proc")),
)
"""Texts of py-spy 0.3-0.4 and pystack 1.7; their exit code is 1 for all of these."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a tool. Either ``threads`` and ``raw``, or ``trouble`` and the tool's words in ``message``."""

    threads: tuple[ThreadStack, ...] = ()
    raw: str = ""
    trouble: Trouble | None = None
    message: str = ""


def find(name: str, python: str | None) -> tuple[str, ...]:
    """Paths of ``name``: beside the server's python (it fits that Python's version), beside ours, on PATH."""
    beside = [Path(p).parent / name for p in (python and shutil.which(python), sys.executable) if p]
    found = [str(path) for path in beside if os.access(path, os.X_OK)]
    if on_path := shutil.which(name):
        found.append(on_path)
    return tuple(dict.fromkeys(found))


def pyspy(executable: str, pid: int, *, limit: float, stop: bool, native: bool = False) -> Attempt:
    """``py-spy dump --json``, never longer than ``limit`` seconds. ``stop``: stop the target while it is read.

    A py-spy that has to be killed may leave the target about to stop; the caller sends SIGCONT.
    """
    options = ["--json", "--pid", str(pid), *([] if stop else ["--nonblocking"]), *(["--native"] if native else [])]
    attempt = run([executable, "dump", *options], limit)
    if attempt.trouble:
        return attempt
    try:
        threads = pyspy_threads(json.loads(attempt.raw), pid)
    except ValueError:
        return Attempt(trouble="other", message="py-spy printed something that is not its JSON")
    if not any(t.frames for t in threads):  # the interpreter is starting or ending
        return Attempt(trouble="race", message="no frames yet: the interpreter is starting or ending")
    return Attempt(threads, attempt.raw)


def pystack(executable: str, pid: int, *, limit: float, native: bool = False) -> Attempt:
    """``pystack remote``: another reader of memory, for what py-spy cannot read. Only ``native`` stops the target."""
    options = ["--native-last"] if native else ["--no-block"]
    attempt = run([executable, "remote", str(pid), *options], limit)
    if attempt.trouble:
        return attempt
    threads = text_threads(attempt.raw, pid)
    if not threads:
        return Attempt(trouble="other", message="pystack printed no stack")
    return Attempt(threads, attempt.raw)


def pystack_inside(pid: int) -> Attempt:
    """pystack's library in this process, without stopping the target: for Yama, under which only ancestors may read.

    No limit can be put on it; it only reads memory, and the caller's thread is expendable.
    """
    try:
        from pystack.engine import NativeReportingMode, get_process_threads
    except ImportError:
        return Attempt(trouble="missing", message="pystack is not installed")
    try:
        found = list(get_process_threads(pid, stop_process=False, native_mode=NativeReportingMode.OFF))
    except Exception as error:  # EngineError and what its C++ side throws
        return Attempt(trouble=classify(str(error)), message=str(error))
    lines: list[str] = []
    for thread in found:  # as the command prints it, so that there is one reader
        gil = "Has the GIL" if thread.holds_the_gil else ""
        lines.append(f"Traceback for thread {thread.tid} ({thread.name}) [{gil}] (most recent call last):")
        lines += (
            f'    (Python) File "{f.code.filename}", line {f.code.location.lineno}, in {f.code.scope}'
            for f in thread.frames
        )
    raw = "\n".join(lines)
    return Attempt(text_threads(raw, pid), raw)


def classify(stderr: str) -> Trouble:
    """What a tool's error text means."""
    return next((trouble for trouble, pattern in _TROUBLES if pattern.search(" ".join(stderr.split()))), "other")


def run(argv: Sequence[str], limit: float) -> Attempt:
    """Run a tool; its standard output is ``raw``. Never longer than ``limit`` and a second."""
    environment = {**os.environ, "RUST_BACKTRACE": "0", "NO_COLOR": "1"}
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
        )
    except OSError as error:
        return Attempt(trouble="missing", message=f"{argv[0]}: {error.strerror}")
    try:
        out, err = process.communicate(timeout=max(limit, 0.01))
    except subprocess.TimeoutExpired:
        process.kill()
        _bury(process)
        return Attempt(trouble="timeout", message=f"no answer within {time.monotonic() - began:.1f} s")
    if process.returncode:
        return Attempt(trouble=classify(err), message=_words(err) or f"exit code {process.returncode}")
    return Attempt(raw=out)


def _bury(process: subprocess.Popen[str]) -> None:
    """Collect a killed tool, also where a child of it keeps its pipes open; one that the kernel will not let die is
    left behind."""
    try:
        process.communicate(timeout=1.0)
    except subprocess.TimeoutExpired:
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        process.poll()


def _words(stderr: str) -> str:
    """An error of anyhow's form (numbered causes, maybe a backtrace) in one line."""
    head = re.split(r"\n\s*(?:Stack backtrace|Location):", stderr)[0]
    parts = (re.sub(r"^(Error: |\d+: )", "", line.strip()) for line in head.splitlines())
    return "; ".join(part for part in parts if part and part != "Caused by:")[:300]
