"""repro.sh: the same server again, by hand. A function of server.json, so that it can be made anew anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..shell import word
from ..text import one_line
from .pages import mapping, strings, where

SCHEMA: Final = "gpuserve.launch/1"
"""Schema of a bundle's server.json."""

_OF_THE_PLACE: Final = re.compile(
    r"PATH|LANG|LC_.*|TZ|CI|TMPDIR|VIRTUAL_ENV|CONDA_PREFIX|PYTHON[A-Z]*|GPUSERVE_.*|PYTEST_XDIST_.*|XDG_CACHE_.*|RANK"
    r"|VLLM_API_KEY|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_PORT|OMP_NUM_THREADS|NVIDIA_(?!TF32).*"
)
"""Variables that belong to the machine or to us, and not to what is tested."""

_SERVING: Final = ("ready", "serving", "warmup")


def script(server: Mapping[str, Any], incident: Mapping[str, Any]) -> str:
    """A shell script; foreign text in it stands quoted, or in comments of one line."""
    lines = [
        "#!/bin/sh",
        f"# {_comment(incident.get('verdict'))} {_comment(where(incident) or 'in an unknown phase')}: "
        f"{_comment(incident.get('id'))}",
        "# Starts the server that failed, with what differed from a plain environment. Values like <secret-1> were",
        "# removed: put your own in their places.",
    ]
    if test := incident.get("test"):
        lines.append(f"# The test that was running: pytest {word(_comment(test, 1000))}")
    lines.append("set -eu")
    for name, value in environment(server).items():
        lines.append(f"export {name}={word(value)}")
    argv = strings(server.get("argv"))
    command = " \\\n    ".join(_grouped(argv)) or "false # the command line is not known"
    if incident.get("phase") in _SERVING and isinstance(server.get("request"), Mapping):
        lines += ["", f"{command} &", "server=$!", "trap 'kill $server' EXIT", "", *_request(server)]
    else:
        lines += ["", f"exec {command}"]
    return "\n".join(lines) + "\n"


def environment(server: Mapping[str, Any]) -> dict[str, str]:
    """The variables that are worth setting again."""
    return {
        name: str(value)
        for name, value in mapping(server.get("environment")).items()
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and not _OF_THE_PLACE.fullmatch(name)
    }


def _grouped(argv: Sequence[str]) -> Iterator[str]:
    """An option and its value on one line."""
    held: list[str] = []
    for part in argv:
        if held and (part.startswith("-") or len(held) > 2):
            yield " ".join(held)
            held = []
        held.append(word(part))
    if held:
        yield " ".join(held)


def _request(server: Mapping[str, Any]) -> Iterator[str]:
    """Wait until it is ready, then the request that makes a token."""
    request = server["request"]
    url = str(server.get("url") or "http://127.0.0.1:8000")
    ready = word(url + str(server.get("ready") or "/health"))
    yield f"until curl -sf -o /dev/null {ready}; do kill -0 $server; sleep 1; done"
    path, body = str(request.get("path") or "/v1/completions"), request.get("body")
    data = f" -H 'Content-Type: application/json' -d {word(json.dumps(body))}" if body is not None else ""
    yield f"curl -sS -m 300 {word(url + path)}{data}"


def _comment(text: object, width: int = 200) -> str:
    return one_line(str(text), width)
