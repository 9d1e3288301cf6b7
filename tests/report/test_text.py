"""Foreign text on a terminal: nothing obeyed, nothing hidden, nothing too wide."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.text import escape, one_line


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("100%|##|\r200%", r"100%|##|\x0d200%"),
        ("a\x00\x08\x7f\x9b1m", r"a\x00\x08\x7f\x9b1m"),
        ("abc\u202edcba\u2069", r"abc\u202edcba\u2069"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("sur\udc80rogate", r"sur\udc80rogate"),
        ("tag\U000e0041", r"tag\U000e0041"),
        ("line\u2028sep", r"line\u2028sep"),
        ("filler\u3164\ufe0f", r"filler\u3164\ufe0f"),
        ("héllo 世界 ✓ a\u00a0b", "héllo 世界 ✓ a\u00a0b"),
        ("tabs\tand\nlines", "tabs\tand\nlines"),
        ("::error file=x::y\n \u3000::add-mask::z", "\\x3a:error file=x::y\n \u3000\\x3a:add-mask::z"),
        ("a ##[group]b ##vso[task.x]c ##teamcity[d]", "a \\x23#[group]b \\x23#vso[task.x]c \\x23#teamcity[d]"),
        ("## a heading, std::move(x), ::1, ###", "## a heading, std::move(x), ::1, ###"),
    ],
)
def test_escapes(raw, shown):
    assert escape(raw) == shown


@given(st.text(st.characters(codec=None), max_size=60))
def test_nothing_survives_that_a_terminal_obeys_or_hides(text):
    shown = escape(text)
    for character in shown:
        assert character in "\n\t" or unicodedata.category(character)[0] != "C"
    shown.encode()  # no surrogate left
    assert escape(shown) == shown


@given(st.text(max_size=80), st.integers(1, 40))
def test_width(text, width):
    for line in escape(text, width).split("\n"):
        columns = 0
        for c in line:
            if c == "\t":
                columns += 8 - columns % 8
            elif not unicodedata.combining(c):
                columns += 2 if unicodedata.east_asian_width(c) in "WF" else 1
        assert columns <= width


def test_width_cuts_with_an_ellipsis_and_only_what_is_too_long():
    assert escape("12345678", 8) == "12345678"
    assert escape("123456789", 8) == "1234567…"
    assert escape("世界世界", 5) == "世界…"
    assert escape("ab\n" + "c" * 9, 3) == "ab\ncc…"


def test_one_line():
    assert one_line("a\n  b\tc\r\nd\x1b") == r"a b c d\x1b"
