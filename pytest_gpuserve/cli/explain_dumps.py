"""``gpuserve explain DUMP...``: stacks that were taken elsewhere, with or without the server's log."""

from __future__ import annotations

import argparse
import errno
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from .. import foreign
from ..diagnose import parse
from ..diagnose.evidence import Evidence, LogFact
from ..diagnose.merge import merge
from ..diagnose.model import ProcessDump
from ..diagnose.triage import Triage
from ..diagnose.verdict import judge
from ..engines import engine_names, get_engine
from ..errors import GpuserveError
from ..text import escape, one_line

EXIT_CODES: Final = {"ready": 0, "hang": 3, "slow": 4, "undecided": 5}
"""Exit code by verdict; every other verdict is a failure, 1."""

_HEAD: Final = 256 << 10
_SIGNS: Final = re.compile(
    rb"(?m)^\s*(?:Process \d+: |Thread (?:0x)?[0-9a-f]+ \(|(?:Current thread|Thread) 0x[0-9a-f]+"
    rb"|Traceback for thread \d+|#0 +0x|TID \d+:|\[\{\"pid\")|\"frames\": ?\["
)
_FATAL: Final = frozenset({"crash", "oom", "config", "unsupported_arch", "port", "leak", "infra"})


def dumps_of(path: Path) -> list[ProcessDump]:
    """The stacks in a file; none when it does not look like a dump, or has the time stamps of an engine's log: that may
    quote a stack, too.

    Raises:
        GpuserveError: it is too large for a dump.
    """
    try:
        head = foreign.beginning(path, _HEAD)
        if not _SIGNS.search(head) or any(clock.search(head) for clock in _clocks()):
            return []
        text = foreign.whole(path)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise GpuserveError(
                f"{one_line(str(path))} looks like a stack dump, and {error.strerror}: give the part that matters."
            ) from None
        return []
    return parse.read_dumps(text.decode(errors="replace"), source=path.name)


def _clocks() -> Iterator[re.Pattern[bytes]]:
    for name in engine_names():
        with suppress(GpuserveError):
            if clock := get_engine(name).grammar.clock:
                yield clock


def run(dumps: Sequence[ProcessDump], log: Triage | None, arguments: argparse.Namespace) -> int:
    """Judge them; ``log``: what the logs that were named beside them say.

    Stacks alone do not tell whether anybody waited for an answer: idle processes are healthy ones.
    """
    rounds = parse.as_rounds(dumps)
    merged = merge(rounds)
    ranks = tuple(log.ranks) if log else ()
    facts: tuple[LogFact, ...] = ()
    if log and log.cause is not None and log.verdict in _FATAL:
        facts = (LogFact(log.cause.line, f"{log.cause.log}, line {log.cause.number}", log.verdict, log.cause.rank),)
    evidence = Evidence(
        reason="manual", rounds=rounds, expected=ranks, log=facts, engine=log.engine if log else None, foreign=True
    )
    judgement = judge(evidence)
    if arguments.json:
        print(json.dumps(judgement.to_json(), indent=1))
    else:
        print(escape(f"{judgement.text}\n\n{merged.text()}", 200))
    return EXIT_CODES.get(judgement.verdict, 1)
