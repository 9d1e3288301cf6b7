"""One run of a small program under a hard limit, for facts about the machine: it may hang, we do not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from .. import procfs


def output(argv: Sequence[str], limit: float) -> tuple[str, str | None]:
    """What ``argv`` printed and, when it failed, why, in a few words. Never longer than ``limit`` seconds and a bit.

    Runs in ``/``, without our cookie. One that the kernel will not let die (a wedged driver) is left behind.
    """
    environment = {name: value for name, value in os.environ.items() if name != procfs.COOKIE_VARIABLE}
    name = argv[0].rpartition("/")[2]
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd="/",
            env=environment,
        )
    except (OSError, ValueError) as error:
        return "", f"{name}: {getattr(error, 'strerror', None) or error}"
    try:
        out, err = process.communicate(timeout=max(limit, 0.05))
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.5)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        return "", f"{name} gave no answer within {limit:.0f} s"
    if process.returncode:
        words = " ".join(err.split()[-30:]) or f"exit code {process.returncode}"
        return out, f"{name}: {words[-200:]}"
    return out, None
