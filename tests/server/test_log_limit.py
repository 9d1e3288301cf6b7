"""A server's log has a limit: it never fills the disk, whatever the server prints."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.errors import ServerHungError, ServerStartError
from pytest_gpuserve.server.loop import Log

Wait = Callable[..., Any]
MB = 1 << 20
SPARE = [sys.executable, "-c", "import sys; sys.exit(75)"]


def left_out(log: Path) -> int:
    """Bytes that the newest line of ours says are not there."""
    with log.open("rb") as file:
        file.seek(4 * MB)
        found = re.findall(rb"\[gpuserve: (\d+) bytes are left out here: .* \(log-limit\)\]\n", file.read(MB))
    return int(found[-1]) if found else 0


def test_an_endless_log_stays_bounded_while_its_server_lives(serve: Any, wait_for: Wait) -> None:
    server = serve("say=the first line", "endless", log=4 * MB, incident=lambda directory, reason: SPARE)
    sizes = []

    def enough() -> bool:
        sizes.append(server.log_path.stat().st_size)
        return left_out(server.log_path) > 60 * MB

    wait_for(enough, 60)
    assert max(sizes) < 60 * MB
    with server.log_path.open("rb") as file:
        assert file.readline() == b"the first line\n"
    assert server.get("/health").text == "ok"
    assert [e.data["name"] for e in server.control.events() if e.kind == "fired"] == ["log_limit"]


def test_no_limit(serve: Any, wait_for: Wait) -> None:
    server = serve("endless", log=0)
    wait_for(lambda: server.log_path.stat().st_size > 8 * MB, 60)
    assert server.control.last("fired") is None


def test_an_alarm_that_does_not_spare_it_ends_it(serve: Any, wait_for: Wait) -> None:
    server = serve(log=2 * MB)
    server.get("/flood")
    wait_for(lambda: server.control.last("stopped"))
    with pytest.raises(ServerHungError, match=r"was ended \(log_limit\)"):
        server.get("/health")


def test_before_it_is_ready(serve: Any) -> None:
    with pytest.raises(ServerStartError, match=r"was ended \(log_limit\), .* before it was ready") as caught:
        serve("endless", "hang", log=2 * MB)
    assert caught.value.verdict == "hang"


def test_a_log_that_lost_its_name_is_bounded_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    log = Log(str(path), MB)
    assert not log.look(0.0)
    path.unlink()
    os.write(writer, b"x" * (2 * MB))
    assert log.look(10.0)  # True once
    os.write(writer, b"x" * (2 * MB))
    assert not log.look(20.0)
    assert os.fstat(writer).st_size < MB + 200
    for fd in (writer, log.fd):
        os.close(fd)


@pytest.mark.parametrize("append", [os.O_APPEND, 0])
def test_what_is_left_out_is_counted_once(tmp_path: Path, append: int) -> None:
    """A server that opens its log anew, without O_APPEND, goes on behind what was cut: before it is a hole."""
    path = tmp_path / "log"
    writer = os.open(path, os.O_WRONLY | os.O_CREAT | append)
    log = Log(str(path), MB)
    for turn in range(1, 5):
        os.write(writer, b"x" * (4 * MB))
        log.look(10.0 * turn)
    assert log.cut == pytest.approx(15 * MB, abs=MB // 2)
    assert os.fstat(writer).st_size < MB + 200
    for fd in (writer, log.fd):
        os.close(fd)


def test_how_soon_it_is_looked_at_again(tmp_path: Path) -> None:
    """The nearer the limit the sooner; a log that cannot be had, or is no larger than its limit, stays as it is."""
    path = tmp_path / "log"
    log = Log(str(path), 100 * MB)
    assert (log.look(0.0), log.next_look) == (False, pytest.approx(0.131, abs=0.001))
    path.write_bytes(b"x" * (100 * MB))
    assert (log.look(1.0), log.next_look) == (True, pytest.approx(1.026, abs=0.001))
    assert not log.look(1.01)
    assert (path.stat().st_size, Log(str(path), 0).next_look) == (100 * MB, float("inf"))
    os.close(log.fd)
