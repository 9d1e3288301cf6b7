"""What is collected of an incident, and in what order: our own questions are no progress of the server's."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.diagnose.evidence import Departure, Progress
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.engines.base import Rank
from pytest_gpuserve.report import gather, log_parts, logs
from pytest_gpuserve.report.blame import Witnesses, decide
from pytest_gpuserve.server.record import ServerRecord, boot_id
from pytest_gpuserve.spec import ServerSpec

Writing = Callable[[str, str], Path]


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    """Writes a log, and then goes on with more, 200 times a second, cutting it again and again."""
    over, threads = threading.Event(), list[threading.Thread]()

    def write(path: Path, more: str) -> None:
        size = path.stat().st_size
        while not over.wait(0.005):
            with path.open("a") as file:
                file.write(more)
            if path.stat().st_size > size + (1 << 20):
                os.truncate(path, size)

    def begin(first: str, more: str) -> Path:
        path = tmp_path / f"log{len(threads)}"
        path.write_text(first)
        threads.append(threading.Thread(target=write, args=(path, more)))
        threads[-1].start()
        return path

    yield begin
    over.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def record(tmp_path: Path) -> ServerRecord:
    me = procfs.process_id(os.getpid())
    assert me
    return ServerRecord(
        spec=ServerSpec("sglang", tp=2),
        engine="sglang",
        argv=(),
        url="http://127.0.0.1:1",
        host="127.0.0.1",
        port=1,
        gpus=(),
        python="python",
        cookie="",
        owner=me,
        supervisor=me,
        root=None,
        directory=tmp_path,
        log=tmp_path / "server.log",
        started=0.0,
        boot=boot_id(),
    )


def scene(record: ServerRecord, monkeypatch: pytest.MonkeyPatch, now: Progress) -> gather.Scene:
    """An incident that began 5 s ago, when nothing had moved for 40 s."""
    found = gather.Scene(record, None, "test_timeout")
    found.before, found.began = Progress("suspect", 40.0, 45.0, "tokens"), time.monotonic() - 5
    monkeypatch.setattr(gather, "progress", lambda directory: now)
    return found


def test_a_log_line_that_our_own_probe_called_forth_is_no_progress(
    record: ServerRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scene(record, monkeypatch, Progress("moving", 0.3, 45.0, "log", ("log",)))
    seen = found.evidence(found.merged).progress
    assert seen is not None
    assert seen.state == "suspect"
    assert seen.still >= 45


def test_a_flood_is_no_answer_to_our_probe(record: ServerRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line a second may be what our question called forth; a megabyte a second is not."""
    found = scene(record, monkeypatch, Progress("moving", 0.5, 45.0, "log", ("log",)))
    monkeypatch.setattr(logs, "flood", lambda path, since: "noise")
    assert not found.evidence(found.merged).ready
    (record.directory / "ready").touch()
    evidence = found.evidence(found.merged)
    assert evidence.ready
    assert evidence.progress
    assert (evidence.flood, evidence.progress.still) == ("noise", 0.5)


TOKENS = Progress("moving", 0.1, 45.0, "tokens", ("tokens", "log"))
LOG = Progress("moving", 0.1, 45.0, "log", ("log", "(CPU of TP0)"))


@pytest.mark.parametrize(
    ("reason", "seen", "progress", "spared"),
    [
        ("log_limit", {"responds": True}, LOG, True),
        ("log_limit", {"responds": False}, LOG, False),
        ("test_timeout", {"responds": True, "waits": False}, LOG, True),
        ("test_timeout", {"responds": True, "waits": True}, LOG, False),
        ("test_timeout", {"responds": True, "waits": None}, LOG, False),
        ("log_limit", {"responds": True, "answers": False}, TOKENS, True),
        ("log_limit", {"responds": True, "answers": False}, LOG, False),
        ("log_limit", {"responds": False, "answers": False}, TOKENS, False),
    ],
)
def test_who_answers_while_one_line_repeats_does_not_hang(
    record: ServerRecord,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    seen: dict[str, bool | None],
    progress: Progress,
    spared: bool,
) -> None:
    found = scene(record, monkeypatch, progress)
    found.reason = reason
    for name, value in seen.items():
        setattr(found, name, value)
    monkeypatch.setattr(logs, "flood", lambda path, since: "noise")
    evidence = found.evidence(found.merged)
    assert evidence.flood == ("" if spared else "noise")
    assert evidence.progress
    assert evidence.progress.last == progress.last  # the line is no echo of our question
    assert decide("log_limit", Witnesses(answers=found.answers, flood=bool(found.flood))).kill is not spared


