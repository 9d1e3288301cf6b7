"""``gpuserve explain DUMP...``: stacks that were taken elsewhere, with or without the server's log."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from .. import foreign
from ..diagnose import parse
from ..diagnose.evidence import Evidence, LogFact
from ..diagnose.logfile import CHUNK, DAMAGE, MOST, Readable, unpacked
from ..diagnose.merge import merge
from ..diagnose.model import Judgement, ProcessDump
from ..diagnose.triage import Triage
from ..diagnose.verdict import judge
from ..engines import engine_names, get_engine
from ..errors import GpuserveError
from ..text import escape, one_line

EXIT_CODES: Final = {"ready": 0, "hang": 3, "slow": 4, "undecided": 5}
"""Exit code by verdict; every other verdict is a failure, 1."""

_HEAD: Final = 256 << 10
_TAIL: Final = 4 << 20
_SIGNS: Final = re.compile(
    rb"Process \d+: |Thread .{0,40}\((?:idle|active)|most recent call first|Traceback for thread \d+|#0:? +\S"
    rb"|TID \d+:|thread #\d|~ Stack of "
)
_JSON: Final = re.compile(rb"\[\{\"pid\"|\"frames\": ?\[")
_FATAL: Final = frozenset({"crash", "oom", "config", "unsupported_arch", "port", "leak", "infra"})


def dumps_of(name: str) -> list[ProcessDump]:
    """The stacks in a file, unpacked, or in a pipe; none when it does not look like a dump, or has the time stamps of
    an engine's log: that may quote a stack, too.

    Raises:
        GpuserveError: it is too large for a dump, or as :func:`unpacked`.
    """
    try:
        with unpacked(name) as file:
            text = head = _read(file, _HEAD)
            sure = _JSON.search(head) is not None
            if not (sure or _SIGNS.search(head)) or any(clock.search(head) for clock in _clocks()):
                return []
            text += _read(file, foreign.MOST_JSON + 1 - len(head))
    except (OSError, *DAMAGE):  # said where it is read as a log
        return []
    if len(text) > foreign.MOST_JSON:
        if not sure and not parse.read_dumps(head.decode(errors="replace")):
            return []
        raise GpuserveError(
            f"{one_line(name)} looks like a stack dump, and it is larger than {foreign.MOST_JSON >> 20} MiB: "
            f"give the part that matters."
        )
    return parse.read_dumps(text.decode(errors="replace"), source=Path(name).name)


def quoted_in(name: str) -> list[ProcessDump]:
    """The stacks that the end of a log holds: an engine's watchdog prints those of every rank before it gives up."""
    text = bytearray()
    try:
        with unpacked(name) as file:
            if isinstance(file, (io.BufferedReader, io.BufferedRandom)) and file.seekable():
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            left = MOST
            while left > 0 and (piece := file.read(min(CHUNK, left))):
                left -= len(piece)
                text += piece
                if len(text) > 4 * _TAIL:
                    del text[:-_TAIL]
    except (OSError, *DAMAGE):
        return []
    del text[:-_TAIL]
    return parse.read_dumps(text.decode(errors="replace"), source=Path(name).name) if _SIGNS.search(text) else []


def _read(file: Readable, most: int) -> bytes:
    """At most so much: an unpacker gives it piece by piece."""
    text = bytearray()
    while len(text) < most and (piece := file.read(min(CHUNK, most - len(text)))):
        text += piece
    return bytes(text)


def _clocks() -> Iterator[re.Pattern[bytes]]:
    for name in engine_names():
        with suppress(GpuserveError):
            if clock := get_engine(name).grammar.clock:
                yield clock


def run(dumps: Sequence[ProcessDump], log: Triage | None, arguments: argparse.Namespace) -> int:
    """Judge them; ``log``: what the logs that were named beside them say."""
    return show(dumps, judged(dumps, log), arguments)


def judged(dumps: Sequence[ProcessDump], log: Triage | None) -> Judgement:
    """Stacks alone do not tell whether anybody waited for an answer: idle processes are healthy ones."""
    facts = _deaths(dumps)
    if log and log.cause is not None:
        place = f"{log.cause.log}, line {log.cause.number}"
        if log.verdict in _FATAL:
            facts.append(LogFact(log.cause.line, place, log.verdict, log.cause.rank))
        elif log.cause.kind.startswith("watchdog_"):
            facts.append(LogFact(log.cause.line, place, "stalled"))
    evidence = Evidence(
        reason="manual",
        rounds=parse.as_rounds(dumps),
        expected=tuple(log.ranks) if log else (),
        log=tuple(facts),
        engine=log.engine if log else None,
        foreign=True,
    )
    return judge(evidence)


def _deaths(dumps: Sequence[ProcessDump]) -> list[LogFact]:
    """What the processes died of: a stack that an interpreter prints at its end is no hang. Who was aborted may have
    been so because it waited, and of several nobody knows the first."""
    said = [(dump, str(dump.facts["fatal"])) for dump in dumps if dump.facts.get("fatal")]
    alone = len(said) == 1 and not said[0][1].endswith("Aborted") and said[0][0].role.rank is not None
    return [LogFact(words, "the dump", "crash", dump.label if alone else None) for dump, words in said]


def show(dumps: Sequence[ProcessDump], judgement: Judgement, arguments: argparse.Namespace) -> int:
    """Print the verdict, whole, and the classes."""
    if arguments.json:
        print(json.dumps(judgement.to_json(), indent=1))
    else:
        print(escape(judgement.text))
        print(escape(f"\n{merge(parse.as_rounds(dumps)).text()}", 200))
    return EXIT_CODES.get(judgement.verdict, 1)
