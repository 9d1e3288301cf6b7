"""Builds and drives the fake NVML library: real calls through the real pynvml, no GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")


def build(directory: Path, *flags: str) -> str | None:
    """Compile libnvidia-ml.so.1 into ``directory``; None, or one line why it cannot be built.

    ``-DOLD_DRIVER``: one that has only version 2 of the list of processes.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return "no C compiler (gcc or cc) to build the fake NVML library"
    target = directory / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    done = subprocess.run(
        [*command, *flags, "-o", str(target), str(SOURCE)], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return None


class FakeNvml:
    """The GPUs of the fake library. Keys as in fake_nvml.c, ``_`` for the dot: ``set(used_3=20480)``."""

    def __init__(self, library: Path, state: Path) -> None:
        self.library = library
        self.state = state
        self.values: dict[str, object] = {}
        self.set()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment before it starts."""
        return {"LD_LIBRARY_PATH": str(self.library), "FAKE_NVML": str(self.state)}

    def set(self, **values: object) -> None:
        """Change some values; processes see it at their next call."""
        self.values.update(values)
        lines = []
        for key, value in self.values.items():
            head, _, tail = key.rpartition("_")
            lines.append(f"{head}.{tail} {value}\n" if tail.isdigit() else f"{key} {value}\n")
        fresh = self.state.with_suffix(".new")
        fresh.write_text("".join(lines))
        fresh.replace(self.state)
