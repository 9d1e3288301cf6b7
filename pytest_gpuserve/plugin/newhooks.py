"""Hooks that a conftest or another plugin may implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..server.handle import Server
    from ..spec import ServerSpec


@pytest.hookspec(firstresult=True)
def pytest_gpuserve_spec(item: pytest.Item, spec: ServerSpec) -> ServerSpec | None:
    """Change the server that a test gets, after marks and options and before anything is started.

    Called once a test at collection. The first answer that is not None replaces ``spec``::

        def pytest_gpuserve_spec(item, spec):
            if spec.engine == "sglang":
                return dataclasses.replace(spec, env=(*spec.env, ("NCCL_DEBUG", "INFO")))
    """


@pytest.hookspec
def pytest_gpuserve_server_started(server: Server) -> None:
    """A server became ready. Called in the process that runs the test (under xdist, a worker).

    For example::

        def pytest_gpuserve_server_started(server):
            print(server.spec.id, server.url, server.log_path)
    """


@pytest.hookspec
def pytest_gpuserve_incident(server: Server, incident: Mapping[str, Any]) -> None:
    """An incident was written while a test ran: ``incident`` has time, reason, incident (directory), verdict, text.

    For copying more evidence beside it::

        def pytest_gpuserve_incident(server, incident):
            shutil.copy("/var/log/dmesg", incident["incident"])
    """


@pytest.hookspec
def pytest_gpuserve_bundle(incident: Path, add: Callable[[str, str | bytes | Path], None]) -> None:
    """Add files to a bundle: ``incident`` is its directory, whole by now. ``add(name, content)`` writes
    ``extra/NAME`` there and lists it; text, or a file with text, is redacted and cut at 16 MiB. Binary content cannot
    be redacted and is refused::

        def pytest_gpuserve_bundle(incident, add):
            add("dmesg.txt", Path("/var/log/dmesg"))
            add("mount.txt", Path("/proc/mounts").read_text())
    """
