"""An incident that is killed, or runs out of time, half way: the supervisor's limit is real."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pytest_gpuserve import procfs
from pytest_gpuserve.diagnose import stacks
from pytest_gpuserve.report import stack_rounds, taking
from pytest_gpuserve.report.incident import EXIT_KILL, record_incident

SECRETS = ("never-to-be-seen-17", "my private words", "token-of-the-env-9", "in-the-spec-42", "given-as-flag-31")


def files(directory):
    """By relative name; none of a directory that is not there yet, or has just got its final name."""
    with suppress(FileNotFoundError):
        return {str(p.relative_to(directory)): p for p in Path(directory).rglob("*") if p.is_file()}
    return {}


def test_killed_at_any_moment_leaves_whole_files(fake):
    server = fake(ranks=4, answer="no", faults=["2=late"])
    stacks = 0
    for count in (0, 2, 4, 6, 8, 9):
        before = len(files(server.artifacts)) if server.artifacts.exists() else 0
        process = subprocess.Popen(server.command("no_progress", rounds=1), stderr=subprocess.DEVNULL)
        while process.poll() is None and (not count or len(files(server.artifacts)) < before + count):
            time.sleep(0.005)
            if not count:
                break
        process.kill()
        process.wait()
    for path in server.artifacts.iterdir():
        if not path.is_dir() or not (path / "incident.json").exists():
            continue  # killed while it was made
        content = json.loads((path / "incident.json").read_text())
        assert content["complete"] is False
        assert content["reason"] == "no_progress"
        for name, file in files(path).items():
            if name.endswith(".json") and not Path(name).name.startswith("."):
                json.loads(file.read_text())
                stacks += name.startswith("stacks/TP")
            assert not any(secret in file.read_text() for secret in SECRETS), name
    assert stacks >= 4  # the later ones had taken them
    told = {line["incident"] for line in server.lines()}
    with_stacks = {str(p) for p in server.artifacts.iterdir() if (p / "stacks").is_dir()}
    assert with_stacks <= told  # whoever was killed half way has told where


def test_its_own_limit_ends_it_with_what_it_has(fake, tmp_path):
    """Here with a py-spy that never answers: the supervisor must not be left to end us without a verdict."""
    server = fake(ranks=2, answer="no")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "py-spy").write_text(f"#!{sys.executable}\nimport time; time.sleep(600)")
    (tools / "py-spy").chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    server.record = replace(server.record, python=str(tools / "python"))
    server.record.save()
    began = time.monotonic()
    code, line = server.incident("no_progress", limit=4)
    took = time.monotonic() - began
    assert took < 12
    assert code == EXIT_KILL
    assert line["incident"]
    assert procfs.same(server.record.root)


def test_its_own_clock_ends_it_where_the_work_is_stuck(fake, monkeypatch):
    """Here the judgement; it might be a file system that does not answer."""
    server = fake(ranks=3, answer="no", faults=["1=late"])
    real, calls, left, stuck = taking.judge, [], threading.Event(), threading.Event()

    def judge(evidence):
        calls.append(1)
        if len(calls) > 1:
            stuck.wait(30)
        return real(evidence)

    codes = []
    monkeypatch.setattr(taking, "judge", judge)
    work = threading.Thread(
        target=record_incident,
        args=(server.directory, server.artifacts, "no_progress"),
        kwargs={"limit": 4.0, "rounds": 1, "leave": lambda code: (codes.append(code), left.set())},
        daemon=True,
    )
    began = time.monotonic()
    work.start()
    assert left.wait(15)
    line = server.line()
    stuck.set()
    work.join(20)
    assert codes == [EXIT_KILL]
    assert time.monotonic() - began >= 4.0
    assert line["verdict"] == "hang"
    assert line["culprits"] == ["TP1"]
    assert "the time for this incident was over" in line["text"]


def test_what_is_on_disk_when_its_clock_ends_it_within_the_first_round(fake, monkeypatch):
    """One rank's stack takes for ever, and nobody has judged anything yet.

    Mutations: no ``missing``; the sentence of ``StackRounds.so_far`` left out.
    """
    server = fake(ranks=3, answer="no", faults=["1=late"])
    left, stuck, codes = threading.Event(), threading.Event(), []
    real = stack_rounds.stacks.take

    def take(everyone, role_of, *, on_dump, **options):
        def all_but_one(dump):
            if dump.label == "TP1":
                stuck.wait(30)
            on_dump(dump)

        return real(sorted(everyone, key=lambda s: "TP1" in " ".join(procfs.cmdline(s.pid))), role_of,
                    on_dump=all_but_one, **options)  # fmt: skip

    monkeypatch.setattr(stack_rounds.stacks, "take", take)
    monkeypatch.setattr(stacks, "_AT_ONCE", 1)  # in that order
    work = threading.Thread(
        target=record_incident,
        args=(server.directory, server.artifacts, "no_progress"),
        kwargs={"limit": 6.0, "rounds": 1, "leave": lambda code: (codes.append(code), left.set())},
        daemon=True,
    )
    work.start()
    assert left.wait(20)
    line = server.line()
    written = json.loads((Path(line["incident"]) / "incident.json").read_text())
    there = {path.name.partition(".")[0] for path in (Path(line["incident"]) / "stacks").glob("*.json")}
    stuck.set()
    work.join(20)
    assert codes == [EXIT_KILL]
    assert {"TP0", "TP2"} <= there
    assert "TP1" not in there
    assert not written["complete"]
    assert written["missing"] == ["TP1"]
    for text in (line["text"], written["text"]):
        assert "on disk: TP0, TP2" in text
        assert "the time was over before those of TP1 were taken" in text
