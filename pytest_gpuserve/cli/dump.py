"""``gpuserve dump PID|PORT|SERVER_DIR``: the stacks of every process of a live server, ours or not."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import procfs
from ..diagnose import crowd, locks, machine, parse, stacks
from ..diagnose.evidence import Evidence, Progress
from ..diagnose.merge import Merged, merge
from ..diagnose.model import Judgement, ProcessDump
from ..diagnose.roles import any_role
from ..diagnose.verdict import judge
from ..errors import GpuserveError
from ..procfs import Stat
from ..redaction.redact import Redactor, shown_command
from ..report.files import Store, safe_name
from ..report.gather import tree
from ..report.incident_text import stacks_text
from ..server.record import load, processes
from ..text import escape, one_line

SCHEMA = "gpuserve.dump/1"

_PROBLEMS = 10


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="PID|PORT|SERVER_DIR",
        help="a process (with all below it), a TCP port that a server listens on (:8000 where a process has that "
        "number too), or a server's directory of ours; anything else lists the processes it matches and touches none",
    )
    parser.add_argument("--native", action="store_true", help="C frames too: half a second and more a process")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="look N times, 2 s apart: frozen or moving?")
    parser.add_argument("--limit", type=float, default=20.0, metavar="S", help="seconds for one round (default 20)")
    parser.add_argument("--json", action="store_true", help=f"print the {SCHEMA} object")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write stacks.txt, stacks/ and dump.json there"
    )


def run(arguments: argparse.Namespace) -> int:
    """0: there are stacks. 1: none could be had, or the target was a name. All output is redacted.

    Raises:
        GpuserveError: an option that leaves nothing to do; as :func:`resolve`.
    """
    if arguments.rounds < 1:
        raise GpuserveError(f"--rounds takes how often to look, 1 or more, not {arguments.rounds}.")
    if not 0 < arguments.limit < math.inf:
        raise GpuserveError(f"--limit takes the seconds for one round, more than 0, not {arguments.limit:g}.")
    target = resolve(arguments.target)
    if isinstance(target, Matches):
        print(target.text(), file=sys.stderr)
        return 1
    return report(target, arguments)


def report(target: Target, arguments: argparse.Namespace, progress: Progress | None = None) -> int:
    """Take the stacks and print what they say; ``progress``: what a watch saw before, which makes it no manual dump."""
    rounds = []
    for number in range(arguments.rounds):
        if number:
            time.sleep(2.0)
        found = [s for s in target.stats if procfs.process_id(s.pid) == s.id] if number else target.stats
        rounds.append(
            stacks.take(
                found,
                any_role,
                python=target.python,
                markers=target.markers,
                limit=arguments.limit,
                native=arguments.native,
            )
        )
    merged = merge(rounds)
    judgement = _judge(rounds, merged, progress)
    redactor = Redactor.of(os.environ, *(procfs.environ(s.pid) for s in target.stats[:1]), argv=target.argv)
    content = _content(arguments.target, rounds, judgement)
    if arguments.output:
        _write(arguments.output, redactor, rounds, merged, content)
    if arguments.json:
        print(json.dumps(redactor.value(content), indent=1))
    else:
        print(_text(rounds, merged, judgement, redactor))
        if arguments.output:
            print(f"written to {one_line(str(arguments.output))}")
    return 0 if any(d.threads for d in rounds[0]) else 1


@dataclass(frozen=True, slots=True)
class Target:
    """Processes to dump, parents first; the interpreter and the markers of the first, where they can be seen."""

    stats: Sequence[Stat]
    argv: Sequence[str]
    python: str | None
    markers: Path | None


@dataclass(frozen=True, slots=True)
class Matches:
    """What a name matches. Nothing is attached to: names lie."""

    name: str
    found: Sequence[tuple[int, str]]

    def text(self) -> str:
        what = f"gpuserve: {one_line(self.name)!r} is no process id, port or directory of a server"
        if not self.found:
            return f"{what}, and no process matches it."
        lines = (f"{pid:>8}  {one_line(title, 100)}" for pid, title in self.found)
        return "\n".join([f"{what}. Nothing was dumped; choose one of these and give its PID:", *lines])


def resolve(text: str) -> Target | Matches:
    """What the user means.

    Raises:
        GpuserveError: a number that is neither a process nor a port, or both; a server of ours that is over; nothing.
    """
    if not text.strip():
        raise GpuserveError("the target is empty (an unset variable?): name a PID, a port, or a server's directory.")
    kind, _, number = text.rpartition(":")
    if number.isdigit() and kind in ("", "pid", "port"):
        return _by_number(int(number), "port" if text.startswith(":") else kind)
    path = Path(text)
    if path.is_dir():
        record = load(path)
        stats = tree(record, processes(record))
        if not stats:
            raise GpuserveError(f"nothing of the server in {text} runs any more. Its log is {record.log}.")
        return Target(stats, record.argv, record.python, path / "markers")
    found = []
    for pid in sorted(procfs.pids()):
        title = " ".join(procfs.cmdline(pid))
        if text.lower() in title.lower() and pid not in (os.getpid(), os.getppid()):
            found.append((pid, shown_command(title)))
    return Matches(text, found[:50])


def _by_number(number: int, kind: str) -> Target:
    stat = procfs.stat(number) if kind != "port" else None
    listeners = machine.listeners(number) if kind != "pid" and number < 65536 else ()
    if stat is not None and listeners:
        command = one_line(shown_command(procfs.cmdline(number)) or stat.comm, 60)
        raise GpuserveError(
            f"{number} is a process ({command}) and a port that somebody listens on. Write pid:{number} or :{number}."
        )
    if listeners == (-1,):
        raise GpuserveError(f"the process that listens on port {number} cannot be seen: run as its user, or as root.")
    if stat is None and not listeners:
        what = {"port": "nobody listens on port", "pid": "there is no process"}.get(kind, "there is no process or port")
        raise GpuserveError(f"{what} {number} on this machine.")
    table = procfs.snapshot()
    tops = [number] if stat is not None else sorted(listeners)
    ours = [os.getpid(), *_ancestors(os.getpid(), table)]
    if above := next((top for top in tops if top in ours), None):
        raise GpuserveError(
            f"process {above} ({one_line(shown_command(procfs.cmdline(above)) or 'unknown', 60)}) is this command, or "
            f"started it: everything below it would be stopped for a moment and taken for one server. Name the "
            f"server's own process or port."
        )
    below = [pid for top in tops for pid in procfs.descendants(top, table)]
    pids = dict.fromkeys([*(top for top in tops if top not in below), *below])
    first = next(iter(pids))
    return Target([table[pid] for pid in pids if pid in table], procfs.cmdline(first), _python(first), _markers(first))


def _ancestors(pid: int, table: Mapping[int, Stat]) -> Iterator[int]:
    """Parents of a process, nearest first."""
    while (stat := table.get(pid)) is not None and stat.ppid:
        pid = stat.ppid
        yield pid


def _python(pid: int) -> str | None:
    """The interpreter as it was called, so that a virtual environment's own tools are found."""
    words = procfs.cmdline(pid)
    return words[0] if words and "python" in Path(words[0]).name and Path(words[0]).is_file() else None


