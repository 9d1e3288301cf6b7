"""Which phase each rank has reached, read from an engine's log while it grows: bytes in, phases per rank out."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from .. import foreign
from ..engines.base import LogGrammar, PhaseRule, Rank
from .log_clock import LogClock
from .rank_phase import RankPhase, State

__all__ = ["MAX_LINE", "PhaseReader", "RankPhase", "read_phases"]

MAX_LINE: Final = 64 * 1024
"""Bytes of one line that are looked at; the rest of a longer one is counted and dropped."""

MOST: Final = 16 << 20
"""Bytes that are read of a server's log while somebody waits: an endless one has gigabytes."""

MAX_RANKS: Final = 4096
"""Ranks told apart in one log, whatever it claims."""

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
_BAR_END = re.compile(rb"(?:it/s|s/it|[a-z]/s)\]$")


class PhaseReader:
    """Follows one server's log. How the log is cut into chunks makes no difference, except to arrival times."""

    def __init__(self, grammar: LogGrammar) -> None:
        self._grammar = grammar
        self._rules = tuple(enumerate(grammar.rules))
        self._clock = LogClock(grammar.clock)
        self._server = State()
        self._states: dict[Rank, State] = {}
        self._prefixes: set[tuple[bytes | None, ...]] = set()
        self._pids: dict[bytes, Rank] = {}
        self._carry: State | None = None
        self._pending = b""
        self._dropping = False
        self._position: int | None = None
        self._text, self._base = b"", 0
        self.progress_bytes = 0
        """Bytes of complete records that are no heartbeats: grows exactly when the server says something new."""
        self.heartbeats = 0
        """Records that were heartbeats."""
        self.last_line = ""
        """The last record of anything, at most 400 characters, foreign text."""

    # --- bytes in

    def feed(self, chunk: bytes, now: float) -> None:
        """Read what the log has grown by; ``now`` is its arrival, in seconds of any clock that does not go back."""
        if self._position is None:
            self._position = 0
            self._server.since = self._server.last = self._clock.time(b"", now)
        data = self._pending + chunk if self._pending else chunk
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if self._dropping:
            end = _first_end(data)
            self.progress_bytes += len(data) if end < 0 else end
            if end < 0:
                return
            data, cut, self._dropping = data[end + 1 :], cut - end - 1, False
        if _BAR_END.search(data, max(cut, len(data) - 64)):
            cut = len(data)  # a bar is whole when its bracket closes; what ends its line is the next thing printed
        self._pending = data[cut:]
        if len(self._pending) > MAX_LINE:
            self._dropping, self._pending, cut = True, b"", len(data)
        if cut:
            self._block(data[:cut], now)

    def finish(self, now: float) -> None:
        """The log is over: what has no line end is a line."""
        rest, self._pending = self._pending, b""
        if rest:
            self._block(rest, now)

    def cut(self) -> None:
        """The log was truncated or replaced: an unfinished line stays unfinished."""
        self._pending, self._dropping = b"", False

    def skip(self, count: int) -> None:
        """The log went on by ``count`` bytes that nobody reads. What stands in them is unknown, but it is progress."""
        self.cut()
        self._dropping = True  # up to the end of the line
        self.progress_bytes += count
        self._position = (self._position or 0) + count

    # --- phases out

    def ranks(self) -> dict[str, RankPhase]:
        """Every rank that the log has named, by label, in the order of coordinates. A log without tags has ``TP0``."""
        states = list(self._states.values())
        shapes = {_shape(state.rank) for state in states if state.certain}
        if shapes:  # a number in the world was no TP number when the coordinates turn out to be others
            states = [state for state in states if state.certain or _shape(state.rank) in shapes]
        leaders: dict[int | None, State] = {}
        result: dict[str, RankPhase] = {}
        for state in sorted(states, key=lambda state: _key(state.rank)):
            assert state.rank is not None
            led = leaders.setdefault(state.rank.dp, state).led
            shown = self._show(state)
            if led and led[2] > state.moved and led[0] != state.phase:
                since = self._clock.arrival(led[1])
                shown = replace(shown, phase=led[0], since=since, left=None, done=None, total=None, assumed=True)
            result[state.rank.label] = shown
        return result

    @property
    def pids(self) -> dict[int, Rank]:
        """Ranks by the pid in their log prefix: known before a process has its rank in its title (vLLM)."""
        return {int(pid): rank for pid, rank in self._pids.items()}

    @property
    def server(self) -> RankPhase:
        """The phase by the lines that speak for the whole server (``warmup``, ``ready``, ``serving``, ``shutdown``)."""
        return self._show(self._server)

    @property
    def last_lines(self) -> Mapping[str, str]:
        """Last record of every rank."""
        return {label: found.last_line for label, found in self.ranks().items()}

    def _show(self, state: State) -> RankPhase:
        out = self._clock.arrival
        return RankPhase(
            phase=state.phase,
            since=out(state.since),
            done=state.done,
            total=state.total,
            last_line=_text(state.line),
            history=tuple((phase, out(begin), out(end)) for phase, begin, end in state.history),
            left=None if state.left is None else out(state.left),
            last=out(max(state.last, state.since)),
        )

    # --- one block of whole lines

    def _block(self, block: bytes, now: float) -> None:
        assert self._position is not None
        block = block.replace(b"\r", b"\n")
        if b"\x1b" in block:
            block = _ANSI.sub(b"", block)
        base, self._position = self._position, self._position + len(block)
        self._text, self._base = block, base
        if not self._clock.started:
            self._clock.begin(block, now)
        self.progress_bytes += len(block) - block.count(b"\n")
        latest, hits = self._hits(block)
        done = -1
        while hits:
            begin = heapq.heappop(hits)
            if begin < done:
                continue
            done = _line_end(block, begin)
            phase = self._server.phase
            self._line(block[begin : min(done, begin + MAX_LINE)], base + begin, now)
            if self._server.phase != phase:
                self._look_ahead(block, done, hits)
            done += 1
        self._clock.pass_over(block[-MAX_LINE:], now)
        for prefix in latest:
            state = self._identify(prefix)
            if state is not None and base + prefix.start() > state.at:
                self._note(state, block[prefix.start() : _line_end(block, prefix.start())], base + prefix.start(), now)
        if last := block[-MAX_LINE:].rstrip(b"\n "):
            self.last_line = _text(last[last.rfind(b"\n") + 1 :])

    def _hits(self, block: bytes) -> tuple[list[re.Match[bytes]], list[int]]:
        """The last record of every prefix, and where the lines begin that need a closer look."""
        latest: dict[tuple[bytes | None, ...], re.Match[bytes]] = {}
        begins: list[int] = []
        for found in self._grammar.rank.finditer(block):
            key = found.groups()
            if key not in self._prefixes and len(self._prefixes) < 4 * MAX_RANKS:
                self._prefixes.add(key)
                begins.append(found.start())
            latest[key] = found
        for anchor in self._grammar.anchors:
            begins.extend(found.start() for found in anchor.finditer(block))
        if self._grammar.anchors:
            hits = sorted({block.rfind(b"\n", 0, begin) + 1 for begin in begins})
            self._look_ahead(block, 0, hits)
        else:
            hits = [0, *(found.end() for found in re.finditer(b"\n", block))]
        return list(latest.values()), hits

    def _look_ahead(self, block: bytes, begin: int, hits: list[int]) -> None:
        """A rule with ``after`` matters once: look for its next line only while that phase lasts."""
        for _, rule in self._rules:
            if rule.after is not None and rule.after == self._server.phase:
                found = rule.pattern.search(block, begin)
                if found:
                    heapq.heappush(hits, block.rfind(b"\n", 0, found.start()) + 1)

    def _line(self, line: bytes, at: int, now: float) -> None:
        """Cut a line at the prefixes glued into it, and read each record."""
        if b"|" not in line and self._beats(line):
            return
        starts = [found.start() for found in self._grammar.rank.finditer(line)]
        if not starts or starts[0] > 0:
            starts.insert(0, 0)
        for start, end in zip(starts, [*starts[1:], len(line)], strict=True):
            self._record(line[start:end], at + start, now)

    def _record(self, record: bytes, at: int, now: float) -> None:
        prefix = self._grammar.rank.match(record)
        mine = self._identify(prefix) if prefix else None
        if self._beats(record):
            return
        if prefix and not record[prefix.end() :].strip():
            self._carry = mine  # vLLM 0.10-0.24 print the prefix, then a bar that begins with \r
        else:
            self._apply(record, at, now, prefix, mine)

    def _beats(self, record: bytes) -> bool:
        """Count a heartbeat, which says nothing else."""
        for beat in self._grammar.heartbeats:
            if beat.search(record):
                self.progress_bytes -= len(record)
                self.heartbeats += 1
                return True
        return False

    def _apply(self, record: bytes, at: int, now: float, prefix: re.Match[bytes] | None, mine: State | None) -> None:
        for number, rule in self._rules:
            if rule.after is not None and self._server.phase not in (rule.after, rule.phase):
                continue
            found = rule.pattern.search(record)
            if not found:
                continue
            values = found.groupdict()
            done, total = _number(values.get("done")), _number(values.get("total"))
            states = list(self._targets(rule, prefix, mine, values.get("world")))
            if not self._clock.stamped(record) and not all(state.inside(rule) for state in states):
                begin = at - self._base
                self._clock.pass_over(self._text[max(0, begin - 4096) : begin], now)
            time = self._clock.time(record, now)
            for state in states:
                state.apply(number, rule, done, total, time, at)
                if rule.scope == "rank" and at > state.at:
                    self._note(state, record, at, now)
            return

    def _note(self, state: State, record: bytes, at: int, now: float) -> None:
        state.line, state.at = record[:2048], at
        state.last = max(state.last, self._clock.look(record, now))

    # --- whose line it is

    def _targets(
        self, rule: PhaseRule, prefix: re.Match[bytes] | None, mine: State | None, world: bytes | None
    ) -> Iterator[State]:
        values = prefix.groupdict() if prefix else {}
        core = _number(values.get("core"))
        if rule.scope == "server":
            states = list(self._states.values())
            own = [state for state in states if core is not None and state.rank and state.rank.dp == core]
            yield from own or [self._server, *states]
            return
        mine = mine or self._by_world(world, values.get("pid"))
        if mine is None and prefix is None and rule.edge == "progress":
            mine = self._carry
        if mine is None and values.get("worker"):
            return  # a rank for certain, but nothing says which
        yield mine or self._nobody(rule, core)

    def _identify(self, prefix: re.Match[bytes]) -> State | None:
        """The rank that a prefix names; None for the front end, an engine core, or a worker without coordinates."""
        values = prefix.groupdict()
        tp, pp, dp, ep = (_number(values.get(name)) for name in ("tp", "pp", "dp", "ep"))
        rank = Rank(tp, pp, dp, ep if tp is None else None)
        pid = values.get("pid")
        if rank != Rank():
            if rank not in self._states and len(self._states) >= MAX_RANKS:
                return None
            if pid:
                self._rename(self._pids.get(pid), rank)
                self._pids[pid] = rank
            return self._state(rank, certain=True)
        if pid and pid in self._pids:
            return self._states.get(self._pids[pid])
        return self._by_world(values.get("world"), pid)

    def _by_world(self, world: bytes | None, pid: bytes | None) -> State | None:
        """A rank known by its number in the world: its TP number, unless coordinates say otherwise later."""
        if world is None:
            return None
        rank = Rank(tp=int(world))
        if pid:
            self._pids[pid] = rank
        return self._state(rank, certain=False)

    def _rename(self, old: Rank | None, new: Rank) -> None:
        """A process known by its number in the world now tells its coordinates."""
        if old and old != new and old in self._states and not self._states[old].certain:
            state = self._states.pop(old)
            state.rank = new
            self._states.setdefault(new, state)

    def _state(self, rank: Rank, *, certain: bool, worker: bool = True) -> State:
        state = self._states.get(rank)
        if state is None or worker > state.worker:
            if worker:  # the stand-ins of a log without tags make way for ranks
                self._states = {key: kept for key, kept in self._states.items() if kept.worker}
            state = self._states[rank] = self._server.spawn(rank, worker=worker)
        state.certain = state.certain or certain
        return state

    def _nobody(self, rule: PhaseRule, core: int | None) -> State:
        """For a record of a rank without a tag: the first rank inside this phase, the first rank, or the only one."""
        workers = sorted((s for s in self._states.values() if s.worker), key=lambda state: _key(state.rank))
        if workers:
            inside = (s for s in workers if s.left is None and s.phase in (rule.phase, rule.again))
            return next(inside, workers[0])
        return self._state(Rank(tp=0) if core is None else Rank(dp=core), certain=False, worker=False)


