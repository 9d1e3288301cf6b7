"""What is expected of a configuration, and what its figures say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpuserve.errors import SpecError
from pytest_gpuserve.isolation.figures import Expectation, Figures, base_of, judge, parse

BASE = Figures("sim-tp1-base", "k0", "f", True, 1234.0)
EAGLE = Figures("sim-tp1-eagle3", "k1", "f", False, 814.0, 0.15, 1.45)


@pytest.mark.parametrize(
    ("written", "op", "limit"),
    [
        (">=0.5", ">=", 0.5),
        ("> 1", ">", 1.0),
        (0.5, ">=", 0.5),
        (2, ">=", 2.0),
        ("<=.25", "<=", 0.25),
        ("1.2x", ">=", 1.2),
    ],
)
def test_ways_to_write_it(written: object, op: str, limit: float) -> None:
    assert parse({"accept_rate": written}, "m") == (Expectation("accept_rate", op, limit),)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([], "must be a mapping"),
        ({"acceptrate": 1}, "knows no 'acceptrate'. It knows accept_rate, accept_length, tokens_per_s, speedup"),
        ({"speedup": "=> 1"}, "expect speedup cannot be '=> 1'"),
        ({"speedup": True}, "cannot be True"),
        ({"speedup": "fast"}, "cannot be 'fast'"),
        ({"speedup": -1}, "cannot be -1"),
    ],
)
def test_what_cannot_be_expected(raw: Any, words: str) -> None:
    with pytest.raises(SpecError, match=r"^the mark: .*expect") as caught:
        parse(raw, "the mark")
    assert words in str(caught.value)


def test_none_takes_it_back() -> None:
    assert parse({"speedup": None, "accept_rate": 0}, "m") == (Expectation("accept_rate", ">=", 0.0),)


def test_both_numbers_are_told() -> None:
    found = judge(EAGLE, parse({"accept_rate": ">=0.5", "speedup": ">=1.0"}, "m"), BASE)
    assert found.text == "accept rate 0.15 (>= 0.5 asked), 0.66x the base cell's 1234 tok/s (>= 1 asked)"
    assert (found.verdict, found.failed, found.waiting) == ("degraded", ("accept_rate", "speedup"), ())
    alone = judge(EAGLE, parse({"accept_rate": ">=0.5"}, "m"), BASE)
    assert alone.text == "accept rate 0.15 (>= 0.5 asked), 0.66x the base cell's 1234 tok/s"
    assert alone.failed == ("accept_rate",)


def test_what_is_met_is_no_fault() -> None:
    found = judge(
        EAGLE, parse({"accept_rate": 0.15, "accept_length": ">1.4", "tokens_per_s": 800, "speedup": 0.6}, "m"), BASE
    )
    assert found.verdict is None
    assert "814 tok/s (>= 800 asked)" in found.text


def test_a_speedup_waits_for_its_base() -> None:
    found = judge(EAGLE, parse({"speedup": 1}, "m"), None)
    assert (found.verdict, found.waiting) == (None, ("speedup",))
    assert judge(EAGLE, parse({"speedup": 1}, "m"), replace(BASE, tokens_per_s=0.0)).waiting == ("speedup",)


def test_not_one_token_accepted_is_degraded_whatever_is_asked() -> None:
    found = judge(replace(EAGLE, useless=True, accept_rate=0.0), parse({"tokens_per_s": 1}, "m"), None)
    assert found.verdict == "degraded"
    assert found.text.startswith("not one drafted token was accepted")


def test_the_base_cell_of_a_matrix_is_asked_for_nothing_that_it_cannot_have() -> None:
    asked = parse({"accept_rate": 0.5, "speedup": 1.0, "tokens_per_s": 2000}, "m")
    found = judge(BASE, asked, None, of_matrix=True)
    assert (found.failed, found.unknown, found.waiting) == (("tokens_per_s",), (), ())
    alone = judge(BASE, asked, None)
    assert alone.unknown == ("accept_rate",)
    assert judge(BASE, asked[:1], None).verdict == "undecided"


def test_a_speculating_server_that_tells_nothing_is_undecided() -> None:
    found = judge(replace(EAGLE, accept_rate=None), parse({"accept_rate": 0.5}, "m"), None)
    assert found.verdict == "undecided"
    assert "no accept rate: the server tells none (>= 0.5 asked)" in found.text


def test_the_base_differs_in_speculation_alone() -> None:
    others = [EAGLE, replace(BASE, family="g"), replace(BASE, id="right"), BASE]
    assert base_of(EAGLE, others) == others[2]
    assert base_of(BASE, others) is None
    assert base_of(EAGLE, others[:2]) is None


def test_figures_travel_as_json() -> None:
    assert Figures.from_json(json.loads(json.dumps(EAGLE.to_json()))) == EAGLE
    assert str(EAGLE) == "814 tok/s, accept rate 0.15, accept length 1.45"
