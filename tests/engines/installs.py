"""Make a directory that looks like an installed engine to an interpreter that has it on PYTHONPATH."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

HELP = Path(__file__).parent.parent / "data" / "engines" / "help"

_MAIN = """
import os, sys
with open(os.environ["ASKED"], "a") as file:
    file.write(os.getcwd() + "\\n")
sys.stdout.write(open({help!r}).read())
"""

_ENUM = """
class AttentionBackendEnum(Enum, metaclass=Meta):
    \"\"\"All of them.\"\"\"

    FLASH_ATTN = "a"
    TRITON_ATTN = (
        "b"
    )
    FLASHINFER = "c"
    CPU_ATTN = "d"

    def path(self):
        OTHER = 1


class Later:
    NOT_ONE = 1
"""

_MODES = """
class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
"""


@dataclass(frozen=True)
class Fake:
    """``python`` runs it, with ``env``; ``asked`` has one line for every time that it was asked for help."""

    root: Path
    python: str
    env: dict[str, str]

    @property
    def asked(self) -> int:
        file = self.root / "asked"
        return len(file.read_text().splitlines()) if file.exists() else 0


def sglang(root: Path, version: str = "0.5.23", *, main: str | None = None) -> Fake:
    """SGLang as a module."""
    package = root / "site" / "sglang"
    (package / "srt" / "arg_groups").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "srt" / "server_args.py").write_text("ARGS = 1\n")
    help_file = HELP / f"sglang-{version}.txt"
    (package / "launch_server.py").write_text(main or _MAIN.format(help=str(help_file)))
    return _fake(root, "sglang", version, sys.executable)


def vllm(root: Path, version: str = "0.32.0", *, script: bool = True, distribution: str = "vllm") -> Fake:
    """vLLM, by a script beside the interpreter (or as a module), with its enumerations in the source."""
    package = root / "site" / "vllm"
    for folder in ("v1/attention/backends", "config", "entrypoints/cli", "engine"):
        (package / folder).mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "v1/attention/backends/registry.py").write_text(_ENUM)
    (package / "config/compilation.py").write_text(_MODES)
    main = _MAIN.format(help=str(HELP / f"vllm-{version}.txt"))
    python = sys.executable
    if script:
        binaries = root / "bin"
        binaries.mkdir()
        (binaries / "python").symlink_to(os.path.realpath(sys.executable))
        (binaries / "vllm").write_text(main)
        python = str(binaries / "python")
    else:
        (package / "entrypoints/__init__.py").touch()
        (package / "entrypoints/cli/__init__.py").touch()
        (package / "entrypoints/cli/main.py").write_text(main)
    return _fake(root, distribution, version, python)


def _fake(root: Path, distribution: str, version: str, python: str) -> Fake:
    info = root / "site" / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(distribution.split("-")[0] + "\n")
    return Fake(root, python, {"PYTHONPATH": str(root / "site"), "ASKED": str(root / "asked")})
