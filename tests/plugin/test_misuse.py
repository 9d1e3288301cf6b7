"""Marks that would be ignored in silence, servers that cannot be: each is one paragraph that says what to change."""

from __future__ import annotations

from fnmatch import fnmatch
from inspect import cleandoc
from types import SimpleNamespace

import pytest

from pytest_gpuserve.plugin.ledger import Ledger
from pytest_gpuserve.plugin.session_results import open_log

pytestmark = pytest.mark.usefixtures("toys")

CASES = {
    "own fixture": (
        """
        @fixture
        def server(): return "mine"
        @mark.gpuserve(engine="toy")
        def test_it(server): pass
        """,
        "the gpuserve mark has no effect, because the `server` of this test is another fixture*Rename that fixture*",
    ),
    "own fixture, mark of the module": (
        """
        pytestmark = mark.gpuserve_matrix(axes={"cuda_graph": ["on"]})
        @fixture
        def server(): return "mine"
        def test_it(server): pass
        """,
        "the gpuserve_matrix mark has no effect, because the `server` of this test is another fixture*",
    ),
    "matrix on a TestCase": (
        """
        @mark.gpuserve_matrix(axes={"cuda_graph": ["on"]})
        class TestIt(unittest.TestCase):
            def test_it(self): pass
        """,
        "the gpuserve_matrix mark has no effect on a unittest.TestCase*plain class*",
    ),
    "mark on a TestCase": (
        """
        @mark.gpuserve(engine="toy")
        class TestIt(unittest.TestCase):
            def test_it(self): pass
        """,
        "the gpuserve mark has no effect on a unittest.TestCase*autouse fixture*",
    ),
    "matrix on a TestCase that uses the server": (
        """
        @mark.usefixtures("server")
        @mark.gpuserve(engine="toy")
        @mark.gpuserve_matrix(axes={"cuda_graph": ["on"]})
        class TestIt(unittest.TestCase):
            def test_it(self): pass
        """,
        "gpuserve_matrix needs a test that pytest can parametrize, which a unittest.TestCase is not*",
    ),
    "mark without server": (
        """
        @mark.gpuserve(engine="toy")
        def test_it(): pass
        """,
        "the gpuserve mark has no effect, because this test does not use `server`. Add `server` to its arguments*",
    ),
    "matrix with the pool only": (
        """
        @mark.gpuserve_matrix(axes={"cuda_graph": ["on"]})
        def test_it(gpuserve_pool): pass
        """,
        "the gpuserve_matrix mark has no effect, because this test does not use `server`*",
    ),
    "no engine": (
        "def test_it(server): pass",
        "test_it.py::test_it (it has no gpuserve mark) names no engine: add engine=*",
    ),
    "no engine in the mark": (
        """
        @mark.gpuserve(tp=2)
        def test_it(server): pass
        """,
        "the gpuserve mark of test_it.py::test_it names no engine: add engine=*",
    ),
    "a mapping for an engine": (
        """
        @mark.gpuserve(engine={"name": "toy"})
        def test_it(server): pass
        """,
        "the gpuserve mark of test_it.py::test_it: engine must be a name such as \"sglang\", not {'name': 'toy'}.",
    ),
    "a list for an engine": (
        """
        @mark.gpuserve(engine=["toy"])
        def test_it(server): pass
        """,
        "the gpuserve mark of test_it.py::test_it: engine must be a name such as \"sglang\", not [[]'toy'].",
    ),
    "unknown engine": (
        """
        @mark.gpuserve(engine="torch")
        def test_it(server): pass
        """,
        "there is no engine called 'torch'. Known engines: toy, doll.",
    ),
    "unknown option": (
        """
        @mark.gpuserve(engine="toy", quantisation="fp8")
        def test_it(server): pass
        """,
        "the gpuserve mark of test_it.py::test_it: unknown option 'quantisation'. Known: engine,*"
        " uses_gpus, server, fresh, startup_timeout, grace, dump_timeout, expect (in a test's mark); axes: *",
    ),
    "unknown axis": (
        """
        @mark.gpuserve(engine="toy", overlap="off")
        def test_it(server): pass
        """,
        "*engine 'toy' has no axis 'overlap'. Its axes: attention_backend, cuda_graph, spec_decode; *",
    ),
    "unknown value": (
        """
        @mark.gpuserve(engine="toy", attention_backend="trition")
        def test_it(server): pass
        """,
        "*engine 'toy' has no attention_backend 'trition'. Values: fa3, triton.",
    ),
    "unknown value in a matrix": (
        """
        @mark.gpuserve(engine="toy")
        @mark.gpuserve_matrix(axes={"attention_backend": ["triton", "trition"]})
        def test_it(server): pass
        """,
        "the gpuserve_matrix mark of test_it.py::test_it: engine 'toy' has no attention_backend 'trition'*",
    ),
    "empty axis": (
        """
        @mark.gpuserve(engine="toy")
        @mark.gpuserve_matrix(axes={"cuda_graph": []})
        def test_it(server): pass
        """,
        "the gpuserve_matrix mark of test_it.py::test_it: axis 'cuda_graph' has no value*",
    ),
    "matrix without axes": (
        """
        @mark.gpuserve(engine="toy")
        @mark.gpuserve_matrix()
        def test_it(server): pass
        """,
        "the gpuserve_matrix mark of test_it.py::test_it*",
    ),
    "the mark is well": (
        """
        from pytest import mark
        @mark.gpuserve(engine="sim")
        def test_it(server): pass
        """,
        "--gpuserve-set: tp must be a whole number of GPUs, 1 or more, not 'x'.",
        "--gpuserve-set=tp=x",
    ),
    "an engine as a name": (
        """
        from pytest import mark
        @mark.gpuserve("vllm")
        def test_it(server): pass
        """,
        "'vllm' is an engine, not a server of your configuration: write engine='vllm'.*",
    ),
    "unknown named server": (
        """
        @mark.gpuserve("kimi")
        def test_it(server): pass
        """,
        "there is no servers table called 'kimi'. Known: none. Add *tool.gpuserve.servers.kimi* to */pyproject.toml*",
    ),
    "two positional arguments": (
        """
        @mark.gpuserve("kimi", "k2")
        def test_it(server): pass
        """,
        "the gpuserve mark of test_it.py::test_it takes one positional argument*",
    ),
    "a number for a name": (
        """
        @mark.gpuserve(3)
        def test_it(server): pass
        """,
        "the gpuserve mark of test_it.py::test_it takes the name of a server or keywords*not 3.",
    ),
    "wrong tp": (
        """
        @mark.gpuserve(engine="toy", tp=0)
        def test_it(server): pass
        """,
        "the gpuserve mark of test_it.py::test_it: tp must be a whole number*",
    ),
    "wrong limit": (
        """
        @mark.gpuserve(engine="toy", startup_timeout="10m")
        def test_it(server): pass
        """,
        "the gpuserve mark of test_it.py::test_it: startup_timeout: '10m' is no number of seconds*",
    ),
    "missing model": (
        """
        @mark.gpuserve(engine="toy", model="/models/none")
        def test_it(server): pass
        """,
        "the model /models/none does not exist. Change model=*",
    ),
    "missing model with a command to the terminal": (
        """
        @mark.gpuserve(engine="toy", model="/models/no\\x1bne")
        def test_it(server): pass
        """,
        r"the model /models/no\x1bne does not exist. Change model=*",
    ),
    "command as a line": (
        """
        @mark.gpuserve(engine="toy", command="python -m x")
        def test_it(server): pass
        """,
        "*command must be a list of arguments (no shell)*",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_paragraph_and_the_other_tests_run(project, no_servers, case):
    source, paragraph, *options = CASES[case]
    head = "import unittest\nfrom pytest import fixture, mark\n"
    project.write(test_it=head + cleandoc(source), test_other="def test_other(): pass", conftest=no_servers)
    result = project.here("--strict-markers", *options)
    result.assert_outcomes(errors=1, passed=1)
    start = result.outlines.index(next(line for line in result.outlines if "ERROR at setup of" in line))
    end = next(n for n, line in enumerate(result.outlines) if "short test summary" in line)
    said = [line for line in result.outlines[start + 1 : end] if line.strip()]
    assert len(said) == 1, said  # no traceback, nothing but the paragraph
    assert fnmatch(
        said[0].removeprefix("test_it.py::TestIt::test_it: ").removeprefix("test_it.py::test_it: "), paragraph
    )


def test_class_and_module_marks_may_cover_tests_without_a_server(project, no_servers):
    project.write(
        conftest=no_servers,
        test_it="""
        from pytest import mark
        pytestmark = mark.gpuserve(engine="toy")
        def test_plain(): pass
        @mark.gpuserve(tp=2)
        class TestMixed:
            def test_plain(self): pass
            def test_served(self, server): pass
        @mark.gpuserve(tp=4)
        def test_by_hand(gpuserve_pool): pass
        """,
    )
    project.here().assert_outcomes(passed=4)


def test_own_server_fixture_without_our_marks_is_left_alone(project):
    project.write(
        test_it="""
        from pytest import fixture
        @fixture
        def server(): return "mine"
        def test_it(server): assert server == "mine"
        """
    )
    project.here().assert_outcomes(passed=1)


def test_own_server_fixture_on_top_of_ours(project, no_servers):
    project.write(
        conftest=no_servers,
        test_it="""
        from pytest import fixture, mark
        @fixture
        def server(gpuserve_server): return ("wrapped", gpuserve_server)
        @mark.gpuserve(engine="toy")
        def test_it(server): assert server == ("wrapped", None)
        """,
    )
    project.here().assert_outcomes(passed=1)


def test_test_case_with_an_autouse_fixture(project, no_servers):
    project.write(
        conftest=no_servers,
        test_it="""
        import unittest
        from pytest import fixture, mark
        @mark.gpuserve(engine="toy")
        class TestIt(unittest.TestCase):
            @fixture(autouse=True)
            def _server(self, server): self.server = server
            def test_it(self): assert self.server is None
        """,
    )
    project.here().assert_outcomes(passed=1)


def test_skip_option_skips_exactly_the_tests_with_a_server(project):
    project.write(
        test_it="""
        from pytest import mark
        def test_plain(): pass
        @mark.gpuserve(engine="toy")
        def test_served(server): raise RuntimeError
        def test_pool(gpuserve_pool): raise RuntimeError
        """
    )
    result = project.here("--gpuserve=skip", "-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED *test_it.py:3: needs a server, and --gpuserve=skip starts none"])


def test_artifacts_that_cannot_be_written_name_their_option(tmp_path):
    (tmp_path / "file").touch()
    said = []
    settings = SimpleNamespace(artifacts=tmp_path / "file")
    state = SimpleNamespace(settings=settings, config=object(), ledger=SimpleNamespace(trouble=said.append))
    assert open_log(state) is None
    assert said == [f"results.jsonl cannot be written in {tmp_path}/file (--gpuserve-artifacts): File exists"]


def test_results_of_somebody_else_are_not_written_to(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"theirs": 1}\n')
    ledger = Ledger()
    settings = SimpleNamespace(artifacts=tmp_path)
    state = SimpleNamespace(settings=settings, config=object(), ledger=ledger)
    for _ in range(2):  # the second appends to ours
        log = open_log(state)
        log.put({"nodeid": "t::x"})
        log.close()
    assert ledger.troubles == [f"{tmp_path}/results.jsonl is not ours and stays as it is: see results-2.jsonl"] * 2
    assert (tmp_path / "results.jsonl").read_text() == '{"theirs": 1}\n'
    assert (tmp_path / "results-2.jsonl").read_text().count("t::x") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results-2.jsonl", "results.jsonl"]