def test_tokens_that_move_are_progress_whenever_they_do(record: ServerRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scene(record, monkeypatch, Progress("moving", 0.3, 45.0, "tokens", ("tokens",)))
    seen = found.evidence(found.merged).progress
    assert seen is not None
    assert seen.state == "moving"


@pytest.mark.parametrize(
    ("line", "more"),
    [
        (b'[2026-01-01 10:00:00] INFO:     127.0.0.1:4 - "GET /metrics HTTP/1.1" 200 OK\n', False),
        (b"[2026-01-01 10:00:00 TP0] Decode batch, #running-req: 1, #token: 42\n", True),
        (b"\n", False),
    ],
)
def test_heartbeats_are_nothing_that_the_log_says(tmp_path: Path, line: bytes, more: bool) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"[2026-01-01 09:00:00 TP0] Load weight begin.\n")
    size = log.stat().st_size
    with log.open("ab") as out:
        out.write(line)
    assert logs.said_more(log, size, get_engine("sglang")) is more


@pytest.mark.parametrize("engine", ["sglang", "vllm", "llama_cpp", "sim", "command"])
@pytest.mark.parametrize("page", ["/", "/health", "/v1/models", "/metrics", "/anything?a=1"])
def test_pages_that_we_ask_for_are_no_progress(tmp_path: Path, engine: str, page: str) -> None:
    """Else our own question makes a hang look like a server that moves: no culprit, "too short to tell"."""
    log = tmp_path / "server.log"
    log.write_bytes(b'INFO:     127.0.0.1:4 - "GET %s HTTP/1.1" 404 Not Found\n' % page.encode())
    assert not logs.said_more(log, 0, get_engine(engine))


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: '/models/kimi'", "config"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/models/kimi/vocab'", "config"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/drafts/x'", "config"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/models/kimi-cache/lock'", "crash"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/dev/shm/psm_17'", "crash"),
        ("my_server: error: --tp 8 needs eight devices", "config"),
        ("/usr/bin/python3: can't open file '/srv/none.py': [Errno 2] No such file or directory", "config"),
        ("/usr/bin/python3: No module named my_server", "config"),
    ],
)
def test_a_mistake_on_the_command_line_is_no_crash(record: ServerRecord, line: str, verdict: str) -> None:
    """Mutations: ``logs._named`` always False or always True; the causes usage and no_such_script taken out."""
    spec = ServerSpec("command", model="/models/kimi")
    asked = replace(record, spec=spec, engine="command", argv=("python", "--draft=/drafts/x"))
    asked.log.write_text(f'starting\nTraceback (most recent call last):\n  File "s.py", line 3, in run\n{line}\n')
    if "Error:" not in line:
        asked.log.write_text(f"usage: my_server [-h]\n{line}\n")
    fact = logs.said(asked).facts[0]
    assert (fact.claim, fact.verdict) == (line, verdict)


@pytest.mark.parametrize(
    "line", ["ninja: error: loading 'build.ninja': No such file", "x86_64-linux-gnu-gcc: error: x.o"]
)
def test_a_compilers_error_is_no_mistake_on_the_command_line(record: ServerRecord, line: str) -> None:
    record = replace(record, engine="command")
    record.log.write_text(f"{line}\n")
    assert all(fact.verdict != "config" for fact in logs.said(record).facts)


