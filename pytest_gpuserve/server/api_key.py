"""The API key of a server: made for one start, and given where other users of the machine cannot read it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..engines.base import Launch
from ..spec import ServerSpec

FLAG: Final = "--api-key"
CONFIG: Final = "engine.yaml"
"""In a server's directory, 0600: options that must not stand on a command line, which every user can read."""


def authorise(
    spec: ServerSpec, launch: Launch, private: Path, environ: Mapping[str, str] = os.environ
) -> tuple[Launch, str | None]:
    """The launch with a key of its own, and that key; None: requests need none.

    What the user says about the key stands, on the command line and in the engine's variable: a key of theirs, or none
    (``args={"api_key": False}``). Nothing is made for an engine that takes a key on its command line only.
    """
    if any(_is_flag(name) for name, _ in spec.args) or any(_is_flag(word) for word in launch.argv):
        return launch, in_argv(launch.argv)
    if variable := launch.key_variable:
        if variable in launch.env or environ.get(variable):
            return launch, launch.env.get(variable, environ.get(variable)) or None
        key = _make()
        return replace(launch, env={**launch.env, variable: key}), key
    if launch.key_config:
        key, path = _make(), private / CONFIG
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(f"api-key: {key}\n")
        return replace(launch, argv=(*launch.argv, launch.key_config, str(path))), key
    return launch, None


def in_argv(argv: Sequence[str]) -> str | None:
    """The key of a command line."""
    for word, following in zip(argv, (*argv[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if _is_flag(name) and name.startswith("--"):
            return (value if equals else following) or None
    return None


def _is_flag(name: str) -> bool:
    return "--" + name.partition("=")[0].lstrip("-").replace("_", "-") == FLAG


def _make() -> str:
    """Neither a number to YAML nor an option to argparse."""
    return f"gpuserve-{secrets.token_hex(16)}"
