"""The pages that a session leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pytest_gpuserve.plugin import pages
from pytest_gpuserve.plugin.ledger import Ledger

MODULE = """
from pytest import mark

@mark.gpuserve(engine="sim", tp=1, args={"no-such-option": "1"})
def test_config(server):
    pass
"""


def test_a_page_for_the_session_and_one_for_its_incident(project):
    project.write(test_it=MODULE)
    result = project.run("-n2")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["config: sim-tp1 in *", "page: gpuserve-artifacts/index.html"])
    (incident,) = project.incidents()
    page = (project.path / "gpuserve-artifacts" / "index.html").read_text()
    assert f'href="{incident.name}/index.html"' in page
    assert "of earlier sessions" not in page
    assert "no-such-option" in (incident / "index.html").read_text()


@pytest.fixture
def state(tmp_path):
    return SimpleNamespace(
        settings=SimpleNamespace(artifacts=tmp_path / "artifacts", action="run"), ledger=Ledger(), page=None, began=0.0
    )


def incident(state, name, time=5.0):
    directory = state.settings.artifacts / name
    directory.mkdir(parents=True)
    (directory / "incident.json").write_text(f'{{"verdict": "hang", "id": "{name}", "time": {time}}}')
    return directory


def test_nothing_is_written_where_there_is_nothing_to_tell(state, tmp_path):
    pages.write(state)
    assert (state.page, list(tmp_path.iterdir())) == (None, [])
    state.settings.artifacts.mkdir()
    pages.write(state)
    assert (state.page, list(state.settings.artifacts.iterdir()), state.ledger.troubles) == (None, [], [])


@pytest.mark.parametrize(("artifacts", "action"), [(False, "run"), (True, "plan")])
def test_neither_without_artifacts_nor_when_nothing_was_run(state, tmp_path, artifacts, action):
    incident(state, "one")
    state.settings.action = action
    if not artifacts:
        state.settings.artifacts = None
    pages.write(state)
    assert state.page is None
    assert not list(tmp_path.rglob("index.html"))


def test_what_goes_wrong_is_told(state, monkeypatch):
    incident(state, "one")
    (state.settings.artifacts / "index.html").write_text("somebody else's")
    monkeypatch.setattr(pages, "LIMIT", -1)
    pages.write(state)
    assert state.page is None
    late, others = state.ledger.troubles
    assert late.startswith("no page yet for 1 incidents")
    assert "index.html is not a page of ours, so it is not replaced" in others
    assert (state.settings.artifacts / "index.html").read_text() == "somebody else's"


def test_templates_are_loaded_only_to_write_a_page(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom pytest_gpuserve.report.html import refresh\n"
        "print(refresh(Path(sys.argv[1]), since=0, limit=9).page, 'jinja2' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert ran.stdout == "None False\n"
