"""The life of the watcher's process: its owner, its end, its pauses, its configuration."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.watch import watcher
from pytest_gpuserve.watch.watcher import Config


def test_it_ends_with_its_owner(scenes, tmp_path):
    session = tmp_path / "session"
    session.mkdir()
    code = (
        "import sys,time;from pathlib import Path;from pytest_gpuserve.watch import watcher\n"
        "p=watcher.start(Path(sys.argv[1]),{'gpus':False});print(p.pid,flush=True);time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(session)], stdout=subprocess.PIPE)
    pid = int(owner.stdout.readline())
    identity = procfs.process_id(pid)
    time.sleep(1)
    assert procfs.same(identity)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    scenes.until(lambda: not procfs.same(identity), 10)


def test_it_ends_when_told_and_leaves_the_servers_alone(scene, scenes):
    process = scene.watch()
    server = scene.serve()
    scenes.until(scene.progress)
    process.terminate()
    assert process.wait(20) == 0
    assert server.exit_code() is None


def test_a_watcher_that_was_stopped_calls_no_hang_for_the_time_it_slept(scene, scenes):
    process = scene.watch(window=4.0)
    scene.serve(fault="sleep@cuda_graph:rank=1", background=True)
    scenes.until(lambda: any(p.get("state") == "suspect" for p in scene.progress()))
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(5.5)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(1)
    assert scene.incidents() == []
    scenes.until(scene.incidents, 30)


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="unknown phase"):
        watcher.start(tmp_path, {"budgets": {"phases": {"lunch": 3}}})
    assert not list(tmp_path.iterdir())
    assert Config.from_json({"interval": 0}).settings.interval == 0.05


def test_a_broken_configuration_ends_it_with_a_word(tmp_path):
    (tmp_path / "config.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-m", watcher.__name__, "--session", str(tmp_path), "--config", str(tmp_path / "config.json")],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert b"config.json" in done.stderr
    assert b"Traceback" not in done.stderr
