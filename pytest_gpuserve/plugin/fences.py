"""May a running server serve another test? Asked before each reuse, on no test's clock."""

from __future__ import annotations

from ..engines import get_engine
from ..server.handle import Server
from ..text import escape

PATIENCE = 60.0
"""Seconds for one token: a kernel that nobody has asked for yet may have to be compiled first."""


def answers(server: Server) -> str | None:
    """One token, as when the server became ready. Returns why it must not be used again; None: it answered.

    Raises:
        ServerError: it hung and was ended, or it has exited; an incident was taken.
    """
    import requests

    probe = get_engine(server.spec.engine).ready(server.spec)
    limits = (10.0, PATIENCE)
    try:
        if probe.generate is None:
            response = server.get(probe.path, timeout=limits)
        else:
            body = {"model": server.model, **probe.generate}
            response = server.post(probe.generate_path, json=body, timeout=limits)
    except requests.RequestException as error:
        return f"it did not answer the request before its reuse: {escape(str(error), 300)}"
    if response.status_code != 200:
        return f"it answered the request before its reuse with {response.status_code}"
    return None
