"""What a report says of a server whose stacks could not be written."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpuserve.plugin import outcome
from pytest_gpuserve.plugin.evidence import Finding


@pytest.mark.parametrize("killed", [True, False])
def test_no_dump_is_claimed_where_there_is_none(tmp_path: Path, killed: bool) -> None:
    server: Any = SimpleNamespace(spec=SimpleNamespace(id="sim-tp2"), directory=tmp_path / "gone")
    found = Finding(server, ("test_timeout",), killed, None, ())
    text = outcome._headline(found, 4.0)
    assert f"(no stack is on disk: {tmp_path / 'gone'}: {os.strerror(2)})" in text
    assert "was dumped" not in text
    taken = Finding(server, ("test_timeout",), killed, None, ({"incident": ""},))
    assert "was dumped" in outcome._headline(taken, 4.0)
