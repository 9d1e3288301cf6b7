"""Roles of processes that look alike in every engine: compilers, helpers, children that have no title yet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from .base import ProcessRole, Rank

COMPILERS: Final = frozenset(
    {
        "nvcc",
        "cicc",
        "ptxas",
        "cudafe++",
        "fatbinary",
        "nvlink",
        "ninja",
        "make",
        "cmake",
        "gcc",
        "g++",
        "cc",
        "c++",
        "cc1",
        "cc1plus",
        "collect2",
        "as",
        "ld",
        "ld.gold",
        "lld",
        "clang",
        "clang++",
        "clang-cpp",
        "hipcc",
        "ptxas-blackwell",
        "rustc",
        "tileiras",
    }
)
"""Programs that build kernels: their life is progress of the server that started them."""

HELPERS: Final = frozenset(
    {
        "py-spy",
        "pystack",
        "gdb",
        "cuda-gdb",
        "nvidia-smi",
        "rocm-smi",
        "lscpu",
        "ldconfig",
        "git",
        "lspci",
        "numactl",
        "sccache",
        "ccache",
        "pkill",
        "ps",
    }
)

_COORDINATE = re.compile(r"(?<!_MOE)_(DP|PP|TP|EP)(\d+)(?=_|$)")


def program(cmdline: Sequence[str], comm: str) -> str:
    """Name of the program: the base name of argv[0], or ``comm`` (at most 15 characters) when argv is unreadable."""
    return PurePath(cmdline[0].partition(" ")[0]).name if cmdline and cmdline[0] else comm


def coordinates(title: str) -> Rank | None:
    """Rank from the end of a title such as ``scheduler_DP0_TP1_EP0``; None when it has no coordinates."""
    found = {name.lower(): int(number) for name, number in _COORDINATE.findall(title)}
    return Rank(**found) if found else None


def common_role(cmdline: Sequence[str], comm: str) -> ProcessRole | None:
    """Role by what every engine's tree contains; None when the process is none of these."""
    name = program(cmdline, comm)
    if name in COMPILERS or name.startswith(("ptxas", "x86_64-linux-gnu-", "aarch64-linux-gnu-")):
        return ProcessRole("compiler")
    if any(
        "compile_worker" in part or part.startswith(("torch._inductor", "triton.runtime.build")) for part in cmdline[:6]
    ):
        return ProcessRole("compiler")
    if name in HELPERS:
        return ProcessRole("helper")
    line = " ".join(cmdline[:6])
    if "multiprocessing.resource_tracker" in line or "multiprocessing.forkserver" in line:
        return ProcessRole("helper")
    if "multiprocessing.spawn" in line or "--multiprocessing-fork" in line:
        return ProcessRole("other")  # a rank to be: the engines set titles only after their imports
    return None
