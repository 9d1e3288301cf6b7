"""Which server a test gets, and what its marks are: every level of marks, options and the configuration file."""

from __future__ import annotations

from inspect import cleandoc

import pytest

from pytest_gpuserve.plugin.state import PROBLEM, WANTED

pytestmark = pytest.mark.usefixtures("toys")


@pytest.fixture
def collect(project, monkeypatch):
    """Items of a module by name, with --strict-markers; nothing is started."""

    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source: str, *arguments: str) -> dict[str, pytest.Item]:
        project.write(test_it="import pytest\nfrom pytest import mark\n" + cleandoc(source))
        items, recorder = project.pytester.inline_genitems("-p", "gpuserve", "--strict-markers", *arguments)
        assert recorder.ret == 0
        return {item.nodeid.partition("::")[2]: item for item in items}

    return run


def spec(item: pytest.Item):
    assert item.stash.get(PROBLEM, None) is None
    return item.stash[WANTED].spec


def test_function_over_class_over_module(collect):
    items = collect("""
        pytestmark = mark.gpuserve(engine="toy", model="m", tp=8, env={"A": "module", "B": "module"}, cuda_graph="on")
        def test_module(server): pass
        @mark.gpuserve(tp=4, env={"A": "class"}, args={"--x": 1})
        class TestOne:
            def test_class(self, server): pass
            @mark.gpuserve(tp=2, env={"A": "function"}, args={"--y": 2}, cuda_graph="off")
            def test_function(self, server): pass
    """)
    assert spec(items["test_module"]).tp == 8
    one = spec(items["TestOne::test_class"])
    assert (one.tp, one.model, dict(one.env), dict(one.args)) == (4, "m", {"A": "class", "B": "module"}, {"--x": 1})
    two = spec(items["TestOne::test_function"])
    assert (two.tp, dict(two.env), dict(two.args)) == (2, {"A": "function", "B": "module"}, {"--x": 1, "--y": 2})
    assert [(axis, value.name) for axis, value in two.axes] == [("cuda_graph", "off")]


def test_derived_class_over_base_and_mixin_in_the_order_of_the_mro(collect):
    items = collect("""
        @mark.gpuserve(engine="toy", tp=1, model="base", env={"A": "base", "B": "base", "C": "base"})
        class Base:
            def test_it(self, server): pass
            @mark.gpuserve(model="function")
            def test_own(self, server): pass
        @mark.gpuserve(model="mixin", env={"B": "mixin"})
        class Mixin: pass
        class TestInherits(Base): pass
        @mark.gpuserve(tp=2, env={"C": "derived"})
        class TestDerived(Mixin, Base): pass
        @mark.gpuserve(tp=4)
        class TestTwice(TestDerived): pass
    """)
    assert spec(items["TestInherits::test_it"]).model == "base"
    derived = spec(items["TestDerived::test_it"])
    assert (derived.tp, derived.model) == (2, "mixin")
    assert dict(derived.env) == {"A": "base", "B": "mixin", "C": "derived"}
    assert spec(items["TestTwice::test_it"]).tp == 4
    assert spec(items["TestTwice::test_own"]).model == "function"


def test_outer_class_is_weaker_and_the_top_decorator_is_strongest(collect):
    items = collect("""
        @mark.gpuserve(engine="toy", tp=8, model="outer")
        class TestOuter:
            @mark.gpuserve(tp=4)
            class TestInner:
                @mark.gpuserve(env={"A": "top"})
                @mark.gpuserve(env={"A": "bottom", "B": "bottom"})
                def test_it(self, server): pass
    """)
    inner = spec(items["TestOuter::TestInner::test_it"])
    assert (inner.tp, inner.model, dict(inner.env)) == (4, "outer", {"A": "top", "B": "bottom"})


def test_axes_merge_however_they_are_written(collect):
    items = collect("""
        pytestmark = mark.gpuserve(engine="toy", cuda_graph="on", axes={"attention_backend": "fa3"})
        @mark.gpuserve(axes={"cuda_graph": False}, attention_backend="triton")
        def test_it(server): pass
    """)
    names = {axis: value.name for axis, value in spec(items["test_it"]).axes}
    assert names == {"cuda_graph": "off", "attention_backend": "triton"}


def test_marks_of_one_parameter(collect):
    items = collect("""
        @mark.parametrize("n", [1, pytest.param(2, marks=mark.gpuserve(tp=2))])
        @mark.gpuserve(engine="toy")
        def test_it(server, n): pass
    """)
    assert [spec(items[f"test_it[{n}]"]).tp for n in (1, 2)] == [1, 2]


