"""Runs under a PID 1 that reaps nobody: ``under_pid1.py STATE TAG``; prints what was left, as JSON."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pytest_gpuserve import procfs
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.server import reaper
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.paths import session_directory
from pytest_gpuserve.spec import ServerSpec

state, tag = sys.argv[1:3]
os.environ["GPUSERVE_STATE"] = state
here = Path(__file__).parent


def zombies():
    return [pid for pid, entry in procfs.snapshot().items() if not entry.alive and entry.ppid == 1]


def ours():
    """Live processes with the tag, but for us and PID 1."""
    found = []
    for pid, entry in procfs.snapshot().items():
        words = procfs.cmdline(pid)
        if entry.alive and pid not in (1, os.getpid()) and tag in words and str(here / "under_pid1.py") not in words:
            found.append(pid)
    return found


command = [sys.executable, str(here / "serve.py"), "{port}", tag, "child", "escape"]
server = start(
    ServerSpec.from_mapping({"engine": "command", "command": command}),
    get_engine("command"),
    parent=session_directory(),
    limits=Limits(startup=60, grace=0.5, dump=10),
    incident=lambda directory, reason: [],
)
os.kill(server.record.supervisor.pid, signal.SIGKILL)
begin = time.monotonic()
server.stop()
seconds = time.monotonic() - begin
print(json.dumps({"left": server.left, "alive": ours(), "zombies": len(zombies()), "seconds": seconds}))

config = json.dumps({"what": ["child", "escape"], "grace": 0.2})
owner = subprocess.Popen(
    [sys.executable, str(here / "owner.py"), state, tag, config], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
)
directory = Path(json.loads(owner.stdout.readline())["directory"])
pid = json.loads((directory / "server.json").read_text())["supervisor"][0]
for victim in (pid, owner.pid):
    os.kill(victim, signal.SIGKILL)  # the owner stays a zombie: we do not wait for it
begin = time.monotonic()
limit = time.monotonic() + 15
while time.monotonic() < limit and any(found.alive for victim in (pid, owner.pid) if (found := procfs.stat(victim))):
    time.sleep(0.01)
swept = reaper.sweep_dead_sessions(20.0)
seconds = time.monotonic() - begin
left = [one.id.pid for one in swept.left]
print(json.dumps({"left": left, "alive": ours(), "zombies": len(zombies()), "seconds": seconds}))
