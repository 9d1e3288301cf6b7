"""Owns a server and waits to be killed: ``owner.py STATE TAG CONFIG``; CONFIG is JSON: what, grace, owners, then."""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.procfs import ProcessId, process_id
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.paths import session_directory
from pytest_gpuserve.spec import ServerSpec

state, tag, text = sys.argv[1:4]
config = json.loads(text)
os.environ["GPUSERVE_STATE"] = state
program = str(Path(__file__).with_name("serve.py"))
spec = ServerSpec.from_mapping(
    {"engine": "command", "command": [sys.executable, program, "{port}", tag, *config.get("what", [])]}
)
server = start(
    spec,
    get_engine("command"),
    parent=session_directory(),
    limits=Limits(startup=60, grace=config.get("grace", 0.5), dump=config.get("dump", 10)),
    incident=lambda directory, reason: [],
    owners=[process_id(pid) or ProcessId(pid, 0) for pid in config.get("owners", [])],
)
if alarm := config.get("alarm"):
    deadline = time.monotonic() + alarm["after"]
    server.control.arm("test", deadline, alarm["argv"], alarm["limit"])
    print(json.dumps({"deadline": deadline}), flush=True)
print(json.dumps({"directory": str(server.directory)}), flush=True)
if config.get("then") == "_exit":
    sys.stdin.readline()
    os._exit(1)
if config.get("then") == "gil":
    ctypes.PyDLL(None).sleep(4)
    print(json.dumps({"woke": time.monotonic()}), flush=True)
    os._exit(0)
while True:
    time.sleep(60)
