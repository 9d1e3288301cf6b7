"""Named servers and matrices: what stands in the configuration file, and what is told when it cannot be used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpuserve import foreign
from pytest_gpuserve.errors import SpecError
from pytest_gpuserve.plugin.named import named


def look(root: Path, kind: str = "servers", name: str = "kimi", ini: str = "pyproject.toml") -> Any:
    config: Any = SimpleNamespace(inipath=root / ini, rootpath=root)
    return named(config, kind, name)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("pyproject.toml", b"[tool.gpuserve", "pyproject.toml cannot be read: "),
        ("pyproject.toml", b"x = '\xff'", "pyproject.toml cannot be read: "),
        ("pyproject.toml", b"[tool.gpuserve]\nservers = 3", r"\[tool.gpuserve.servers\] must hold one table a name"),
        ("pyproject.toml", b"[tool.gpuserve.servers]\nkimi = 3", "must hold one table a name"),
        ("tox.ini", b"[gpuserve.servers.kimi", "tox.ini cannot be read: "),
        ("tox.ini", b"[gpuserve.servers.kimi]\nmodel = \xff", "tox.ini cannot be read: "),
        ("pytest.ini", b"[pytest]", "there is no servers table called 'kimi'. Known: none. Add "),
        ("pyproject.toml", b"[tool.gpuserve.servers.kimi-k2]\ntp = 8", "Known: kimi-k2. Add "),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, file: str, text: bytes, said: str) -> None:
    (tmp_path / file).write_bytes(text)
    with pytest.raises(SpecError, match=said):
        look(tmp_path, ini=file)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("")

    def refused(*_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(foreign, "whole", refused)
    with pytest.raises(SpecError, match=r"cannot be read: .*Permission denied"):
        look(tmp_path)


def test_an_ini_file_keeps_the_case_of_flags_and_variables(tmp_path: Path) -> None:
    (tmp_path / "tox.ini").write_text("[gpuserve.servers.kimi]\ntp = 8\nenv.NCCL_DEBUG = INFO\nargs.--Flag = a=b\n")
    table, where = look(tmp_path, ini="tox.ini")
    assert table == {"tp": 8, "env": {"NCCL_DEBUG": "INFO"}, "args": {"--Flag": "a=b"}}
    assert where == f"[servers kimi] in {tmp_path / 'tox.ini'}"


def test_pyproject_counts_beside_the_file_that_configures_pytest(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "pyproject.toml").write_text("[tool.gpuserve.matrix.graphs]\naxes = { cuda_graph = ['on', 'off'] }\n")
    table, _ = look(tmp_path, "matrix", "graphs", "pytest.ini")
    assert table == {"axes": {"cuda_graph": ["on", "off"]}}
