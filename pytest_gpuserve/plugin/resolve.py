"""From a test to the server it wants: marks, options and the configuration file put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from ..errors import EngineError, SpecError
from ..spec import AXES, ServerSpec, merge
from .named import named
from .option_values import seconds
from .options import LIMITS, Settings

if TYPE_CHECKING:
    from ..isolation.figures import Expectation

    Node = pytest.Item | pytest.Collector


OVERRIDE = "--gpuserve-set"

_BESIDE = ("server", "fresh", *LIMITS, "expect (in a test's mark)")
"""What may be said beside the keys of a spec."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one test asks for: the server, and the limits its marks set (None: the session's).

    ``alone``: for whom the server is started afresh and ended afterwards (``fresh=True``); empty: it is shared.
    ``expect``: what the server should reach.
    """

    spec: ServerSpec
    alone: str = ""
    startup_timeout: float | None = None
    grace: float | None = None
    dump_timeout: float | None = None
    expect: tuple[Expectation, ...] = ()

    @property
    def key(self) -> str:
        """Equal for two tests exactly when one running server serves both."""
        return f"{self.spec.key} {self.alone}" if self.alone else self.spec.key

    def limits(self, settings: Settings) -> Settings:
        """The session's settings with this test's own limits."""
        own = {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}
        return replace(settings, **own) if own else settings


@dataclass(frozen=True, slots=True)
class AxisProblem:
    """An axis, or a value of it, that the engine does not have. ``source``: who asked for it."""

    axis: str
    value: str
    text: str
    source: str


def marks(node: Node, name: str) -> Iterator[pytest.Mark]:
    """Marks called ``name``, weakest first: package, module, outer class, class (base before derived), function, param.

    (``get_closest_marker`` would give the mark of a base class before that of the class itself.)
    """
    for parent in node.listchain():
        yield from (mark for mark in parent.own_markers if mark.name == name)


def layers_of(node: Node) -> list[Mapping[str, object]]:
    """What the ``gpuserve`` marks of a test say, weakest first.

    Raises:
        SpecError: a mark that says nothing we understand.
    """
    source = f"the gpuserve mark of {node.nodeid}"
    layers = []
    for mark in marks(node, "gpuserve"):
        if len(mark.args) > 1:
            raise SpecError(f"{source} takes one positional argument, the name of a server, not {mark.args!r}.")
        layers.append(as_layer(mark.args[0] if mark.args else None, mark.kwargs, source))
    return layers


def resolve(item: pytest.Item, settings: Settings) -> Wanted:
    """The server that the marks of ``item`` describe.

    Raises:
        SpecError, EngineError: they describe none that can exist.
    """
    layers = layers_of(item)
    source = f"the gpuserve mark of {item.nodeid}" if layers else f"{item.nodeid} (it has no gpuserve mark)"
    return build(item.config, settings, *layers, source=source, asker=item.nodeid)


def build(
    config: pytest.Config,
    settings: Settings,
    *layers: Mapping[str, object],
    source: str,
    asker: str = "",
    check: bool = True,
) -> Wanted:
    """Defaults, the named server that the strongest layer names, the layers, ``--gpuserve-set``: later ones win.

    ``asker``: for whom a fresh server is; different ones get different servers.

    Raises:
        SpecError, EngineError: the result is no server that can exist (axes are looked at if ``check``).
    """
    given = [_normal(layer, source) for layer in (settings.defaults, *layers, settings.override)]
    name = next((str(layer["server"]) for layer in reversed(given) if "server" in layer), None)
    if name is not None:
        table, where = named(config, "servers", name)
        given.insert(1, _normal(table, where))
    expect: dict[str, object] = {}
    for layer in given:
        expect |= _expect(layer.pop("expect", None) or {}, source)
    values = merge(*given)
    values.pop("server", None)
    fresh = values.pop("fresh", False)
    if not isinstance(fresh, bool):
        raise SpecError(f"{source}: fresh must be True or False, not {fresh!r}.")
    limits = {key: _limit(values.pop(key), f"{source}: {key}") for key in LIMITS if key in values}
    try:
        spec = ServerSpec.from_mapping(values, source=source, beside=_BESIDE)
    except SpecError:
        ServerSpec.from_mapping(values, source=_blamed(given, source), beside=_BESIDE)
        raise
    if check and (problem := axis_problem(spec, settings, source)):
        raise SpecError(f"{problem.source}: {problem.text}")
    return Wanted(spec, asker if fresh else "", **limits, expect=_expectations(expect, source) if expect else ())


def _blamed(layers: list[dict[str, object]], source: str) -> str:
    """Who is at fault for layers that are no spec: the last one, ``--gpuserve-set``, when all is well without it."""
    rest = merge(*layers[:-1])
    try:
        ServerSpec.from_mapping({k: v for k, v in rest.items() if k not in ("server", "fresh", *LIMITS)})
    except SpecError:
        return source
    return OVERRIDE


def axis_problem(spec: ServerSpec, settings: Settings, source: str) -> AxisProblem | None:
    """The first axis or value of a spec that its engine does not have; ``source`` or ``--gpuserve-set`` asked for it.

    Raises:
        EngineError: there is no such engine.
    """
    from ..engines import get_engine

    override = _normal(settings.override, OVERRIDE)
    try:
        known = get_engine(spec.engine).axes
    except EngineError as error:
        if "engine" in override:
            raise EngineError(f"{OVERRIDE}: {error}") from None
        raise
    overridden = override.get("axes")
    for axis, value in spec.axes:
        by = OVERRIDE if isinstance(overridden, Mapping) and axis in overridden else source
        if axis not in known:
            text = (
                f"engine {spec.engine!r} has no axis {axis!r}. Its axes: {', '.join(sorted(known)) or 'none'}; "
                f"for a flag of the engine itself use args=, for a variable env=."
            )
            return AxisProblem(axis, value.name, text, by)
        if known[axis] and value.name not in known[axis]:
            text = f"engine {spec.engine!r} has no {axis} {value.name!r}. Values: {', '.join(sorted(known[axis]))}."
            return AxisProblem(axis, value.name, text, by)
    return None


def as_layer(first: object, values: Mapping[str, object], source: str) -> Mapping[str, object]:
    """``values`` over the name of a server, a ServerSpec, a mapping, a cell of a matrix, or None.

    Raises:
        SpecError: ``first`` is none of these.
    """
    if isinstance(first, str):
        first = {"server": first}
    elif isinstance(first, ServerSpec):
        first = first.to_json()
    elif hasattr(first, "layer"):
        first = first.layer()
    if first is not None and not isinstance(first, Mapping):
        raise SpecError(f"{source} takes the name of a server or keywords such as engine=, not {first!r}.")
    return {**(first or {}), **values}


def _normal(layer: Mapping[str, object], source: str) -> dict[str, object]:
    """Axes at the top level moved into ``axes``, so that layers merge whichever way they were written."""
    values: dict[str, object] = {key: value for key, value in layer.items() if key not in AXES and value is not None}
    inner = values.get("axes", {})
    if not isinstance(inner, Mapping):
        raise SpecError(f"{source}: axes must be a mapping of axis to value, not {inner!r}.")
    top = {key: value for key, value in layer.items() if key in AXES and value is not None}
    if top or inner:
        values["axes"] = {**inner, **top}
    return values


def _expect(value: object, source: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise SpecError(f'{source}: expect must be a mapping such as {{"accept_rate": ">=0.5"}}, not {value!r}.')
    return value


def _expectations(expect: Mapping[str, object], source: str) -> tuple[Expectation, ...]:
    from ..isolation.figures import parse

    return parse(expect, source)


def _limit(value: Any, source: str) -> float:
    try:
        return seconds(value, source)
    except pytest.UsageError as error:
        raise SpecError(str(error)) from None
