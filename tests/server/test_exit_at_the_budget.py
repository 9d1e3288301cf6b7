"""A server that exits when its start-up budget ends: one incident, and it is the one that the error names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.engines.base import ReadyProbe
from pytest_gpuserve.errors import ServerStartError
from pytest_gpuserve.server import ports
from pytest_gpuserve.server.control import Control
from pytest_gpuserve.server.readiness import Waiting, wait
from pytest_gpuserve.server.record import ServerRecord, boot_id
from pytest_gpuserve.spec import ServerSpec


def incident(directory: Path, reason: str) -> None:
    entry = {"time": 1, "reason": reason, "incident": f"/of/{reason}", "verdict": "oom", "text": f"seen by {reason}"}
    with (directory / "incidents.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def events(directory: Path, *found: dict[str, object]) -> None:
    with (directory / "events.jsonl").open("a") as file:
        for n, event in enumerate(found):
            file.write(json.dumps({"time": n, "monotonic": n, **event}) + "\n")


class Scripted(Control):
    """A supervisor that has one alarm armed; ``disarmed`` is called when it is asked to forget it."""

    def __init__(self, directory: Path, disarmed: Callable[[], None]) -> None:
        super().__init__(directory, procfs.process_id(os.getpid()))
        self._disarmed = disarmed

    def request(self, **words: Any) -> dict[str, Any]:
        if words["do"] == "disarm":
            assert words["name"] == "startup_budget"
            self._disarmed()
        return {"armed": ["startup_budget"], "was_armed": True}


@pytest.fixture
def error(tmp_path: Path) -> Callable[..., ServerStartError]:
    """What a wait says of a server that has exited; ``disarmed`` and ``post_mortem`` are called by it."""

    def told(disarmed: Callable[[], None], post_mortem: Callable[[], object]) -> ServerStartError:
        me = procfs.process_id(os.getpid())
        assert me
        held = ports.hold("127.0.0.1", None)
        record = ServerRecord(
            spec=ServerSpec("command"),
            engine="command",
            argv=("serve", "--fast"),
            url=f"http://127.0.0.1:{held.number}",
            host="127.0.0.1",
            port=held.number,
            gpus=(),
            python="python",
            cookie="1:1:none",
            owner=me,
            supervisor=me,
            root=None,
            directory=tmp_path,
            log=tmp_path / "server.log",
            started=0.0,
            boot=boot_id(),
        )
        events(tmp_path, {"event": "started", "pid": 1, "start": 1}, {"event": "exited", "code": 9})
        waiting = Waiting(
            record=record,
            control=Scripted(tmp_path, disarmed),
            probe=ReadyProbe(),
            model="m",
            budget=1.0,
            incident_limit=20.0,
            rearm=lambda: None,
            disarm=lambda: pytest.fail("it is not ready"),
            progress=lambda _: None,
            tick=lambda: None,
            post_mortem=post_mortem,
        )
        try:
            with pytest.raises(ServerStartError) as caught:
                wait(waiting)
        finally:
            held.release()
        return caught.value

    return told


def test_nobody_is_left_whose_budget_could_end(tmp_path: Path, error: Callable[..., ServerStartError]) -> None:
    done: list[str] = []

    def disarmed() -> None:
        done.append("disarmed")

    def post_mortem() -> None:
        done.append("examined")
        incident(tmp_path, "exited")

    found = error(disarmed, post_mortem)
    assert done == ["disarmed", "examined"], "else the budget's incident follows, of a server that is dead"
    assert (found.verdict, found.incident) == ("oom", "/of/exited")
    assert "seen by exited Its command was serve --fast; the gpuserve mark decides it" in str(found)


def test_the_budget_was_quicker(tmp_path: Path, error: Callable[..., ServerStartError]) -> None:
    """Its incident looks at the dead server already; a second one would be refused."""

    def disarmed() -> None:
        events(tmp_path, {"event": "fired", "name": "startup_budget"})
        incident(tmp_path, "startup_budget")
        events(tmp_path, {"event": "killing", "why": "alarm"}, {"event": "stopped"})

    found = error(disarmed, lambda: pytest.fail("examined twice"))
    assert (found.verdict, found.incident) == ("oom", "/of/startup_budget")
    assert "exited with code 9" in str(found)
    assert "seen by startup_budget" in str(found)
