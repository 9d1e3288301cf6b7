"""The start-up of every rank, and the server's whole life, from ``timeline.jsonl``: bars, silence, events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...phases.labels import format_ranks, label_order
from ...vocabulary import PHASES
from .axis import Axis, Mark, Span
from .reading import mapping, number, text
from .wording import seconds

ROWS: Final = 600
BARS: Final = 6000
EVENTS: Final = 300
DENSE: Final = 16
"""Rows above which they are drawn thin."""

_SILENT: Final = 3.0
_QUIET_CORES: Final = 0.02
_QUIET_RUNS: Final = 60
_INTERVALS: Final = 60
_CHARACTER: Final = 0.0085
"""Width of a character of a bar's label, as part of a picture of usual width."""

_STATES: Final = ("moving", "suspect", "hung", "dead")
"""States of a server that is at work: only then does silence mean anything."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One rank in one phase. ``label`` is "" where it would not fit. ``open``: it had not ended."""

    span: Span
    phase: str
    label: str
    open: bool
    culprit: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One rank. ``quiet``: where it used no CPU."""

    label: str
    culprit: bool
    absent: bool
    bars: tuple[Bar, ...]
    quiet: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """One drawing. ``id``: unique in the page. ``said``: what it shows, for those who do not see it."""

    id: str
    title: str
    said: str
    rows: tuple[Row, ...]
    ticks: tuple[Mark, ...]
    silences: tuple[Span, ...]
    events: tuple[Mark, ...]
    incident: str
    dense: bool
    phases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """What some ranks did, in words: the same as the bars, for a table."""

    ranks: str
    phases: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Timeline:
    """``timeline.jsonl`` taken apart; times are seconds since the epoch."""

    phases: dict[str, list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    samples: list[Mapping[str, Any]] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    ready: float | None = None
    incident: float | None = None

    @property
    def silences(self) -> list[tuple[float, float]]:
        """When nothing moved although the server was at work, by what the watcher saw."""
        least = max(_SILENT, 0.004 * (self.end - self.begin))
        found: list[tuple[float, float]] = []
        for sample in self.samples:
            still = number(sample.get("still")) or 0.0
            if still < least or sample.get("state") not in _STATES:
                continue
            begin, end = float(sample["t"]) - still, float(sample["t"])
            if found and begin <= found[-1][1]:
                found[-1] = (min(begin, found[-1][0]), end)
            else:
                found.append((begin, end))
        return sorted(found, key=lambda span: span[0] - span[1])[:_INTERVALS]


def read(lines: Iterable[Mapping[str, Any]], incident: float | None) -> Timeline:
    """Take the lines in; those that have no time, or tell nothing we know, are passed over. Never raises."""
    found = Timeline()
    times: list[float] = []
    for line in lines:
        when = number(line.get("t"))
        if when is None:
            continue
        kind = line.get("kind")
        if kind == "phase" and len(found.phases) < ROWS:
            end = number(line.get("end"))
            found.phases[text(line.get("rank"), 80)].append({**line, "t": when, "end": end})
            times += [when] if end is None else [when, end]
        elif kind == "sample":
            found.samples.append({**line, "t": when})
            times.append(when)
        elif kind == "event":
            said = text(line.get("text"), 400)
            found.events.append((when, said))
            if said.startswith("incident: "):
                incident = when
            elif said == "handed to a test":
                found.ready = when
            times.append(when)
    found.samples.sort(key=lambda sample: float(sample["t"]))
    found.incident = incident
    times += [incident] if incident is not None else []
    if times:
        found.begin, found.end = min(times), max(*times, min(times) + 0.1)
    return found


def pictures(found: Timeline, culprits: Sequence[str], missing: Sequence[str]) -> list[Picture]:
    """The whole life; before it the start-up alone, where that is too short to be seen in the whole."""
    if not found.phases:
        return []
    whole = Axis(found.begin, found.end, found.begin)
    drawn = []
    started = found.ready if found.ready is not None else _ready(found)
    if started is not None and started - found.begin < 0.5 * whole.seconds:
        begin = Axis(found.begin, started + 0.06 * (started - found.begin), found.begin)
        drawn.append(
            _picture("startup", f"Start-up, {seconds(started - found.begin)}", begin, found, culprits, missing)
        )
        drawn.append(_picture("life", f"Whole life, {seconds(whole.seconds)}", whole, found, culprits, missing))
    else:
        drawn.append(_picture("startup", f"Start-up, {seconds(whole.seconds)}", whole, found, culprits, missing))
    return drawn


def _ready(found: Timeline) -> float | None:
    """When the last rank began to serve."""
    times = [
        min((float(line["t"]) for line in lines if line.get("phase") in ("ready", "serving")), default=None)
        for lines in found.phases.values()
    ]
    known = [when for when in times if when is not None]
    return max(known) if known and len(known) == len(times) else None


def _picture(
    id: str, title: str, axis: Axis, found: Timeline, culprits: Sequence[str], missing: Sequence[str]
) -> Picture:
    labels = sorted({*found.phases, *missing}, key=lambda label: (label != "server", label_order(label)))[:ROWS]
    dense = len(labels) > DENSE
    quiet = _quiet(found)
    most = max(4, BARS // max(1, len(labels)))
    rows = tuple(
        Row(
            label,
            label in culprits,
            label not in found.phases,
            tuple(_bars(found.phases.get(label, [])[-most:], axis, dense, label in culprits)),
            tuple(axis.span(*run) for run in quiet.get("api" if label == "server" else label, ()) if axis.shows(*run)),
        )
        for label in labels
    )
    events = [when for when, said in found.events if not said.startswith("incident: ") and axis.shows(when, when)]
    incident = found.incident
    return Picture(
        id=id,
        title=title,
        said=_said(found, culprits),
        rows=rows,
        ticks=axis.ticks(),
        silences=tuple(
            axis.span(b, e, f"nothing moved for {seconds(e - b)}") for b, e in found.silences if axis.shows(b, e)
        ),
        events=tuple(Mark(axis.x(when)) for when in events[:EVENTS]),
        incident=axis.x(incident) if incident is not None and axis.shows(incident, incident) else "",
        dense=dense,
        phases=tuple(p for p in PHASES if any(bar.phase == p for row in rows for bar in row.bars)),
    )


def _bars(lines: Sequence[Mapping[str, Any]], axis: Axis, dense: bool, culprit: bool) -> Iterable[Bar]:
    for line in lines:
        begin, end = float(line["t"]), number(line.get("end"))
        open_ = end is None
        end = axis.end if end is None else end
        if not axis.shows(begin, end):
            continue
        phase = text(line.get("phase"), 40)
        title = f"{phase}, {'not ended after ' if open_ else ''}{seconds(end - begin)}{_done(line)}"
        span = axis.span(begin, end, f"{text(line.get('rank'), 80)}: {title}")
        fits = not dense and axis.part(end) - axis.part(begin) > _CHARACTER * (len(phase) + 1)
        yield Bar(span, phase if phase in PHASES else "other", phase if fits else "", open_, culprit and open_)


def _done(line: Mapping[str, Any]) -> str:
    done, total = number(line.get("done")), number(line.get("total"))
    return f", {done:.0f} of {total:.0f}" if done is not None and total is not None else ""


def _quiet(found: Timeline) -> dict[str, list[tuple[float, float]]]:
    """By label, when a process used less than a fiftieth of a core from one sample to the next."""
    least = max(2.0, 0.004 * (found.end - found.begin))
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    before: dict[str, tuple[float, float]] = {}
    for sample in found.samples:
        when = float(sample["t"])
        for label, value in mapping(sample.get("cpu")).items():
            used = number(value)
            if used is None:
                continue
            then = before.get(label)
            before[label] = (when, used)
            if then is None or when <= then[0] or not 0 <= used - then[1] < _QUIET_CORES * (when - then[0]):
                continue
            known = runs[label]
            if known and known[-1][1] >= then[0]:
                known[-1] = (known[-1][0], when)
            else:
                known.append((then[0], when))
    return {
        label: sorted((run for run in known if run[1] - run[0] >= least), key=lambda run: run[0] - run[1])[:_QUIET_RUNS]
        for label, known in runs.items()
    }


def table(found: Timeline, missing: Sequence[str]) -> list[Line]:
    """The phases in words; ranks that did the same, in nearly the same time, together."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for label, lines in found.phases.items():
        told = []
        for line in lines[-40:]:
            begin, end = float(line["t"]), number(line.get("end"))
            spent = seconds((found.end if end is None else end) - begin)
            told.append(
                (text(line.get("phase"), 40), f"{'not ended after ' if end is None else ''}{spent}{_done(line)}")
            )
        alike[tuple(told)].append(label)
    shown = [Line(format_ranks(labels), told) for told, labels in alike.items()]
    return [*shown, *([Line(format_ranks(missing), (("not there", ""),))] if missing else [])][:80]


def _said(found: Timeline, culprits: Sequence[str]) -> str:
    parts = [f"Phases of {len(found.phases)} ranks over {seconds(found.end - found.begin)}."]
    if culprits:
        parts.append(f"To blame: {format_ranks(culprits)}.")
    if found.silences:
        begin, end = found.silences[0]
        parts.append(f"Nothing moved for {seconds(end - begin)} from {seconds(begin - found.begin)} on.")
    return " ".join([*parts, "The table below says the same in words."])
