"""``gpuserve explain FILE...``: what became of a server, from its logs, from stack dumps, or from an incident.

Exit codes: 0 the server was ready; 1 it failed (crash, oom, config, unsupported_arch, port, leak, infra); 3 it hung, or
stalled by its log; 4 it works, degraded; 5 undecided; 2 a file cannot be read, or a wrong option.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .. import foreign
from ..diagnose.triage import SCHEMA, Triage, explain
from ..diagnose.triage_rules import load
from ..engines import engine_names
from ..errors import GpuserveError
from ..text import one_line

EXIT_CODES: Final = {"ready": 0, "stalled": 3, "degraded": 4, "undecided": 5}
"""Exit code by verdict; every other verdict is a failure, 1."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="logs of one server (per rank, per node, or one; .gz, .bz2, .xz, .zst are unpacked; - is stdin); stack "
        "dumps of py-spy, faulthandler, pystack, gdb, lldb, eu-stack or pytest-timeout, or what gpuserve dump -o "
        "wrote; or the directory or zip of an incident, or of many",
    )
    parser.add_argument("--engine", metavar="NAME", help="the engine that wrote the logs (default: the log tells)")
    parser.add_argument("--json", action="store_true", help=f"print JSON: of logs the {SCHEMA} object")
    bundles = parser.add_argument_group("incidents")
    bundles.add_argument("--check", action="store_true", help="say what is missing or torn; exit code 0: nothing is")
    bundles.add_argument("--issue", action="store_true", help="print the text to paste into a bug report")
    bundles.add_argument("--zip", type=Path, metavar="OUT", help="put all of it into one zip file")
    bundles.add_argument(
        "--render", type=Path, metavar="DIR", help="judge again, and write verdict.md, issue.md and repro.sh there"
    )
    bundles.add_argument("--html", type=Path, metavar="OUT", help="write its page: one file that loads nothing")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "exit codes:\n" + "\n".join(
        f"  {line}"
        for line in (
            "0  ready; with --check: whole; --zip: all of it; --issue, --render, --html: written",
            "1  it failed: crash, oom, config, unsupported_arch, port, leak, infra; --check: not whole; --zip: not all",
            "2  a file cannot be read, or a wrong option",
            "3  hang; of logs alone stalled: neither failed nor ready, which cannot tell slow from hung",
            "4  degraded or slow: it works, worse than asked for",
            "5  undecided: not the log of a server we know",
        )
    )


def run(arguments: argparse.Namespace) -> int:
    """Read what was named: incidents, stack dumps, logs."""
    if gone := next((name for name in arguments.files if name != "-" and not os.path.lexists(name)), None):
        raise GpuserveError(f"{one_line(gone)}: there is no such file.")
    paths = [written_by_dump(Path(name)) for name in arguments.files]
    arguments.files = [name if name == "-" else str(path) for name, path in zip(arguments.files, paths, strict=True)]
    bundles = [path for path in paths if path.is_dir() or is_zip(path)]
    wanted = [f"--{name}" for name in ("check", "issue", "zip", "render", "html") if getattr(arguments, name)]
    if bundles and len(bundles) < len(paths):
        raise GpuserveError("an incident is explained by itself: name it without the logs and dumps beside it.")
    if bundles:
        from .explain_bundle import run as explain_bundles

        return explain_bundles(bundles, arguments)
    if wanted:
        raise GpuserveError(
            f"{wanted[0]} is for incidents, and {one_line(arguments.files[0])} is neither a directory nor a zip. Name "
            f"the directory or zip of one, or leave {wanted[0]} out."
        )
    from .explain_dumps import dumps_of
    from .explain_dumps import run as explain_dumps

    dumps = {name: found for name in arguments.files if (found := dumps_of(name))}
    if not dumps:
        return _logs(arguments)
    logs = [name for name in arguments.files if name not in dumps]
    log = explain(logs, arguments.engine) if logs else None
    return explain_dumps([dump for found in dumps.values() for dump in found], log, arguments)


def written_by_dump(path: Path) -> Path:
    """The stacks in a directory that ``gpuserve dump -o`` wrote; anything else as it is."""
    inner = path / "dump.json"
    return inner if inner.is_file() and not (path / "incident.json").exists() else path


def is_zip(path: Path) -> bool:
    """By its first bytes; an empty zip is one too."""
    try:
        return foreign.beginning(path, 4) in (b"PK\x03\x04", b"PK\x05\x06")
    except OSError:
        return False


def _logs(arguments: argparse.Namespace) -> int:
    known = sorted({*engine_names(), *(marks.name for marks in load().engines)})
    if arguments.engine is not None and arguments.engine not in known:
        raise GpuserveError(
            f"there is no engine called {arguments.engine!r}: --engine takes one of {', '.join(known)}."
        )
    found = explain(arguments.files, arguments.engine)
    if found.verdict in ("stalled", "undecided"):  # what the log leaves open, stacks in it may decide
        from .explain_dumps import judged, quoted_in, show

        stacks = [dump for name in arguments.files for dump in quoted_in(name)]
        judgement = judged(stacks, found) if stacks else None
        if judgement is not None and judgement.verdict != "undecided":
            return show(stacks, judgement, arguments)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))  # ASCII: nothing in it is obeyed by a terminal
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for head, text in report(found):
            print(f"{head:9} {one_line(text, width and max(20, width - 10))}")
    return EXIT_CODES.get(found.verdict, 1)


def report(found: Triage) -> Iterator[tuple[str, str]]:
    """The report a person reads, as (heading, text); the texts quote the log and are not escaped."""
    engine = " ".join(filter(None, (found.engine or "unknown engine", found.version)))
    yield "verdict", f"{found.verdict} ({engine}{f', in {found.phase}' if found.phase else ''})"
    if found.cause is not None:
        cause = found.cause
        yield "cause", f"{cause.log}:{cause.number}{f' {cause.rank}' if cause.rank else ''} [{cause.kind}] {cause.line}"
    yield from _ranks(found)
    for text in found.degraded:
        yield "degraded", text
    if found.benign:
        count = sum(noise.count for noise in found.benign.values())
        yield "folded", f"{count} lines that look bad and are not:"
        for name, noise in found.benign.items():
            yield "", f"{noise.count:5} {name}: {noise.why}"
    for text in found.hints:
        yield "hint", text


def _ranks(found: Triage) -> Iterator[tuple[str, str]]:
    together: dict[str, list[str]] = defaultdict(list)
    for label, rank in found.ranks.items():
        if label not in found.lagging:
            together[rank.phase or "?"].append(label)
    for phase, labels in together.items():
        yield "ranks", f"{', '.join(labels)}: {phase}"
    for label in found.lagging:
        rank = found.ranks[label]
        said = f"{rank.phase}, last line: {rank.last_line}" if rank.phase else "never printed a line"
        yield "behind", f"{label}: {said}"
