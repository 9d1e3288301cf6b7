"""n configurations are started n times, whatever the order of the tests; order is stable otherwise."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from pytest_gpuserve.plugin.order import together
from pytest_gpuserve.plugin.state import WANTED


class Item:
    """What :func:`together` looks at."""

    class Wanted:
        def __init__(self, key: str) -> None:
            self.key = key

    def __init__(self, name: str) -> None:
        self.name = name
        self.stash = pytest.Stash()
        if name[0] != "-":
            self.stash[WANTED] = Item.Wanted(name[0])


def ordered(*names: str) -> str:
    return " ".join(item.name for item in together([Item(name) for name in names]))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a1 b1 a2 b2", "a1 a2 b1 b2"),
        ("b1 a1 b2 a2", "b1 b2 a1 a2"),
        ("-1 a1 -2 a2", "-1 a1 a2 -2"),
        ("a1 -1 b1 -2 a2 b2 -3", "a1 a2 -1 b1 b2 -2 -3"),
        ("-1 -2", "-1 -2"),
    ],
)
def test_stable_by_first_appearance(before, after):
    assert ordered(*before.split()) == after
    assert ordered(*after.split()) == after


MODULE = """
import os
from pytest import mark

def use(server):
    with open("starts.txt", "a") as file:
        file.write(f"{server.spec.tp} {server.record.cookie}\\n")
    assert not os.path.exists(f"fail-{os.environ['PYTEST_CURRENT_TEST'].split('::')[1].split()[0]}")

@mark.gpuserve(engine="sim", tp=1)
def test_a1(server): use(server)
@mark.gpuserve(engine="sim", tp=2)
def test_b1(server): use(server)
@mark.gpuserve(engine="sim", tp=1)
def test_a2(server): use(server)
@mark.gpuserve(engine="sim", tp=2)
def test_b2(server): use(server)
"""


class TestStarts:
    """Counted by the servers' own cookies."""

    @pytest.fixture
    def run(self, project):
        project.write(test_one=MODULE)

        def run(*arguments: str) -> list[str]:
            (project.path / "starts.txt").unlink(missing_ok=True)
            result = project.wait(project.start(*arguments))
            assert result.ret in (0, 1, 2), result.outlines
            lines = (project.path / "starts.txt").read_text().split("\n")[:-1]
            project.assert_nothing_left()
            return lines

        return run

    @staticmethod
    def runs_of_one_server(lines: list[str]) -> bool:
        """Every server's tests follow each other, and no configuration was started twice."""
        cookies = [line.split()[1] for line in lines]
        changes = sum(one != two for one, two in pairwise(cookies))
        return changes == len(set(cookies)) - 1 and len(set(cookies)) == len({line.split()[0] for line in lines})

    @pytest.mark.parametrize(
        "arguments", [["-p", "no:randomly"], ["-p", "randomly"], ["-p", "no:randomly", "--reruns", "1"]]
    )
    def test_as_often_as_there_are_configurations(self, run, arguments):
        lines = run(*arguments)
        assert len(lines) == 4
        assert self.runs_of_one_server(lines)

    def test_after_a_failure_with_ff_nf_and_sw(self, run, project):
        (project.path / "fail-test_b2").touch()
        lines = run("-p", "no:randomly")
        assert [line[0] for line in lines] == ["1", "1", "2", "2"]
        (project.path / "fail-test_b2").unlink()
        lines = run("-p", "no:randomly", "--ff")
        assert [line[0] for line in lines] == ["2", "2", "1", "1"]  # the failed test's server first
        assert self.runs_of_one_server(lines)
        assert self.runs_of_one_server(run("-p", "no:randomly", "--nf"))
        (project.path / "fail-test_a2").touch()
        assert [line[0] for line in run("-p", "no:randomly", "--sw")] == ["1", "1"]
        (project.path / "fail-test_a2").unlink()
        lines = run("-p", "no:randomly", "--sw")
        assert [line[0] for line in lines] == ["1", "2", "2"]  # goes on where it stopped
        assert self.runs_of_one_server(lines)


def test_a_server_is_stopped_when_no_later_test_wants_it(project):
    project.write(
        test_one="""
        import os
        from pytest import mark
        from pytest_gpuserve import procfs
        seen = {}
        @mark.gpuserve(engine="sim", tp=1)
        def test_first(server): seen["one"] = server.record.root
        @mark.gpuserve(engine="sim", tp=1)
        def test_again(server): assert server.record.root == seen["one"]
        def test_between(): assert not procfs.same(seen["one"])
        @mark.gpuserve(engine="sim", tp=2)
        def test_other(server): pass
        """
    )
    project.run().assert_outcomes(passed=4)
    project.assert_nothing_left()


def test_plan_shows_each_server_once_and_starts_nothing(project):
    project.write(test_one=MODULE, test_plain="def test_plain(): raise RuntimeError")
    result = project.run("--gpuserve=plan", "-n2", "--gpuserve-gpus=virtual:4")  # the one with more of them first
    assert result.ret == 0
    lines = [line for line in result.outlines if re.match(r"sim-|    test_|\\d+ servers", line)]
    assert [line.split()[0] for line in lines] == [
        "sim-tp2",
        "test_one.py::test_b1",
        "test_one.py::test_b2",
        "sim-tp1",
        "test_one.py::test_a1",
        "test_one.py::test_a2",
    ]
    result.stdout.fnmatch_lines(["2 servers to start for 4 tests; 1 test without one; 2 starts fewer than one a test*"])
    assert list(project.state.iterdir()) == []


def test_a_plan_tells_what_could_not_run(project):
    project.write(
        test_one="""
        from pytest import mark
        @mark.gpuserve(engine="sim")
        def test_good(server): pass
        @mark.gpuserve(engine="sim")
        @mark.gpuserve_matrix(axes={"cuda_grahp": ["on"]})
        def test_bad(server): pass
        """
    )
    result = project.run("--gpuserve=plan")
    result.stdout.fnmatch_lines(
        [
            "1 server to start for 1 test. Nothing was started.",
            "1 test would fail, since the marks cannot be obeyed:",
            "    test_one.py::test_bad: *engine 'sim' has no axis 'cuda_grahp'*",
        ]
    )
