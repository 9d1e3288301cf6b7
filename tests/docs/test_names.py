"""Whatever the documentation names exists, and whatever a user can set is explained by a page that a person wrote."""

from __future__ import annotations

import re

import gpuserve_reference as reference
import pytest
from gpuserve_examples import DOCS, fences, pages

from pytest_gpuserve import cli
from pytest_gpuserve.plugin.options import OPTIONS

PAGES = {str(page.relative_to(DOCS.parent)): page.read_text(encoding="utf-8") for page in pages()}
DECLARED = reference.declared()
MARKS = set(reference.mark_names())
FOREIGN_MARKS = {"parametrize", "skip", "skipif", "xfail", "usefixtures", "timeout", "flaky"}


def code(text: str) -> list[str]:
    """Lines of fenced blocks and `code spans` of a page, less what other programs replace in them."""
    lines = [line for _, body in fences(text) for line in body.splitlines() if "===" not in line]
    return [re.sub(r"\$\{\{.*?\}\}", "", line) for line in lines + re.findall(r"`([^`\n]+)`", text)]


@pytest.mark.parametrize("page", PAGES)
def test_options_that_are_named_exist(page):
    named = set(re.findall(r"--gpuserve(?:-[a-z]+)*", PAGES[page]))
    assert named <= set(DECLARED.options), named - set(DECLARED.options)
    keys = set(re.findall(r"^\s*(gpuserve_[a-z_]+) = ", "\n".join(code(PAGES[page])), re.MULTILINE))
    keys -= {key for key in keys if f"def {key}" in PAGES[page]}
    assert keys <= set(DECLARED.keys), keys - set(DECLARED.keys)


@pytest.mark.parametrize("page", PAGES)
def test_marks_that_are_named_exist(page):
    named = set(re.findall(r"pytest\.mark\.(\w+)", PAGES[page]))
    lines = "\n".join(code(PAGES[page]))
    for expression in re.findall(r"(?:pytest|judge|bisect)\b[^\n`]* -m (\"[^\"]+\"|'[^']+'|\w+)", lines):
        if "cell(" not in expression:
            named |= set(re.findall(r"\w+", expression)) - {"and", "or", "not"}
    assert named <= MARKS | FOREIGN_MARKS, named - MARKS - FOREIGN_MARKS


@pytest.mark.parametrize("page", PAGES)
def test_sub_commands_that_are_named_exist_with_their_options(page):
    for piece in code(PAGES[page]):
        for command, rest in re.findall(r"(?:^|[ $])gpuserve ([a-z]+)((?: [^\n|;]*)?)", piece, re.MULTILINE):
            assert command in cli.COMMANDS, f"gpuserve {command}"
            ours = re.sub(r"\"[^\"]*\"|'[^']*'", "", rest).partition(" -- ")[0]
            named = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", ours))
            known = reference.command_options(command)
            assert named <= known, f"gpuserve {command}: {named - known}"


def test_every_option_is_explained():
    for option in OPTIONS:
        spelled = re.compile(rf"(?:{option.cli}|{option.key.upper()}|{option.key})(?![\w-])")
        assert any(spelled.search(text) for text in PAGES.values()), option.cli


def test_every_sub_command_is_explained():
    text = "\n".join(PAGES.values())
    assert not [name for name in cli.COMMANDS if f"gpuserve {name}" not in text]


def test_the_reference_has_everything():
    text = {name: make() for name, make in reference.PAGES.items()}
    assert not [name for name in DECLARED.options if f"## `{name}`" not in text["options"]]
    assert not [name for name in MARKS if f"`{name}`" not in text["marks"] and f"`{name}(" not in text["marks"]]
    assert not [
        name
        for name in cli.COMMANDS
        if f"usage: gpuserve {name}" not in re.sub("git bisect run ", "usage: ", text["commands"])
    ]
    for fixture in ("server", "gpuserve_server", "gpuserve_pool", "gpuserve_cell"):
        assert f"## `{fixture}`" in text["fixtures"]
    for hook in ("pytest_gpuserve_spec", "pytest_gpuserve_server_started", "pytest_gpuserve_incident"):
        assert hook in text["hooks"]


def test_generated_parts_of_the_pages_are_known():
    wanted = {name for text in PAGES.values() for name in re.findall(r"<!-- generated: ([a-z-]+) -->", text)}
    assert wanted == set(reference.PAGES)
