"""Nothing that a server started outlives its owner by more than grace + 1 s, whatever kills the owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs

GRACE = 0.5
SLACK = 3.0  # 1.0 promised; the rest is for machines that do other things


@pytest.fixture
def own(tagged: Any, programs: Path, state: Path) -> Iterator[Callable[..., Any]]:
    """Start owner.py; returns (its process, the server's directory, what it said)."""
    started: list[subprocess.Popen[str]] = []

    def start(**config: Any) -> tuple[subprocess.Popen[str], Path, list[dict[str, Any]]]:
        config.setdefault("grace", GRACE)
        argv = [sys.executable, str(programs / "owner.py"), str(state), tagged.tag, json.dumps(config)]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        said: list[dict[str, Any]] = []
        assert process.stdout is not None
        while not said or "directory" not in said[-1]:
            line = process.stdout.readline()
            assert line, "the owner died"
            said.append(json.loads(line))
        return process, Path(said[-1]["directory"]), said

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def kinds(directory: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (directory / "events.jsonl").read_text().splitlines()]


def supervisors(directory: Path) -> list[int]:
    """The supervisor of a server and its helper: nothing of ours may stay either."""
    pid = json.loads((directory / "server.json").read_text())["supervisor"][0]
    return [pid, *procfs.descendants(pid)]


@pytest.mark.parametrize("escape", ["escape", "escape-clear"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, None])
def test_nothing_is_left(
    own: Callable[..., Any], tagged: Any, wait_for: Callable[..., Any], number: int | None, escape: str
) -> None:
    owner, directory, _ = own(what=["ignore-term", "child", escape], then="_exit" if number is None else None)
    assert sorted(tagged.alive(owner.pid).values()) == ["child", escape, "escaped"]
    begin = time.monotonic()
    if number is None:
        owner.stdin.write("\n")
        owner.stdin.flush()
    else:
        os.kill(owner.pid, number)
    owner.wait()
    gone = tagged.gone_within(GRACE + SLACK)
    print(f"all gone after {time.monotonic() - begin:.2f} s")
    assert gone is not None, tagged.alive()
    wait_for(lambda: kinds(directory)[-1] == "stopped")


def test_a_polite_server_gets_its_grace(own: Callable[..., Any], tagged: Any, wait_for: Callable[..., Any]) -> None:
    owner, directory, _ = own(grace=20.0)
    owner.kill()
    assert tagged.gone_within(8.0, owner.pid) is not None
    wait_for(lambda: kinds(directory)[-1] == "stopped")
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert [event["code"] for event in events if event["event"] == "exited"] == [-signal.SIGTERM]


def test_the_second_owner_counts(own: Callable[..., Any], tagged: Any) -> None:
    controller = subprocess.Popen(["sleep", "100"])
    try:
        owner, directory, _ = own(what=["ignore-term"], owners=[controller.pid])
        controller.kill()
        controller.wait()
        assert tagged.gone_within(GRACE + SLACK, owner.pid) is not None
        assert owner.poll() is None
        assert "killing" in kinds(directory)
    finally:
        controller.kill()
        controller.wait()


def test_an_owner_that_was_dead_before(own: Callable[..., Any], tagged: Any) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(AssertionError, match="the owner died"):
        own(what=[], owners=[gone.pid])
    assert tagged.gone_within(GRACE + SLACK) is not None


def test_the_supervisor_goes_too(own: Callable[..., Any], wait_for: Callable[..., Any]) -> None:
    owner, directory, _ = own()
    pids = supervisors(directory)
    assert len(pids) >= 3
    owner.kill()
    owner.wait()
    wait_for(lambda: not any((found := procfs.stat(pid)) and found.alive for pid in pids), 8.0)


def test_a_deadline_while_the_owner_holds_the_gil(own: Callable[..., Any], tmp_path: Path, tagged: Any) -> None:
    """A Python timer in the owner could not fire: the alarm is not its business."""
    mark = tmp_path / "dumped"
    alarm = {"after": 0.5, "argv": [sys.executable, "-c", f"open({str(mark)!r}, 'w')"], "limit": 10}
    owner, directory, said = own(alarm=alarm, then="gil")
    out, _ = owner.communicate(timeout=30)
    events = {event["event"]: event for event in map(json.loads, (directory / "events.jsonl").read_text().splitlines())}
    assert mark.exists()
    woke = json.loads(out)["woke"]
    assert said[0]["deadline"] <= events["fired"]["monotonic"] < events["stopped"]["monotonic"] < woke
    assert events["dumped"]["code"] == 0
    assert events["killing"]["why"] == "alarm"
    assert tagged.gone_within(2.0, owner.pid) is not None


@pytest.mark.parametrize(("takes", "finished"), [(0.3, True), (60.0, False)])
def test_a_dump_in_progress_gets_the_grace_and_no_more(
    own: Callable[..., Any], tmp_path: Path, tagged: Any, wait_for: Callable[..., Any], takes: float, finished: bool
) -> None:
    begun, mark = tmp_path / "begun", tmp_path / "dumped"
    code = f"import time; open({str(begun)!r}, 'w'); time.sleep({takes}); open({str(mark)!r}, 'w')"
    alarm = {"after": 0.2, "argv": [sys.executable, "-c", code, tagged.tag], "limit": 100}
    owner, directory, _ = own(alarm=alarm, grace=1.5)
    wait_for(begun.exists)
    owner.kill()
    begin = time.monotonic()
    owner.wait()
    assert tagged.gone_within(1.5 + SLACK) is not None
    print(f"all gone after {time.monotonic() - begin:.2f} s")
    wait_for(lambda: kinds(directory)[-1] == "stopped")
    assert mark.exists() == finished
    assert "dumped" in kinds(directory)
