"""``expect=`` on the mark: measured once a server, judged in the test or at the end."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpuserve.isolation.figures import Figures, parse
from pytest_gpuserve.plugin.figures import conclude

MATRIX = """
from pytest import mark

@mark.gpuserve(engine="sim", args={"step_seconds": 0.002, "flavor": "vllm"},
               expect={"accept_rate": ">=0.5", "speedup": ">=1.0"})
@mark.gpuserve_matrix(axes={"spec_decode": ["base", {"eagle3": {"accept_rate": 0.15}}]})
class TestCells:
    @mark.timeout(20)
    def test_first(self, server):
        assert server.get("/health").status_code == 200

    def test_second(self, server):
        pass
"""


def test_a_cell_that_accepts_too_little_is_degraded_once(project: Any) -> None:
    project.write(test_it=MATRIX)
    result = project.run("-n0", "--junitxml=junit.xml")
    result.assert_outcomes(passed=3, failed=1)
    failed = project.junit()["test_first[sim-tp1-eagle3]"]
    message = failed.find("failure").text
    assert "sim-tp1-eagle3 is degraded: accept rate 0.1" in message
    assert "(>= 0.5 asked)" in message
    assert "x the base cell's " in message
    properties = {p.get("name"): p.get("value") for p in failed.iter("property")}
    assert properties["gpuserve_verdict"] == "degraded"
    result.stdout.fnmatch_lines(["2 server starts for 2 configurations, reused 2 times"])  # it serves on
    result.stdout.fnmatch_lines(["sim-tp1-base: * tok/s", "sim-tp1-eagle3: * tok/s, accept rate 0.1*x its base *"])
    cells = {c["id"]: c for c in json.loads((project.path / "gpuserve-artifacts/matrix.json").read_text())["cells"]}
    assert cells["sim-tp1-eagle3"]["verdict"] == "degraded"
    assert cells["sim-tp1-eagle3"]["figures"]["accept_rate"] == pytest.approx(0.15, abs=0.05)
    assert set(cells["sim-tp1-base"]["figures"]) == {"throughput"}


def test_figures_of_two_workers_meet_at_the_end(project: Any) -> None:
    """Each worker has one configuration, so no test can know the speedup: the session fails."""
    project.write(
        test_it="""
        from pytest import mark

        @mark.gpuserve(engine="sim", spec_decode={"eagle3": {"accept_rate": 0.6}}, expect={"speedup": ">=50"})
        def test_eagle(server):
            pass

        @mark.gpuserve(engine="sim", expect={"tokens_per_s": ">1"})
        def test_base(server):
            pass
        """
    )
    result = project.run("-n2")
    result.assert_outcomes(passed=2)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["degraded: sim-tp1-eagle3: *x the base cell's * tok/s (>= 50 asked)"])


def row(figures: Figures, **expect: str) -> dict[str, Any]:
    asked = [[e.name, e.op, e.limit] for e in parse(expect, "m")]
    return {"figures": figures.to_json(), "expect": asked, "settled": []}


def state_of(*rows: dict[str, Any]) -> Any:
    return SimpleNamespace(ledger=SimpleNamespace(figures={str(n): r for n, r in enumerate(rows)}))


def test_the_end_of_a_session_compares_with_the_base_or_is_undecided() -> None:
    base = Figures("b", "k0", "f", True, 1000.0)
    fast = Figures("fast", "k1", "f", False, 1500.0, 0.6, 2.8)
    slow = replace(fast, id="slow", key="k2", tokens_per_s=660.0)
    lines, bad = conclude(state_of(row(fast, speedup=">=1"), row(base)))
    assert lines == ["fast: 1500 tok/s, accept rate 0.60, accept length 2.80, 1.50x its base b", "b: 1000 tok/s"]
    assert not bad
    lines, bad = conclude(state_of(row(slow, speedup=">=1"), row(base)))
    assert lines[0] == "degraded: slow: 0.66x the base cell's 1000 tok/s (>= 1 asked)"
    assert bad
    lines, bad = conclude(state_of(row(slow, speedup=">=1"), row(replace(base, family="other"))))
    assert lines[0].endswith("; speedup undecided (>= 1 asked): no base cell was measured in this session")
    assert not bad
    settled = {**row(slow, speedup=">=1"), "settled": ["speedup"]}  # its test has failed for it
    assert not conclude(state_of(settled, row(base)))[1]


def test_expectations_merge_and_mistakes_are_set_up_errors(toys: None, project: Any, no_servers: str) -> None:
    project.write(
        conftest=no_servers,
        test_it="""
        from pytest import mark, fixture

        @fixture(autouse=True)
        def look(request):
            from pytest_gpuserve.plugin.state import WANTED
            if WANTED in request.node.stash:
                print("EXPECT", [(e.name, e.op, e.limit) for e in request.node.stash[WANTED].expect])

        @mark.gpuserve(engine="toy", expect={"accept_rate": 0.5, "speedup": ">=1"})
        class TestIt:
            @mark.gpuserve(expect={"speedup": None, "accept_length": ">2"})
            def test_merged(self, server):
                pass

            @mark.gpuserve(expect={"speed": 1})
            def test_unknown(self, server):
                pass

        @mark.gpuserve(engine="toy", expect="fast")
        def test_text(server):
            pass
        """,
    )
    result = project.here("-rA", "-p", "no:xdist")
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["EXPECT *('accept_length', '>', 2.0), ('accept_rate', '>=', 0.5)*"])
    result.stdout.fnmatch_lines(
        ["*expect knows no 'speed'. It knows accept_rate*", "*expect must be a mapping*not 'fast'*"]
    )


def test_a_base_server_that_is_asked_for_an_accept_rate_is_undecided(project: Any) -> None:
    project.write(
        test_it="""
        from pytest import mark

        @mark.gpuserve(engine="sim", expect={"accept_rate": ">=0.5"})
        def test_it(server, gpuserve_pool):
            from pytest import raises
            with raises(Exception, match="expect= belongs to a test's mark"):
                gpuserve_pool.get(engine="sim", expect={"speedup": 1})
        """
    )
    result = project.run("-n0")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*sim-tp1 is undecided: no accept rate: the server tells none (>= 0.5 asked).*"])
