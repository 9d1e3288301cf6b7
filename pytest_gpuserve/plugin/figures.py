"""``expect=`` of the ``gpuserve`` mark: measured once a server, after the first test of its that passed.

Accept rate and length are judged there and then, and so is the speedup when the base configuration was measured before
in this process. What was not is judged when the session ends, where all figures arrive (under pytest-xdist in the
controller): a session whose configuration is slower than was asked fails, and one without a base says ``undecided``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ..errors import DegradedError, GpuserveError
from ..isolation.figures import Expectation, Figures, base_of, judge
from .state import ERROR, WANTED, State

if TYPE_CHECKING:
    from ..server.handle import Server
    from ..spec import ServerSpec


def check(item: pytest.Item, state: State) -> None:
    """The body of a test has passed: is its server as its marks expect? Once a server and set of expectations."""
    wanted = item.stash[WANTED]
    server = state.pool.server_of(wanted) if state.pool is not None else None
    if server is None:
        return
    rows, key = state.ledger.figures, wanted.spec.key
    try:
        if key not in rows:
            with state.clock.paused():  # a measure of seconds is not the test's
                rows[key] = {"figures": measure(server).to_json(), "expect": [], "settled": []}
        row = rows[key]
        fresh = [e for e in wanted.expect if _plain(e) not in row["expect"]]
        row["expect"] += map(_plain, fresh)
        if fresh:
            _judge(row, fresh, rows, of_matrix=varies(item))
    except GpuserveError as error:
        item.stash[ERROR] = error
        message = str(error)
    else:
        return
    pytest.fail(message, pytrace=False)


def measure(server: Server) -> Figures:
    """A small closed loop, and what the server counted meanwhile.

    Raises:
        ServerError: the server hung, ended, or answers nothing that can be measured.
    """
    found = server.throughput()
    spec, window = server.spec, found.spec_decode
    base = "spec_base" in spec.traits and window.source == "none"
    return Figures(
        spec.id,
        spec.key,
        family(spec),
        base,
        round(found.tokens_per_s, 1),
        window.accept_rate,
        window.accept_length,
        window.useless,
    )


def family(spec: ServerSpec) -> str:
    """Key of what is left when speculation is taken away: equal for a configuration and its base."""
    return replace(spec, axes=tuple(pair for pair in spec.axes if pair[0] != "spec_decode")).key


def varies(item: pytest.Item) -> bool:
    """A test of a matrix over ``spec_decode``: its base cell has the same marks as the others."""
    from ..isolation.matrix import Cell

    cells = [m.args[0] for m in item.own_markers if m.name == "gpuserve" and m.args and isinstance(m.args[0], Cell)]
    return any("spec_decode" in cell.names() for cell in cells)


def _judge(row: dict[str, Any], expect: list[Expectation], rows: dict[str, Any], *, of_matrix: bool) -> None:
    figures = Figures.from_json(row["figures"])
    found = judge(figures, expect, base_of(figures, map(_figures, rows.values())), of_matrix=of_matrix)
    row["settled"] += [e.name for e in expect if e.name not in found.waiting]
    if found.verdict is not None:
        raise DegradedError(f"{figures.id} is {found.verdict}: {found.text}.", verdict=found.verdict)


def conclude(state: State) -> tuple[list[str], bool]:
    """Where all figures are: a line a configuration, and whether one fails that was not judged in a test."""
    rows = state.ledger.figures
    lines, bad = [], False
    for row in rows.values():
        figures = Figures.from_json(row["figures"])
        base = base_of(figures, map(_figures, rows.values()))
        text = f"{figures.id}: {figures}"
        if base is not None:
            text += f", {figures.tokens_per_s / base.tokens_per_s:.2f}x its base {base.id}" if base.tokens_per_s else ""
        late = [Expectation(*e) for e in row["expect"] if e[0] == "speedup" and "speedup" not in row["settled"]]
        found = judge(figures, late, base) if late else None
        if found is not None and "speedup" in found.failed:
            bad = True
            text = f"degraded: {figures.id}: {found.text}"
        elif found is not None and found.waiting:
            text += f"; speedup undecided {late[0].asked}: no base cell was measured in this session"
        lines.append(text)
    return lines, bad


def finish(session: pytest.Session, state: State) -> None:
    """The session is over: fail it for what no test could know."""
    if conclude(state)[1] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def of_cell(state: State, key: str) -> dict[str, float]:
    """Figures for the conclusion of a matrix, by the key of the cell's spec; empty when it was not measured."""
    row = state.ledger.figures.get(key)
    if row is None:
        return {}
    found = Figures.from_json(row["figures"])
    named = {"throughput": found.tokens_per_s, "accept_rate": found.accept_rate, "accept_length": found.accept_length}
    return {name: value for name, value in named.items() if value is not None}


def _figures(row: dict[str, Any]) -> Figures:
    return Figures.from_json(row["figures"])


def _plain(expectation: Expectation) -> list[Any]:
    """As execnet can carry it."""
    return [expectation.name, expectation.op, expectation.limit]