def test_the_end_of_a_long_log_begins_with_a_whole_line(record: ServerRecord) -> None:
    line = f"\x1b[32mstep\r{'x' * 90} done\x1b[0m"
    record.log.write_text("\n".join([line] * 4000))
    tail = logs.read(record, None).tail.split("\n")
    assert set(tail) == {f"{'x' * 90} done"}  # no piece, no colour, of a bar the last state
    assert len(tail) > 2000
    record.log.write_text(f"{line}\n")
    assert logs.read(record, None).tail.split("\n") == [f"{'x' * 90} done", ""]


def test_who_ended_by_itself_is_read_in_order_and_no_more(record):
    """Named by the log where the title did not say; what we ended is not among them."""
    lines = [
        {"monotonic": 4.0, "pid": 12, "label": "sh", "role": "other", "code": 0},
        {"monotonic": 5.0, "pid": 11, "label": "python3", "role": "other", "code": -9},
        {"monotonic": 7.5, "pid": 10, "label": "TP0", "role": "worker", "code": None},
        {"monotonic": 9.5, "pid": 9, "label": "engine_core", "role": "engine_core", "code": -15},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (record.directory / "exits.jsonl").write_text(text + '{"monotonic": 9.')
    ranks = {11: Rank(tp=1), 10: Rank(tp=0)}
    assert [d.label for d in gather.departures(record, ranks)] == ["TP1", "TP0", "engine_core"]
    killing = {"event": "killing", "time": 1.0, "monotonic": 9.0, "why": "stop"}
    (record.directory / "events.jsonl").write_text(json.dumps(killing) + "\n")
    assert gather.departures(record, ranks) == (Departure("TP1", 11, 5.0, -9), Departure("TP0", 10, 7.5))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["waiting"], "waiting"),
        (["2026-11-30 05:19:{n} ERROR try {n} failed"], "2026-11-30 05:19:99 ERROR try 99 failed"),
        (["one", "two"], ""),
        (["", "waiting"], "waiting"),
        ([], ""),
    ],
)
def test_a_flood_is_one_line_over_and_over(writing: Writing, lines: list[str], told: str) -> None:
    text = "".join(f"{line}\n".format(n=n) for n in range(100) for line in lines)
    path = writing("something\nelse\n" * 10_000 + text * 100, text * 100)
    assert logs.flood(path, 0) == told
    assert logs.flood(path, 1 << 40) == told  # it was cut at its limit meanwhile
    assert logs.flood(path, None) == logs.flood(path.with_name("no"), 0) == ""


def test_a_few_long_lines_are_no_flood(writing: Writing) -> None:
    line = "x" * 5000 + "\n"
    assert logs.flood(writing(line * 1000, line * 100), 0) == ""


def test_what_repeats_itself_slowly_is_no_flood(writing: Writing) -> None:
    path = writing("GET /health\n" * 50_000, "GET /health\n")
    assert logs.flood(path, 0) == ""
    path = writing("GET /health\n" * 50_000, "")
    assert logs.flood(path, path.stat().st_size) == ""


def test_a_log_that_was_cut_meanwhile_has_said_more(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\n")
    assert logs.said_more(path, 1000, None)
    assert not logs.said_more(path, 4, None)


def test_the_cause_is_found_far_down_a_log(tmp_path: Path) -> None:
    """A line by its number, whatever stands before it."""
    path = tmp_path / "log"
    path.write_bytes(b"noise\n" * 700_000 + b"the cause\n" + b"noise\n" * 100)
    with path.open("rb") as file:
        around = b"".join(log_parts._around(file, 700_001)).splitlines()
    assert len(around) == 2 * log_parts.AROUND + 1
    assert around[log_parts.AROUND] == b"> 700001: the cause"
    assert around[0] == b"  699941: noise"
    with path.open("rb") as file:
        assert b"".join(log_parts._around(file, 3)).splitlines()[2] == b"> 3: noise"
        assert not list(log_parts._around(file, 2_000_000))
