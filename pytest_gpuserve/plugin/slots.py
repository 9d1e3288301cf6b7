"""One server of the session's pool, its alarms, and the note of what it is used for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import procfs
from ..report.incident import command
from ..server.leases import Lease
from ..server.readiness import EXITED, exit_text
from .evidence import Evidence
from .options import Settings, alarm_limit, incident_limit

if TYPE_CHECKING:
    from ..server.handle import Server

END = "end"
"""Reason of the bundle that --gpuserve-retain=always takes of a server that is about to be stopped."""


@dataclass(eq=False, slots=True)
class Slot:
    """A server of ours that runs, or ran.

    Attributes:
        key: of what was asked for; tests that ask for the same share it.
        limits: the session's settings with the limits of the mark that started it.
        lease: its GPUs.
        users: fixtures and tests that hold it now; 0 is idle.
        tests: tests that got it.
        last: node id of the test that used it last: what it left behind is that test's.
        retire: why it must not serve another test; None: it may.
        armed: the test's alarm is set.
    """

    key: str
    server: Server
    limits: Settings
    lease: Lease
    evidence: Evidence
    users: int = 0
    tests: int = 0
    last: str = ""
    retire: str | None = None
    armed: bool = False

    def unfit(self) -> str | None:
        """Why it cannot serve another test; None: it can."""
        if self.retire is None:
            if (code := self.server.exit_code()) is not None:
                self.retire = f"it {exit_text(code)}"
            elif not self.server.control.alive():
                self.retire = "its supervisor was killed"
            elif (root := self.server.record.root) is not None and not procfs.same(root):
                self.retire = "it ended by itself"  # and its supervisor is about to say so
        return self.retire


def incident(
    settings: Settings, directory: Path, reason: str, test: str | None, after: float | None = None
) -> list[str]:
    """argv of an incident of the server in ``directory``; ``after``: seconds that ``test`` had been running."""
    limit, rounds = incident_limit(settings.dump_timeout), 1 if reason in (EXITED, END) else None
    return command(
        directory,
        settings.artifacts,
        reason,
        test=test,
        after=after,
        soft=settings.soft,
        limit=limit,
        rounds=rounds,
        keep=settings.keep,
    )


def arm(slot: Slot, name: str, deadline: float, test: str | None, after: float | None) -> None:
    """Have the server dumped at ``deadline`` (CLOCK_MONOTONIC), and ended if it is to blame."""
    argv = incident(slot.limits, slot.server.directory, name, test, after)
    slot.evidence.quietly(slot.server.control.arm, name, deadline, argv, alarm_limit(slot.limits.dump_timeout))


def note(directory: Path, entry: Mapping[str, object]) -> None:
    """``current_test.json`` beside the server's log: what pytest was doing, for whoever looks after a crash."""
    path = directory / "current_test.json"
    try:
        draft = path.with_name(f".{path.name}")
        draft.write_text(
            json.dumps({"worker": os.environ.get("PYTEST_XDIST_WORKER"), **entry}) + "\n", encoding="utf-8"
        )
        draft.replace(path)
    except OSError:
        pass  # the directory is gone: so is the server
