"""What a bundle holds beside stacks and verdict: the command, the versions, the log, the session's tests so far.

Asked in the background while the stacks are taken; what does not come in time is left out, and the manifest says so.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from .. import foreign
from ..engines.base import Engine
from ..gpu import Gpu
from ..redaction.redact import Redactor
from ..server.record import ServerRecord
from . import bundle, log_parts, repro, results_log, versions
from .again import render
from .bundle_reader import Bundle, Directory
from .files import Stores, place_of
from .gather import Later

TESTS: Final = 400
"""Lines of the session's results that an incident keeps."""

_LIMIT: Final = 5.0
_MOST_ANSWER: Final = 1 << 20


class Surroundings:
    """Everything of one incident that is not its stacks. ``left_out``: parts that could not be had, and why."""

    def __init__(
        self,
        record: ServerRecord,
        engine: Engine | None,
        environment: Mapping[str, str],
        stores: Stores,
        redactor: Redactor,
    ) -> None:
        self._record = record
        self._engine = engine
        self._environment = redactor.environment(environment)
        self._stores = stores
        self._redactor = redactor
        self._server: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}

    def begin(self) -> None:
        """What is known at once, and the questions that take a moment."""
        self._server = self._launch()
        self._stores.write_json("server.json", self._server)
        limit, python = _LIMIT, self._record.python
        quiet = getattr(self._engine, "uses_gpus", True) is False
        self._versions: Later[tuple[dict[str, Any], str | None]] = Later(
            lambda: versions.of_interpreter(python, limit), ({}, f"{python} did not answer")
        )
        self._topology: Later[tuple[str | None, str | None]] = Later(
            lambda: (None, None) if quiet else versions.topology(limit), (None, "it took too long")
        )
        self._answers: Later[dict[str, Any]] = Later(self._ask, {})

    def finish(self, cause: int | None, gpus: tuple[Gpu, ...], limit: float) -> None:
        """Everything else, within ``limit`` seconds or a little more."""
        deadline = time.monotonic() + limit
        self._tests()
        log_parts.write_rest(self._stores, self._redactor, self._record.log, cause)
        interpreter, why = self._versions.get(min(_LIMIT, deadline - time.monotonic()))
        topology, problem = self._topology.get(deadline - time.monotonic())
        problems = [text for text in (why, problem) if text]
        self._stores.write_json("versions.json", versions.to_json(interpreter, gpus, topology, problems))
        if answers := self._answers.get(deadline - time.monotonic()):
            self._server["answers"] = answers
            self._stores.write_json("server.json", self._server)

    def render(self) -> None:
        """The pages, from what is in each directory now: the same code makes them again on another machine."""
        self._stores.each(lambda store: render(Bundle(store.path.name, Directory(store.path)), store))

    def manifest(self, *, complete: bool) -> None:
        """bundle.json; the last file of a whole bundle."""
        log = self._record.log
        if complete and not any(name in self._stores.raw.files for name in ("log.txt", "log_head.txt")):
            self.left_out["log.txt"] = f"{log.name} could not be read"
        if complete and not any(name.startswith("stacks/") for name in self._stores.raw.files):
            self.left_out["stacks/"] = "nothing of the server was left"
        self._stores.each(
            lambda store: store.write_json(
                bundle.NAME, bundle.manifest(store, complete=complete, left_out=self.left_out)
            )
        )

    def _launch(self) -> dict[str, Any]:
        record = self._record
        ready, body = None, None
        with suppress(Exception):  # somebody else's engine
            probe = self._engine.ready(record.spec) if self._engine else None
            if self._engine and probe:
                ready = probe.path
                if probe.generate is not None:
                    model = self._engine.served_model(record.spec)
                    body = {"path": probe.generate_path, "body": {"model": model, **probe.generate}}
        return {
            "schema": repro.SCHEMA,
            "engine": record.engine,
            "spec": record.spec.to_json(),
            "argv": list(record.argv),
            "environment": self._environment,
            "url": record.url,
            "gpus": list(record.gpus),
            "python": record.python,
            "started": record.started,
            "own_timeout": record.own_timeout,
            "ready": ready,
            "request": body or ({"path": ready, "body": None} if ready else None),
            "answers": {},
        }

    def _ask(self) -> dict[str, Any]:
        """What the server says of itself, on paths that do not wait for its ranks (the engine names them)."""
        found: dict[str, Any] = {}
        paths: tuple[str, ...] = getattr(self._engine, "info_paths", ("/v1/models",))
        for path in paths:
            connection = http.client.HTTPConnection(self._record.host, self._record.port, timeout=1.5)
            with suppress(OSError, http.client.HTTPException, ValueError):
                connection.request("GET", path, headers=self._record.headers)
                answer = connection.getresponse()
                data = answer.read(_MOST_ANSWER)
                if answer.status == 200:
                    found[path] = json.loads(data)
            connection.close()
        return found

    def _tests(self) -> None:
        """The session's results so far, which pytest's own report does not hold yet; they are redacted already."""
        shared = self._stores.shared
        if shared is None:
            return
        with suppress(OSError):
            lines = last_lines(place_of(shared.path.parent, results_log.NAME, results_log.SCHEMA), TESTS)
            if lines:
                self._stores.write("results.jsonl", "".join(lines), clean=True)


def last_lines(path: Path, most: int) -> list[str]:
    """The last whole lines of a file that grows; none where it is not there."""
    try:
        with foreign.opened(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - (1 << 20)))
            data = file.read(1 << 20)
    except OSError:
        return []
    lines = data[: data.rfind(b"\n") + 1].decode(errors="replace").splitlines(keepends=True)
    return lines[-most:] if size <= 1 << 20 else lines[1:][-most:]
