"""Incidents of real processes: what is on disk, who is blamed, and what is left when it is killed half way."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.diagnose.parse import read_dumps, read_file
from pytest_gpuserve.report.incident import EXIT_KILL, EXIT_SPARE

SECRETS = ("never-to-be-seen-17", "my private words", "token-of-the-env-9", "in-the-spec-42", "given-as-flag-31")


def files(directory):
    return {str(p.relative_to(directory)): p for p in Path(directory).rglob("*") if p.is_file()}


def test_rank_in_another_place(fake):
    server = fake(ranks=4, answer="no", faults=["2=late"])
    code, line = server.incident("no_progress", after=12, test="tests/test_x.py::test_y", rounds=2)
    assert code == EXIT_KILL
    assert line["verdict"] == "hang"
    assert line["culprits"] == ["TP2"]
    assert line["test"] == "tests/test_x.py::test_y"
    path, raw = Path(line["incident"]), Path(line["raw"])
    assert path.parent == server.artifacts
    assert re.fullmatch(r"\d{8}T\d{6}-sglang-tp4-no_progress", path.name)
    found = files(path)
    for rank, pid in server.ranks().items():
        (dump, *_) = read_file(found[f"stacks/TP{rank}.{pid}.json"])
        assert dump.label == f"TP{rank}"
        assert dump.main.frames[0].name == ("load_extension" if rank == 2 else "all_reduce")
    assert {"incident.json", "verdict.md", "stacks.txt", "log_tail.txt", "timeline.jsonl", ".gpuserve"} <= set(found)
    happened = [json.loads(entry) for entry in found["timeline.jsonl"].read_text().splitlines()]
    loading = {e["rank"]: e["end"] for e in happened if e["kind"] == "phase" and e["phase"] == "weight_load"}
    assert loading == {"TP0": None, "TP1": None, "TP2": None, "TP3": None}
    assert "incident: no_progress" in [e.get("text") for e in happened]
    assert f"stacks/pytest.{os.getpid()}.json" in found
    text = line["text"]
    assert "TP2" in text
    assert "load_extension" in text
    assert "phases: TP0-3 weight_load" in text
    assert "Load weight begin" in text
    assert str(path) in text
    assert len(text.splitlines()) <= 60
    content = json.loads(found["incident.json"].read_text())
    assert content["schema"] == "gpuserve.incident/1"
    assert content["complete"] is True
    assert content["rounds"] == 2
    assert content["kill"] is True
    assert set(content["ranks"]) >= {"TP0", "TP1", "TP2", "TP3"}
    assert content["ranks"]["TP2"]["leaf"].startswith("load_extension")
    assert content["ranks"]["TP2"]["phase"] == "weight_load"
    assert content["missing"] == []
    assert "# hang: sglang-tp4" in found["verdict.md"].read_text()
    again = {d.process.pid: d for d in read_dumps(found["stacks.txt"].read_text())}
    assert {again[pid].main.frames[0].name for pid in server.ranks().values()} == {"all_reduce", "load_extension"}
    assert stat.S_IMODE(raw.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in files(raw).values())
    assert not [name for name in files(server.artifacts) if ".new" in name]
    for name, file in files(server.artifacts).items():
        for secret in SECRETS:
            assert secret not in file.read_text(), name
    assert "never-to-be-seen-17" in (raw / "log_tail.txt").read_text()  # raw evidence is kept where only we can read
    assert not any(secret in text for secret in SECRETS)


def test_healthy_server_is_spared_and_the_test_is_shown(fake):
    server = fake(ranks=2, answer="yes")
    code, line = server.incident("test_timeout", after=5, limit=6, rounds=1)
    assert code == EXIT_SPARE
    assert "the server answers; the test is stuck in its own code" in line["text"]
    assert line["verdict"] == "ready"
    assert line["kill"] is False
    content = json.loads((Path(line["incident"]) / "incident.json").read_text())
    assert content["probe"]["answers"] is True
    assert content["pytest"]["pid"] == os.getpid()
    assert content["pytest"]["leaf"]
    assert not [name for name in files(line["incident"]) if ".native." in name]  # no long stop of what is healthy


def test_silent_server_is_to_blame_for_a_tests_timeout(fake):
    server = fake(ranks=2, answer="no")
    code, line = server.incident("test_timeout", after=5, limit=6, rounds=1)
    assert code == EXIT_KILL
    assert line["kill"] is True
    content = json.loads((Path(line["incident"]) / "incident.json").read_text())
    assert content["probe"]["answers"] is False
    assert content["why"] == "a completion sent just now was not answered"


def test_soft_and_manual_kill_nothing(fake):
    server = fake(ranks=2, answer="no", faults=["1=late"])
    assert server.incident("test_timeout", soft=True, limit=5, rounds=1)[0] == EXIT_SPARE
    line = server.line()
    assert "mode=soft: it would have been ended" in line["text"]
    (server.directory / "incidents.jsonl").unlink()
    code, line = server.incident("manual", limit=5, rounds=1)
    assert code == EXIT_SPARE
    assert server.process.poll() is None


def test_stopped_rank_stays_stopped_and_is_to_blame(fake):
    server = fake(ranks=3, answer="no")
    pid = server.ranks()[1]
    os.kill(pid, signal.SIGSTOP)
    server.until(lambda: procfs.stat(pid).state == "T", "SIGSTOP")
    code, line = server.incident("request_timeout", limit=6, rounds=1)
    assert code == EXIT_KILL
    assert line["culprits"] == ["TP1"]
    assert procfs.stat(pid).state == "T"
    (dump, *_) = read_file(Path(line["incident"]) / "stacks" / f"TP1.{pid}.json")
    assert dump.main.frames[0].name == "all_reduce"


def test_dead_rank_is_named_with_its_exit_code(fake):
    server = fake(ranks=3, answer="no", faults=["1=die"])
    code, line = server.incident("no_progress", limit=6, rounds=1)
    assert code == EXIT_KILL
    assert line["verdict"] == "crash"
    assert line["culprits"] == ["TP1"]
    content = json.loads((Path(line["incident"]) / "incident.json").read_text())
    assert "TP1" in content["missing"]
    assert "exit code 7" in line["text"]


def test_artifacts_off_and_artifacts_that_cannot_be_written(fake, tmp_path):
    server = fake(ranks=1, answer="yes")
    code, line = server.incident("manual", artifacts=False, limit=5, rounds=1)
    assert code == EXIT_SPARE
    assert line["incident"] == line["raw"]
    assert not server.artifacts.exists()
    assert "incident.json" in files(line["incident"])
    (server.directory / "incidents.jsonl").unlink()
    server.artifacts.write_text("a file")
    code, line = server.incident("manual", limit=5, rounds=1)
    assert line["incident"] == line["raw"]
    assert "cannot be written" in line["text"]


def test_ptrace_refused_is_said_once(fake, targets):
    server = fake(ranks=4, answer="no", faults=["2=late"])
    launcher = [sys.executable, "-c", targets.DENY, targets.PTRACE]
    code, line = server.incident("no_progress", launcher=launcher, limit=6, rounds=1)
    if "no seccomp" in server.stderr:
        pytest.skip(server.stderr)
    assert code == EXIT_KILL
    assert line["text"].count("SYS_PTRACE") == 1
    assert "TP2" in line["culprits"]
    verdict = (Path(line["incident"]) / "verdict.md").read_text()
    assert verdict.count("SYS_PTRACE") == 1


def test_record_that_is_gone_is_one_sentence(tmp_path):
    from pytest_gpuserve.report import incident

    for more, code in (([], 1), (["--soft"], EXIT_SPARE)):
        argv = [*incident.command(tmp_path, None, "no_progress"), *more]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == code
        assert "Traceback" not in ran.stderr
        assert "no directory of a server" in ran.stderr


def test_hostile_titles_and_logs(fake):
    server = fake(ranks=1, answer="no")
    evil = "\x1b[2J<script>alert(1)</script> ```\u202e ![x](http://evil.example.net/a)"
    code = "import setproctitle, sys, time; setproctitle.setproctitle(sys.argv[1]); time.sleep(600)"
    environment = {**os.environ, "GPUSERVE_COOKIE": server.record.cookie}
    with subprocess.Popen([sys.executable, "-c", code, evil], env=environment) as process:
        try:
            with server.log.open("a") as log:
                log.write(f"[2026-11-29 10:00:01 TP0] {evil}\n" + "x" * 500_000 + "\n\x00\xff\n")
            server.until(lambda: procfs.read(f"/proc/{process.pid}/cmdline").startswith(b"\x1b"), "its title")
            _, line = server.incident("manual", "--test", evil, limit=8, rounds=1)
        finally:
            process.kill()
    for name, file in files(line["incident"]).items():
        if not name.endswith(".json"):
            assert "\x1b" not in file.read_text(), name
            assert "\u202e" not in file.read_text(), name
    assert "\x1b" not in line["text"]
    page = (Path(line["incident"]) / "verdict.md").read_text()
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", page)
    assert "<script" not in outside
    assert "![x](" not in outside


def test_connection_of_the_tests_process_is_seen(fake):
    """A plain client in the test's own process that waits for an answer."""
    server = fake(ranks=1, answer="no")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        _, line = server.incident("manual", limit=6, rounds=1)
        content = json.loads((Path(line["incident"]) / "incident.json").read_text())
    assert content["test_waits"] in (False, True, None)
    from pytest_gpuserve.report import probe

    with socket.create_connection(("127.0.0.1", server.port)):
        assert probe.connections(os.getpid(), server.port) == 1
    assert probe.connections(os.getpid(), server.port) == 0


def test_limit_stays_below_the_supervisors(tmp_path):
    from pytest_gpuserve.report.incident import LIMIT, usual_limit

    assert usual_limit(tmp_path) == LIMIT
    (tmp_path / "supervisor.json").write_text(json.dumps({"alarms": [{"name": "startup_budget", "limit": 10.0}]}))
    assert usual_limit(tmp_path) == 7.0


@pytest.mark.parametrize(("answer", "code"), [("yes", EXIT_SPARE), ("no", EXIT_KILL)])
def test_where_nothing_can_be_written_its_answers_decide(fake, answer, code):
    """No stack can be taken then, yet a server that answers has no hang to be ended for."""
    server = fake(ranks=2, answer=answer)
    full = ["sh", "-c", 'ulimit -f 0 && exec "$@"', "sh"]
    ran = subprocess.run([*full, *server.command("test_timeout")], capture_output=True, text=True, check=False)
    assert server.lines() == []
    assert "gpuserve: no incident: " in ran.stderr
    assert ran.returncode == code
