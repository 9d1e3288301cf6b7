"""The reference, read from the code: each function returns the Markdown of one part of it. Needs no Sphinx."""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from gpuserve_documents import DOCUMENTS

from pytest_gpuserve import cli, vocabulary
from pytest_gpuserve.engines import engine_names, get_engine
from pytest_gpuserve.plugin import fixtures, marks, newhooks
from pytest_gpuserve.plugin import options as plugin_options
from pytest_gpuserve.spec import AXES, ServerSpec

DOCS = Path(__file__).parents[1]


class _Recorder:
    """Stands for pytest's parser and config while the plugin declares what it has."""

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.marks: list[str] = []

    def getgroup(self, *_: str) -> _Recorder:
        return self

    def addoption(self, name: str, **given: Any) -> None:
        self.options[name] = given

    def addini(self, name: str, help: str, **_: Any) -> None:
        self.keys[name] = help

    def addinivalue_line(self, _: str, line: str) -> None:
        self.marks.append(line)


def declared() -> _Recorder:
    """Every option, ini key and mark, as the plugin declares them to pytest."""
    recorder = _Recorder()
    plugin_options.add_options(recorder)  # type: ignore[arg-type]
    marks.register(recorder)  # type: ignore[arg-type]
    return recorder


def mark_names() -> list[str]:
    """Names of all marks, in the order of their declaration."""
    return [re.split(r"[:(]", line)[0] for line in declared().marks]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def options() -> str:
    """Options and ini keys."""
    found, parts = declared(), []
    for option in plugin_options.OPTIONS:
        given = found.options[option.cli]
        value = f" {given['metavar']}" if given.get("metavar") else ""
        default = f"`{option.default}`" if option.default else "unset"
        parts.append(
            f"## `{option.cli}`\n\n`{option.cli}{value}`; environment `{option.key.upper()}`; ini `{option.key}`; "
            f"default {default}.\n\n{option.help[0].upper()}{option.help[1:]}."
        )
    listed = {option.cli for option in plugin_options.OPTIONS}
    for name, given in found.options.items():
        if name not in listed:
            usage, text = f"`{name} {given.get('metavar', '')}`", str(given["help"])
            parts.append(
                f"## `{name}`\n\n{usage}; may be repeated; no environment variable.\n\n{text[0].upper()}{text[1:]}."
            )
    own = {option.key for option in plugin_options.OPTIONS}
    rows = [(f"`{key}`", text) for key, text in found.keys.items() if key not in own]
    return "\n\n".join([*parts, "## Ini keys without an option", _table(("key", ""), rows)])


def mark_list() -> str:
    """Every registered mark; those that differ in a name or a number only, together."""
    speculation = "|".join(f"{name}$" for name in marks.SPEC_DECODE)
    families = (
        ("architectures", re.compile(r"sm\d+$"), "needs GPUs of exactly that compute capability; of several, any"),
        ("attention", re.compile(r"attn_"), "the server runs that attention backend"),
        ("speculation", re.compile(speculation), "the server runs that speculative decoding"),
    )
    members: dict[str, list[str]] = {name: [] for name, _, _ in families}
    rows = []
    for line in declared().marks:
        head, _, text = line.partition(": ")
        name = re.split(r"[:(]", line)[0]
        family = next((title for title, pattern, _ in families if pattern.match(name)), None)
        if family is None:
            rows.append((f"`{head}`", text))
        else:
            members[family].append(name)
    parts = [_table(("mark", "meaning"), rows)]
    for title, _, text in families:
        parts.append(f"**{title.capitalize()}**: {text}.\n\n" + ", ".join(f"`{name}`" for name in members[title]))
    return "\n\n".join(parts)


def spec_keys() -> str:
    """What a ``gpuserve`` mark may say: the attributes of ServerSpec, and the limits of a mark."""
    rows = [(f"`{key}`", text) for key, text in _attributes(ServerSpec).items() if key != "axes"]
    rows += [
        (f"`{name}`", "seconds; stronger than the option of that name, for this server")
        for name in plugin_options.LIMITS
    ]
    rows.append(("`fresh`", "True: a server that no other test gets"))
    rows.append(("`expect`", "figures that the server should reach, such as `{'accept_rate': '>=0.5'}`"))
    return _table(("key", "meaning"), rows)


