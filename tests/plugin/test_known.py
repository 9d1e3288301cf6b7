"""The file of known failures."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("toys")

MODULE = """
from pytest import mark

@mark.gpuserve(engine="toy", tp=2)
@mark.gpuserve_matrix(axes={"cuda_graph": ["on", "off"], "spec_decode": ["base", "eagle3"]})
def test_it(server, request):
    cell = request.node.callspec.id
    assert "eagle3" not in cell or "cuda_graph_off" in cell

def test_plain(): pass
"""

KNOWN = """
[[failure]]
cell = { spec_decode = "eagle3", cuda_graph = true, tp = 2 }
reason = "hangs in capture"
issue = "https://example.org/1"
"""


@pytest.fixture
def run(project: Any, no_servers: str) -> Any:
    project.write(conftest=no_servers, test_it=MODULE)

    def run(text: str, *arguments: str) -> pytest.RunResult:
        (project.path / "known.toml").write_text(text)
        return project.here("--gpuserve-known-failures=known.toml", "-rxfX", *arguments)

    return run


def test_a_known_failure_is_expected(run: Any) -> None:
    result = run(KNOWN)
    result.assert_outcomes(passed=4, xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL *known failure: hangs in capture (https://example.org/1)*"])


def test_a_fixed_cell_is_reported(run: Any) -> None:
    result = run(KNOWN.replace('"eagle3"', '"base"'))
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["*XPASS(strict)*known failure: hangs in capture*"])


def test_another_verdict_than_the_known_one_is_news(run: Any) -> None:
    result = run(KNOWN + 'verdict = "hang"')
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        ["*is a known failure with verdict hang (hangs in capture*), but failed with verdict test.*"]
    )
    run(KNOWN + 'verdict = "test"').assert_outcomes(passed=4, xfailed=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[failure", "cannot be read"),
        ("[failures]\nx = 1", "should hold ?[[]failure]] tables"),
        ('[[failure]]\nreason = "x"', "failure 1: needs cell"),
        ("[[failure]]\ncell = {a = 1}", "failure 1: needs cell (axes and values) and reason"),
        ('[[failure]]\ncell = "eagle3"\nreason = "x"', "cell must be a table"),
        ('[[failure]]\ncell = {a = 1}\nreason = "x"\nverdikt = "hang"', "failure 1: needs cell"),
    ],
)
def test_bad_files_are_one_paragraph(run: Any, text: str, said: str) -> None:
    result = run(text)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --gpuserve-known-failures: *known.toml*{said}*"])


def test_a_missing_file_is_told(project: Any) -> None:
    result = project.here("--gpuserve-known-failures=nowhere.toml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --gpuserve-known-failures: *nowhere.toml cannot be read*"])
