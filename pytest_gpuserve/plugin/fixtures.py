"""The fixtures. ``server`` is all that most tests need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

from .state import state_of

if TYPE_CHECKING:
    from ..server.handle import Server
    from .pool import Pool


@pytest.fixture(scope="session")
def gpuserve_pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """The session's servers: ``get(engine=…, tp=…)`` starts one or gives the one that runs already.

    For fixtures wider than one test, and for starts by hand. A server got in a fixture is held as long as the fixture
    lives, one got in a test until the test's end.
    """
    state = state_of(pytestconfig)
    with state.clock.paused():  # what is imported here takes as long as a small server's start
        from .pool import Pool

        pool = Pool(state)
    yield pool
    pool.close()


@pytest.fixture
def gpuserve_cell(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """The cell of ``gpuserve_matrix`` this test runs in: axis to the name of its value; empty without a matrix."""
    cell = getattr(request, "param", None)
    if cell is None:
        return {}
    from .checks import skip_excluded

    skip_excluded(request.node, cell)
    return cell.names()  # type: ignore[no-any-return]


@pytest.fixture
def gpuserve_server(request: pytest.FixtureRequest, gpuserve_cell: Mapping[str, str], gpuserve_pool: Pool) -> Server:
    """The same as ``server``, for modules that have a fixture of that name already."""
    return gpuserve_pool.for_test(request.node)


@pytest.fixture
def server(gpuserve_server: Server) -> Server:
    """The running server that this test's ``gpuserve`` mark describes, shared by all tests that describe the same."""
    return gpuserve_server