def _attributes(thing: type) -> dict[str, str]:
    """The ``Attributes:`` of a docstring."""
    doc = inspect.getdoc(thing) or ""
    block = textwrap.dedent(doc.partition("Attributes:\n")[2].partition("\n\n")[0])
    entries = re.findall(r"^(\w+): (.*(?:\n .*)*)", block, re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in entries}


def axes() -> str:
    """Every axis and what each engine takes for it."""
    names = [name for name in engine_names() if getattr(get_engine(name), "axes", None)]
    rows = []
    for axis in AXES:
        cells = []
        for name in names:
            values = get_engine(name).axes.get(axis)
            cells.append("" if values is None else ", ".join(f"`{value}`" for value in values) or "any")
        rows.append((f"`{axis}`", *cells))
    return _table(("axis", *names), rows)


def hooks() -> str:
    """Hooks for a conftest, with their docstrings."""
    names = [name for name, thing in vars(newhooks).items() if name.startswith("pytest_") and callable(thing)]
    return "```{eval-rst}\n" + "\n".join(f".. autofunction:: {newhooks.__name__}.{name}" for name in names) + "\n```"


def fixture_list() -> str:
    """Fixtures: name, scope and docstring."""
    tree = ast.parse(Path(inspect.getfile(fixtures)).read_text(encoding="utf-8"))
    parts = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("fixture" in ast.unparse(d) for d in node.decorator_list):
            scope = next((k.value.value for d in node.decorator_list if isinstance(d, ast.Call) for k in d.keywords
                          if k.arg == "scope" and isinstance(k.value, ast.Constant)), "function")  # fmt: skip
            text = (ast.get_docstring(node) or "").replace("``", "`")
            parts.append(f"## `{node.name}`\n\nScope: {scope}.\n\n{text}")
    return "\n\n".join(parts)


def command_help(name: str) -> str:
    """What ``gpuserve NAME --help`` prints, 100 columns wide."""
    text = io.StringIO()
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.main([name, "--help"])
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return text.getvalue().rstrip()


def command_options(name: str) -> set[str]:
    """Long and short options of a sub-command."""
    parser = argparse.ArgumentParser()
    import_module(f"{cli.__name__}.{name}").configure(parser)
    return {word for action in parser._actions for word in action.option_strings}


def commands() -> str:
    """Every sub-command."""
    parts = []
    for name, text in cli.COMMANDS.items():
        parts.append(f"## gpuserve {name}\n\n{text[0].upper()}{text[1:]}.\n\n```text\n{command_help(name)}\n```")
    return "\n\n".join(parts)


def words() -> str:
    """Phases and verdicts, in their order."""
    phases, verdicts = (", ".join(f"`{word}`" for word in found) for found in (vocabulary.PHASES, vocabulary.VERDICTS))
    return f"Phases, in the usual order: {phases}.\n\nVerdicts: {verdicts}."


def schemas() -> str:
    """Every JSON document: where it is found, its keys, their types and meaning."""
    parts = []
    for name, document in DOCUMENTS.items():
        rows = [(f"`{key}`", *map(str.strip, text.split(":", 1))) for key, text in document["keys"].items()]
        schema, number = document["schema"], document["schema"].rpartition("/")[2]
        where = f'`"schema": "{schema}"`, version {number}. ' if schema else ""
        parts.append(f"## {name}\n\n{where}{document['text']}\n\n{_table(('key', 'type', 'meaning'), rows)}")
    return "\n\n".join(parts)


def other_pages() -> str:
    """Pages at the top of docs/ that index.md does not name, so that a new one is in the navigation."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    names = sorted(page.stem for page in DOCS.glob("*.md"))
    return "\n".join(name for name in names if name != "index" and not re.search(rf"^{name}$", index, re.MULTILINE))


PAGES: Mapping[str, Callable[[], str]] = {
    "options": options,
    "marks": mark_list,
    "spec": spec_keys,
    "axes": axes,
    "hooks": hooks,
    "fixtures": fixture_list,
    "commands": commands,
    "words": words,
    "documents": schemas,
    "other-pages": other_pages,
}
"""Parts of the reference by the name in ``<!-- generated: NAME -->``."""