def _markers(pid: int) -> Path | None:
    value = procfs.environ(pid).get("GPUSERVE_MARKERS")
    return Path(value) if value else None


def _judge(rounds: Sequence[Sequence[ProcessDump]], merged: Merged, progress: Progress | None) -> Judgement:
    pids = [d.process.pid for d in rounds[-1] if d.state not in "ZX"]
    evidence = Evidence(
        reason="manual" if progress is None else "no_progress",
        after=None if progress is None else progress.still,
        rounds=rounds,
        memory=machine.memory(pids),
        locks=locks.locks(merged, limit=2.0),
        progress=progress,
    )
    return judge(evidence)


def _content(target: str, rounds: Sequence[Sequence[ProcessDump]], judgement: Judgement) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "target": target,
        "time": time.time(),
        "verdict": judgement.to_json(),
        "rounds": [[parse.to_json(dump) for dump in dumps] for dumps in rounds],
    }


def _text(rounds: Sequence[Sequence[ProcessDump]], merged: Merged, judgement: Judgement, redactor: Redactor) -> str:
    last = rounds[-1]
    parts = [judgement.text, merged.text()]
    without = [d for d in last if d.problem and not (d.problem.startswith("no Python process") or crowd.crowded(d))]
    parts += [f"pid {d.process.pid} ({d.role.label}): {d.problem}" for d in without[:_PROBLEMS]]
    parts += [f"{len(without) - _PROBLEMS} more have no stack"] if len(without) > _PROBLEMS else []
    parts += [note for note in (stacks.refused(last), crowd.unread(last)) if note]
    return escape(redactor.redact("\n".join(parts)))


def _write(
    directory: Path,
    redactor: Redactor,
    rounds: Sequence[Sequence[ProcessDump]],
    merged: Merged,
    content: dict[str, Any],
) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        store = Store(directory, redactor, 0o644)
        for dump in (d for d in rounds[-1] if not crowd.crowded(d)):
            name = f"stacks/{safe_name(dump.label)}.{dump.process.pid}.json"
            store.write_json(name, {"schema": "gpuserve.stacks/1", "label": dump.label, "rounds": [
                parse.to_json(d) for dumps in rounds for d in dumps if d.process == dump.process
            ]})  # fmt: skip
        store.write("stacks.txt", stacks_text(merged, rounds, None))
        store.write_json("dump.json", content)
    except OSError as error:
        raise GpuserveError(
            f"{directory} cannot be written: {error.strerror}. Choose another directory with -o."
        ) from error
