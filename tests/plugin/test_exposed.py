"""A server that others of the network reach although nobody asked for that is told, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TESTS = """
    import pytest

    def mark(*words):
        command = ["{python}", "-m", "http.server", "{port}", *words]
        return pytest.mark.gpuserve(engine="command", command=command, ready="/", fresh=True)

    @mark()
    def test_once(server): pass

    @mark()
    def test_twice(server): pass

    @mark("--bind", "127.0.0.1")
    def test_private(server): pass

    @mark("--bind", "0.0.0.0")
    def test_asked(server): pass
"""


def test_a_server_that_binds_everything(new_project: Callable[[], Any]) -> None:
    project = new_project()
    project.write(test_it=TESTS)
    result = project.run()
    result.assert_outcomes(passed=4)
    assert result.stdout.str().count("where others of the network reach it: have it bind 127.0.0.1") == 1
