"""What a run will start, in which order, and about how long it takes. Pure: marks and past durations in, text out."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..server.lease_policy import Device, Request, decide

GUESS = 60.0
"""Seconds for a server's first run when nothing at all is known of any."""


@dataclass(frozen=True, slots=True)
class PlannedTest:
    """One test: its node id and, where it wants a server, that server's key, readable id and number of GPUs."""

    nodeid: str
    key: str | None = None
    id: str = ""
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """Tests that run on one worker, one after the other, because they share a server (``key``) or a group.

    ``tests`` are positions in the sequence that was given; ``seconds`` is None when nothing is known of any of them.
    """

    key: str
    id: str
    gpus: int
    tests: tuple[int, ...]
    seconds: float | None = None

    @property
    def server(self) -> bool:
        return bool(self.id)


def make_units(
    tests: Sequence[PlannedTest], durations: Mapping[str, float], groups: Sequence[str | None] | None = None
) -> list[Unit]:
    """One unit a server, in the order of first appearance; a test without a server is a unit of its own.

    Args:
        durations: seconds of whole tests (set-up with the server's start, call, teardown) of past runs, by node id.
        groups: a name per test that also keeps tests together (xdist_group), or None.
    """
    chosen: dict[str, str] = {}

    def find(name: str) -> str:
        while (parent := chosen.setdefault(name, name)) != name:
            name = parent
        return name

    names = []
    for n, test in enumerate(tests):
        own = f"server {test.key}" if test.key is not None else f"test {n}"
        group = groups[n] if groups is not None else None
        if group is not None:
            roots = find(own), find(f"group {group}")
            chosen[max(roots)] = min(roots)
        names.append(own)
    members: dict[str, list[int]] = {}
    for n, name in enumerate(names):
        members.setdefault(find(name), []).append(n)
    return [_unit(tests, positions, durations) for positions in members.values()]


def _unit(tests: Sequence[PlannedTest], positions: Sequence[int], durations: Mapping[str, float]) -> Unit:
    served = list(
        dict.fromkeys((tests[n].key, tests[n].id, tests[n].gpus) for n in positions if tests[n].key is not None)
    )
    known = [durations[tests[n].nodeid] for n in positions if tests[n].nodeid in durations]
    seconds = sum(known) + (len(positions) - len(known)) * median(known) if known else None
    return Unit(
        key=served[0][0] or "" if served else tests[positions[0]].nodeid,
        id=" + ".join(id for _, id, _ in served),
        gpus=max((gpus for _, _, gpus in served), default=0),
        tests=tuple(positions),
        seconds=seconds,
    )


def guess(units: Sequence[Unit]) -> dict[str, float]:
    """Seconds of every unit by key: known ones, else the median of the known ones of its kind, else :data:`GUESS`."""
    servers = [u.seconds for u in units if u.seconds is not None and u.server]
    others = [u.seconds for u in units if u.seconds is not None and not u.server]
    unknown = {True: median(servers) if servers else GUESS, False: median(others) if others else 0.0}
    return {u.key: u.seconds if u.seconds is not None else unknown[u.server] for u in units}


def longest_first(units: Sequence[Unit]) -> list[Unit]:
    """Most GPUs first, then longest: large leases while the machine is whole, short work to fill the end.

    Stable, so that without any knowledge the order of collection (base first, then by changes) remains. Tests without a
    server come last.
    """
    seconds = guess(units)
    return sorted(units, key=lambda u: (not u.server, -u.gpus, -seconds[u.key]))


