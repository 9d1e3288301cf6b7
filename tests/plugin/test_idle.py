"""A server of which nobody wants anything is idle, not hung, however long it says nothing."""

from __future__ import annotations

from typing import Any

import pytest

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

TEST = """
import sys, time
from pytest import mark

@mark.gpuserve(engine="command", command=[sys.executable, "serve.py", "{port}"])
def test_busy_elsewhere(server):
    server.get("/health")
    time.sleep(8)
    assert server.get("/health").status_code == 200
"""


@pytest.mark.timeout(120)
def test_an_idle_server_with_a_silent_log_is_not_hung(project: Any) -> None:
    project.write(serve=SERVER, test_idle=TEST)
    result = project.run("--gpuserve-stall-timeout=3", "-rA")
    result.assert_outcomes(passed=1)
    assert project.incidents() == []
