"""``gpuserve explain LOG...``: what became of a server, from its logs alone.

Exit codes: 0 the server was ready; 1 it failed (crash, oom, config, unsupported_arch, port, leak, infra); 3 it stalled;
4 it works, degraded; 5 undecided; 2 a log cannot be read, or a wrong option.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from ..diagnose.triage import SCHEMA, Triage, explain
from ..diagnose.triage_rules import load
from ..engines import engine_names
from ..errors import GpuserveError
from ..text import one_line

EXIT_CODES: Final = {"ready": 0, "stalled": 3, "degraded": 4, "undecided": 5}
"""Exit code by verdict; every other verdict is a failure, 1."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="logs of one server: per rank, per node, or one; .gz, .bz2, .xz and .zst are unpacked; - is stdin",
    )
    parser.add_argument("--engine", metavar="NAME", help="the engine that wrote them (default: the log tells)")
    parser.add_argument("--json", action="store_true", help=f"print the {SCHEMA} object")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "exit codes:\n" + "\n".join(
        f"  {line}"
        for line in (
            "0  ready",
            "1  it failed: crash, oom, config, unsupported_arch, port, leak or infra",
            "2  a log cannot be read, or a wrong option",
            "3  stalled: neither failed nor ready; a log cannot tell slow from hung",
            "4  degraded: it works, worse than asked for",
            "5  undecided: not the log of a server we know",
        )
    )


def run(arguments: argparse.Namespace) -> int:
    """Read what was named. Stack dumps and bundles, when they are taken too, are told apart from logs here."""
    return _logs(arguments)


def _logs(arguments: argparse.Namespace) -> int:
    known = sorted({*engine_names(), *(marks.name for marks in load().engines)})
    if arguments.engine is not None and arguments.engine not in known:
        raise GpuserveError(
            f"there is no engine called {arguments.engine!r}: --engine takes one of {', '.join(known)}."
        )
    found = explain(arguments.logs, arguments.engine)
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
