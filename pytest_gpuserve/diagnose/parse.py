"""Dumps taken elsewhere, and the dumpers' own output, to values: only reads."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from .. import foreign
from ..engines.base import ProcessRole, Rank
from ..procfs import ProcessId
from ..text import foreign_decoder
from ..vocabulary import RoleName
from . import dump_text
from .model import Dumper, Frame, ProcessDump, ThreadStack
from .roles import UNKNOWN, any_role, rank_in

RoleOf = Callable[[Sequence[str], str], ProcessRole | None]

STACK_SCHEMA = "gpuserve.stack/1"
"""Schema of ``stacks/<label>.<pid>.json`` in an incident; see :func:`to_json`."""

_FAILURES = 500
_DEEP = 10_000

_ROLES: tuple[RoleName, ...] = get_args(RoleName)
_DUMPERS: tuple[Dumper, ...] = get_args(Dumper)
_RANK_NAME = re.compile(r"(?i)(?:^|[_.-])(?:rank|tp|for_worker)[_-]?(\d{1,5})(?=[_.-]|$)")
_MARKER_NAME = re.compile(r"fh\.(\d+)\.(\d+)\.txt$")


def read_dumps(text: str, *, role_of: RoleOf = any_role, source: str = "") -> list[ProcessDump]:
    """Every process whose stacks stand in ``text``: any number of dumps, of any of the known tools, in any company.

    Known: py-spy text and ``--json`` (also in envelopes with ``stacks``, as our own incidents have), faulthandler,
    pystack, gdb ``bt`` and ``py-bt``, lldb, eu-stack, coredumpctl, pytest-timeout. ``source`` (a file name) helps to
    tell the process where the dump does not say. Rounds of one process come as several dumps, in the order of the text.
    What a process died of, where the dump says so, is in its facts as ``fatal``. Never raises.
    """
    dumps: list[ProcessDump] = []
    rest: list[str] = []
    for piece in _split_json(text):
        if isinstance(piece, str):
            rest.append(piece)
        else:
            dumps.extend(_from_json(piece, role_of))
    marker = _MARKER_NAME.search(source)
    for process in dump_text.read_processes("".join(rest).splitlines()):
        if marker and process.pid is None:
            process.pid = int(marker[1])
        start = int(marker[2]) if marker and process.pid == int(marker[1]) else 0
        threads = process.stacks()
        if threads or process.certain:
            dump = _dump(process.pid or _main_tid(threads) or 0, process.title, threads, role_of, process.prefix)
            facts = {"fatal": process.fatal} if process.fatal else {}
            dumps.append(replace(dump, process=ProcessId(dump.process.pid, start), facts=facts))
    return _named(dumps, source)


def _named(dumps: list[ProcessDump], source: str) -> list[ProcessDump]:
    """With the rank in the file's name (``rank3.txt``, ``VLLM_STACK_DUMP_for_worker_1_812.log``), where it holds one
    process that does not tell its own."""
    found = set(_RANK_NAME.findall(source))
    if len(found) != 1 or len({dump.process for dump in dumps}) != 1 or dumps[0].role is not UNKNOWN:
        return dumps
    role = ProcessRole("worker", Rank(tp=int(found.pop())))
    return [replace(dump, role=role) for dump in dumps]


def read_file(path: Path, *, role_of: RoleOf = any_role) -> list[ProcessDump]:
    """:func:`read_dumps` of a file.

    Raises:
        OSError: it cannot be read.
    """
    text = foreign.whole(path).decode(errors="replace")
    return read_dumps(text, role_of=role_of, source=path.name)


def as_rounds(dumps: Sequence[ProcessDump]) -> list[list[ProcessDump]]:
    """What :func:`read_dumps` returned, by round: the second dump of a process belongs to the second round."""
    rounds: list[list[ProcessDump]] = []
    seen: Counter[ProcessId] = Counter()
    for dump in dumps:
        number = seen[dump.process] if dump.process.pid else 0
        seen[dump.process] += 1
        while len(rounds) <= number:
            rounds.append([])
        rounds[number].append(dump)
    return rounds


def pyspy_threads(threads: object, pid: int) -> tuple[ThreadStack, ...]:
    """The array that ``py-spy dump --json`` prints (0.3 to 0.4): leaf frame first, threads newest first.

    The main thread is the one whose id is the pid: names are missing where ``threading`` was never imported. Ids are
    missing where py-spy did not stop a Python before 3.11.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(threads, list) or not all(isinstance(t, dict) for t in threads):
        raise ValueError("not py-spy's JSON")
    mains = [t for t in threads if t.get("os_thread_id") == pid] or [
        t for t in threads if t.get("thread_name") == "MainThread"
    ]
    main = (mains or threads[-1:] or [None])[0]
    return tuple(
        ThreadStack(
            tid=_int(t.get("os_thread_id")),
            name=_str(t.get("thread_name")),
            main=t is main,
            frames=tuple(_pyspy_frame(f) for f in t.get("frames") or () if isinstance(f, dict)),
            active=_active(t),
            owns_gil=_bool(t.get("owns_gil")),
            ident=_int(t.get("thread_id")),
        )
        for t in threads
    )


def _active(thread: Mapping[str, Any]) -> bool | None:
    active, owns_gil = _bool(thread.get("active")), _bool(thread.get("owns_gil"))
    return dump_text.active(active, owns_gil, numbered=thread.get("os_thread_id") is not None)


def text_threads(text: str, pid: int) -> tuple[ThreadStack, ...]:
    """Threads of one process from a text dump; several dumps of it: of the last."""
    last: tuple[ThreadStack, ...] = ()
    for process in dump_text.read_processes(text.splitlines()):
        process.pid = process.pid or pid
        last = process.stacks() or last
    return last


