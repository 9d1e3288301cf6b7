"""Running pytest for isolate and judge, and reading what our plugin reports of each test (plugin/results.py)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import procfs, shell
from ..errors import GpuserveError
from ..isolation.deltas import parse_options
from ..isolation.judge import BAD, GOOD, Report, Session, judge_session
from ..isolation.signature import Signature
from ..server.paths import scratch
from ..shape import OBJECT, parsed
from ..text import escape, one_line
from ..vocabulary import FINISHED, RESULTS, STARTED
from .launches import Seen
from .user_command import end_group, start

if TYPE_CHECKING:
    from ..isolation.variants import Wanted


_PYTEST = ("pytest", "py.test", "-mpytest")


def is_pytest(argv: Sequence[str]) -> bool:
    """Whether pytest is among the words: ``pytest …``, ``python -I -m pytest …``, ``A=1 uv run pytest …``. Then options
    of pytest may be added at the end; whether it runs, its results tell."""
    return any(Path(word).name in _PYTEST for word in argv)


def check_pytest(command: str, argv: Sequence[str]) -> None:
    """Raises GpuserveError where no pytest can be seen; what to write instead."""
    if is_pytest(argv):
        return
    instead = f"for example: gpuserve {command} -- pytest -m sm120 -k eagle3"
    if not argv:
        raise GpuserveError(f"write the test command after --, {instead}")
    raise GpuserveError(
        f"no pytest can be seen in {one_line(shell.line(argv), 200)}, and what another program does with a failure is "
        f"not known here. Write the pytest command that it runs, {instead} (NAME=VALUE, env, uv run and the like may "
        "stand before it; of an environment of tox: .tox/NAME/bin/pytest; what has to be built: --build)."
    )


def run_session(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    limit: float | None = None,
    output: Path | None = None,
    cwd: Path | None = None,
    stopped: Callable[[], bool] = lambda: False,
    started: Callable[[int], None] = lambda pid: None,
) -> Session:
    """Run pytest; never longer than ``limit`` seconds. Its output goes where ours goes, or to a file.

    On Ctrl-C, past the limit, and when ``stopped`` (asked several times a second) says so, it is ended, and its servers
    with it. ``started`` takes its pid.

    Raises:
        GpuserveError: it cannot be run.
    """
    with scratch("results") as directory:
        results = directory / "results.jsonl"
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(output.open("ab")) if output is not None else None
            try:
                child = start(argv, {**(env or {}), RESULTS: str(results)}, cwd=cwd, output=target)
            except OSError as error:
                raise GpuserveError(
                    f"{argv[0]} cannot be run: {error.strerror}. Correct the command after --."
                ) from None
            timed_out = False
            try:
                started(child.pid)
                deadline = math.inf if limit is None else time.monotonic() + limit
                while child.poll() is None and not timed_out:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(min(0.2, max(0.0, deadline - time.monotonic())))
                    timed_out = child.poll() is None and (time.monotonic() >= deadline or stopped())
                said = _read(results)  # what fails from here on is our own doing
            finally:
                _end(child)
        return Session(child.returncode, *said, timed_out)


def run_pytest(
    probe: Sequence[str], wanted: Wanted, whole: Wanted, limit: float, output: Path, stopped: Callable[[], bool]
) -> Seen:
    """One launch of isolate where a test starts the server itself, with ``--gpuserve-set``."""
    begin = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    log = output / "pytest.log"
    artifacts = ["--gpuserve-artifacts", str((output / "incidents").absolute())]
    words = [*probe, *artifacts, *settings(wanted, whole)]
    session = run_session(words, limit=limit, output=log, stopped=stopped)
    judged = judge_session(session, None)
    failed = next((report for report in session.reports or () if report.outcome == "failed"), None)
    seen = Signature("ready") if judged.code == GOOD else judged.signature if judged.code == BAD else None
    text = escape(failed.reason if failed else "" if seen else judged.reason)
    mute = seen is None and failed is None and not session.timed_out and session.code >= 0
    incident = failed.incident if failed else None
    return Seen(seen or Signature("undecided"), time.monotonic() - begin, text, incident, str(log), mute=mute)


def settings(wanted: Wanted, whole: Wanted) -> list[str]:
    """``--gpuserve-set`` for what is wanted. Flags of the ``whole`` command that are not in it are taken away, should
    the test's own marks have them.

    Raises:
        GpuserveError: the command line cannot be said that way.
    """
    spec = wanted.spec
    raw = spec.to_json()
    if wanted.command is not None:
        if spec.engine == "command":
            keys = {"engine": "command", "command": list(wanted.command.argv), "env": dict(wanted.command.env)}
            return _set(keys)
        everything = _arguments(whole.command.argv) if whole.command is not None else {}
        raw["args"] = {**dict.fromkeys(everything, False), **_arguments(wanted.command.argv)}
    return _set({key: raw[key] for key in ("engine", "model", "tp", "axes", "args", "env") if raw[key]})


def _arguments(argv: Sequence[str]) -> dict[str, Any]:
    at = next((n for n, word in enumerate(argv) if word.startswith("--") or word in ("-tp", "-O", "-cc")), len(argv))
    args: dict[str, Any] = {}
    for option in parse_options(argv[at:]):
        if option.values in (("{port}",), ("{host}",)):
            continue
        if len(option.values) > 1:
            raise GpuserveError(
                f"{option.flag} has several values, which --gpuserve-set cannot say. Use a probe that takes {{url}} "
                f"instead of pytest, or write the flag with one value."
            )
        args[option.flag] = option.values[0] if option.values else True
    return args


def _set(values: Mapping[str, Any]) -> list[str]:
    words = []
    for key, value in values.items():
        words += ["--gpuserve-set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return words


def _end(child: subprocess.Popen[bytes]) -> None:
    """By SIGINT, where it does not ignore that, so that its report is whole; else its servers end as their owner does,
    on whom their supervisors hold a pidfd. To all of its group, as a terminal does: it may be behind a launcher."""
    deaf = procfs.ignores(child.pid, signal.SIGINT)
    for number, patience in ((signal.SIGTERM if deaf else signal.SIGINT, 30.0), (signal.SIGTERM, 5.0)):
        if child.poll() is not None:
            return
        os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
    end_group(child)


def _read(path: Path) -> tuple[tuple[Report, ...] | None, bool]:
    """Its tests, None when the plugin did not report at all, and whether each session came to its end."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None, False
    found: list[Report] = []
    started = finished = 0
    for line in lines:
        with contextlib.suppress(ValueError):  # torn, or some test wrote there
            entry = parsed(line, OBJECT)
            started += entry == STARTED
            finished += entry == FINISHED
            found.append(Report.from_json(entry))
    return tuple(found), 0 < started == finished
