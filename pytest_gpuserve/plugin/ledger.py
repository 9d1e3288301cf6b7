"""What became of the session's servers, as plain values: counted where tests run, told on the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from ..errors import ServerStartError
    from ..server.handle import Server
    from ..spec import ServerSpec


@dataclass(slots=True)
class Row:
    """One configuration. ``retired``: why servers were not used again, and how often."""

    id: str
    started: int = 0
    reused: int = 0
    failed_starts: int = 0
    hung: int = 0
    exited: int = 0
    retired: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Ledger:
    """Counts by spec key, and one entry an incident."""

    rows: dict[str, Row] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    unpinned: int = 0
    """GPUs that were not given back and for which no test failed: the session does."""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By spec key: ``figures`` (isolation/figures.py), ``expect`` and the names of those ``settled`` in a test."""

    def _row(self, spec: ServerSpec) -> Row:
        return self.rows.setdefault(spec.key, Row(spec.id))

    def starting(self, spec: ServerSpec) -> None:
        self._row(spec).started += 1

    def not_started(self, spec: ServerSpec) -> None:
        """There is no such program, or it cannot be asked: nothing was launched."""
        self._row(spec).started -= 1

    def retired(self, spec: ServerSpec, reason: str) -> None:
        """A server was stopped although tests were still to come, perhaps, that could have used it."""
        row = self._row(spec)
        row.retired[reason] = row.retired.get(reason, 0) + 1

    def reused(self, server: Server) -> None:
        self._row(server.spec).reused += 1

    def start_failed(self, spec: ServerSpec, error: ServerStartError, test: str | None, spared: str | None) -> None:
        """``spared``: a name for this start, when soft mode spared the server until nothing could come of it."""
        self._row(spec).failed_starts += 1
        self.incident(spec, test=test, reason="start", verdict=error.verdict, incident=error.incident, spared=spared)

    def hung(self, spec: ServerSpec) -> None:
        self._row(spec).hung += 1

    def exited(self, spec: ServerSpec) -> None:
        self._row(spec).exited += 1

    def incident(self, spec: ServerSpec, **entry: str | None) -> None:
        """test, reason, verdict, incident (its directory), spared (cookie of a server that soft mode kept alive)."""
        self.incidents.append({"id": spec.id, **entry})

    def trouble(self, text: str) -> None:
        self.troubles.append(text)

    def gave_way(self, theirs: Path, ours: Path) -> None:
        """A file of ours got another name, because somebody else's has it."""
        self.trouble(f"{theirs} is not ours and stays as it is: see {ours.name}")

    def to_json(self) -> dict[str, Any]:
        """Values that execnet can carry to the controller."""
        return asdict(self)

    def add(self, other: Mapping[str, Any]) -> None:
        """Take in what another process counted."""
        for key, row in other["rows"].items():
            mine = self.rows.setdefault(key, Row(row["id"]))
            for name in ("started", "reused", "failed_starts", "hung", "exited"):
                setattr(mine, name, getattr(mine, name) + row[name])
            for reason, count in row["retired"].items():
                mine.retired[reason] = mine.retired.get(reason, 0) + count
        self.incidents += other["incidents"]
        self.troubles += other["troubles"]
        self.unpinned += other["unpinned"]
        for key, row in other["figures"].items():
            self.figures.setdefault(key, row)
