"""``git bisect run gpuserve judge -- pytest …``: what a test run means, as git bisect has to be told."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

from ..engines.arguments import JIT_CACHES
from ..engines.flags import cache_root
from ..errors import GpuserveError
from ..gpu import query, visible
from ..isolation.judge import BROKEN, SKIP, Judged, confidence, decided, judge_session
from ..isolation.signature import SHAPE, Signature
from ..report.files import Store
from ..server.paths import state_root
from ..shape import Maybe, read
from ..text import one_line
from .pytest_probe import check_pytest, run_session
from .signals import as_interrupt
from .user_command import check_above_zero, end_group, start, words_of

INTERRUPTED = 130
"""128 + SIGINT: git bisect stops."""

_BUSY = 512 << 20
"""Bytes on a GPU beyond which somebody's memory is in the way of a test."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a commit is judged.

    Attributes:
        argv: the pytest command.
        build: command that builds the commit; empty: none.
        repeat: good runs that a commit needs.
        rate: in how many of the runs a bad commit fails, for the stated confidence; None: not known.
        target: the failure that is sought; None: any. tests: node ids that failed so; without them no commit is good,
            or without ``every`` one of them.
        log: where one line a step goes. artifacts: incidents of the runs; None: pytest's own default.
        limit, build_limit: seconds for one run, and for the build. gpu_wait: for GPUs to become free.
    """

    argv: tuple[str, ...]
    build: tuple[str, ...] = ()
    repeat: int = 1
    rate: float | None = None
    target: Signature | None = None
    tests: tuple[str, ...] = ()
    every: bool = False
    log: Path = Path("bisect.log")
    limit: float | None = None
    build_limit: float | None = None
    gpu_wait: float = 60.0
    private_caches: bool = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that ``judge`` and ``bisect`` share."""
    parser.add_argument("words", nargs="*", metavar="pytest …", help="the test command, after --; no shell")
    parser.add_argument(
        "--build", metavar="CMD", help="builds the commit, no shell; where it fails the commit is skipped"
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="good runs that a commit needs (default 1)")
    parser.add_argument(
        "--repro-rate", type=float, metavar="Q", help="share of runs in which the failure shows; chooses --repeat"
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.995,
        metavar="P",
        help="of one good commit, with --repro-rate (%(default)s)",
    )
    parser.add_argument(
        "--signature",
        metavar="FILE|last",
        help="only this failure is bad, others are skipped: an incident (its directory or incident.json), a file that "
        "judge wrote, or the last failure that judge saw",
    )
    parser.add_argument("--log", type=Path, default=Path("bisect.log"), metavar="FILE", help="default: %(default)s")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds for one run of pytest (default: none)")
    parser.add_argument("--build-timeout", type=float, metavar="S", help="seconds for the build (default: none)")
    parser.add_argument(
        "--gpu-wait", type=float, default=60.0, metavar="S", help="for GPUs to become free (%(default)g)"
    )
    parser.add_argument("--shared-caches", action="store_true", help="do not give each commit kernel caches of its own")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "git bisect run gpuserve judge [options] -- pytest ARGS…"
    parser.epilog = (
        "Exit codes: 0 good: at least one test passed, none failed, none was skipped by us. 1 bad. 125 cannot be "
        "tested: the build failed, no test ran, trouble of the machine, another failure. 128: this machine can test no "
        "commit; 130: interrupted."
    )
    parser.error = partial(_usage, parser)  # type: ignore[method-assign]
    add_options(parser)
    parser.add_argument("--save-signature", type=Path, metavar="FILE", help="write the failure of a bad commit there")


