"""JIT builds: one rank compiles, the others wait for its lock file, as with torch's extensions.

Called by few ranks and late, so pathlib and contextlib (3 ms an interpreter) are imported only then.
"""

from __future__ import annotations

import os
import sys
import time

BURN = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


class BuildBaton:
    """A lock file that exists while somebody builds. Whoever dies in a build leaves it behind, and all others wait."""

    def __init__(self, lock_file_path: str) -> None:
        self.lock_file_path = lock_file_path

    def try_acquire(self) -> bool:
        """Make the file; False when it is there already."""
        try:
            os.close(os.open(self.lock_file_path, os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def wait(self) -> None:
        """Look ten times a second until the file is gone."""
        while os.access(self.lock_file_path, os.F_OK):
            time.sleep(0.1)

    def release(self) -> None:
        from pathlib import Path

        Path(self.lock_file_path).unlink()


def run_compiler(directory: str, seconds: float) -> None:
    """Let ``cicc``, then ``ptxas`` burn a CPU, as children of this process, for so many seconds in all.

    They are this interpreter under the compilers' names. Each ends by itself when its time is up, so one that is
    orphaned does not stay.
    """
    from contextlib import suppress
    from pathlib import Path

    environment = os.environ | {"PYTHONHOME": sys.base_prefix}
    for name in ("cicc", "ptxas"):
        path = Path(directory, name)
        with suppress(FileExistsError):
            path.symlink_to(Path(sys.executable).resolve())
        command = [str(path), "-S", "-s", "-c", BURN, str(seconds / 2), "-arch=sm_120"]
        _, status = os.waitpid(os.posix_spawn(path, command, environment), 0)
        if status:
            raise RuntimeError(f"{name} failed with exit code {os.waitstatus_to_exitcode(status)}")


def build_extension(directory: str, seconds: float) -> None:
    """Build, or wait for the rank that does. A directory that holds the finished kernels is a warm cache."""
    from pathlib import Path

    cache = Path(directory)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    baton = BuildBaton(str(cache / "lock"))
    if not baton.try_acquire():
        baton.wait()
        return
    try:
        if seconds and not (cache / "kernels.so").exists():
            run_compiler(directory, seconds)
            (cache / "kernels.so").touch()
    finally:
        baton.release()