def to_json(dump: ProcessDump, raw: object = None) -> dict[str, Any]:
    """One round of one process as an incident stores it; :func:`read_dumps` reads it back.

    ``raw`` takes the place of ``dump.raw`` (a redacted copy, say).
    """
    stacks = dump.raw if raw is None else raw
    if isinstance(stacks, str):
        with contextlib.suppress(ValueError):
            stacks = json.loads(stacks) if stacks else None
    return {
        "schema": STACK_SCHEMA,
        "pid": dump.process.pid,
        "start": dump.process.start,
        "label": dump.label,
        "role": dump.role.role,
        "title": dump.title,
        "state": dump.state,
        "dumper": dump.dumper,
        "problem": dump.problem,
        "taken": dump.taken,
        "seconds": round(dump.seconds, 4),
        "facts": dict(dump.facts),
        "stacks" if isinstance(stacks, list) else "text": stacks,
    }


def _split_json(text: str) -> Iterator[object]:
    """Text between JSON values as str, the values themselves as dict or list; values begin at the start of a line.

    What looks like a value and is none is read again from its next line, so it is only tried so often and so far.
    """
    decoder = foreign_decoder()
    position = begin = 0
    failures, wasted = 0, 0
    for found in re.finditer(r"^[ \t]{0,3}([\[{])(?=[\s\"{\]])", text, re.MULTILINE):
        if found.start() < position:
            continue
        try:
            value, end = decoder.raw_decode(text, found.start(1))
        except (ValueError, RecursionError) as error:
            failures += 1
            wasted += error.pos - found.start() if isinstance(error, json.JSONDecodeError) else _DEEP
            if failures > _FAILURES or wasted > len(text) + _DEEP * 100:
                break
            continue
        if isinstance(value, (dict, list)) and value:
            yield text[begin : found.start()]
            yield value
            begin = position = end
    yield text[begin:]


def _from_json(value: object, role_of: RoleOf) -> Iterator[ProcessDump]:
    if isinstance(value, list):
        items = [item for item in value if isinstance(item, dict)]
        if items and all("frames" in item for item in items):
            pids = list(dict.fromkeys(_int(item.get("pid")) or 0 for item in items))
            for pid in pids:  # several arrays may have been joined into one
                yield _pyspy_dump(pid, [i for i in items if (_int(i.get("pid")) or 0) == pid], {}, role_of)
        else:
            for item in items:
                yield from _from_json(item, role_of)
    elif isinstance(value, dict):
        if isinstance(value.get("rounds"), list):
            for item in value["rounds"]:
                yield from _from_json(item, role_of)
        elif "pid" in value and ("stacks" in value or "text" in value or value.get("schema") == STACK_SCHEMA):
            yield _pyspy_dump(_int(value["pid"]) or 0, value.get("stacks"), value, role_of)
        elif "frames" in value:
            yield _pyspy_dump(_int(value.get("pid")) or 0, [value], {}, role_of)


def _pyspy_dump(pid: int, stacks: object, envelope: Mapping[str, Any], role_of: RoleOf) -> ProcessDump:
    text = envelope.get("text")
    try:
        threads = pyspy_threads(stacks, pid) if stacks else text_threads(text, pid) if isinstance(text, str) else ()
    except ValueError:
        threads = ()
    title = _str(envelope.get("title")) or _str(envelope.get("cmd")) or ""
    problem = _str(envelope.get("problem"))
    if not threads and not problem:
        problem = _str(envelope.get("stderr")) or "the dump holds no stack"
    facts = envelope.get("facts")
    dump = _dump(pid, title, threads, role_of, "")
    label = str(envelope.get("label", ""))
    role = next((name for name in _ROLES if name == envelope.get("role")), None)
    if role and envelope.get("schema") == STACK_SCHEMA:  # our own: the engine was asked then
        dump = replace(dump, role=ProcessRole(role, rank_in(label)))
    elif dump.role is UNKNOWN and (rank := rank_in(label)):
        dump = replace(dump, role=ProcessRole("worker", rank))
    return replace(
        dump,
        dumper=next((name for name in _DUMPERS if name == envelope.get("dumper")), dump.dumper),
        seconds=_number(envelope.get("seconds")),
        process=ProcessId(pid, _int(envelope.get("start")) or 0),
        state=_str(envelope.get("state")) or "?",
        problem=problem,
        facts=facts if isinstance(facts, dict) else {},
        taken=_number(envelope.get("taken")),
        raw=json.dumps(stacks) if stacks else text if isinstance(text, str) else "",
    )


def _dump(pid: int, title: str, threads: tuple[ThreadStack, ...], role_of: RoleOf, prefix: str) -> ProcessDump:
    words = title.split()
    role = role_of(words, words[0].rpartition("/")[2][:15]) if words else None
    if role is None and (rank := rank_in(prefix)):
        role = ProcessRole("worker", rank)
    return ProcessDump(
        process=ProcessId(pid, 0),
        role=role or UNKNOWN,
        title=title,
        state="?",
        dumper="file",
        threads=threads,
        problem=None if threads else "the dump holds no stack",
    )


def _main_tid(threads: Sequence[ThreadStack]) -> int | None:
    return next((t.tid for t in threads if t.main), None)


def _pyspy_frame(frame: Mapping[str, Any]) -> Frame:
    return Frame(
        name=_str(frame.get("name")) or "?",
        file=_str(frame.get("filename")) or _str(frame.get("short_filename")) or "",
        line=_int(frame.get("line")) or None,
        module=_str(frame.get("module")),
    )


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _str(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
