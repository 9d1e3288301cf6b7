"""``gpuserve isolate -- CMD…``: the smallest part of a failing command line that fails, and the smallest way around."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ..engines import engine_names, get_engine
from ..engines.features import features_of
from ..errors import GpuserveError, SpecError
from ..isolation.conclude import SHAPE, from_json
from ..isolation.deltas import split
from ..isolation.search import Trial
from ..isolation.signature import Signature
from ..isolation.variants import CommandLine, Variants, from_matrix
from ..redaction.redact import Redactor
from ..server.gpu_pool import GpuPool, gpu_pool
from ..server.lifecycle import Limits
from ..server.paths import scratch
from ..server.reaper import sweep_dead_sessions
from ..shape import read
from ..text import escape, one_line
from . import isolate_text as text
from . import parity
from .isolate_run import Isolation
from .isolate_state import fingerprint, lock, open_state
from .launches import Check, Launcher
from .signals import as_interrupt
from .user_command import check_above_zero, check_program, words_of


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "gpuserve isolate [options] -- [NAME=VALUE…] CMD…\n       gpuserve isolate [options] --from matrix.json CELL"
    )
    parser.epilog = (
        "Exit code: 0 found and verified; 1 nothing to find (the base fails too, or nothing fails) or undecided; "
        "2 usage; 130 interrupted: the same command goes on where it was."
    )
    parser.add_argument("words", nargs="*", metavar="CMD", help="the failing server command, after --; no shell")
    parser.add_argument(
        "--from", dest="matrix", nargs=2, metavar=("MATRIX", "CELL"), help="a cell of a finished matrix"
    )
    parser.add_argument("--engine", choices=engine_names(), help="default: told by the command; command: any server")
    parser.add_argument("--ready", metavar="PATH", help="URL path that answers 200 when the server is ready")
    parser.add_argument(
        "--probe",
        metavar="CMD",
        help="check of a ready server, no shell; {url}, {port}, {model} are filled in (also GPUSERVE_URL, "
        "GPUSERVE_MODEL); exit code 0 passes, 125 cannot tell, others fail. pytest NODEID starts the server itself. "
        "Default: completions at temperature 0, one of 288 tokens; they must be those of the base, unless its "
        "logprobs say that two tokens were nearly equal",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="NAME",
        help="flag or variable that is never taken away, since no server starts here without it "
        "(--keep=--attention-backend, --keep=NCCL_*); may be repeated",
    )
    parser.add_argument("--plan", action="store_true", help="show deltas, remedies and cost, and start nothing")
    parser.add_argument(
        "--output", type=Path, default=Path("gpuserve-isolate"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs in DIR")
    parser.add_argument("--budget", type=int, default=60, metavar="N", help="search launches (default %(default)s)")
    parser.add_argument("--minutes", type=float, metavar="M", help="no launch begins after M minutes of launches")
    parser.add_argument(
        "--calibrate", type=int, default=3, metavar="N", help="launches of each end (default %(default)s)"
    )
    parser.add_argument(
        "--parallel", type=int, metavar="N", help="servers at once (default: as the GPUs allow, at most 4)"
    )
    parser.add_argument(
        "--remedies", type=int, default=12, metavar="N", help="launches for remedies (default %(default)s)"
    )
    parser.add_argument("--one", action="store_true", help="do not look for a second failing set")
    parser.add_argument("--startup-timeout", type=float, default=1800.0, metavar="S", help="default %(default)g")
    parser.add_argument("--stall-timeout", type=float, metavar="S", help="seconds without progress (default: by phase)")
    parser.add_argument("--request-timeout", type=float, default=300.0, metavar="S", help="default %(default)g")
    parser.add_argument("--probe-timeout", type=float, default=1800.0, metavar="S", help="default %(default)g")
    parser.add_argument("--grace", type=float, default=10.0, metavar="S", help="from SIGTERM to SIGKILL")
    parser.add_argument("--gpus", metavar="GPUS", help="auto, none, 0,1 or UUIDs, virtual:8")


def run(arguments: argparse.Namespace) -> int:
    """See the epilog for exit codes.

    Raises:
        GpuserveError: the command cannot be isolated; one paragraph why.
    """
    _check(arguments)
    variants, evidence, target = _problem(arguments)
    probe = words_of("--probe", arguments.probe) if arguments.probe is not None else ()
    if probe:
        check_program("--probe", probe)
    if target is not None and target.verdict == "test" and not probe:
        raise GpuserveError(
            "this cell failed in its test, not in its server, and the built-in check does not run that test. Name it: "
            '--probe "pytest NODEID" (without the cell in brackets).'
        )
    check = Check(probe, arguments.probe_timeout, arguments.request_timeout)
    everything = range(len(variants.names))
    redactor = Redactor.of(
        os.environ, dict(variants.wanted(everything).spec.env), argv=variants.wanted(everything).spec.command
    )

    def say(line: str) -> None:
        print(f"{escape(redactor.redact(line))}\n", end="", flush=True)  # in one piece: several threads speak

    for line in text.plan(variants, arguments, evidence, text.command(variants, (), redactor)):
        say(line)
    if isinstance(variants, CommandLine) and variants.engine == "command" and variants.parts.port_added:
        say("It does not say {port}, so --port {port} is added: write {port} where this server takes its port.")
    if not variants.names:
        raise GpuserveError(
            "nothing in this command can be taken away: all of it is what the model needs. Isolate a command with the "
            "flags or variables that you suspect."
        )
    if arguments.plan:
        return 0
    taken = f"another gpuserve isolate works in {arguments.output}"
    held = lock(arguments.output / ".lock", taken, " Choose another place with --output.")
    what = probe or (parity.PROMPTS, parity.TOKENS)
    mark = fingerprint(variants.names, variants.texts, variants.shown(()), what, arguments.ready, len(evidence))
    state = open_state(
        arguments.output, mark, text.command(variants, everything, redactor), redactor, fresh=arguments.fresh
    )
    if state.runs:
        say(f"{len(state.runs)} runs are known from {arguments.output}; they are not repeated.")
    if state.target is None:
        state.target = target
    pool = _pool(arguments.gpus)
    if swept := sweep_dead_sessions().text:
        say(swept)
    spec = variants.wanted(()).spec
    width = arguments.parallel or (min(4, len(pool.devices) // spec.tp) if pool.counted else 1)
    limits = Limits(arguments.startup_timeout, arguments.grace)
    begin = time.monotonic()
    try:
        with (
            as_interrupt([]),
            scratch("cold") as cold,
            Launcher(arguments.output / "incidents", limits, check, pool, stall=arguments.stall_timeout) as launcher,
        ):
            isolation = Isolation(variants, state, launcher, arguments, say, max(1, width), cold, probe)
            result = isolation.run(evidence)
    except KeyboardInterrupt:
        say(f"\nInterrupted. {len(state.runs)} runs are in {arguments.output}; the same command goes on from there.")
        return 130
    finally:
        os.close(held)
    for line in text.report(variants, state, result, time.monotonic() - begin):
        say(line)
    state.result = result.to_json()
    state.save()
    return 0 if result.status == "found" else 1


def _check(arguments: argparse.Namespace) -> None:
    above = ("calibrate", "budget", "parallel", "minutes", "startup_timeout", "stall_timeout", "request_timeout")
    check_above_zero(arguments, *above, "probe_timeout")
    for name in ("remedies", "grace"):
        if not getattr(arguments, name) >= 0:
            raise GpuserveError(f"--{name} must be 0 or more.")


def _pool(option: str | None) -> GpuPool:
    try:
        return gpu_pool(option, os.environ)
    except GpuserveError as error:  # it speaks of pytest's option
        raise GpuserveError(str(error).replace("--gpuserve-gpus", "--gpus")) from None


def _problem(arguments: argparse.Namespace) -> tuple[Variants, list[Trial], Signature | None]:
    """What is to be isolated.

    Raises:
        GpuserveError: there is no command, or the matrix cannot be used.
    """
    if arguments.matrix:
        if arguments.words:
            raise GpuserveError("give either --from MATRIX CELL or -- CMD…, not both.")
        path, cell = arguments.matrix
        try:
            raw = read(Path(path), SHAPE)
        except OSError as error:
            raise GpuserveError(f"{one_line(path)} cannot be read: {error.strerror}. Correct --from.") from None
        except ValueError as error:
            raise GpuserveError(
                f"{one_line(path)} is no matrix.json of pytest-gpuserve: {error}. Give --from one that pytest wrote."
            ) from None
        try:
            return from_matrix(raw, from_json(raw), cell)
        except SpecError as error:
            raise SpecError(one_line(str(error), 1000)) from None  # what stands in it may be long
    engine = arguments.engine or recognise(arguments.words)
    names = {word.partition("=")[0] for word in arguments.words}
    if lost := [pattern for pattern in arguments.keep if not any(fnmatchcase(name, pattern) for name in names)]:
        raise GpuserveError(f"--keep {lost[0]}: no flag and no variable of the command is called that. Correct --keep.")
    features = features_of(engine)
    features = replace(features, base=(*features.base, *arguments.keep), base_env=(*features.base_env, *arguments.keep))
    parts = split(arguments.words, features)
    return CommandLine(parts, engine, str(Path.cwd())), [], None


def recognise(words: Sequence[str]) -> str:
    """The engine whose adapter takes this command line for its front end; ``command`` where none does."""
    rest = list(words)
    while rest and ("=" in rest[0] or Path(rest[0]).name == "env") and not rest[0].startswith("-"):
        rest.pop(0)
    for name in _known(rest):
        return name
    return "command"


def _known(words: Sequence[str]) -> Iterable[str]:
    for name in engine_names():
        if name == "command" or not words:
            continue
        role = get_engine(name).process_role(words, Path(words[0]).name[:15])
        if role is not None and role.role == "api":
            yield name
