"""At the end of a session: the HTML pages of its incidents, and its own. Never while an incident is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .state import State

LIMIT: Final = 20.0
"""Seconds after which no further incident's page is begun."""


def write(state: State) -> None:
    """Write the pages of what this process knows all of; what goes wrong is one line in the terminal's section."""
    artifacts = state.settings.artifacts
    if artifacts is None or state.settings.action != "run" or not artifacts.is_dir():
        return
    from ..report.html import refresh

    written = refresh(artifacts, since=state.began, limit=LIMIT)
    state.page = written.page
    if written.left:
        state.ledger.trouble(
            f"no page yet for {written.left} incidents, there are so many: gpuserve page {artifacts}/NAME writes one"
        )
    for problem in written.problems[:3]:
        state.ledger.trouble(problem)
