"""What the text of an option says: each function takes it, and where it came from, and raises pytest.UsageError."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

Source = str
"""Where a value came from, as an error names it: ``--gpuserve-grace``, ``GPUSERVE_GRACE``, ``gpuserve_grace in …``."""


def place(text: str, source: Source) -> str:
    if not text.strip():
        raise pytest.UsageError(f"{source}: it names no directory. Name one, or say off to have no artifacts.")
    return text


def choice(*allowed: str) -> Callable[[str, Source], str]:
    def parse(text: str, source: Source) -> str:
        if text not in allowed:
            raise pytest.UsageError(f"{source}: {text!r} is none of {', '.join(allowed)}.")
        return text

    return parse


def gpus(text: str, source: Source) -> str:
    import re

    if not re.fullmatch(r"auto|none|virtual:[1-9][0-9]*|([0-9]+|(GPU|MIG)-[^,]+)(,([0-9]+|(GPU|MIG)-[^,]+))*", text):
        raise pytest.UsageError(
            f"{source}: {text!r} names no GPUs. Write auto, none, virtual:8, or numbers or UUIDs as in "
            f"CUDA_VISIBLE_DEVICES: 0,1."
        )
    return text


def seconds(text: object, source: Source) -> float:
    """A positive number of seconds.

    Raises:
        pytest.UsageError: it is none.
    """
    try:
        value = float(str(text))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise pytest.UsageError(f"{source}: {text!r} is no number of seconds above 0 (write 600, not 10m).")
    return value


def number(text: str, source: Source) -> int:
    if not text.isdecimal():
        raise pytest.UsageError(f"{source}: {text!r} is no number (write 200, or 0 for all).")
    return int(text)


def switch(text: str, source: Source) -> bool:
    words = {"1": True, "yes": True, "true": True, "on": True, "0": False, "no": False, "false": False, "off": False}
    if text.lower() not in words:
        raise pytest.UsageError(f"{source}: {text!r} is neither yes nor no.")
    return words[text.lower()]


def deadline(text: str, source: Source, now: float | None = None) -> float | None:
    """Wall-clock time of a session deadline: seconds from now, ``HH:MM[:SS]`` (next one, local), or ISO date and time.

    Raises:
        pytest.UsageError: it is none of these, or a date that has passed.
    """
    if text in ("", "off"):
        return None
    from datetime import datetime, timedelta

    now = time.time() if now is None else now
    moment = datetime.fromtimestamp(now)
    if ":" not in text:
        return now + seconds(text, source)
    try:
        if "-" in text:
            when = datetime.fromisoformat(text).timestamp()
        else:
            hour, minute, *rest = (int(part) for part in text.split(":"))
            clock = moment.replace(hour=hour, minute=minute, second=rest[0] if rest else 0, microsecond=0)
            when = (clock if clock > moment else clock + timedelta(days=1)).timestamp()
    except (ValueError, IndexError):
        raise pytest.UsageError(
            f"{source}: {text!r} is neither seconds (3300), a time of day (17:45) nor a date and time "
            f"(2026-01-31T17:45)."
        ) from None
    if when <= now:
        raise pytest.UsageError(f"{source}: {text} has already passed.")
    return when


def monotonic(when: float | None) -> float | None:
    """A wall-clock time on the clock that is never set: what a session waits for must not move with the other one."""
    return None if when is None else time.monotonic() + when - time.time()


def count(text: str, source: Source) -> int:
    if not text.isdecimal():
        raise pytest.UsageError(f"{source}: {text!r} is no whole number, 0 or more.")
    return int(text)


def stall(text: str, source: Source) -> float | Literal["auto"] | None:
    return "auto" if text == "auto" else None if text == "off" else seconds(text, source)


def assignments(lines: Sequence[str], source: Source) -> dict[str, Any]:
    """``KEY=VALUE`` lines as a layer of a spec: ``args.FLAG``, ``env.NAME`` and axes are put where they belong.

    A value that reads as JSON (a number, true, false, null, a list, an object) is taken as that, any other as text.

    Raises:
        pytest.UsageError: a line without ``=`` or with a key that no server has.
    """
    layer: dict[str, Any] = {}
    for line in lines:
        from ..spec import AXES, SPEC_KEYS

        key, equals, text = line.partition("=")
        key = key.strip()
        if key.startswith("args.--"):  # args.--flag=value: the flag's own dashes stay
            equals = equals or "="
        if not equals:
            raise pytest.UsageError(f"{source}: {line!r} is no KEY=VALUE (for example tp=2 or env.NCCL_DEBUG=INFO).")
        room, dot, name = key.partition(".")
        if dot and room in ("args", "env", "axes") and name:
            value = text if room == "env" else _json_or_text(text)
            layer.setdefault(room, {})[name] = None if room == "args" and text == "" else value
        elif key in AXES:
            layer.setdefault("axes", {})[key] = _json_or_text(text)
        elif key in SPEC_KEYS or key == "server":
            layer[key] = _json_or_text(text) if key in ("tp", "command", "args", "env", "axes", "uses_gpus") else text
        else:
            raise pytest.UsageError(
                f"{source}: there is no {key!r}. Keys: {', '.join(SPEC_KEYS)}, args.FLAG, env.NAME; "
                f"axes: {', '.join(AXES)}."
            )
    return layer


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
