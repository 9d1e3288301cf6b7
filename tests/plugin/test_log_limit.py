"""Servers whose log reaches --gpuserve-log-limit: an endless line ends them, a long log does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

SERVER = """
    import http.server, os, sys, threading

    def print_for_ever(words):
        number = 0
        while True:
            number += 1
            os.write(1, b"".join(b"%d retry %s\\n" % (number, word) for word in words) * 50)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/talk":
                threading.Thread(target=print_for_ever, args=([b"a", b"few", b"words"],), daemon=True).start()
            if self.path == "/repeat":
                threading.Thread(target=print_for_ever, args=([b"again"],), daemon=True).start()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    if "stuck" in sys.argv:
        print_for_ever([b"again"])
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
TESTS = """
    import sys, time
    import pytest

    def mark(*words):
        command = [sys.executable, "server.py", "{port}", *words]
        return pytest.mark.gpuserve(engine="command", command=command, ready="/")

    @mark("stuck")
    def test_stuck(server):
        pass

    @mark()
    def test_chatty(server):
        server.get("/talk")
        while not any(entry["kill"] is not None for entry in server.incidents()):
            time.sleep(0.1)
        assert server.get("/").status_code == 200

    @mark("repeats")
    def test_repeats(server):
        server.get("/repeat")
        while server.control.last("spared", "killing") is None:
            time.sleep(0.1)
        assert server.get("/").status_code == 200
"""


@pytest.fixture(scope="module")
def run(new_project: Callable[[], Any]) -> Any:
    project = new_project()
    project.write(server=SERVER, test_log=TESTS)
    project.result = project.run("-rP", "--gpuserve-log-limit=8", "--gpuserve-grace=1", "--gpuserve-startup-timeout=60")
    return project


def test_one_line_for_ever_is_a_hang_that_names_the_line_and_the_option(run: Any) -> None:
    """Long before the start-up budget of half an hour is over."""
    run.result.assert_outcomes(passed=2, errors=1)
    run.result.stdout.re_match_lines_random(
        [
            r".*was ended \(log_limit\), .* before it was ready",
            r".*hang: it prints one line over and over, more than a megabyte a second: '\d+ retry again'.*",
            r".*its log reached its limit \(--gpuserve-log-limit.*",
        ]
    )


def test_a_long_log_ends_nothing_and_is_told(run: Any) -> None:
    run.result.stdout.re_match_lines_random(
        [r".*the log of command-tp1-\S+ reached its limit \(--gpuserve-log-limit\): .* dumped, not ended\."]
    )
    run.assert_nothing_left()


def test_who_answers_while_it_prints_one_line_for_ever_is_spared_and_does_not_hang(run: Any) -> None:
    written = [json.loads((path / "incident.json").read_text()) for path in run.incidents()]
    (found,) = [one for one in written if one["test"] == "test_log.py::test_repeats"]
    assert found["verdict"] != "hang"
    assert not found["kill"]


def test_the_test_in_progress_is_told_in_the_incident(run: Any) -> None:
    tests = {json.loads((path / "incident.json").read_text())["test"] for path in run.incidents()}
    assert tests == {f"test_log.py::test_{name}" for name in ("stuck", "chatty", "repeats")}


@pytest.mark.parametrize("value", ["-1", "1.5", "1GB"])
def test_a_limit_is_a_number_of_megabytes(project: Any, value: str) -> None:
    project.write(test_one="def test_one(): pass")
    result = project.here(f"--gpuserve-log-limit={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--gpuserve-log-limit: '{value}' is no whole number*"])
