"""Dumpers that are missing, old, stuck, or print what nobody can read."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gpuserve.diagnose import tools

Tool = Callable[[str], str]
THREAD = {"pid": 7, "thread_id": 1, "thread_name": "MainThread", "active": True, "owns_gil": False}


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    """A program that does what its Python says."""

    def make(code: str) -> str:
        path = tmp_path / "tool"
        path.write_text(f"#!{sys.executable}\nimport sys, time, os, signal\n{code}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.parametrize(
    ("code", "trouble", "words"),
    [
        ("print('{')", "other", "not its JSON"),
        ("print('[3]')", "other", "not its JSON"),
        (f"print({json.dumps(json.dumps([{**THREAD, 'frames': []}]))})", "race", "no frames yet"),
        ("sys.exit('Error: Permission denied (os error 13)')", "refused", "Permission denied"),
        ("sys.exit('Error: Failed to find python version')", "not-python", "Failed to find python version"),
        ("sys.exit('Error: unexpected waitpid result')", "stopped", "unexpected waitpid result"),
        ("sys.exit('error: unexpected argument --json found')", "too-old", "unexpected argument"),
        ("sys.exit('Error: No such process')", "gone", "No such process"),
        ("sys.exit('Error: a\\n\\nCaused by:\\n  0: b\\n  1: c\\n\\nStack backtrace:\\n 0: x')", "other", "a; b; c"),
        ("sys.exit(3)", "other", "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "other", "exit code -9"),
    ],
)
def test_what_the_words_of_py_spy_mean(tool: Tool, code: str, trouble: str, words: str) -> None:
    found = tools.pyspy(tool(code), 7, limit=60.0, stop=False)
    assert (found.trouble, found.threads) == (trouble, ())
    assert words in found.message


def test_a_tool_that_prints_no_stack(tool: Tool) -> None:
    found = tools.pystack(tool("print('nothing')"), 7, limit=60.0)
    assert (found.trouble, found.message) == ("other", "pystack printed no stack")
    assert tools.pystack(tool("sys.exit('Operation not permitted')"), 7, limit=60.0).trouble == "refused"


def test_options_say_whether_the_target_is_stopped(tool: Tool) -> None:
    """A stopped target must not be waited for, and C frames need it to be stopped."""
    show = tool("sys.exit(' '.join(sys.argv[1:]))")
    assert tools.pyspy(show, 7, limit=60.0, stop=True).message == "dump --json --pid 7"
    assert (
        tools.pyspy(show, 7, limit=60.0, stop=False, native=True).message
        == "dump --json --pid 7 --nonblocking --native"
    )
    assert tools.pystack(show, 7, limit=60.0).message == "remote 7 --no-block"
    assert tools.pystack(show, 7, limit=60.0, native=True).message == "remote 7 --native-last"


@pytest.mark.parametrize("kind", ["missing", "not-executable", "directory"])
def test_a_tool_that_cannot_be_run(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tool"
    if kind == "not-executable":
        path.write_text("")
    elif kind == "directory":
        path.mkdir()
    found = tools.run([str(path)], 60.0)
    assert (found.trouble, found.message.partition(":")[0]) == ("missing", str(path))


def test_a_stuck_tool_is_killed_and_its_childrens_pipes_are_not_waited_for(tool: Tool) -> None:
    """The child keeps the tool's output open: who waits for its end waits for the child."""
    code = "if os.fork(): time.sleep(600)\nelse: os.setsid(); time.sleep(30)"
    begin = time.monotonic()
    found = tools.run([tool(code)], 0.5)
    assert found.trouble == "timeout"
    assert time.monotonic() - begin < 25.0


def test_where_tools_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the server's Python first, each once; what may not be executed is none."""
    for name in ("venv", "path", "odd"):
        (tmp_path / name).mkdir()
        for file in ("python", "py-spy"):
            (tmp_path / name / file).touch(mode=0o755)
    (tmp_path / "odd" / "py-spy").chmod(0o644)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "odd" / "python"))
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in ("odd", "path")))
    beside, on_path = str(tmp_path / "venv" / "py-spy"), str(tmp_path / "path" / "py-spy")
    assert tools.find("py-spy", str(tmp_path / "venv" / "python")) == (beside, on_path)
    assert tools.find("py-spy", None) == (on_path,)
    assert tools.find("py-spy", str(tmp_path / "nowhere" / "python")) == (on_path,)
    assert tools.find("no-such-tool", None) == ()


def test_pystack_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pystack.engine", None)
    assert tools.pystack_inside(7).trouble == "missing"
