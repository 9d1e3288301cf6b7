"""A running server as a test sees it: requests and their errors, what it says of itself, its end."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.engines.base import ProcessRole, Rank
from pytest_gpuserve.errors import ServerError, ServerExitedError, ServerHungError
from pytest_gpuserve.server.handle import Sample, parse_metrics

Wait = Callable[..., Any]


class Incidents:
    """Incidents of our making: exit code and verdict can be set between them."""

    def __init__(self) -> None:
        self.code, self.verdict, self.reasons = 0, "hang", list[str]()

    def __call__(self, directory: Path, reason: str) -> list[str]:
        self.reasons.append(reason)
        entry = {"time": 1, "reason": reason, "incident": "/evidence", "verdict": self.verdict, "text": "TP3 waits"}
        path, line = str(directory / "incidents.jsonl"), json.dumps(entry) + "\n"
        code = f"import time; time.sleep(0.3); open({path!r}, 'a').write({line!r}); exit({self.code})"
        return [sys.executable, "-c", code]


@pytest.fixture
def incidents() -> Incidents:
    return Incidents()


def later(seconds: float, call: Callable[[], object]) -> None:
    threading.Timer(seconds, call).start()


def test_requests(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server = serve()
    assert server.get("/health").text == "ok"
    assert server.post("/status/201", json={}).status_code == 201
    assert server.request("GET", "/nothing").status_code == 404


def test_a_server_that_answers_500_and_ends(serve: Any) -> None:
    """SGLang and vLLM answer for a dead rank before they end themselves: the test must not go on with that answer."""
    server = serve()
    assert server.post("/status/500", json={}).status_code == 500
    with pytest.raises(ServerExitedError, match="exited with code 7"):
        server.get("/last-words")


def test_a_fork_has_connections_of_its_own_and_ends_nothing(serve: Any) -> None:
    server = serve()
    server.get("/health")
    ports = read_ports(server)
    if (pid := os.fork()) == 0:
        code = 9
        try:
            assert server.get("/health").text == "ok"
            code = 2 if read_ports(server) & ports else 3
            server.stop()
            code = 0 if code == 3 else code
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert server.get("/health").text == "ok"
    assert not server.control.status()["stopping"]


def read_ports(server: Any) -> set[int]:
    """Local ports of the connections that the next request may use."""
    found = set()
    for pool in server._session.get_adapter(server.url).poolmanager.pools._container.values():
        for connection in pool.pool.queue:
            if connection is not None and connection.sock is not None:
                found.add(connection.sock.getsockname()[1])
    return found


def test_a_server_ended_by_an_alarm_was_hung(serve: Any, incidents: Incidents, tagged: Any) -> None:
    server = serve("escape", incident=incidents)
    server.control.arm("test_timeout", time.monotonic() + 0.5, incidents(server.directory, "test_timeout"), 20)
    with pytest.raises(ServerHungError, match="TP3 waits\nEvidence: /evidence") as caught:
        server.get("/silent")
    assert (caught.value.verdict, caught.value.incident) == ("hang", "/evidence")
    with pytest.raises(ServerHungError, match="TP3 waits"):
        server.get("/health")
    assert tagged.alive() == {}
    assert server.incidents()[0]["reason"] == "test_timeout"


@pytest.mark.parametrize("path", ["/drip", "/silent"])
def test_a_streamed_answer_that_breaks(serve: Any, incidents: Incidents, path: str) -> None:
    server = serve(incident=incidents)
    server.control.arm("test_timeout", time.monotonic() + 0.8, incidents(server.directory, "test_timeout"), 20)
    with pytest.raises(ServerHungError, match="TP3 waits"):
        list(server.get(path, stream=True).iter_lines())


def test_a_streamed_answer_that_stops(serve: Any, incidents: Incidents) -> None:
    server = serve(incident=incidents)
    with pytest.raises(ServerHungError, match="TP3 waits"):
        list(server.get("/drip", stream=True, timeout=0.5).iter_lines())
    assert incidents.reasons[-1] == "request_timeout"


def test_an_answer_that_stops(serve: Any, incidents: Incidents) -> None:
    server = serve(incident=incidents)
    with pytest.raises(ServerHungError, match="TP3 waits"):
        server.get("/drip", timeout=0.5)
    assert incidents.reasons[-1] == "request_timeout"


def test_an_exit_under_a_request(serve: Any) -> None:
    server = serve("say=last words")
    with pytest.raises(ServerExitedError, match="exited with code 7") as caught:
        server.get("/die")
    assert caught.value.verdict == "crash"
    assert "last words" in str(caught.value)
    assert server.exit_code() == 7


def test_the_incident_of_an_exit_gives_its_error_the_cause(serve: Any, incidents: Incidents) -> None:
    incidents.code, incidents.verdict = 75, "oom"
    server = serve("say=last words", incident=incidents)
    for _ in range(2):
        with pytest.raises(ServerExitedError, match="exited with code 7") as caught:
            server.get("/die")
        assert caught.value.verdict == "oom"
        assert "exited with code 7. TP3 waits Last lines of" in str(caught.value)
        assert caught.value.incident == "/evidence"
    assert incidents.reasons.count("exited") == 1, "once, however many requests find out"


def test_a_broken_connection_of_a_live_server_stays_what_it_is(serve: Any) -> None:
    server = serve()
    with pytest.raises(requests.ConnectionError):
        server.get("/reset")
    assert server.get("/health").status_code == 200


def test_a_request_out_of_time_takes_an_incident_that_blames_the_server(
    serve: Any, incidents: Incidents, tagged: Any
) -> None:
    server = serve("child", incident=incidents)
    with pytest.raises(ServerHungError, match=r"request_timeout\): TP3 waits"):
        server.get("/silent", timeout=0.3)
    assert incidents.reasons == ["startup_budget", "log_limit", "request_timeout"]
    assert tagged.alive() == {}


def test_a_request_out_of_time_at_a_healthy_server(serve: Any, incidents: Incidents) -> None:
    server = serve(incident=incidents)
    incidents.code, incidents.verdict = 75, "slow"
    with pytest.raises(requests.ReadTimeout, match=r"was spared \(verdict slow\), evidence: /evidence"):
        server.get("/silent", timeout=0.3)
    with pytest.raises(requests.ReadTimeout, match="/evidence"):
        server.get("/silent", timeout=0.3)
    assert incidents.reasons == ["startup_budget", "log_limit", "request_timeout"]  # the second one told nothing new
    assert server.get("/health").status_code == 200


def test_a_request_to_a_stopped_server(serve: Any) -> None:
    server = serve()
    server.stop()
    with pytest.raises(ServerExitedError, match="was stopped"):
        server.get("/health")


def test_a_stop_under_a_request(serve: Any) -> None:
    server = serve()
    later(0.3, lambda: server.control.stop(0.1))
    with pytest.raises(ServerExitedError, match=r"was stopped \(stop\)"):
        server.get("/silent")


def test_a_request_after_the_end_began_is_told_at_once(serve: Any, wait_for: Wait) -> None:
    """It listens no more, and does not obey SIGTERM: nothing new will be heard of it for a minute."""
    server = serve("deaf-to-term")
    server.control.stop(60.0)

    def refused() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", server.port)) == errno.ECONNREFUSED

    wait_for(refused)
    begin = time.monotonic()
    with pytest.raises(ServerExitedError, match=r"was stopped \(stop\)"):
        server.get("/health")
    assert time.monotonic() - begin < 10.0


def test_metrics(serve: Any) -> None:
    server = serve()
    assert server.metrics() == {"reqs_total": 5.5, "up": 1.0}
    assert server.samples()[1] == Sample("reqs_total", {"a": '2,"}'}, 3.5)
    with pytest.raises(requests.HTTPError):
        server.metrics("/nothing")


def test_metrics_of_all_kinds() -> None:
    text = 'a 1\nb{x="y",} NaN\nc{} +Inf\nd{x="a\\nb\\\\"} 1e3 # {id="1"} 0.5\n'
    text += "\n# TYPE a counter\ne\nf{x=1} 2\n{} 3\ng 0x\n"
    found = parse_metrics(text)
    assert [(s.name, dict(s.labels)) for s in found] == [
        ("a", {}),
        ("b", {"x": "y"}),
        ("c", {}),
        ("d", {"x": "a\nb\\"}),
        ("f", {}),
    ]
    assert found[1].value != found[1].value
    assert found[2].value == float("inf")


def test_ranks_and_phases(serve: Any, monkeypatch: pytest.MonkeyPatch, tagged: Any) -> None:
    server = serve("child", "escape")
    assert server.ranks() == {}
    assert isinstance(server.phases, dict)

    def role(cmdline: Any, comm: str) -> ProcessRole | None:
        number = {"child": 10, "escaped": 2}.get(cmdline[-1])
        return ProcessRole("worker", Rank(tp=number)) if number and "-c" in cmdline else None

    monkeypatch.setattr(type(get_engine("command")), "process_role", staticmethod(role))
    pids = {what: pid for pid, what in tagged.alive().items()}
    assert list(server.ranks().items()) == [
        ("TP2", pids["escaped"]),
        ("TP10", next(pid for pid, what in tagged.alive().items() if what == "child")),
    ]


def test_dump(serve: Any, incidents: Incidents) -> None:
    server = serve(incident=incidents)
    assert server.dump("manual") == Path("/evidence")
    assert server.get("/health").status_code == 200  # though the incident's code was 0
    assert incidents.reasons[-1] == "manual"
    assert [entry["reason"] for entry in server.incidents()] == ["manual"]


def test_a_reason_that_no_argument_can_hold(serve: Any, incidents: Incidents) -> None:
    server = serve(incident=incidents)
    server.dump("a\0b")
    assert incidents.reasons[-1] == r"a\x00b"


def test_a_log_that_its_server_removed_tells_no_phases(serve: Any) -> None:
    server = serve("remove-log")
    assert server.phases == {}
    assert server.get("/health").status_code == 200


def test_a_dump_without_an_incident(serve: Any) -> None:
    server = serve()
    with pytest.raises(ServerError, match="no incident was written"):
        server.dump()
    server.stop()
    with pytest.raises(ServerError):
        server.dump()


def test_stop_may_be_called_again_and_frees_the_port(serve: Any) -> None:
    server = serve()
    server.stop()
    server.stop()
    again = serve(port=server.port)
    assert again.port == server.port
    assert server.left == []


def test_exit_code_of_a_killed_server(serve: Any, wait_for: Wait) -> None:
    server = serve()
    os.kill(server.record.root.pid, signal.SIGSEGV)
    assert wait_for(server.exit_code) == -signal.SIGSEGV
    with pytest.raises(ServerExitedError, match="SIGSEGV"):
        server.get("/health")
