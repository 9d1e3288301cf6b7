"""Programs that compile: while one of our own children uses CPU, its server is slow, not hung."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAMES = re.compile(
    r"(?:nvcc|cicc|ptxas|fatbinary|cudafe\+\+|nvlink|bin2c|ninja|make|cmake|cc1|cc1plus|collect2|lto1|as|ld(?:\.\w+)?|"
    r"(?:[\w.]+-)*(?:gcc|g\+\+|c\+\+|cc|clang|clang\+\+)(?:-\d+)?|rustc|hipcc|amdclang\+\+|icpx)"
)
_WORKERS = re.compile(
    rb"(?:torch[./]_inductor[./]compile_worker|compile_worker|triton.*compile|subproc_pool|deep_gemm.*compile)"
)


def is_compiler(comm: str, cmdline: Sequence[str] = ()) -> bool:
    """True for compilers, assemblers, linkers and build tools, and for the worker processes of inductor and triton.

    ``comm`` is the kernel's name of 15 characters; ``cmdline`` tells Python workers.
    """
    name = (cmdline[0] if cmdline else comm).rpartition("/")[2]
    if _NAMES.fullmatch(name) or _NAMES.fullmatch(comm):
        return True
    return bool(_WORKERS.search(" ".join(cmdline[:8]).encode(errors="replace")))
