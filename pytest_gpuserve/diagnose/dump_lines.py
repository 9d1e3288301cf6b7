"""Lines of a paste as the dumper wrote them: what terminals, log collectors, launchers, mail and markdown put around
them is taken off, and what of that names a process or a rank is kept."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LONGEST = 8192
"""Characters of a line that are looked at: no frame is longer, and an endless line must not cost time."""

_ANSI = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]"
    r"|(?:\x1b|ESC|\^\[|\\x1b|\\e|\\033|␛)?\[(?:\d{1,2}(?:;\d{1,3})*)?m"  # a web form ate the escape character
)
_ENTITY = re.compile(r"&(?:quot|lt|gt|amp|nbsp|#39|#x27|#34);")

_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?[\d.,]*(?:Z|[+-]\d\d:?\d\d)?"
_RECORD = re.compile(  # of the line, whoever wrote it
    r"(?!>>> )(?:>\s?)+"  # quoted; ">>> Call stack dump" is vLLM's
    r"|\[[^\[\]]{0,80}\b[TPDE]P\d+\b[^\[\]]{0,40}\]\s?"  # SGLang
    rf"|{_TIME}\s|\[{_TIME}\]\s"  # CI runners, docker --timestamps
    r"|(?:stdout|stderr) [FP]\s"  # Kubernetes
    r"|[^\W\d]{3,5}\.? +\d{1,2} \d\d:\d\d:\d\d \S+ [^\s:]+:\s"  # syslog, journalctl
    r"|\[\d{1,9}\]\s"  # numbered lines
    r"|\((?:cuda-)?(?:gdb|lldb)\)\s"
)
_WRITER = re.compile(  # of the process: launchers mix the lines of several
    r"\([A-Za-z][^()]{0,80}\bpid=\d+[^()]{0,40}\)\s?"  # vLLM, ray
    r"|\[[^\[\]]{0,80}\brank ?(?P<torch>\d+)\b[^\[\]]{0,40}\]:?\s?"
    r"|\[[a-z]\w*?(?P<torchrun>\d+)\]:"
    r"|\[\d+,(?P<mpi>\d+)\]<std(?:out|err)>:\s?"
    r"|\[pod/[^\]\s]+\]\s"
    r"|[\w.-]{1,60}\s*\|(?:\s|$)"  # docker compose
)
_SRUN = re.compile(r"(?P<srun>\d{1,5}):\s")
_PID = re.compile(r"\bpid=(\d+)")

_TAG = r"(?:TP|DP|PP|EP|rank)[ _#-]?\d+"
_HEADING = re.compile(
    rf"(?i)^(?P<mark>[\s#*=_~<>-]*)(?:(?:on|for|from|of)\s+|\S*/)?(?P<tags>{_TAG}(?:[\s_,/]+{_TAG})*)"
    r"(?:\.[a-z]\w{0,4}\b)?(?P<rest>(?![\d.-])[^:`/]{0,40}?)(?P<end>[\s#*=_~:<>-]*)$"  # head and tail name the file
)
_TIMED_OUT = re.compile(r"^Process (?P<rank>\d+) timed out with traceback:")  # torch's tests
_END_NOTE = re.compile(r"\s+(?:<[-=]|[←⬅]|#\s).*$")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a dump.

    Attributes:
        text: as the tool wrote it, with its indentation.
        prefix: what stood before it; ranks that a launcher names are written ``rank 3`` there.
        writer: whose line it is, where each line says so; "" elsewhere.
    """

    text: str
    prefix: str = ""
    writer: str = ""

    @property
    def pid(self) -> int | None:
        """The process that wrote it, where the prefix tells."""
        found = _PID.search(self.prefix)
        return int(found[1]) if found else None


def clean(raw: str) -> Line:
    """``raw`` without colours, entities and prefixes. An empty line has an empty text."""
    line = _ANSI.sub("", raw[:_LONGEST]).rstrip()
    if _ENTITY.search(line):
        line = html.unescape(line)
    end, writer, ranks = 0, "", ""
    while end < len(line):
        found = _RECORD.match(line, end)
        if not found and (found := _WRITER.match(line, end) or (_SRUN.match(line) if end == 0 else None)):
            writer += found[0].strip()
            rank = next((number for number in found.groupdict().values() if number), None)
            ranks += f" rank {rank}" if rank else ""
        if not found:
            break
        end = found.end()
    return Line(line[end:], line[:end] + ranks, writer)


def heading(text: str) -> str:
    """The rank that a line announces as ``TP3`` or ``rank 3``, where it does nothing else: people write one above each
    stack. "" for any other line, and for one about several ranks."""
    if found := _TIMED_OUT.match(text):
        return f"rank {found['rank']}"
    found = _HEADING.match(text[:120])
    if not found:
        return ""
    plain = not found["rest"].strip()
    announced = plain or ":" in found["end"] or found["mark"].strip(" \t>")
    if not announced or re.search(r"\d\s*(?:-|\.\.|to|and|,|&)\s*(?:rank|[tdpe]p)?[ _]?\d", found[0], re.IGNORECASE):
        return ""
    return re.sub(r"(?i)rank[ _#-]?", "rank ", found["tags"].upper())


def without_note(text: str) -> str:
    """A frame without what its reader wrote behind it: ``wait (a.py:3)  <-- here``."""
    return _END_NOTE.sub("", text)


def sorted_by_writer(lines: Iterable[str]) -> Iterator[list[Line]]:
    """Lines of one writer after another, in the order of their first lines. What has no prefix goes with the line
    before it: dumps print their header with a prefix and the rest without."""
    writers: dict[str, list[Line]] = {}
    writer = ""
    for raw in lines:
        line = clean(raw)
        writer = line.writer or writer
        writers.setdefault(writer, []).append(line)
    yield from writers.values()
