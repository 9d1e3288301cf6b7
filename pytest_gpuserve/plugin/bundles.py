"""The hook by which others add files to a bundle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .state import State


def fill(state: State, incident: str | None) -> None:
    """Call ``pytest_gpuserve_bundle`` for an incident; what goes wrong there is told at the end of the session."""
    hook = state.config.hook.pytest_gpuserve_bundle
    if not incident or not hook.get_hookimpls():
        return
    from ..redaction.redact import Redactor
    from ..report.bundle_extra import Extra

    directory = Path(incident)
    if not directory.is_dir():
        return
    extra = Extra(directory, Redactor.of(os.environ))
    try:
        hook(incident=directory, add=extra.add)
    except (
        Exception
    ) as error:  # somebody else's code; a bundle with less in it is better than a test without its report
        state.ledger.trouble(f"pytest_gpuserve_bundle, for {directory.name}: {type(error).__name__}: {error}")
    try:
        extra.close()
    except OSError as error:
        state.ledger.trouble(f"{directory}: {error.strerror}")
