"""The file of known failures."""

from __future__ import annotations

import json
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
    ("options", "verdict"),
    [((), "config"), (("--gpuserve-session-deadline=0.000001",), "undecided")],
)
def test_a_test_that_was_never_run_has_a_verdict(
    project: Any, no_servers: str, options: tuple[str, ...], verdict: str
) -> None:
    """Mutation: checks._refuse keeps nothing in the stash."""
    model = "/nowhere" if verdict == "config" else "m"
    project.write(
        conftest=no_servers,
        test_it=f"from pytest import mark\n@mark.gpuserve(engine='toy', model='{model}')\ndef test_it(server): pass",
    )
    text = f'[[failure]]\ncell = {{ model = "{model}" }}\nverdict = "{verdict}"\nreason = "known"'
    (project.path / "known.toml").write_text(text)
    project.here("--gpuserve-known-failures=known.toml", *options).assert_outcomes(xfailed=1)


CELLS = """
from pytest import mark

@mark.gpuserve(engine="sim", args={"shards": 1, "quiet": True})
@mark.gpuserve_matrix(axes={"spec_decode": ["base", {"eagle3": {"num_stepz": 1}}, "ngram"]})
class TestCells:
    def test_first(self, server): pass
    def test_second(self, server): pass
"""


def test_a_fixed_cell_keeps_its_server_and_a_cell_that_is_refused_is_config(project: Any) -> None:
    """Mutations: Outcome.apply retires for any failure; _set_properties knows ServerError only; CellResult.refused."""
    project.write(test_it=CELLS)
    entries = [("base", "hang"), ("eagle3", "config")]
    (project.path / "known.toml").write_text(
        "".join(
            f'[[failure]]\ncell = {{ spec_decode = "{value}" }}\nverdict = "{verdict}"\nreason = "known"\n'
            for value, verdict in entries
        )
    )
    result = project.run("--gpuserve-known-failures=known.toml")
    result.assert_outcomes(passed=2, failed=2, xfailed=2)
    result.stdout.fnmatch_lines(["[*] All 2 cells pass; 1 config."])
    result.stdout.fnmatch_lines(["2 server starts for *, reused 2 times"])
    result.stdout.no_fnmatch_line("*not used again*")
    raw = json.loads((project.path / "gpuserve-artifacts" / "matrix.json").read_text())
    assert [(cell["verdict"], cell["phase"]) for cell in raw["cells"]] == [
        ("ready", None),
        ("config", None),
        ("ready", None),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[failure", "cannot be read"),
        ("[failures]\nx = 1", "should hold ?[[]failure]] tables"),
        ('[[failure]]\nreason = "x"', "failure 1: needs cell"),
        ("[[failure]]\ncell = {a = 1}", "failure 1: needs cell (axes and values) and reason"),
        ('[[failure]]\ncell = "eagle3"\nreason = "x"', "cell must be a table"),
        (
            '[[failure]]\ncell = {spec_decod = "x"}\nreason = "x"',
            "failure 1: *'spec_decod' (did you mean 'spec_decode'?)*",
        ),
        ('[[failure]]\ncell = {"arg.--x" = 1}\nreason = "x"', "failure 1: there is no axis 'arg.--x'"),
        ('[[failure]]\ncell = {tp = [1]}\nreason = "x"', "failure 1: *axis 'tp' cannot be ?1?"),
        ('[[failure]]\ncell = {tp = 1}\nreason = "x"\nverdict = "hnag"', "no verdict 'hnag' (did you mean 'hang'?)"),
        ('[[failure]]\ncell = {a = 1}\nreason = "x"\nverdikt = "hang"', "failure 1: needs cell"),
    ],
)
def test_bad_files_are_one_paragraph(run: Any, text: str, said: str) -> None:
    result = run(text)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --gpuserve-known-failures: *known.toml*{said}*"])


NO_TEST = """
[[failure]]
cell = { spec_decode = "eagle3", tp = 4 }
reason = "another job"
[[failure]]
cell = { spec_decode = "eagle3", cuda_graph = "onn" }
reason = "typo"
[[failure]]
cell = { nccl_p2p = "off" }
reason = "no such axis here"
[[failure]]
cell = { attention_backend = "fa33" }
reason = "typo"
"""


def test_entries_that_match_no_test_are_told_once_likely_slips_first(run: Any) -> None:
    """Mutations: the lines are not sorted; engines' own values are not known; collected after ``-k``."""
    result = run(KNOWN + NO_TEST, "-k", "cuda_graph_on-base or plain")
    result.stdout.fnmatch_lines(
        [
            "*= gpuserve known failures =*",
            "known.toml, failure 3 (typo) * cuda_graph 'onn' is nowhere (did you mean 'on'?); there: off, on.",
            "known.toml, failure 5 * attention_backend 'fa33' is nowhere (did you mean 'fa3'?); there: fa3, triton.",
            "known.toml, failure 2 (another job) matches no test of this run: tp '4' is nowhere; there: 2.",
            "known.toml, failure 4 *: nccl_p2p 'off' is nowhere; no test has nccl_p2p.",
        ],
        consecutive=True,
    )
    result.stdout.no_fnmatch_line("*failure 1*")


def test_many_entries_without_a_test_are_counted(run: Any) -> None:
    result = run('[[failure]]\ncell = { tp = 4 }\nreason = "x"\n' * 12)
    result.stdout.fnmatch_lines(["known.toml, failure 10 *", "and 2 more"], consecutive=True)


def test_a_run_without_servers_is_told_nothing(project: Any) -> None:
    project.write(test_it="def test_plain(): pass")
    (project.path / "known.toml").write_text(KNOWN)
    project.here("--gpuserve-known-failures=known.toml").stdout.no_fnmatch_line("*known failures*")


def test_the_controller_of_workers_tells_it_too(project: Any, no_servers: str) -> None:
    """Mutations: no pytest_sessionfinish, no pytest_testnodedown."""
    project.write(conftest=no_servers, test_it=MODULE.replace("toy", "sim"))
    (project.path / "known.toml").write_text(KNOWN + NO_TEST)
    result = project.run("--gpuserve-known-failures=known.toml", "-n2")
    result.assert_outcomes(passed=4, xfailed=1)
    assert sum("matches no test" in line for line in result.outlines) == 4


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("spec_decode = {eagle3 = {num_steps = 3}}", 1),
        ("spec_decode = {eagle3 = {num_steps = 4}}", 0),
        ('spec_decode = "eagle3"', 1),
        ('"args.--flag" = true, "env.A" = "1"', 1),
        ('"args.--flag" = false', 0),
    ],
)
def test_details_flags_and_variables(project: Any, no_servers: str, cell: str, expected: int) -> None:
    """Mutations: ``==`` instead of ``covers``; args, or env, are not among the values."""
    spec = {"spec_decode": {"eagle3": {"num_steps": 3, "topk": 1}}, "args": {"--flag": True}, "env": {"A": "1"}}
    project.write(
        conftest=no_servers,
        test_it=f"from pytest import mark\n@mark.gpuserve(engine='toy', **{spec})\ndef test_it(server): assert 0",
    )
    (project.path / "known.toml").write_text(f'[[failure]]\ncell = {{ {cell} }}\nreason = "x"')
    result = project.here("--gpuserve-known-failures=known.toml")
    result.assert_outcomes(xfailed=expected, failed=1 - expected)


def test_a_missing_file_is_told(project: Any) -> None:
    result = project.here("--gpuserve-known-failures=nowhere.toml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --gpuserve-known-failures: *nowhere.toml cannot be read*"])
