"""What a person reads, for 8 and for 512 ranks, and whatever the foreign text is."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.diagnose.merge import merge
from pytest_gpuserve.diagnose.model import Frame, Judgement, ProcessDump, ThreadStack
from pytest_gpuserve.diagnose.parse import read_dumps
from pytest_gpuserve.diagnose.verdict import judge
from pytest_gpuserve.engines.base import ProcessRole, Rank
from pytest_gpuserve.phases.reader import RankPhase
from pytest_gpuserve.procfs import ProcessId
from pytest_gpuserve.redaction.redact import Redactor
from pytest_gpuserve.report import gather, incident_json, logs
from pytest_gpuserve.report.blame import Decision
from pytest_gpuserve.report.incident_text import Words, stacks_text, summary
from pytest_gpuserve.report.pages import verdict_page
from pytest_gpuserve.server.record import ServerRecord
from pytest_gpuserve.spec import ServerSpec


def dump(number, *names, problem=None, state="S", title=None, **facts):
    frames = tuple(Frame(name, f"/srv/app/{name}.py", 7) for name in names)
    threads = (ThreadStack(100 + number, "MainThread", True, frames, False, False),) if names else ()
    role = ProcessRole("scheduler", Rank(tp=number))
    title = title or f"sglang::scheduler_TP{number}"
    return ProcessDump(ProcessId(100 + number, 1), role, title, state, "py-spy", threads, problem, facts)


def words(dumps, *, kill=True, answers=None, lines=None, phases=None, judgement=None, problems=(), test=None):
    spec = ServerSpec.from_mapping({"engine": "sglang", "model": "m", "tp": len(dumps) or 1})
    record = ServerRecord(
        spec, "sglang", ("python", "-m", "sglang.launch_server"), "http://127.0.0.1:1", "127.0.0.1", 1, (), "python",
        "c", ProcessId(1, 1), None, None, Path("/nonexistent"), Path("/nonexistent/server.log"), 0.0,
    )  # fmt: skip
    scene = gather.Scene(record, None, "no_progress", test, 12.0, [list(dumps)])
    scene.log = logs.Log(phases or {}, lines or {}, "")
    scene.answers = answers
    merged = merge(scene.rounds)
    evidence = scene.evidence(merged)
    return Words(
        scene=scene,
        evidence=evidence,
        merged=merged,
        judgement=judgement or judge(evidence),
        decision=Decision(kill, "why it is so"),
        owner=dump(900, "stuck_in_test", title="pytest"),
        probe="POST /v1/completions: no answer within 3 s",
        redact=Redactor([], home="/home/a", hosts=[]).redact,
        problems=problems,
    )


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_summary_is_short_for_any_number_of_ranks(count):
    dumps = [dump(n, "all_reduce" if n != 1 else "build_extension", "main") for n in range(count)]
    phases = {f"TP{n}": RankPhase("cuda_graph" if n != 1 else "weight_load", 0.0, n % 7, 9) for n in range(count)}
    lines = {f"TP{n}": [f"[TP{n}] line {i}" for i in range(3)] for n in range(count)}
    text = summary(words(dumps, phases=phases, lines=lines), "/where/it/is")
    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines()[1:])) < 2000
    assert "TP1" in text
    assert "build_extension" in text
    assert "weight_load 1/9" in text
    assert text.endswith("ended: why it is so\ndumps: /where/it/is")
    if count > 2:
        assert "[TP1] line 2" in text


def test_of_a_server_that_is_gone_nothing_is_said_to_be_spared_or_counted():
    found = words([])
    found = replace(
        found, scene=replace(found.scene, reason="exited"), decision=Decision(False, "it had exited by itself")
    )
    text = summary(found, "/where")
    assert "ended: it had exited by itself" in text
    assert "no process was left to look at" in text
    page = verdict_page({**incident_json.head(found.scene, 0.0), **incident_json.body(found, None, None, {})})
    assert "it ended by itself, " in page
    assert "; ended: it had exited by itself." in page
    assert "## Stacks" not in page
    assert "1 process in 1 class over 1 round" in summary(words([dump(0, "main")]), "/where").splitlines()


def test_log_and_stacks_that_differ_are_both_told():
    """The verdict is by both; what stands below it must not say something else."""
    dumps = [dump(0, "all_reduce", "init_memory_pool"), dump(1, "all_reduce", "main")]
    phases = {f"TP{n}": RankPhase("weight_load", 0.0, 64, 64, left=1.0) for n in range(2)}
    found = words(dumps, phases=phases, judgement=None)
    text = summary(found, "/where")
    assert "phases: TP0 weight_load 64/64 by the log, kv_cache by the stack; TP1 weight_load 64/64 (over)" in text
    ranks = incident_json.body(found, None, [], {})["ranks"]
    assert [(ranks[n]["phase"], ranks[n]["done"]) for n in ("TP0", "TP1")] == [("kv_cache", None), ("weight_load", 64)]


def test_every_rank_without_a_stack_says_why_and_ptrace_is_said_once():
    dumps = [
        dump(0, "all_reduce"),
        dump(1, problem="no permission to read its memory", ptrace="refused"),
        dump(2, problem="traced by pid 9 (strace), which must let go first"),
        dump(3, "all_reduce", ptrace="refused"),
    ]
    text = summary(words(dumps, problems=["the disk is full"]), "x")
    assert "TP1 (pid 101) has no stack: no permission" in text
    assert "TP2 (pid 102) has no stack: traced by pid 9" in text
    assert text.count("SYS_PTRACE") == 1
    assert "the disk is full" in text


def test_spared_server_names_the_tests_own_place():
    found = words([dump(0, "recv_requests")], kill=False, answers=True)
    library = (Frame("sleep", "/usr/lib/python3.12/time.py", 1), Frame("get", "/v/site-packages/requests/api.py", 2))
    main = found.owner.threads[0]
    text = summary(
        replace(found, owner=replace(found.owner, threads=(replace(main, frames=library + main.frames),))), "x"
    )
    assert "the server answers; the test is stuck in its own code, at stuck_in_test (stuck_in_test.py:7)." in text
    assert "spared: why it is so" in text
    assert "stuck_in_test (/srv/app/stuck_in_test.py:7)" in text
    assert "recv_requests" not in text
    assert len(text.splitlines()) < 20


def test_what_moved_before_but_not_while_we_looked_is_not_moving(tmp_path):
    """The watcher tells every few seconds only."""
    dumps = [dump(n, "all_reduce" if n else "sleeps_here", cpu_seconds=1.0, read_bytes=0) for n in range(3)]
    rounds = [[replace(d, taken=t) for d in dumps] for t in (0.0, 4.0)]
    told = {"state": "moving", "still": 1.0, "window": 60.0, "moving": ["log"], "monotonic": time.monotonic()}
    (tmp_path / "progress.json").write_text(json.dumps(told))
    (tmp_path / "server.log").write_text("x")
    found = words(dumps)
    scene = found.scene
    scene.record = replace(scene.record, directory=tmp_path, log=tmp_path / "server.log")
    scene.rounds, scene.log_size = rounds, 1
    assert scene.evidence(merge(rounds)).progress.state == "suspect"
    assert judge(scene.evidence(merge(rounds))).verdict == "hang"
    busy = [rounds[0], [replace(d, facts={"cpu_seconds": 3.0}) for d in rounds[1]]]
    scene.rounds = busy
    assert scene.evidence(merge(busy)).progress.state == "moving"
    scene.rounds, scene.log_size = rounds, 0  # the log has grown
    assert scene.evidence(merge(rounds)).progress.state == "moving"


def test_stacks_text_reads_back():
    dumps = [dump(0, "all_reduce", "main"), dump(1, problem="gone"), dump(2, "load (x)", "main")]
    text = stacks_text(merge([dumps]), [dumps], dump(900, "stuck_in_test"))
    again = {d.process.pid: d for d in read_dumps(text)}
    assert [f.name for f in again[100].main.frames] == ["all_reduce", "main"]
    assert again[102].main.frames[0].name == "load (x)"
    assert again[1000].main.frames[0].name == "stuck_in_test"
    assert "# gone" in text


@pytest.mark.parametrize("idents", [(None, None, None), (0x7F01, 0x7F02, 0x7F03)])
def test_stacks_of_threads_without_a_number_read_back_as_one_process(idents):
    """Those of the fault handler, and of a Python before 3.11 that py-spy did not stop."""
    threads = [
        ThreadStack(None, name, name is None, (Frame(f"f{n}", "/srv/app/a.py", n + 1),), ident=ident)
        for n, (name, ident) in enumerate(zip(("a", "b", None), idents, strict=True))
    ]
    first = replace(dump(0, "x"), threads=tuple(threads))
    again = read_dumps(stacks_text(merge([[first]]), [[first]], None))
    assert [(d.process.pid, len(d.threads), d.main.frames[0].name) for d in again] == [(100, 3, "f2")]


HOSTILE = st.text(st.sampled_from("`<>[]()!*\\#\n\t ab\x1b\u202e|_&"), max_size=60)


@settings(max_examples=60, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE)
def test_foreign_text_is_no_markup_outside_of_code(one, two, three):
    judgement = Judgement("hang", None, (), (), (), ((one, two),), 0.5, f"text {three}", ((two, one),))
    found = words([dump(0, "f", title=f"t{one}")], judgement=judgement, lines={"server": [two, three]}, test=three)
    found = replace(found, decision=Decision(True, one))
    page = verdict_page({**incident_json.head(found.scene, 0.0), **incident_json.body(found, None, None, {})})
    assert "\x1b" not in page
    assert "\u202e" not in page
    inside = None
    outside = []
    for line in page.splitlines():
        fence = re.match(r"`{3,}", line)
        if inside is None and fence and line.endswith("text"):
            inside = fence[0]
        elif inside is not None and line == inside:
            inside = None
        elif inside is None:
            outside.append(line)
    assert inside is None
    plain = re.sub(r"\\\\|\\[*\[\]`]", "", "\n".join(outside))
    assert "<" not in plain
    assert not re.search(r"[`\[\]*]", plain)
