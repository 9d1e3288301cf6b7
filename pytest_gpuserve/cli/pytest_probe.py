"""Running pytest for isolate and judge, and reading what our plugin reports of each test (plugin/results.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import GpuserveError
from ..isolation.deltas import parse_options
from ..isolation.judge import Report, Session, signature_of
from ..isolation.signature import Signature
from ..shape import OBJECT, parsed
from ..text import escape
from ..vocabulary import FINISHED, RESULTS
from .launches import Seen

if TYPE_CHECKING:
    from ..isolation.variants import Wanted


def is_pytest(argv: Sequence[str]) -> bool:
    """``pytest …``, ``py.test …`` or ``python -m pytest …``."""
    names = [Path(word).name for word in argv[:3]]
    return bool(names) and (names[0] in ("pytest", "py.test") or names[1:3] == ["-m", "pytest"])


def run_session(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    limit: float | None = None,
    output: Path | None = None,
    cwd: Path | None = None,
) -> Session:
    """Run pytest; never longer than ``limit`` seconds. Its output goes where ours goes, or to a file.

    On Ctrl-C, and past the limit, it gets SIGINT (its servers end with it), then SIGKILL.

    Raises:
        GpuserveError: it cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="gpuserve-results-") as directory:
        results = Path(directory) / "results.jsonl"
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(output.open("ab")) if output is not None else None
            try:
                child = subprocess.Popen(
                    list(argv),
                    env={**os.environ, **(env or {}), RESULTS: str(results)},
                    stdin=subprocess.DEVNULL,
                    stdout=target,
                    stderr=target,
                    cwd=cwd,
                    start_new_session=True,  # Ctrl-C reaches it once, from us
                )
            except OSError as error:
                raise GpuserveError(
                    f"{argv[0]} cannot be run: {error.strerror}. Correct the command after --."
                ) from None
            timed_out = False
            try:
                child.wait(limit)
            except subprocess.TimeoutExpired:
                timed_out = True
                _end(child)
            except BaseException:
                _end(child)
                raise
        return Session(child.returncode, *_read(results), timed_out)


def run_pytest(probe: Sequence[str], wanted: Wanted, whole: Wanted, limit: float, output: Path) -> Seen:
    """One launch of isolate where a test starts the server itself, with ``--gpuserve-set``."""
    begin = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    log = output / "pytest.log"
    artifacts = ["--gpuserve-artifacts", str((output / "incidents").absolute())]
    session = run_session([*probe, *artifacts, *settings(wanted, whole)], limit=limit, output=log)
    seen = signature_of(session)
    failed = next((report for report in session.reports or () if report.outcome == "failed"), None)
    incident = failed.incident if failed else None
    text = escape(failed.reason) if failed else f"pytest ended with exit code {session.code}" if session.code else ""
    if seen is None:
        seen = Signature("undecided")
    return Seen(seen, time.monotonic() - begin, text, incident, str(log))


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
    with contextlib.suppress(OSError):
        child.send_signal(signal.SIGINT)
    try:
        child.wait(60.0)
    except subprocess.TimeoutExpired:
        child.kill()  # its servers end with it: their supervisors hold a pidfd
        child.wait()


def _read(path: Path) -> tuple[tuple[Report, ...] | None, bool]:
    """Its tests, None when the plugin did not report at all, and whether its session came to its end."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None, False
    found, whole = [], False
    for line in lines:
        with contextlib.suppress(ValueError):  # torn, or some test wrote there
            entry = parsed(line, OBJECT)
            whole = whole or entry == FINISHED
            found.append(Report.from_json(entry))
    return tuple(found), whole
