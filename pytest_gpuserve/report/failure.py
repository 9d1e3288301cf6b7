"""Which failure was it? The signature of a server's end, by which isolate, judge and bisect tell one from another.

Verdict, phase and ranks come from the incident. After a crash its ranks are those that were left by chance: there the
log says why, and in which phase.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ..isolation.signature import Signature
from ..phases.reader import MOST
from ..shape import OBJECT, read

_PRECISE = ("oom", "config", "unsupported_arch", "port")


def read_incident(directory: str | Path | None) -> dict[str, Any] | None:
    """The content of ``incident.json``; None: there is none."""
    if directory is None:
        return None
    try:
        return cast("dict[str, Any]", read(Path(directory) / "incident.json", OBJECT))
    except (OSError, ValueError):
        return None


def signature(
    verdict: str, incident: Mapping[str, Any] | None, server: Path | None = None, engine: str | None = None
) -> Signature:
    """Of one failure.

    Args:
        verdict: where there is no incident, or it does not say.
        server: the server's directory; None: as the incident has it, as for ``engine``.
    """
    known = Signature(verdict)
    if incident and incident.get("verdict"):
        with contextlib.suppress(ValueError):
            known = Signature.from_json(incident)
        where = incident.get("server")
        server = server or (Path(where) if isinstance(where, str) else None)
        engine = engine or str(incident.get("engine") or "command")
    if server is None or known.verdict not in ("crash", "undecided"):
        return known
    with contextlib.suppress(Exception):  # a log that cannot be read says nothing
        from ..diagnose.triage import explain

        told = explain([str(server / "server.log")], engine if engine != "command" else None, MOST)
        cause = frozenset({told.cause.kind} if told.cause is not None else ())
        verdict = told.verdict if told.verdict in _PRECISE and known.verdict == "crash" else known.verdict
        return Signature(verdict, known.phase or told.phase, cause)
    return known
