"""Tests of one server together, whatever the order they come in.

Registered when the session starts, after every other plugin, so that this wrapper is the outermost one: it sorts before
pytest's own selection sees the tests (``--sw`` deselects by order) and again after ``--ff``, ``--nf`` and
pytest-randomly have had their say.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from .state import WANTED, State


class Order:
    """Sorts the session's tests, once their marks are known."""

    def __init__(self, state: State) -> None:
        self._state = state

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        from .collect import annotate

        for item in items:
            annotate(item, self._state)
        items[:] = together(items)
        result = yield
        items[:] = together(items)
        self._state.selected(items)
        if self._state.pending and not self._state.is_worker:
            from .distribution import follow

            follow(self._state)
        return result


def together(items: list[pytest.Item]) -> list[pytest.Item]:
    """Stable: servers in the order of their first test; a test without a server is a group of its own."""
    first: dict[str, int] = {}
    ranks = []
    for n, item in enumerate(items):
        wanted = item.stash.get(WANTED, None)
        ranks.append(n if wanted is None else first.setdefault(wanted.key, n))
    return [items[n] for n in sorted(range(len(items)), key=ranks.__getitem__)]
