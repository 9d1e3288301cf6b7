"""Take an incident of one server: stacks, evidence, verdict, files, and whether the server is to blame.

``python -m pytest_gpuserve.report.incident --server DIR ...`` is what a supervisor runs, while pytest may be wedged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import procfs
from ..errors import GpuserveError
from .blame import EXIT_KILL, EXIT_SPARE, Decision

if TYPE_CHECKING:
    from .taking import Incident

__all__ = ["EXIT_KILL", "EXIT_SPARE", "LIMIT", "Decision", "command", "main", "record_incident"]

LIMIT = 21.0
"""Seconds for everything, where nobody names another."""


def command(
    directory: str | os.PathLike[str],
    artifacts: str | os.PathLike[str] | None,
    reason: str,
    *,
    test: str | None = None,
    after: float | None = None,
    soft: bool = False,
    limit: float | None = None,
    rounds: int | None = None,
    keep: int = 0,
) -> list[str]:
    """argv that takes an incident of the server in ``directory``; ``artifacts`` None: only the private copy is written.

    ``limit``: seconds within which it ends by itself; give the supervisor's limit less a second or two. ``rounds``: how
    often to look, 2 s apart; 3 unless told. ``keep``: as in :class:`pytest_gpuserve.report.taking.Request`.
    """
    argv = [sys.executable, "-m", "pytest_gpuserve.report.incident", "--server", os.fspath(directory)]
    argv += ["--artifacts", "off" if artifacts is None else os.fspath(artifacts), "--reason", reason]
    argv += ["--test", test] if test else []
    argv += ["--after", f"{after:g}"] if after is not None else []
    argv += ["--limit", f"{limit:g}"] if limit is not None else []
    argv += ["--rounds", str(rounds)] if rounds is not None else []
    argv += ["--keep", str(keep)] if keep else []
    return [*argv, "--soft"] if soft else argv


def record_incident(
    directory: Path,
    artifacts: Path | None,
    reason: str,
    *,
    test: str | None = None,
    after: float | None = None,
    soft: bool = False,
    limit: float | None = None,
    rounds: int = 3,
    keep: int = 0,
    spent: float = 0.0,
    leave: Callable[[int], object] | None = None,
) -> Incident:
    """Take an incident of the server in ``directory``.

    ``limit``: seconds; None: well below what the supervisor gives its dumps. ``spent``: seconds of it that are gone,
    since this process was started for nothing else.
    ``leave(exit code)`` is called, in another thread, when that time is over before the work is.

    Raises:
        GpuserveError: there is no record of a server.
        OSError: nothing can be written, not even in the server's own directory.
    """
    from ..server.record import load
    from .taking import Request, Taking  # hundreds of patterns: not for those who only ask for the argv

    request = Request(reason, test, after, soft, usual_limit(directory) if limit is None else limit, rounds, keep)
    return Taking(load(directory), artifacts, request, leave, spent).run()


def age() -> float:
    """Seconds since this process was started: the supervisor's clock runs while the imports do."""
    me = procfs.stat(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - me.start / os.sysconf("SC_CLK_TCK") if me else 0.0


def usual_limit(directory: Path) -> float:
    """0.7 of what the supervisor gives a dump of this server: the plugin arms its alarms with 0.8 of it."""
    try:
        alarms = json.loads((directory / "supervisor.json").read_bytes())["alarms"]
        return 0.7 * min(float(alarm["limit"]) for alarm in alarms)
    except (OSError, ValueError, KeyError, TypeError):
        return LIMIT


def main(argv: Sequence[str] | None = None) -> int:
    """0: the server is to blame; 75: it is spared; anything else: it could not be told, and it is ended.

    Where nothing can be written, its answers alone decide.
    """
    parser = argparse.ArgumentParser(prog="pytest_gpuserve.report.incident", description=__doc__)
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--artifacts", default="off")
    parser.add_argument("--reason", required=True)
    parser.add_argument("--test")
    parser.add_argument("--after", type=float)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=int, default=0)
    parser.add_argument("--soft", action="store_true")
    given = parser.parse_args(argv)
    try:
        taken = record_incident(
            given.server,
            None if given.artifacts == "off" else Path(given.artifacts),
            given.reason,
            test=given.test,
            after=given.after,
            soft=given.soft,
            limit=given.limit,
            rounds=given.rounds,
            keep=given.keep,
            spent=age(),
            leave=os._exit,
        )
        code = taken.decision.exit_code
    except Exception as error:
        if not isinstance(error, GpuserveError):
            traceback.print_exc()
        print(f"gpuserve: no incident: {error}", file=sys.stderr)  # noqa: T201 (kept by the supervisor)
        code = EXIT_SPARE if given.soft or given.reason == "manual" else _without_files(given.server, given.reason)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not through threads that wait for what may never come


def _without_files(directory: Path, reason: str) -> int:
    """The exit code where no incident could be taken, of what needs no file: one that answers is not to blame."""
    from ..engines import get_engine
    from ..server.record import load
    from .blame import Witnesses, decide
    from .probe import ask

    try:
        record = load(directory)
        probe = ask(record, get_engine(record.engine))
        return decide(reason, Witnesses(answers=probe.answers, reachable=probe.reachable)).exit_code
    except Exception as error:  # without a record there is nothing to ask; that has been said
        if not isinstance(error, GpuserveError):
            traceback.print_exc()
        return 1


if __name__ == "__main__":
    main()