def _usage(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """argparse's exit code 2 would call every commit bad."""
    parser.exit(BROKEN, f"{parser.format_usage()}gpuserve judge: {message}\n")


def settings(arguments: argparse.Namespace) -> Settings:
    """Checked options.

    Raises:
        GpuserveError: one of them cannot be.
    """
    from ..isolation.judge import repeats

    check_pytest("judge", arguments.words)
    if arguments.repeat is not None and arguments.repeat < 1:
        raise GpuserveError("--repeat must be 1 or more.")
    rate = arguments.repro_rate
    if rate is not None and not 0 < rate <= 1:
        raise GpuserveError("--repro-rate must be above 0 and at most 1: the share of the runs that fail.")
    if not 0 < arguments.confidence < 1:
        raise GpuserveError("--confidence must lie between 0 and 1.")
    check_above_zero(arguments, "timeout", "build_timeout")
    if not arguments.gpu_wait >= 0:
        raise GpuserveError("--gpu-wait must be 0 or more.")
    times = arguments.repeat or (repeats(rate, 1 - arguments.confidence) if rate is not None else 1)
    target, tests = read_signature(arguments.signature) if arguments.signature else (None, ())
    return Settings(
        argv=tuple(arguments.words),
        build=words_of("--build", arguments.build) if arguments.build is not None else (),
        repeat=times,
        rate=rate,
        target=target,
        tests=tests,
        log=arguments.log.absolute(),
        limit=arguments.timeout,
        build_limit=arguments.build_timeout,
        gpu_wait=arguments.gpu_wait,
        private_caches=not arguments.shared_caches,
    )


def run(arguments: argparse.Namespace) -> int:
    """See the epilog. An error of ours is 128, never a code that git takes for bad."""
    try:
        chosen = settings(arguments)
        with as_interrupt([]):
            judged = judge(chosen, print)
        save_signature(judged, arguments.save_signature)
    except GpuserveError as error:
        print(f"gpuserve judge: {error}", flush=True)
        return BROKEN
    except KeyboardInterrupt:
        print("gpuserve judge: interrupted", flush=True)
        return INTERRUPTED
    except Exception as error:  # a traceback's exit code 1 would call the commit bad
        print(f"gpuserve judge: {type(error).__name__}: {one_line(str(error), 400)}", flush=True)
        return BROKEN
    return judged.code


def judge(
    chosen: Settings,
    say: Callable[[str], None],
    *,
    cwd: Path | None = None,
    started: Callable[[int], None] = lambda pid: None,
) -> Judged:
    """Build, test as often as needed, and say what the commit is; one line in the log. ``started`` takes pids of ours.

    Raises:
        GpuserveError: the command cannot be run, or the log not be written.
    """
    begin = time.monotonic()
    commit = _git(["rev-parse", "HEAD"], cwd) or "-"
    results: list[Judged] = []
    judged = _no_directory(cwd) or _build(chosen, cwd, started)
    env = _caches(commit) if chosen.private_caches and commit != "-" else {}
    while judged is None:
        judged = _busy(chosen.gpu_wait) or None
        if judged is not None:
            break
        session = run_session(chosen.argv, env=env, limit=chosen.limit, cwd=cwd, started=started)
        results.append(judge_session(session, chosen.target, chosen.tests, every=chosen.every))
        judged = decided(results, chosen.repeat)
    _log(chosen, commit, judged, len(results), time.monotonic() - begin, cwd)
    sure = ""
    if judged.code == 0 and chosen.rate is not None:
        sure = f"; good with confidence {confidence(chosen.rate, chosen.repeat):.2%} at a repro rate of {chosen.rate:g}"
    say(f"gpuserve judge: {commit[:12]} is {judged.word.upper()} ({judged.code}): {one_line(judged.reason, 400)}{sure}")
    return judged


def read_signature(name: str) -> tuple[Signature, tuple[str, ...]]:
    """The failure that ``--signature`` names, and the tests that failed so, where they are known.

    Raises:
        GpuserveError: there is none.
    """
    path = state_root() / "last-signature.json" if name == "last" else Path(name)
    if path.is_dir():
        path = path / "incident.json"
    try:
        raw = read(path, SHAPE | {"nodeids": Maybe([str])})
        return Signature.from_json(raw), tuple(raw.get("nodeids") or ())
    except (OSError, ValueError) as error:
        what = "no failure was judged before" if name == "last" else f"{one_line(str(path))} holds no failure"
        raise GpuserveError(f"--signature: {what} ({error}). Name an incident's directory, or leave it out.") from None


def save_signature(judged: Judged, path: Path | None) -> None:
    """Keep a failure for ``--signature last``, and where the user wants it."""
    if judged.signature is None:
        return
    content = judged.signature.to_json() | {"nodeids": list(judged.tests)}
    for target in (state_root() / "last-signature.json", path):
        if target is not None:
            try:
                Store(target.parent, None, 0o600).write_json(target.name, content)
            except OSError as error:
                raise GpuserveError(f"{target} cannot be written: {error.strerror}.") from error


def _no_directory(cwd: Path | None) -> Judged | None:
    gone = cwd is not None and not cwd.is_dir()
    return Judged(SKIP, f"the directory {one_line(str(cwd))} is not there at this commit") if gone else None


def _build(chosen: Settings, cwd: Path | None, started: Callable[[int], None]) -> Judged | None:
    if not chosen.build:
        return None
    try:
        child = start(chosen.build, cwd=cwd)
    except OSError as error:
        # what is missing at one commit (./build.sh) may be there at the next
        return Judged(SKIP, f"the build cannot be run: {chosen.build[0]}: {error.strerror}")
    try:
        started(child.pid)
        code = child.wait(chosen.build_limit)
    except subprocess.TimeoutExpired:
        end_group(child)
        return Judged(SKIP, f"the build did not end within {chosen.build_limit:g} s")
    except BaseException:
        end_group(child)
        raise
    return Judged(SKIP, f"the build failed with exit code {code}") if code else None


def _busy(limit: float) -> Judged | None:
    """Wait until no visible GPU holds memory; what does not go away is no reason to call a commit bad."""
    deadline = time.monotonic() + limit
    while _has_gpus():
        reading = query(20.0)
        units = visible(reading.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        lost = [gpu for gpu in units if gpu.error is not None]
        if lost:
            return Judged(BROKEN, f"{lost[0].label} cannot be used: {lost[0].error}")
        full = [gpu for gpu in units if (gpu.memory_used or 0) > _BUSY]
        if not full:
            return None
        if time.monotonic() >= deadline:
            held = ", ".join(f"{gpu.label} holds {(gpu.memory_used or 0) / 2**30:.1f} GiB" for gpu in full)
            return Judged(
                SKIP, f"GPUs are not free after {limit:g} s: {held} (gpuserve reap --devices names the holders)"
            )
        time.sleep(1.0)
    return None


@cache
def _has_gpus() -> bool:
    return bool(query(20.0).gpus)


def _caches(commit: str) -> dict[str, str]:
    """Kernel caches of one commit: another's compiled kernels may hide or bring a failure."""
    root = cache_root() / "judge" / commit
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {variable: str(root / folder) for variable, folder in JIT_CACHES.items()}


def _log(chosen: Settings, commit: str, judged: Judged, runs: int, seconds: float, cwd: Path | None) -> None:
    subject = _git(["log", "-1", "--format=%s"], cwd) if commit != "-" else ""
    line = "\t".join(
        (
            time.strftime("%Y-%m-%dT%H:%M:%S"),
            commit,
            judged.word,
            str(judged.code),
            f"{runs} runs",
            f"{seconds:.1f} s",
            one_line(judged.reason, 300),
            one_line(subject or "", 100),
        )
    )
    try:
        with chosen.log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise GpuserveError(f"{chosen.log} cannot be written: {error.strerror}. Choose another with --log.") from error


def _git(words: Sequence[str], cwd: Path | None) -> str | None:
    """Output of a git command that only looks; None: not a repository, or no git."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["git", *words], check=False, capture_output=True, text=True, errors="replace", timeout=60, cwd=cwd
        )
        if done.returncode == 0:
            return done.stdout.strip()
    return None
