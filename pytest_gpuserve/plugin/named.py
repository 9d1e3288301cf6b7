"""Named servers and matrices of a project: ``[tool.gpuserve.servers.NAME]`` and ``[tool.gpuserve.matrix.NAME]``.

They are read from the TOML file that configures pytest and from pyproject.toml in the root directory; a project that
is configured by pytest.ini, tox.ini or setup.cfg may write sections ``[gpuserve.servers.NAME]`` there instead, with the
keys of ``--gpuserve-set``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .. import foreign
from ..errors import SpecError
from .option_values import assignments


def named(config: pytest.Config, kind: str, name: str) -> tuple[Mapping[str, Any], str]:
    """The table called ``name`` of ``kind`` (``servers`` or ``matrix``), and the file it stands in.

    Raises:
        SpecError: there is none, or the file cannot be read; the message lists the names there are.
    """
    known: list[str] = []
    files = dict.fromkeys(path for path in (config.inipath, config.rootpath / "pyproject.toml") if path)
    for path in files:
        tables = _tables(path, kind)
        if name in tables:
            return tables[name], f"[{kind} {name}] in {path}"
        known += tables
    from ..engines import engine_names

    if kind == "servers" and name in engine_names():
        raise SpecError(f"{name!r} is an engine, not a server of your configuration: write engine={name!r}.")
    raise SpecError(
        f"there is no {kind} table called {name!r}. Known: {', '.join(known) or 'none'}. Add "
        f"[tool.gpuserve.{kind}.{name}] to {config.rootpath / 'pyproject.toml'}, or change the name in the mark."
    )


def _tables(path: Path, kind: str) -> Mapping[str, Mapping[str, Any]]:
    if not path.is_file():
        return {}
    if path.suffix == ".toml":
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        try:
            document = toml.loads(foreign.whole(path).decode())
        except (OSError, ValueError) as error:
            raise SpecError(f"{path} cannot be read: {error}") from None
        tables = document.get("tool", {}).get("gpuserve", {}).get(kind, {})
        if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
            raise SpecError(
                f"{path}: [tool.gpuserve.{kind}] must hold one table a name, such as [tool.gpuserve.{kind}.x]."
            )
        return tables
    parser = ConfigParser(interpolation=None, delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # flags and variables are case-sensitive
    try:
        parser.read_string(foreign.whole(path).decode(), str(path))
    except (OSError, ConfigParserError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from None
    prefix = f"gpuserve.{kind}."
    return {
        section.removeprefix(prefix): assignments(
            [f"{k}={v}" for k, v in parser[section].items()], f"[{section}] in {path}"
        )
        for section in parser.sections()
        if section.startswith(prefix)
    }
