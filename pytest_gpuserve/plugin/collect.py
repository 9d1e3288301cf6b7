"""At collection: each test's server, its marks, and what is wrong with them. Nothing is started or probed here."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from ..errors import GpuserveError, SpecError
from .state import PROBLEM, WANTED, State, uses_pool, uses_server

_OURS = ("gpuserve", "gpuserve_matrix")


def annotate(item: pytest.Item, state: State) -> None:
    """Put the server a test wants, or what is wrong with its marks, into its stash; give it the marks of its server."""
    try:
        if uses_server(item):
            _annotate(item, state)
        elif problem := _misuse(item):
            raise SpecError(f"{item.nodeid}: {problem}")
    except (GpuserveError, pytest.UsageError) as error:
        item.stash[PROBLEM] = str(error)


def _annotate(item: pytest.Item, state: State) -> None:
    from .marks import add_to, capabilities
    from .resolve import marks, resolve

    if any(marks(item, "gpuserve_matrix")):
        from .matrix import expand, is_cell

        if not is_cell(item):
            expand(item, state)  # says what kept it from becoming cells
            raise SpecError(
                f"{item.nodeid}: gpuserve_matrix needs a test that pytest can parametrize, which a unittest.TestCase "
                f"is not. Write it as a plain function or class, or use gpuserve instead of gpuserve_matrix."
            )
    wanted = resolve(item, state.settings)
    changed = item.config.hook.pytest_gpuserve_spec(item=item, spec=wanted.spec)
    if changed is not None:
        wanted = replace(wanted, spec=changed)
    capabilities(item)
    item.stash[WANTED] = wanted
    add_to(item, wanted.spec)


def _misuse(item: pytest.Item) -> str | None:
    """Why the marks of a test that does not get our server would be ignored in silence; None when there are none."""
    own = [mark.name for mark in item.own_markers if mark.name in _OURS]
    shadowed = "server" in getattr(item, "fixturenames", ())
    case = _is_test_case(item)
    if not own and (shadowed or case):
        own = [mark.name for mark in item.iter_markers() if mark.name in _OURS]
    if not own:
        return None
    if shadowed:
        return (
            f"the {own[0]} mark has no effect, because the `server` of this test is another fixture (of its module, a "
            f"conftest or a plugin). Rename that fixture, or use `gpuserve_server`, in the test or in that fixture."
        )
    if case:
        return (
            f"the {own[0]} mark has no effect on a unittest.TestCase, whose methods take no fixtures. Write it as a "
            f"plain class, or ask for the server in an autouse fixture of the class."
        )
    if "gpuserve_matrix" not in own and uses_pool(item):
        return None
    return (
        f"the {own[0]} mark has no effect, because this test does not use `server`. Add `server` to its arguments, or "
        f"remove the mark."
    )


def _is_test_case(item: pytest.Item) -> bool:
    unittest = sys.modules.get("unittest")
    holder = item.getparent(pytest.Class)
    return unittest is not None and holder is not None and issubclass(holder.obj, unittest.TestCase)
