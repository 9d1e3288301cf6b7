"""NCCL's own view: its RAS service answers a line of text on a loopback port with text, since NCCL 2.24.

It lives in threads of the ranks and needs no rank's main thread: on a rank that was stopped it names process, rank and
GPU, which decides where two ranks have no majority. It also lists groups of ranks that never existed; only entries with
a process are believed. A lag in operation counts is only believed when two answers show the same.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from .evidence import Witness
from .merge import format_ranks

PORT = 28028
"""Default of NCCL_RAS_ADDR."""

_MAX_BYTES = 1 << 20
_PROCESS = re.compile(r"^ *Process (\d+) on node (\S+) managing GPUs? ([\d,-]+)", re.MULTILINE)
_SECTION = re.compile(r"^(?:#(\d+-\d+) \((\w+)\) )?(INCOMPLETE|DEAD|MISMATCH|TIMEOUT|ERROR|ABORT)\s*$", re.MULTILINE)
_RANK = re.compile(
    r"^ *Rank (-?\d+)(?: has (?:launched up to operation (\d+)|not launched any operations))? -- GPUs? ([\d,-]+) "
    r"managed by process (\d+) on node (\S+)",
    re.MULTILINE,
)
_COUNT = re.compile(r"^ *(\d+) ranks have (?:launched up to operation (\d+)|not launched any operations)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RasReport:
    """One answer.

    Attributes:
        silent: pids of processes that gave no data (stopped, wedged) or are dead.
        dead: those of them that NCCL has declared dead.
        counts: pid to the number of operations launched, where they differ (0: none launched).
        most: the highest count that more than one rank has.
        errors: words of the sections that stand in the answer (``INCOMPLETE``, ``MISMATCH`` ...).
    """

    silent: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    counts: tuple[tuple[int, int], ...] = ()
    most: int | None = None
    errors: tuple[str, ...] = ()
    text: str = ""

    @property
    def lagging(self) -> tuple[int, ...]:
        """Pids of the ranks that have launched fewer operations than the others."""
        numbers = [count for _, count in self.counts] + ([self.most] if self.most is not None else [])
        if not numbers or min(numbers) == max(numbers):
            return ()
        return tuple(sorted({pid for pid, count in self.counts if count < max(numbers)}))


def parse(text: str) -> RasReport:
    """Read an answer to ``verbose status``."""
    silent: set[int] = set()
    dead: set[int] = set()
    counts: dict[int, int] = {}
    most: int | None = None
    found = list(_SECTION.finditer(text))
    for number, section in enumerate(found):
        end = found[number + 1].start() if number + 1 < len(found) else len(text)
        body, word = text[section.end() : end], section[3]
        if word in ("INCOMPLETE", "DEAD"):
            pids = {int(m[1]) for m in _PROCESS.finditer(body)} | {int(m[4]) for m in _RANK.finditer(body)}
            silent |= pids
            dead |= pids if word == "DEAD" else set()
        elif word == "MISMATCH":
            current: int | None = None
            for line in body.splitlines():
                if group := _COUNT.match(line):
                    current = int(group[2] or 0)
                    most = max(most or 0, current)
                elif rank := _RANK.match(line):
                    own = rank[2] is not None or "not launched" in line
                    count = int(rank[2] or 0) if own else current
                    if count is not None:
                        counts[int(rank[4])] = count
    words = tuple(dict.fromkeys(f[3] for f in found))
    return RasReport(tuple(sorted(silent)), tuple(sorted(dead)), tuple(sorted(counts.items())), most, words, text)


def address(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Where the service listens, from a rank's environment; None when it is off or not on this machine."""
    if environment.get("NCCL_RAS_ENABLE") == "0":
        return None
    host, _, port = environment.get("NCCL_RAS_ADDR", f"localhost:{PORT}").rpartition(":")
    if host.strip("[]") not in ("localhost", "127.0.0.1", "::1", "") or not port.isdigit():
        return None
    return "127.0.0.1" if host != "[::1]" else "::1", int(port)


def ask(where: tuple[str, int], limit: float = 5.0) -> str | None:
    """The answer to ``verbose status``; None when nobody answers within ``limit`` seconds."""
    deadline = time.monotonic() + limit
    answer = b""
    with suppress(OSError), socket.create_connection(where, timeout=limit) as link:
        link.sendall(b"verbose status\n")
        while len(answer) < _MAX_BYTES and (left := deadline - time.monotonic()) > 0:
            link.settimeout(left)
            chunk = link.recv(65536)
            if not chunk:
                break
            answer += chunk
    text = answer.decode(errors="replace")
    return text if "NCCL" in text and "Communicators" in text else None


def witnesses(first: RasReport, second: RasReport | None, labels: Mapping[int, str]) -> tuple[Witness, ...]:
    """What one or two answers (some seconds apart) say of our ranks; ``labels`` maps pids to ranks."""
    found: list[Witness] = []
    silent = sorted({labels[pid] for pid in (second or first).silent if pid in labels})
    if silent:
        pids = ", ".join(str(pid) for pid in (second or first).silent if pid in labels)
        found.append(
            Witness(
                "NCCL RAS", f"no communicator data from {format_ranks(silent)} (pid {pids})", tuple(silent), "process"
            )
        )
    if second is not None and first.lagging and first.counts == second.counts and first.most == second.most:
        behind = sorted({labels[pid] for pid in second.lagging if pid in labels})
        if behind:
            claim = f"{format_ranks(behind)} launched fewer collectives than the others, and the counts stand still"
            found.append(Witness("NCCL RAS", claim, tuple(behind), "nccl"))
    return tuple(found)