def test_set_over_marks_over_named_over_defaults(collect, project):
    project.pytester.makepyprojecttoml("""
        [tool.pytest.ini_options]
        gpuserve_engine = "toy"
        gpuserve_model = "default"
        gpuserve_tp = "1"
        [tool.gpuserve.servers.big]
        tp = 8
        model = "named"
        cuda_graph = "off"
        env = { A = "named", B = "named" }
        [tool.gpuserve.servers.other]
        tp = 3
    """)
    source = """
        def test_default(server): pass
        @mark.gpuserve("big", tp=4, env={"A": "mark"})
        class TestNamed:
            def test_named(self, server): pass
            @mark.gpuserve("other")
            def test_other(self, server): pass
    """
    (project.path / "tox.ini").unlink()
    items = collect(source)
    assert (spec(items["test_default"]).model, spec(items["test_default"]).tp) == ("default", 1)
    named = spec(items["TestNamed::test_named"])
    assert (named.model, named.tp, dict(named.env)) == ("named", 4, {"A": "mark", "B": "named"})
    other = spec(items["TestNamed::test_other"])
    assert (other.model, other.tp, dict(other.env)) == ("default", 4, {"A": "mark"})
    items = collect(source, "--gpuserve-set", "tp=2", "--gpuserve-set", "cuda_graph=on", "--gpuserve-set", "env.A=set")
    named = spec(items["TestNamed::test_named"])
    assert (named.model, named.tp, dict(named.env)) == ("named", 2, {"A": "set", "B": "named"})
    assert named.traits >= {"cuda_graph_on"}


def test_named_server_in_an_ini_file(collect, project):
    project.pytester.makeini("[pytest]\n[gpuserve.servers.small]\nengine = toy\nargs.--Big-Flag = 1\nenv.Ab = C\n")
    one = spec(collect("@mark.gpuserve('small')\ndef test_it(server): pass")["test_it"])
    assert (one.engine, dict(one.args), dict(one.env)) == ("toy", {"--Big-Flag": 1}, {"Ab": "C"})


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [((), None, "/mark"), (("--gpuserve-python=/cli",), None, "/cli"), ((), "/env", "/mark")],
)
def test_interpreter(collect, monkeypatch, arguments, variable, expected):
    if variable:
        monkeypatch.setenv("GPUSERVE_PYTHON", variable)
    items = collect(
        "@mark.gpuserve(engine='toy', python='/mark')\ndef test_it(server): pass\n"
        "@mark.gpuserve(engine='toy')\ndef test_plain(server): pass",
        *arguments,
    )
    assert spec(items["test_it"]).python == expected
    assert spec(items["test_plain"]).python == (arguments[0].partition("=")[2] if arguments else variable)


def test_limits_of_a_mark_are_no_part_of_the_server(collect):
    items = collect("""
        @mark.gpuserve(engine="toy", startup_timeout=5, grace=1.5, dump_timeout=2)
        def test_limits(server): pass
        @mark.gpuserve(engine="toy")
        def test_plain(server): pass
    """)
    wanted = items["test_limits"].stash[WANTED]
    assert (wanted.startup_timeout, wanted.grace, wanted.dump_timeout) == (5, 1.5, 2)
    assert wanted.spec.key == spec(items["test_plain"]).key


def test_traits_and_the_cell_mark(collect):
    items = collect("""
        @mark.gpuserve(engine="toy", tp=2, model="m", spec_decode="eagle3", cuda_graph="off", attention_backend="fa3")
        def test_it(server): pass
        @mark.gpuserve(engine="toy", spec_decode="homemade")
        def test_plain(server): pass
    """)
    names = {mark.name for mark in items["test_it"].iter_markers()}
    assert {"eagle3", "cuda_graph_off", "attn_fa3"} <= names
    assert not names & {"spec_base", "cuda_graph_on"}
    cell = items["test_it"].get_closest_marker("cell").kwargs
    assert cell == {
        "engine": "toy",
        "tp": 2,
        "model": "m",
        "spec_decode": "eagle3",
        "cuda_graph": "off",
        "attention_backend": "fa3",
    }
    assert items["test_plain"].get_closest_marker("cell").kwargs["spec_decode"] == "homemade"


def test_hook_changes_the_server_of_a_test(collect, project):
    project.write(
        conftest="""
        import dataclasses
        def pytest_gpuserve_spec(item, spec):
            return dataclasses.replace(spec, tp=7) if "seven" in item.name else None
    """
    )
    items = collect("""
        pytestmark = mark.gpuserve(engine="toy")
        def test_seven(server): pass
        def test_one(server): pass
    """)
    assert (spec(items["test_seven"]).tp, spec(items["test_one"]).tp) == (7, 1)
    assert items["test_seven"].get_closest_marker("cell").kwargs["tp"] == 7


MATRIX = """
@mark.gpuserve(engine="toy", tp=8)
@mark.gpuserve_matrix(axes={
    "spec_decode": ["base", {"eagle3": {"num_steps": 3}}],
    "cuda_graph": ["on", "off"],
    "attention_backend": ["triton", "fa3"],
}, exclude=[{"spec_decode": "eagle3", "attention_backend": "fa3"}])
def test_it(server, gpuserve_cell):
    assert gpuserve_cell["cuda_graph"] in ("on", "off")
"""