def choose(queue: Sequence[Unit], *, others: Sequence[Unit], idle: int, gpus: int | None) -> Unit:
    """Which unit of ``queue`` (longest first, not empty) a worker should take next.

    Units that leave no GPU for any other come first. Then the largest that fits beside what runs, leaving something for
    each idle worker, so that neither GPUs nor workers stand still; when nothing fits, the largest, which then waits.

    Args:
        others: units that the other workers run or wait for.
        idle: other workers that have nothing.
        gpus: how many there are to lease; None: not known or not limited.
    """
    if gpus is None or not queue[0].gpus:
        return queue[0]
    least = min(unit.gpus for unit in (*queue, *others) if unit.gpus)
    if queue[0].gpus + least > gpus:
        return queue[0]
    room = gpus - sum(unit.gpus for unit in others if unit.gpus + least <= gpus) - idle * least
    return next((unit for unit in queue if unit.gpus <= room), min(queue, key=lambda unit: unit.gpus))


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each unit would run: ``begin`` and ``end`` by key, seconds from now, and the end of the last."""

    begin: Mapping[str, float]
    end: Mapping[str, float]

    @property
    def makespan(self) -> float:
        return max(self.end.values(), default=0.0)


def simulate(units: Sequence[Unit], *, workers: int, gpus: int | None, lookahead: bool = True) -> Timeline:
    """Run units in this order on ``workers`` processes sharing ``gpus`` (None: no limit), as the scheduler does.

    ``lookahead``: a worker takes its next unit while it runs the last test of the one before, as pytest-xdist has it.
    """
    seconds = guess(units)
    devices = tuple(Device(f"virtual-{n}", n) for n in range(gpus or 0))
    names = {device.name for device in devices}
    queue = list(units)
    current: dict[int, Unit] = {}
    ahead: dict[int, Unit] = {}
    waiting: list[tuple[Request, int]] = []
    held: dict[int, set[str]] = {}
    begin: dict[str, float] = {}
    end: dict[str, float] = {}
    events = [(0.0, worker, "idle") for worker in range(max(1, workers))]
    idle = set(range(max(1, workers)))
    tickets = itertools.count()

    def take(worker: int) -> Unit:
        others = [unit for who, unit in current.items() if who != worker]
        unit = choose(queue, others=others, idle=len(idle - {worker}), gpus=gpus)
        queue.remove(unit)
        return unit

    while events:
        now, worker, what = heapq.heappop(events)
        if what == "idle":
            held.pop(worker, None)
            current.pop(worker, None)
            unit = ahead.pop(worker, None) or (take(worker) if queue else None)
            if unit is not None:
                idle.discard(worker)
                current[worker] = unit
                waiting.append((Request(f"{next(tickets):09d}", unit.gpus if gpus is not None else 0, devices), worker))
                if lookahead and len(unit.tests) == 1 and queue:
                    ahead[worker] = take(worker)
        elif worker not in ahead and queue:
            ahead[worker] = take(worker)
        for entry in list(waiting):
            request, who = entry
            free = names.difference(*held.values())
            chosen = decide([r for r, _ in waiting if r.count], request.key, free, names) if request.count else ()
            if chosen is None:
                continue
            waiting.remove(entry)
            unit = current[who]
            held[who] = {device.name for device in chosen}
            begin[unit.key], end[unit.key] = now, now + seconds[unit.key]
            heapq.heappush(events, (end[unit.key], who, "idle"))
            if lookahead:
                heapq.heappush(events, (now + seconds[unit.key] * (1 - 1 / len(unit.tests)), who, "last test"))
    return Timeline(begin, end)


def lower_bound(units: Sequence[Unit], *, workers: int, gpus: int | None) -> float:
    """No schedule is shorter: the longest unit, the work per worker, the GPU time per GPU, and what cannot overlap."""
    seconds = guess(units)
    served = [u for u in units if u.gpus]
    bounds = [max(seconds.values(), default=0.0), sum(seconds.values()) / max(1, workers)]
    if gpus is not None and served:
        bounds.append(sum(u.gpus * seconds[u.key] for u in served) / gpus)
        for share in range(1, gpus):  # of units that need more than 1/(share + 1) of the GPUs, at most share overlap
            large = [seconds[u.key] for u in served if u.gpus * (share + 1) > gpus]
            bounds.append(sum(large) / min(max(1, workers), share))
        least = min(u.gpus for u in served)
        alone = {u.key for u in served if u.gpus + least > gpus}
        if 0 < len(alone) < len(served):
            rest = [replace(u, seconds=seconds[u.key]) for u in served if u.key not in alone]
            bounds.append(sum(seconds[key] for key in alone) + lower_bound(rest, workers=workers, gpus=gpus))
    return max(bounds)


def plan_text(
    tests: Sequence[PlannedTest],
    durations: Mapping[str, float],
    *,
    workers: int = 1,
    gpus: int | None = None,
    max_uses: int = 0,
) -> list[str]:
    """Lines of ``--gpuserve=plan``: each server with its tests, GPUs and expected minutes, in the order of a run.

    ``max_uses``: tests after which a server is started afresh; 0: never.
    """
    units = make_units(tests, durations)
    servers = [unit for unit in units if unit.server]
    if workers > 1:
        servers = longest_first(servers)
    lines = []
    for unit in servers:
        took = f"about {minutes(unit.seconds)}" if unit.seconds is not None else "duration unknown"
        lines.append(f"{unit.id}  ({_count(unit.gpus, 'GPU') if unit.gpus else 'no GPU'}, {took})")
        lines.extend(f"    {tests[position].nodeid}" for position in unit.tests)
        if gpus is not None and unit.gpus > gpus:
            lines.append(f"    cannot run here: {unit.gpus} GPUs wanted, {gpus} to lease")
    served = sum(len(unit.tests) for unit in servers)
    others = len(tests) - served
    starts = sum(math.ceil(len(unit.tests) / (max_uses or len(unit.tests))) for unit in servers)
    lines.append(
        f"{_count(starts, 'server')} to start for {_count(served, 'test')}"
        + (f"; {_count(others, 'test')} without one" if others else "")
        + (f"; {_count(served - starts, 'start')} fewer than one a test" if served > starts else "")
        + ". Nothing was started."
    )
    known = sum(unit.seconds is not None for unit in servers)
    possible = [unit for unit in servers if gpus is None or unit.gpus <= gpus]
    if known and possible:
        total = simulate(possible, workers=workers, gpus=gpus).makespan
        how = f"{_count(workers, 'worker')}{f' on {gpus} GPUs' if gpus is not None else ''}"
        lines.append(f"Expected: {minutes(total)} with {how}, from past runs of {known} of {len(servers)} servers.")
    elif servers:
        lines.append("Expected time unknown: no past run of these tests is recorded.")
    return lines


def minutes(seconds: float) -> str:
    """``40 s``, ``3.5 min``, ``2 h 5 min``."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min".replace(".0 ", " ")
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
