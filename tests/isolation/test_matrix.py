"""Axes in, cells out."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.errors import SpecError
from pytest_gpuserve.isolation.axes import check_axes
from pytest_gpuserve.isolation.matrix import Cell, combine, expand
from pytest_gpuserve.spec import AxisValue, ServerSpec, merge

THREE: dict[str, list[object]] = {
    "attention_backend": ["triton", "flashinfer"],
    "spec_decode": ["base", {"eagle3": {"draft_model": "/m/d", "num_steps": 3}}],
    "cuda_graph": [True, False],
}


def _ids(cells: list[Cell]) -> list[str]:
    return [cell.id for cell in cells]


def test_full_is_base_first_then_by_number_of_changes() -> None:
    assert _ids(expand(THREE)) == [
        "base-cuda_graph_on-triton",
        "base-cuda_graph_on-flashinfer",
        "base-cuda_graph_off-triton",
        "eagle3-cuda_graph_on-triton",
        "base-cuda_graph_off-flashinfer",
        "eagle3-cuda_graph_on-flashinfer",
        "eagle3-cuda_graph_off-triton",
        "eagle3-cuda_graph_off-flashinfer",
    ]
    cells = expand(THREE)
    assert [len(c.changed) for c in cells] == [0, 1, 1, 1, 2, 2, 2, 3]
    assert cells[3].changed == ("spec_decode",)


def test_a_cell_becomes_a_spec_through_its_layer() -> None:
    cell = expand(THREE)[-1]
    spec = ServerSpec.from_mapping(merge({"engine": "sglang", "model": "/m", "tp": 8, "axes": {}}, cell.layer()))
    assert spec.id == "sglang-tp8-eagle3-cuda_graph_off-flashinfer"
    assert cell.test_id(spec) == spec.id
    assert spec.axis("spec_decode") == AxisValue("eagle3", (("draft_model", "/m/d"), ("num_steps", 3)))
    assert cell.names() == {"spec_decode": "eagle3", "cuda_graph": "off", "attention_backend": "flashinfer"}


def test_one_off_is_base_and_each_single_change() -> None:
    cells = expand({"tp": [1, 2, 4], **THREE}, coverage="one_off")
    assert len(cells) == 1 + 2 + 1 + 1 + 1
    assert max(len(c.changed) for c in cells) == 1


@pytest.mark.parametrize("rule", [{"spec_decode": "eagle3", "attention_backend": "flashinfer"}])
def test_exclude_removes_every_cell_that_meets_all_conditions(rule: dict[str, object]) -> None:
    ids = _ids(expand(THREE, [rule]))
    assert len(ids) == 6
    assert not [i for i in ids if "eagle3" in i and "flashinfer" in i]


def test_exclude_takes_lists_details_and_the_context() -> None:
    steps = [{"eagle3": {"num_steps": n}} for n in (1, 3, 5)]
    axes = {"spec_decode": ["base", *steps], "attention_backend": ["triton", "fa3", "flashinfer"]}
    assert len(expand(axes, [{"attention_backend": ["fa3", "triton"]}])) == 4
    assert len(expand(axes, [{"spec_decode": "eagle3"}])) == 3
    assert len(expand(axes, [{"spec_decode": {"eagle3": {"num_steps": 5}}}])) == 9
    rule = {"engine": "vllm", "attention_backend": "fa3"}
    assert len(expand(axes, [rule], context={"engine": "sglang"})) == 12
    assert len(expand(axes, [rule], context={"engine": "vllm"})) == 8
    assert len(expand(axes, [rule])) == 12


def test_exclude_on_an_architecture_keeps_the_cell_to_be_skipped_there() -> None:
    axes = {"spec_decode": ["base", "eagle3"], "attention_backend": ["triton", "fa3"]}
    cells = expand(
        axes,
        [
            {"spec_decode": "eagle3", "attention_backend": "fa3", "arch": "sm120"},
            {"attention_backend": "fa3", "arch": [121]},
        ],
    )
    assert [c.skip_on for c in cells] == [(), (121,), (), (120, 121)]


def test_ids_differ_whenever_cells_differ() -> None:
    axes: dict[str, list[object]] = {
        "spec_decode": [{"eagle3": {"num_steps": 3, "topk": 1}}, {"eagle3": {"num_steps": 5, "topk": 1}}],
        "args.mem-fraction-static": [None, 0.8, "0.9"],
        "env.NCCL_P2P_DISABLE": ["1", True],
        "model": ["/models/a", "org/B/"],
        "tp": [1, 2],
    }
    cells = expand(axes)
    specs = [ServerSpec.from_mapping({"engine": "sglang", **c.layer()}) for c in cells]
    assert (
        len({c.id for c in cells}) == len({c.test_id(s) for c, s in zip(cells, specs, strict=True)}) == len(cells) == 48
    )
    assert cells[0].test_id(specs[0]) == "sglang-tp1-eagle3-a-num_steps_3-mem_fraction_static_none-nccl_p2p_disable_1"
    assert specs[0].args == (("mem-fraction-static", None),)
    assert specs[-1].model == "org/B/"


def test_duplicates_are_removed() -> None:
    assert _ids(expand({"cuda_graph": ["on", True, "off", "on"]})) == ["cuda_graph_on", "cuda_graph_off"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"axes": {}}, "names no axis"),
        ({"axes": []}, "must map an axis"),
        ({"axes": {"cuda_graph": []}}, "has no value"),
        ({"axes": {"cuda_graph": "on"}}, "must be a list"),
        ({"axes": {"cuda_graph": {"on", "off"}}}, "must be a list"),
        ({"axes": {"cuda_graph": [["on"]]}}, "cannot be ['on']"),
        ({"axes": {"cuda_graph": [None]}}, "cannot be None"),
        ({"axes": {"spec_decode": [{"eagle3": {"x": [1]}}]}}, "cannot be"),
        ({"axes": {"spec_decode": [{"a": {}, "b": {}}]}}, "cannot be"),
        ({"axes": {"args.x": [["unhashable"]]}}, "write text"),
        ({"axes": {"CUDA graph": ["on"]}}, "no name of an axis"),
        ({"axes": {3: ["on"]}}, "no name of an axis"),
        ({"axes": {"tp": [0]}}, "whole numbers"),
        ({"axes": {"tp": ["eight"]}}, "whole numbers"),
        ({"axes": THREE, "exclude": [{"spec_decod": "eagle3"}]}, "did you mean 'spec_decode'?"),
        ({"axes": THREE, "exclude": [{"attention_backend": "flashinfr"}]}, "did you mean 'flashinfer'?"),
        ({"axes": THREE, "exclude": {"spec_decode": "eagle3"}}, "mappings of axis"),
        ({"axes": THREE, "exclude": ["eagle3"]}, "mappings of axis"),
        ({"axes": THREE, "exclude": [{}]}, "mappings of axis"),
        ({"axes": THREE, "exclude": [{"arch": "blackwell"}]}, '"sm120"'),
        ({"axes": THREE, "exclude": [{"cuda_graph": ["on", "off"]}]}, "leaves no cell of the 8"),
        ({"axes": THREE, "coverage": "some"}, "full, pairwise or one_off"),
        ({"axes": THREE, "limit": 0}, "1 or more"),
        ({"axes": THREE, "limit": 7}, "8 cells (spec_decode 2 x cuda_graph 2 x attention_backend 2), more than 7"),
        ({"axes": {f"axis_{n}": list(range(10)) for n in range(4)}}, "10,000 cells"),
        (
            {"axes": {f"axis_{n}": list(range(10)) for n in range(30)}},
            "1,000,000,000,000,000,000,000,000,000,000 cells",
        ),
        ({"axes": {"a": list(range(999)), "b": list(range(999))}, "coverage": "pairwise"}, "998,001 cells"),
    ],
)
def test_bad_input_is_one_paragraph(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        expand(**arguments)
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert message.startswith("gpuserve_matrix")


def test_limit_counts_what_exclusions_leave_and_may_be_raised() -> None:
    big: dict[str, list[object]] = {f"axis_{n}": list(range(10)) for n in range(4)}
    assert len(expand(big, limit=10_000)) == 10_000
    assert len(expand({"tp": [1, 2], **big}, [{"axis_0": list(range(1, 10))}], limit=2000)) == 2000


def test_marks_combine_closer_ones_win() -> None:
    house = {
        "axes": {"cuda_graph": ["on", "off"], "tp": [1, 8]},
        "exclude": [{"cuda_graph": "off", "tp": 8}],
        "limit": 3,
    }
    own = {"axes": {"tp": [8, 2], "spec_decode": ["base", "eagle3"]}, "limit": 9}
    cells = combine([house, own]).cells()
    assert {c["tp"].name for c in cells} == {"8", "2"}
    assert len(cells) == 6, "2 x 2 x 2 less the two cells of the house's exclusion"
    assert cells[0].id == "tp8-base-cuda_graph_on"
    with pytest.raises(SpecError, match="unknown option 'axis'"):
        combine([{"axis": {}}])


def test_check_axes_against_an_engine() -> None:
    known: dict[str, tuple[str, ...]] = {"cuda_graph": ("on", "off"), "attention_backend": ()}
    check_axes({"cuda_graph": ["on"], "attention_backend": ["anything"], "tp": [2], "args.x": [1]}, known, "sim")
    with pytest.raises(SpecError, match=r"no axis 'cuda_grap' \(did you mean 'cuda_graph'\?\)"):
        check_axes({"cuda_grap": ["on"]}, known, "sim")
    with pytest.raises(SpecError, match="cannot be 'of'"):
        check_axes({"cuda_graph": ["of"]}, known, "sim")


_AXES = st.dictionaries(
    st.sampled_from(["tp", "spec_decode", "cuda_graph", "overlap", "log_level", "mine"]),
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4, unique=True),
    min_size=2,
    max_size=5,
)


@given(_AXES, st.data())
@settings(max_examples=60, deadline=None)
def test_pairwise_covers_every_pair_that_can_exist(axes: dict[str, list[int]], data: st.DataObject) -> None:
    names = sorted(axes)
    rules = data.draw(
        st.lists(
            st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True).flatmap(
                lambda keys: st.fixed_dictionaries({key: st.sampled_from(axes[key]) for key in keys})
            ),
            max_size=4,
        )
    )
    try:
        full = expand(axes, rules, limit=2000)
    except SpecError:
        with pytest.raises(SpecError):
            expand(axes, rules, "pairwise", limit=2000)
        return
    cells = expand(axes, rules, "pairwise", limit=2000)

    def pairs(some: list[Cell]) -> set[Any]:
        return {pair for cell in some for pair in itertools.combinations(cell.values, 2)}

    assert pairs(cells) == pairs(full)
    assert len({c.values for c in cells}) == len(cells) <= len(full)
    assert {c.values for c in cells} <= {c.values for c in full}
    if full[0].changed == ():
        assert cells[0].changed == (), "the base is always there, and first"


def test_pairwise_is_small() -> None:
    axes: dict[str, list[object]] = {f"axis_{n}": list(range(3)) for n in range(10)}
    assert len(expand(axes, coverage="pairwise")) <= 21, "59,049 combinations; 9 is the floor"


def test_the_order_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from pytest_gpuserve.isolation.matrix import expand\n"
        "axes = {a: list('pqrs'[:n]) for a, n in [('a', 3), ('b', 4), ('c', 2), ('d', 3), ('e', 4)]}\n"
        "for how in ('full', 'pairwise', 'one_off'):\n"
        "    print([c.id for c in expand(axes, [{'a': ['q', 'r'], 'b': 'p'}], how, 999)])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(seen) == 1
