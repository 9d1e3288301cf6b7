"""One start of a server for the pool: budgets, the line on the terminal, what is counted, and the first alarm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..engines import get_engine
from ..errors import ServerStartError
from ..server.leases import Lease
from ..server.lifecycle import Limits, start
from ..server.paths import session_directory
from ..server.ports import open_to_others
from ..vocabulary import LOG_LIMIT
from .bundles import fill
from .evidence import SESSION_ALARM, Evidence
from .live import Live
from .options import last_resort
from .resolve import Wanted
from .session_results import begin as begin_results
from .slots import Slot, arm, incident, note
from .state import State


def launch(
    state: State, wanted: Wanted, item: pytest.Item | None, lease: Lease, capabilities: Sequence[tuple[int, int]]
) -> Slot:
    """Start the server on the GPUs of ``lease``, whose compute capabilities are given, and wait until it is ready.

    Raises:
        ServerStartError: it did not become ready; counted, and its incident is complete.
        SpecError, EngineError: there can be no such server.
    """
    spec, limits = wanted.spec, wanted.limits(state.settings)

    def command(directory: Path, reason: str) -> list[str]:
        """argv of an incident in the test in progress, as the server's start-up and its requests need it."""
        test = state.item.nodeid if state.item is not None else None
        if test is not None and not (directory / "current_test.json").exists():
            note(directory, {"test": test, "since": time.time()})  # the watcher's incident of a start names it too
        if reason == LOG_LIMIT:  # whenever that will be
            return incident(limits, directory, reason, None)
        return incident(limits, directory, reason, test)

    budget = limits.startup_timeout
    if limits.session_deadline is not None:
        budget = max(1.0, min(budget, limits.session_deadline - time.monotonic()))
    begin_results(state.config)
    state.ledger.starting(spec)
    live, server = Live(state, item), None
    try:
        server = start(
            spec,
            get_engine(spec.engine),
            parent=session_directory(),
            limits=Limits(budget, limits.grace, limits.dump_timeout, limits.log_limit),
            incident=command,
            gpus=lease.gpus,
            capabilities=capabilities,
            owners=state.owners,
            pass_fds=lease.fds,
            progress=live.note,
            tick=live.tick,
        )
    except ServerStartError as error:
        spared = spec.key if limits.soft and error.verdict in ("hang", "slow", "undecided") else None
        state.ledger.start_failed(spec, error, item.nodeid if item is not None else None, spared)
        fill(state, error.incident)
        raise
    except BaseException:
        state.ledger.not_started(spec)
        raise
    finally:
        live.end(ready=server is not None)
    if seen := open_to_others(server.record.port, server.record.argv):
        text = (
            f"server {spec.id} listens at {', '.join(seen)}, where others of the network reach it: have it bind "
            "127.0.0.1 (its mark's args or command)"
        )
        if text not in state.ledger.troubles:  # once, however often it is started
            state.ledger.trouble(text)
    for entry in server.incidents():  # soft mode spared it
        state.ledger.incident(
            spec,
            test=item.nodeid if item is not None else None,
            reason=f"start, {entry.get('reason')}",
            verdict=str(entry.get("verdict")),
            incident=str(entry["incident"]) if entry.get("incident") else None,
            spared=server.record.cookie,
        )
    slot = Slot(wanted.key, server, limits, lease, Evidence(server, last_resort(limits.dump_timeout) + limits.grace))
    if limits.session_deadline is not None:
        arm(slot, SESSION_ALARM, limits.session_deadline, None, None)
    return slot
