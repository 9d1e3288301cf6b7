"""Curves of the samples, as SVG paths: memory, utilisation and power of every GPU; CPU and memory of the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .axis import Axis, Mark, Span
from .reading import items, mapping, number
from .timeline_view import Timeline
from .wording import seconds, size

SIDE: Final = 1000
"""A path's coordinates go from 0 to this, in both directions."""
GPUS: Final = 128
COLOURS: Final = 8

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line. ``colour``: its number, 0 to 7, or -1 where there are too many to tell apart by colour."""

    name: str
    path: str
    colour: int
    least: str
    most: str
    last: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture: ``top`` is what its upper edge stands for, ``scale`` the same as a number, in ``unit``."""

    id: str
    title: str
    top: str
    middle: str
    scale: float
    unit: str
    curves: tuple[Curve, ...]
    ticks: tuple[Mark, ...]
    silences: tuple[Span, ...]
    incident: str
    seconds: float


def charts(found: Timeline, capacity: float | None) -> list[Chart]:
    """What there are samples of. ``capacity``: bytes of the largest GPU, for the scale."""
    if len(found.samples) < 2:
        return []
    axis = Axis(found.begin, found.end, found.begin)
    count = min(GPUS, max((len(items(sample.get("gpus"))) for sample in found.samples), default=0))
    gpus = [f"GPU {n}" for n in range(count)]
    resident = {"resident": _points(found, lambda sample: number(sample.get("rss")))}
    drawn = [
        _chart("gpu-memory", "GPU memory", "bytes", axis, found, _by_gpu(found, gpus, 0), capacity),
        _chart("gpu-busy", "GPU utilisation", "%", axis, found, _by_gpu(found, gpus, 1), 100.0),
        _chart("gpu-power", "GPU power", "W", axis, found, _by_gpu(found, gpus, 2), None),
        _chart("cpu", "CPU of all its processes", "cores", axis, found, {"cores": _cores(found)}, None),
        _chart("host-memory", "Host memory of all its processes", "bytes", axis, found, resident, None),
    ]
    return [chart for chart in drawn if chart is not None]


def _points(found: Timeline, value: Callable[[Mapping[str, Any]], float | None]) -> Points:
    return [(float(s["t"]), v) for s in found.samples if (v := value(s)) is not None]


def _by_gpu(found: Timeline, names: Sequence[str], column: int) -> dict[str, Points]:
    def value(sample: Mapping[str, Any], gpu: int) -> float | None:
        row = items(sample.get("gpus"))
        figures = items(row[gpu]) if gpu < len(row) else ()
        return number(figures[column]) if column < len(figures) else None

    return {name: _points(found, lambda sample, n=n: value(sample, n)) for n, name in enumerate(names)}  # type: ignore[misc]


def _cores(found: Timeline) -> Points:
    """Cores in use from one sample to the next; a process that was not there before, or is gone, does not count."""
    points: list[tuple[float, float]] = []
    then: Mapping[str, Any] | None = None
    for sample in found.samples:
        if then is not None and (passed := float(sample["t"]) - float(then["t"])) > 0:
            old, new = mapping(then.get("cpu")), mapping(sample.get("cpu"))
            used = [(number(new[label]), number(old[label])) for label in new if label in old]
            spent = sum(max(0.0, b - a) for b, a in used if a is not None and b is not None)
            points.append((float(sample["t"]), spent / passed))
        then = sample
    return points


def _chart(
    id: str,
    title: str,
    unit: str,
    axis: Axis,
    found: Timeline,
    lines: Mapping[str, Points],
    top: float | None,
) -> Chart | None:
    known = {name: points for name, points in lines.items() if points}
    if not known:
        return None
    highest = max(value for points in known.values() for _, value in points)
    top = max(highest, top or 0.0) if top else _round(highest, unit)
    buckets = 300 if len(known) <= 8 else 150 if len(known) <= 16 else 80
    return Chart(
        id=id,
        title=title,
        top=_shown(top, unit),
        middle=_shown(top / 2, unit),
        scale=top,
        unit=unit,
        curves=tuple(
            Curve(
                name,
                _path(points, axis, top, buckets),
                n % COLOURS if len(known) <= COLOURS else -1,
                _shown(min(v for _, v in points), unit),
                _shown(max(v for _, v in points), unit),
                _shown(points[-1][1], unit),
            )
            for n, (name, points) in enumerate(known.items())
        ),
        ticks=axis.ticks(),
        silences=tuple(axis.span(b, e, f"nothing moved for {seconds(e - b)}") for b, e in found.silences),
        incident=axis.x(found.incident) if found.incident is not None else "",
        seconds=round(axis.seconds, 3),
    )


def _path(points: Points, axis: Axis, top: float, buckets: int) -> str:
    """The least and the greatest value of every stretch of the axis, so that no peak is lost."""
    kept: list[tuple[int, int]] = []
    bucket: list[tuple[int, int]] = []
    place = -1
    for when, value in points:
        part = axis.part(when)
        here = int(part * buckets)
        if here != place:
            kept += _extremes(bucket)
            bucket, place = [], here
        bucket.append((round(SIDE * part), SIDE - round(SIDE * min(1.0, max(0.0, value / top if top else 0.0)))))
    kept += _extremes(bucket)
    straight = [
        point
        for n, point in enumerate(kept)
        if n in (0, len(kept) - 1) or not kept[n - 1][1] == point[1] == kept[n + 1][1]
    ]
    return "M" + "L".join(f"{x} {y}" for x, y in straight)


def _extremes(bucket: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(bucket) < 3:
        return list(dict.fromkeys(bucket))
    return sorted({min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])})


def _round(value: float, unit: str) -> float:
    """A little above ``value``, at a number that reads well."""
    if value <= 0:
        return 1.0
    base = 1.0
    if unit == "bytes":
        while base * 1024 <= value:
            base *= 1024
    power = base
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * step for step in (1, 2, 4, 5, 8, 10, 20) if power * step >= value)


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        return size(value)
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
