"""Alarms: argv at a deadline, under a limit, then the end of the server, unless it is spared."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.errors import ServerError
from pytest_gpuserve.plugin.options import alarm_limit, incident_limit, last_resort
from pytest_gpuserve.server.loop import STARVED
from pytest_gpuserve.server.record import processes

Wait = Callable[..., Any]


def script(code: str, *more: str) -> list[str]:
    return [sys.executable, "-c", f"import os,sys,time,subprocess\n{code}", *more]


def events(server: Any, *kinds: str) -> list[tuple[str, Any]]:
    return [(e.kind, e.data.get("name")) for e in server.control.events() if e.kind in kinds]


def ended(server: Any, wait_for: Wait) -> None:
    wait_for(lambda: server.control.last("stopped"))
    assert server.control.last("killing").data["why"] == "alarm"


def test_the_deadline_runs_argv_then_ends_the_server(serve: Any, tagged: Any, tmp_path: Path, wait_for: Wait) -> None:
    server = serve("ignore-term", "escape")
    seen = tmp_path / "seen"
    code = f"open({str(seen)!r}, 'w').write(os.getcwd() + '|' + str(os.environ.get('GPUSERVE_COOKIE')))"
    deadline = time.monotonic() + 0.3
    server.control.arm("test_timeout", deadline, script(code), 10)
    assert server.control.status()["armed"] == ["test_timeout"]
    ended(server, wait_for)
    assert seen.read_text() == f"{Path.cwd()}|None"
    fired = server.control.last("fired")
    assert deadline <= fired.monotonic < deadline + 2.0
    order = [e.kind for e in server.control.events()]
    assert order.index("fired") < order.index("dumped") < order.index("killing") < order.index("exited")
    assert tagged.alive() == {}


def test_spare_codes_and_kill_false_let_it_live(serve: Any, wait_for: Wait) -> None:
    server = serve()
    server.control.fire("request_timeout", script("sys.exit(75)"), 10)
    wait_for(lambda: events(server, "spared"))
    server.control.fire("other", script("sys.exit(9)"), 10, spare=(8, 9))
    wait_for(lambda: len(events(server, "spared")) == 2)
    server.control.fire("manual", script("sys.exit(0)"), 10, kill=False)
    wait_for(lambda: len(events(server, "spared")) == 3)
    assert server.get("/health").text == "ok"
    assert server.control.status()["fired"] == ["request_timeout", "other", "manual"]
    server.control.fire("last", script("sys.exit(0)"), 10)
    ended(server, wait_for)


def test_an_argv_over_its_limit_is_killed_with_its_children(serve: Any, tagged: Any, wait_for: Wait) -> None:
    server = serve()
    child = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)', '{tagged.tag}', 'of-the-dump'])"
    server.control.fire("slow", script(f"{child}; time.sleep(300)", tagged.tag, "dump"), 0.8)
    wait_for(lambda: "of-the-dump" in tagged.alive().values())
    begun = time.monotonic()
    ended(server, wait_for)
    assert server.control.last("dumped").data["code"] is None
    assert time.monotonic() - begun < 10
    assert tagged.alive() == {}


def test_over_the_limit_and_kill_false_is_spared(serve: Any, wait_for: Wait) -> None:
    server = serve()
    server.control.fire("soft", script("time.sleep(300)"), 0.3, kill=False)
    wait_for(lambda: events(server, "spared"))
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("argv", [["/no/such/program"], [], ["/"]])
def test_an_argv_that_cannot_run_still_ends_the_server(serve: Any, wait_for: Wait, argv: list[str]) -> None:
    server = serve()
    server.control.fire("broken", argv, 10)
    ended(server, wait_for)
    assert server.control.last("dumped").data["code"] == 127


def test_a_second_alarm_waits_for_the_first(serve: Any, tmp_path: Path, wait_for: Wait) -> None:
    server = serve()
    out = tmp_path / "out"
    now = time.monotonic()
    for name, code in (("one", 75), ("two", 75), ("three", 0)):
        line = f"f = open({str(out)!r}, 'ab', 0); f.write(b'+{name} '); time.sleep(0.3); f.write(b'-{name} ')"
        server.control.arm(name, now + 0.1, script(f"{line}; sys.exit({code})"), 10)
    with suppress(ServerError):  # each look wakes the supervisor up
        wait_for(lambda: server.control.status()["stopping"])
    ended(server, wait_for)
    assert out.read_text() == "+one -one +two -two +three -three "


def test_one_that_ends_the_server_makes_the_others_moot(serve: Any, tmp_path: Path, wait_for: Wait) -> None:
    server = serve()
    never = tmp_path / "never"
    server.control.arm("later", time.monotonic() + 0.5, script(f"open({str(never)!r}, 'w')"), 10)
    server.control.fire("now", script("time.sleep(0.8)"), 10)
    ended(server, wait_for)
    assert events(server, "fired") == [("fired", "now")]
    assert not never.exists()


def test_disarmed_and_replaced_alarms_do_not_fire(serve: Any, wait_for: Wait) -> None:
    server = serve()
    server.control.arm("a", time.monotonic() + 0.3, script("sys.exit(0)"), 10)
    server.control.arm("b", time.monotonic() + 0.3, script("sys.exit(0)"), 10)
    server.control.arm("b", time.monotonic() + 0.4, script("sys.exit(75)"), 10)
    assert server.control.disarm("a") is True
    assert server.control.disarm("a") is False
    wait_for(lambda: events(server, "spared"))
    time.sleep(0.2)
    assert events(server, "fired", "killing") == [("fired", "b")]


def test_processes_of_a_dump_are_not_the_servers(serve: Any, tagged: Any, wait_for: Wait) -> None:
    server = serve("child")
    child = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)', '{tagged.tag}', 'of-the-dump'"
    code = f"{child}], start_new_session=True); time.sleep(1.5); sys.exit(75)"
    server.control.fire("look", script(code, tagged.tag, "dump"), 20)
    wait_for(lambda: "of-the-dump" in tagged.alive().values())
    names = sorted(tagged.alive()[entry.pid] for entry in processes(server.record))
    assert names == ["child", "child"]  # the server, whose last word is that, and the child itself
    wait_for(lambda: events(server, "spared"))
    assert server.get("/health").status_code == 200


def test_a_stop_waits_for_the_dump(serve: Any, tmp_path: Path, wait_for: Wait) -> None:
    server = serve()
    begun, done = tmp_path / "begun", tmp_path / "done"
    code = f"open({str(begun)!r}, 'w'); time.sleep(1); open({str(done)!r}, 'w'); sys.exit(75)"
    server.control.fire("look", script(code), 20)
    wait_for(begun.exists)
    server.stop(0.1)
    assert done.exists()
    assert server.control.last("stopped")


def test_requests_that_make_no_sense_are_refused(serve: Any) -> None:
    server = serve()
    nan = float("nan")
    bad: list[dict[str, Any]] = [
        {"do": "dance"},
        {"do": "arm"},
        {"do": "arm", "name": "x", "deadline": nan, "argv": ["true"]},
        {"do": "arm", "name": "x", "deadline": -1, "argv": ["true"]},
        {"do": "arm", "name": "x", "deadline": 1e300, "argv": ["true"]},
        {"do": "arm", "name": "x", "deadline": 1, "argv": "true"},
        {"do": "arm", "name": "x", "deadline": 1, "argv": [1]},
        {"do": "arm", "name": "x", "deadline": 1, "argv": ["a\0b"]},
        {"do": "fire", "name": "x", "argv": ["true"], "limit": nan},
        {"do": "fire", "name": "x", "argv": ["true"], "spare": 5},
        {"do": "stop", "grace": "soon"},
    ]
    for request in bad:
        with pytest.raises(ServerError, match="refused"):
            server.control.request(**request)
    status = server.control.status()
    assert (status["armed"], status["fired"], status["stopping"]) == ([], [], False)
    server.control.stop(0)
    with pytest.raises(ServerError):
        server.control.fire("late", ["true"], 1)


def test_events_are_lines_of_json_with_both_clocks(serve: Any) -> None:
    server = serve()
    lines = [json.loads(line) for line in (server.directory / "events.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["event"] != "cgroup"]  # only where this user may make one
    assert [line["event"] for line in lines] == ["armed", "started", "disarmed"]
    assert all(abs(line["time"] - time.time()) < 60 for line in lines)
    assert all(abs(line["monotonic"] - time.monotonic()) < 60 for line in lines)
    assert lines[1]["pid"] == server.record.root.pid == server.control.status()["pid"]
    assert os.getsid(lines[1]["pid"]) == lines[1]["pid"]


def test_a_dump_that_waits_for_a_cpu_has_more_time(serve: Any, wait_for: Wait) -> None:
    """The dump is kept from its CPU for more than 1.2 s and sleeps until 2.6 s are over; its limit is 2.

    Mutation: ``Supervisor.starved`` always False.
    """
    server = serve()
    starve = """
        begun = time.monotonic()
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        waited = lambda: int(open("/proc/self/schedstat").read().split()[1]) / 1e9
        while waited() < 1.2: pass
        for rival in rivals: rival.kill()
        time.sleep(max(0, begun + 2.6 - time.monotonic()))
        sys.exit(75)
    """
    server.control.fire("busy", script(cleandoc(starve)), 2.0)
    wait_for(lambda: events(server, "dumped"))
    dumped = server.control.last("dumped").data
    assert dumped["code"] == 75
    assert dumped["seconds"] > 2.3


def test_pytest_timeout_comes_when_a_starved_dump_is_over_and_the_server_ended() -> None:
    for budget in (2.0, 30.0):
        assert last_resort(budget) >= alarm_limit(budget) * (1 + STARVED) + 0.5 * budget
        assert incident_limit(budget) < alarm_limit(budget)
