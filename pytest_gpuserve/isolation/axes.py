"""Reading what a user writes for a matrix: axes, values, exclusions. Every mistake is one paragraph."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import SpecError
from ..spec import AXES, AxisValue, Scalar

SPEC_AXES = ("engine", "model", "tp")
"""Keys of a spec that may be an axis too; so may ``args.FLAG`` and ``env.NAME``."""

Axes = dict[str, tuple[AxisValue, ...]]

_NAME = re.compile(r"[a-z][a-z0-9_]*|(args|env)\.\S+")
_ARCH = re.compile(r"(?:sm_?)?(\d+)[af]?")


@dataclass(frozen=True, slots=True)
class Exclusion:
    """One mapping of ``exclude``, checked: a cell is out when every condition holds.

    ``arch``: the rule holds on these architectures only (120 for sm_120); empty is everywhere.
    """

    conditions: tuple[tuple[str, tuple[AxisValue, ...]], ...]
    arch: tuple[int, ...] = ()

    def matches(self, values: Mapping[str, AxisValue]) -> bool:
        """``values`` may be incomplete: a condition on a missing axis does not hold."""
        return all(
            axis in values and any(covers(wanted, values[axis]) for wanted in allowed)
            for axis, allowed in self.conditions
        )


def covers(wanted: AxisValue, value: AxisValue) -> bool:
    """True when ``value`` is ``wanted``, perhaps with more details."""
    return wanted.name == value.name and set(wanted.details) <= set(value.details)


def parse_axes(axes: object, source: str) -> Axes:
    """Axes in the order of :data:`pytest_gpuserve.spec.AXES`, values parsed, duplicates removed."""
    if not isinstance(axes, Mapping):
        raise SpecError(f"{source}: axes must map an axis to a list of values, not {axes!r}.")
    order = {axis: n for n, axis in enumerate((*SPEC_AXES, *AXES))}
    parsed: Axes = {}
    for axis, values in sorted(axes.items(), key=lambda pair: (order.get(str(pair[0]), len(order)), str(pair[0]))):
        if not isinstance(axis, str) or not _NAME.fullmatch(axis):
            raise SpecError(f"{source}: {axis!r} is no name of an axis (cuda_graph, tp, args.FLAG, env.NAME).")
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise SpecError(f"{source}: axis {axis!r} must be a list of values, in the order to try, not {values!r}.")
        if not values:
            raise SpecError(f"{source}: axis {axis!r} has no value. Give at least one, or remove the axis.")
        parsed[axis] = tuple(dict.fromkeys(parse_value(axis, value, source) for value in values))
    return parsed


def parse_value(axis: str, value: object, source: str) -> AxisValue:
    """One value. For ``args.FLAG`` and ``env.NAME`` any plain value, kept under the detail ``value``."""
    if isinstance(value, AxisValue):
        return value
    if "." in axis:
        if not isinstance(value, Scalar):
            raise SpecError(f"{source}: axis {axis!r} cannot be {value!r}: write text, a number, True, False or None.")
        name = {"True": "on", "False": "off", "None": "none"}.get(str(value), str(value))
        return AxisValue(name, (("value", value),))
    try:
        parsed = AxisValue.parse(axis, value)
    except SpecError as error:
        raise SpecError(f"{source}: {error}") from None
    if axis == "tp" and not re.fullmatch(r"[1-9][0-9]*", parsed.name):
        raise SpecError(f"{source}: axis 'tp' must hold whole numbers of GPUs, 1 or more, not {value!r}.")
    return parsed


def parse_exclude(exclude: object, axes: Mapping[str, Sequence[AxisValue]], source: str) -> list[Exclusion]:
    """The rules of one mark, checked against the axes of that mark."""
    if isinstance(exclude, (Mapping, str)) or not isinstance(exclude, Sequence):
        raise SpecError(f"{source}: exclude must be a list of mappings of axis to value, not {exclude!r}.")
    rules = []
    for entry in exclude:
        if not isinstance(entry, Mapping) or not entry:
            raise SpecError(f"{source}: exclude holds {entry!r}; write mappings of axis to value.")
        conditions: list[tuple[str, tuple[AxisValue, ...]]] = []
        arch: tuple[int, ...] = ()
        for axis, wanted in entry.items():
            several = list(wanted) if isinstance(wanted, (list, tuple, set, frozenset)) else [wanted]
            if axis == "arch":
                arch = tuple(_arch(value, source) for value in several)
            else:
                conditions.append((axis, _condition(axis, several, axes, source)))
        rules.append(Exclusion(tuple(conditions), arch))
    return rules


def _condition(
    axis: str, wanted: Sequence[object], axes: Mapping[str, Sequence[AxisValue]], source: str
) -> tuple[AxisValue, ...]:
    if axis not in axes and axis not in AXES and axis not in SPEC_AXES:
        known = (*axes, *SPEC_AXES, "arch")
        raise SpecError(
            f"{source}: exclude names the axis {axis!r}, which this matrix does not have{suggest(axis, known)}. "
            f"It has: {', '.join(known)}."
        )
    values = tuple(parse_value(axis, value, source) for value in wanted)
    for value in values:
        if axis in axes and not any(covers(value, own) for own in axes[axis]):
            names = list(dict.fromkeys(own.name for own in axes[axis]))
            raise SpecError(
                f"{source}: exclude names {axis}={value.name!r}, which is no value of that axis"
                f"{suggest(value.name, names)}. Its values: {', '.join(names)}."
            )
    return values


def _arch(value: object, source: str) -> int:
    match = _ARCH.fullmatch(str(value).lower())
    if not match:
        raise SpecError(f'{source}: exclude names the architecture {value!r}; write "sm120".')
    return int(match[1])


def check_axes(axes: Mapping[str, Sequence[object]], known: Mapping[str, Collection[str]], engine: str) -> None:
    """Check the axes of a matrix, or of one cell, against :attr:`Engine.axes`.

    Raises:
        SpecError: the engine does not know the axis or the value; the message lists what it knows.
    """
    for axis, values in parse_axes(axes, "gpuserve_matrix").items():
        if axis in SPEC_AXES or "." in axis:
            continue
        if axis not in known:
            raise SpecError(
                f"gpuserve_matrix: engine {engine!r} has no axis {axis!r}{suggest(axis, known)}. "
                f"Its axes: {', '.join(sorted(known)) or 'none'}; for a flag of the engine itself use an axis "
                f'"args.FLAG", for a variable "env.NAME".'
            )
        legal = known[axis]
        for value in values:
            if legal and value.name not in legal:
                raise SpecError(
                    f"gpuserve_matrix: axis {axis!r} of engine {engine!r} cannot be {value.name!r}"
                    f"{suggest(value.name, legal)}. Values: {', '.join(sorted(legal))}."
                )


def distinguishing(axes: Mapping[str, Sequence[AxisValue]]) -> dict[tuple[str, str], tuple[str, ...]]:
    """For values of one axis with the same name, the details in which they differ."""
    result: dict[tuple[str, str], tuple[str, ...]] = {}
    for axis, values in axes.items():
        for name in dict.fromkeys(value.name for value in values):
            alike = [value.detail for value in values if value.name == name]
            keys = sorted({key for detail in alike for key in detail})
            result[axis, name] = tuple(k for k in keys if len({repr(d.get(k)) for d in alike}) > 1)
    return result


def pieces(axis: str, value: AxisValue, distinct: Mapping[tuple[str, str], tuple[str, ...]]) -> Iterator[str]:
    """Pieces of an id for what :attr:`ServerSpec.id` does not tell of this value."""
    if "." in axis:
        yield safe(f"{axis.partition('.')[2]}_{value.name}")
    elif axis == "model":
        yield safe(value.name.rstrip("/").rpartition("/")[2])
    else:
        for key in distinct[axis, value.name]:
            if key in value.detail:
                yield safe(f"{key}_{value.detail[key]}")


def safe(text: str) -> str:
    """Text in the characters of ids."""
    return re.sub(r"[^a-z0-9._]+", "_", text.lower()).strip("_")


def suggest(wrong: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` or nothing."""
    from difflib import get_close_matches

    close = get_close_matches(wrong, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
