"""What a process is for when nobody says which engine it belongs to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from ..engines import engine_names, get_engine
from ..engines.base import ProcessRole, Rank

UNKNOWN = ProcessRole("other")

_COMPILERS = re.compile(
    r"^(nvcc|cicc|ptxas|fatbinary|cudafe\+\+|ninja|cc1(plus)?|g(cc|\+\+)|clang(\+\+)?|ld|as|hipcc)$"
)
_HELPERS = re.compile(r"multiprocessing\.(resource_tracker|forkserver)|\bpy-spy\b")
_RANK_TAG = re.compile(r"\b(TP|PP|DP|EP)[ _]?(\d{1,5})\b|\brank[ _]?(\d{1,5})\b")


def any_role(cmdline: Sequence[str], comm: str) -> ProcessRole | None:
    """The role that the first engine to recognize the process gives it; else compilers and helpers; else None."""
    if not cmdline:
        return None
    for name in engine_names():
        try:
            role = get_engine(name).process_role(cmdline, comm)
        except Exception:  # an engine of somebody else's that is broken must not cost the stacks
            continue
        if role is not None:
            return role
    if _COMPILERS.match(PurePath(cmdline[0]).name):
        return ProcessRole("compiler")
    if _HELPERS.search(" ".join(cmdline)):
        return ProcessRole("helper")
    return None


def rank_in(text: str) -> Rank | None:
    """The coordinates in a log line's prefix (``[2026-06-06 DP1 TP3]``, ``[rank3]:``, ``(Worker_TP1 pid=7)``)."""
    found = {kind.lower(): int(number) for kind, number, _ in _RANK_TAG.findall(text.replace("_", " ")) if kind}
    if not found and (plain := _RANK_TAG.search(text)) and plain[3]:
        found["tp"] = int(plain[3])
    return Rank(**found) if found else None
