"""What the documentation shows is what happens: its examples are run, and what they print is compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from gpuserve_documents import SCHEMAS, differences
from gpuserve_examples import DOCS, Command, File, fences, missing, pages, steps

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

RUNNERS = {
    "pytest": (sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
    "gpuserve": (sys.executable, "-m", "pytest_gpuserve.cli"),
    "python": (sys.executable,),
    "cat": ("cat",),
    "ls": ("env", "LC_ALL=C", "ls"),  # the order of names is the locale's
}
"""How the commands of an example are run; an example with any other is wrong."""

PROJECT = "/home/me/project"
"""Where the examples say that they are."""

TUTORIAL = "docs/start/tutorial.md"

EXAMPLES = {str(page.relative_to(DOCS.parent)): found for page in pages() if (found := steps(page.read_text()))}


def run(command: Command, directory: Path, state: Path) -> str:
    """What a command printed, stderr last, with the directory's name as the examples have it."""
    program, *words = command.words
    words = [path for word in words for path in (_expanded(word, directory) or [word])]
    steering = ("GPUSERVE", "PYTEST_TIMEOUT", "PYTEST_ADDOPTS", "PYTEST_XDIST", "PYTEST_CURRENT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    done = subprocess.run(
        [*RUNNERS[program], *words],
        cwd=directory,
        env={**kept, "GPUSERVE_STATE": str(state), "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return (done.stdout + done.stderr).replace(str(directory), PROJECT)


def _expanded(word: str, directory: Path) -> list[str]:
    """As a shell does it."""
    return sorted(str(path.relative_to(directory)) for path in directory.glob(word)) if "*" in word else []


@pytest.mark.parametrize("page", EXAMPLES)
def test_examples_print_what_the_page_shows(page, tmp_path):
    project, state = tmp_path / "project", tmp_path / "state"
    project.mkdir()
    state.mkdir(mode=0o700)
    (project / "pytest.ini").write_text("[pytest]\naddopts = -p no:randomly\n")
    for step in EXAMPLES[page]:
        if isinstance(step, File):
            (project / step.name).write_text(step.text)
            continue
        printed = run(step, project, state)
        print(f"$ {' '.join(step.words)}\n{printed}")
        assert (line := missing(step.lines, printed)) is None, f"{page}, {step.words}: no line\n{line}\nin\n{printed}"
    seen = set()
    for path in project.glob("gpuserve-artifacts/**/*.json"):
        document = json.loads(path.read_text())
        seen.add(document["schema"])
        assert differences(document) == [], path.name
    if page == TUTORIAL:
        assert seen == set(SCHEMAS) - {"gpuserve.verdict/1", "gpuserve.triage/1"}


def test_marks_in_the_pages_describe_servers_that_can_exist(tmp_path):
    """Blocks with our marks are collected and resolved, nothing is started."""
    tables = ["[tool.pytest.ini_options]\naddopts = '--strict-markers'\n"]
    for page in pages():
        for number, (info, body) in enumerate(fences(page.read_text())):
            language = info.partition(" ")[0]
            if language == "python" and "pytest.mark.gpuserve" in body:
                body = body if "def test_" in body else f"{body}\ndef test_it(server): ..."
                (tmp_path / f"test_{page.stem.replace('-', '_')}_{number}.py").write_text(f"import pytest\n{body}")
            elif language == "toml":
                tomllib.loads(body)
                tables += [body] if "[tool.gpuserve" in body else []
    (tmp_path / "pyproject.toml").write_text("\n".join(tables))
    modules = sorted(path.name for path in tmp_path.glob("test_*.py"))
    printed = run(Command(("pytest", "-q", "--gpuserve=plan", "--import-mode=importlib")), tmp_path, tmp_path / "state")
    print(printed)
    assert len(modules) > 5
    assert not [name for name in modules if name not in printed]
    assert "without one" not in printed


def test_the_tutorial_is_among_them():
    assert TUTORIAL in EXAMPLES


def test_comparison_knows_what_is_stable():
    printed = "hang after 9 s: TP2 is stopped\n\n=== end ===\n20260101T101112-sim: f (a.py:3|4), kernel: futex  frozen"
    assert missing(("hang after 13.5 s: TP2 is …", "...", "====== end ======"), printed) is None
    assert missing(("20270101T000000-sim: f (a.py:77), kernel: select  frozen",), printed) is None
    assert missing(("Ring.recv (ring.py:3)",), "recv (ring.py:5)") is None
    assert missing(("Ring.recv (ring.py:3)",), "Ring.send (ring.py:3)") is not None
    assert missing(("hang after 9 s: TP1 is stopped",), printed) == "hang after 9 s: TP1 is stopped"
    assert missing(("=== end ===", "hang after 9 s: TP2 is stopped"), printed) == "hang after 9 s: TP2 is stopped"
