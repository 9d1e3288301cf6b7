"""What the terminal says while a server starts."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from typing import Any

import pytest

MODULE = """
from pytest import mark

@mark.gpuserve(engine="sim", tp=2, args={"load_seconds": 1.8, "shards": 50})
def test_slow_start(server, capsys):
    print("captured")
    assert capsys.readouterr().out == "captured\\n"

def test_after():
    pass
"""


def test_a_log_gets_one_line_a_phase(project: Any) -> None:
    project.write(test_it=MODULE)
    result = project.run("-n0")
    result.assert_outcomes(passed=2)
    said = [line for line in result.outlines if line.startswith("gpuserve: sim-tp2: ")]
    assert re.fullmatch(r"gpuserve: sim-tp2: weight_load \d+/50 shards \(TP0-1\), \d+ s", said[0])
    assert re.fullmatch(r"gpuserve: sim-tp2: ready after \d+ s", said[-1])
    phases = [line.split()[2] for line in said]
    assert len(set(phases)) == len(phases)
    assert not [line for line in result.outlines if "\r" in line or "\x1b" in line]
    assert not {"ready", "serving"} & set(phases[:-1])
    rest = [line for line in result.outlines[result.outlines.index(said[-1]) + 1 :] if line]
    assert rest[0].startswith("test_it.py ..")  # pytest goes on as before


@pytest.mark.parametrize("quiet", ["-q", "-n1"])
def test_quiet_sessions_and_workers_say_nothing(project: Any, quiet: str) -> None:
    project.write(test_it=MODULE)
    result = project.run(quiet)
    result.assert_outcomes(passed=2)
    assert "sim-tp2: " not in result.stdout.str()


def test_a_terminal_gets_one_live_line(project: Any) -> None:
    project.write(test_it=MODULE)
    ours, theirs = pty.openpty()
    seen = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(ours, 65536):
                seen.extend(chunk)
        except OSError:
            pass  # the other end is closed

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    environment = {**project.environment, "COLUMNS": "60", "TERM": "xterm"}
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:randomly", "-v"]
    process = subprocess.Popen(
        command, cwd=project.path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    assert process.wait(120) == 0
    reader.join(10)
    os.close(ours)
    text = bytes(seen).decode()
    painted = re.findall(r"\r([^\r\n]*)\x1b\[K", text)
    counts = [int(n) for line in painted for n in re.findall(r"sim-tp2: weight_load (\d+)/50 shards \(TP0-1\)", line)]
    assert len(counts) >= 3
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert painted[-1] == ""  # it goes when the server is ready
    assert all(len(line) < 60 for line in painted)
    assert re.search(r"test_slow_start .*PASSED", text.rpartition("\x1b[K")[2])
    assert "2 passed" in text