def read_phases(path: Path, grammar: LogGrammar) -> dict[str, RankPhase]:
    """Phases of a log as it is now. Times are seconds since the epoch: the file's mtime is that of the last line.

    Raises:
        OSError: the file cannot be read.
    """
    return read_log(path, grammar).ranks()


def read_log(path: Path, grammar: LogGrammar, most: int | None = None) -> PhaseReader:
    """A reader that has read the log as it is now; times as in :func:`read_phases`. ``most``: see :func:`parts`.

    Raises:
        OSError: the file cannot be read.
    """
    reader = PhaseReader(grammar)
    with foreign.opened(path) as file:
        status = os.fstat(file.fileno())
        for begin, end in parts(status.st_size, most):
            if left_out := begin - file.tell():
                reader.skip(left_out)
                file.seek(begin)
            while chunk := file.read(min(1 << 20, end - file.tell())):
                reader.feed(chunk, status.st_mtime)
    reader.finish(status.st_mtime)
    return reader


def parts(size: int, most: int | None) -> tuple[tuple[int, int], ...]:
    """(begin, end) of what is read of a log of ``size`` bytes: all of it, or, where that is more than ``most``, its
    beginning, where the start-up is, and its end."""
    if most is None or size <= most:
        return ((0, size),)
    return (0, most // 2), (size - most // 2, size)


def _first_end(data: bytes) -> int:
    ends = [found for found in (data.find(b"\n"), data.find(b"\r")) if found >= 0]
    return min(ends, default=-1)


def _line_end(block: bytes, begin: int) -> int:
    end = block.find(b"\n", begin)
    return len(block) if end < 0 else end


def _number(value: bytes | None) -> int | None:
    return None if value is None else int(value[:15])


def _text(line: bytes) -> str:
    return line[:2048].decode(errors="replace").strip()[:400]


def _shape(rank: Rank | None) -> tuple[bool, ...]:
    return () if rank is None else (rank.tp is not None, rank.pp is not None, rank.dp is not None)


def _key(rank: Rank | None) -> tuple[int, ...]:
    return () if rank is None else tuple(-1 if n is None else n for n in (rank.dp, rank.pp, rank.tp, rank.ep))
