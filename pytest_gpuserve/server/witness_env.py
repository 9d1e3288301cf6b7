"""What a server with GPUs is launched with, so that it can be asked later: the Flight Recorder, and CUDA core dumps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

_RECORDER: Final = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
_PIPES: Final = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DEBUG_INFO_PIPE_FILE")
_FILES: Final = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")
_CORE: Final = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"
_LEFT_OUT: Final = (
    "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,skip_constbank_memory"
)


def witness_environment(directory: Path, given: Mapping[str, str | None]) -> dict[str, str | None]:
    """Variables to add, in ``directory`` (private) whatever files they need; what is given already stays as it is.

    The Flight Recorder costs a ring of 2000 entries. The core dump, which kills a rank when it is taken, is prepared
    only where ``CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1`` is given.
    """
    found: dict[str, str | None] = {}
    if not any(name in given for name in (*_RECORDER, *_PIPES, *_FILES)):
        found[_RECORDER[0]] = "2000"  # the old names: every torch knows them
        found[_PIPES[0]] = str(directory / "flight.")
        found[_FILES[0]] = str(directory / "flight.record.")
    if given.get(_CORE) == "1":
        cores = {
            "CUDA_COREDUMP_PIPE": str(directory / "cuda.%p.pipe"),
            "CUDA_COREDUMP_FILE": str(directory / "cuda.%p.core"),
            "CUDA_COREDUMP_GENERATION_FLAGS": _LEFT_OUT,
        }
        found.update({name: value for name, value in cores.items() if name not in given})
    return found