def test_matrix_makes_one_test_a_cell(collect):
    items = collect(MATRIX)
    assert set(items) == {
        "test_it[toy-tp8-base-cuda_graph_on-triton]",
        "test_it[toy-tp8-base-cuda_graph_on-fa3]",
        "test_it[toy-tp8-base-cuda_graph_off-triton]",
        "test_it[toy-tp8-base-cuda_graph_off-fa3]",
        "test_it[toy-tp8-eagle3-cuda_graph_on-triton]",
        "test_it[toy-tp8-eagle3-cuda_graph_off-triton]",
    }
    one = items["test_it[toy-tp8-eagle3-cuda_graph_off-triton]"]
    assert spec(one).axis("spec_decode").detail == {"num_steps": 3}
    assert {"eagle3", "cuda_graph_off", "attn_triton"} <= {mark.name for mark in one.iter_markers()}


@pytest.mark.parametrize(
    ("expression", "count"),
    [
        ("eagle3", 2),
        ("not eagle3", 4),
        ("spec_base and cuda_graph_off", 2),
        ("attn_fa3", 2),
        ("cell(spec_decode='eagle3', cuda_graph='off')", 1),
        ("cell(tp=8, engine='toy')", 6),
        ("attn_trtllm_mha or sm120 or mtp", 0),
    ],
)
def test_selection_by_marks(collect, project, expression, count):
    project.write(test_it="from pytest import mark\n" + MATRIX)
    result = project.here("--strict-markers", "--collect-only", "-q", "-m", expression)
    assert sum(line.startswith("test_it.py::") for line in result.outlines) == count


def test_matrix_of_engines_skips_a_cell_that_only_the_other_engine_has(project):
    project.write(
        test_it="""
        from pytest import mark
        @mark.gpuserve_matrix(axes={"engine": ["toy", "doll"], "attention_backend": ["triton", "fa3", "flashinfer"]})
        def test_it(server): pass
    """
    )
    result = project.here("--gpuserve=skip", "-rs")
    result.assert_outcomes(skipped=6)
    result.stdout.fnmatch_lines(["SKIPPED * engine 'toy' has no attention_backend 'flashinfer'*"])
    result.stdout.fnmatch_lines(["SKIPPED * engine 'doll' has no attention_backend 'fa3'*"])


def test_named_matrix_and_several_marks(collect, project):
    (project.path / "tox.ini").unlink()
    project.pytester.makepyprojecttoml("""
        [tool.pytest.ini_options]
        [tool.gpuserve.matrix.house]
        axes = { cuda_graph = ["on", "off"] }
    """)
    items = collect("""
        @mark.gpuserve(engine="toy")
        @mark.gpuserve_matrix("house")
        class TestHouse:
            @mark.gpuserve_matrix(axes={"attention_backend": ["triton", "fa3"]})
            def test_both(self, server): pass
            def test_one(self, server): pass
    """)
    assert len([name for name in items if "test_both" in name]) == 4
    assert len([name for name in items if "test_one" in name]) == 2


def test_set_collapses_cells_that_become_equal(collect):
    items = collect(MATRIX, "--gpuserve-set", "cuda_graph=off")
    assert len(items) == 3
    assert all("cuda_graph_off" in name for name in items)


@pytest.mark.parametrize("mark", ["", '@mark.gpuserve_matrix(axes={"cuda_graph": ["on", "off"]})\n'])
@pytest.mark.parametrize("wrong", ["cuda_graph=bogus", "axes.homemade=1", "engine=bogus"])
def test_what_set_gets_wrong_is_no_fault_of_a_mark(collect, mark, wrong):
    """Mutation: ``axis_problem`` always names ``source``."""
    (item,) = collect(
        f"{mark}@mark.gpuserve(engine='toy')\ndef test_it(server): pass", "--gpuserve-set", wrong
    ).values()
    assert item.stash[PROBLEM].startswith("--gpuserve-set: ")


def test_models_are_told_apart_in_ids(collect):
    items = collect("""
        @mark.gpuserve(engine="toy")
        @mark.gpuserve_matrix(axes={"model": ["/m/One", "/m/two"]})
        def test_it(server): pass
    """)
    assert set(items) == {"test_it[toy-tp1-one]", "test_it[toy-tp1-two]"}


def test_models_of_one_name_have_distinct_ids(collect):
    items = collect("""
        @mark.gpuserve(engine="toy")
        @mark.gpuserve_matrix(axes={"model": ["/a/m", "/b/m"]})
        def test_it(server): pass
    """)
    assert len(items) == 2
    assert all(name.startswith("test_it[toy-tp1-") for name in items)
