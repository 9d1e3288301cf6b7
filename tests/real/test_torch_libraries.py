"""``gpuserve doctor`` beside a real torch: libraries that fit it, that were built for another one, that lack another.

GPUSERVE_REAL_VLLM names an interpreter that has vLLM and torch (examples/vllm_cpu/install.sh makes one).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("GPUSERVE_REAL_VLLM", "")
COMPILER = shutil.which("cc") or shutil.which("gcc")
EXISTS = "_ZN3c105Error12refresh_whatEv"
"""A function of c10 in every torch of these years: ``c10::Error::refresh_what()``."""

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="set GPUSERVE_REAL_VLLM to an interpreter that has vLLM's CPU build"),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
]


def test_a_library_for_another_torch_and_one_that_lacks_another(tmp_path: Path) -> None:
    """In the place of the engine's own, so that all of the way from the command to the verdict is walked."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.32.0'\n")
    find = "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
    torch = Path(subprocess.run([PYTHON, "-c", find], check=True, capture_output=True, text=True).stdout.strip())

    def build(path: Path, source: str, *options: str) -> None:
        source_file = tmp_path / "source.c"
        source_file.write_text(source)
        argv = [str(COMPILER), "-shared", "-fPIC", "-Wl,-z,now,--no-as-needed,--allow-shlib-undefined"]
        subprocess.run([*argv, "-o", str(path), str(source_file), *options], check=True, timeout=60)

    for name, symbol in (("fits.so", EXISTS), ("_C.so", "_ZN3c105Error12refresh_whatEi")):
        build(package / name, f"extern int {symbol}(void); int f(void) {{ return {symbol}(); }}", *c10(torch))
    build(tmp_path / "libgone.so.7", "int gone(void) { return 1; }")
    build(package / "needs.so", "int f(void) { return 1; }", f"-L{tmp_path}", "-l:libgone.so.7")
    (tmp_path / "libgone.so.7").unlink()

    argv = [sys.executable, "-m", "pytest_gpuserve.cli", "doctor", "--engine", "vllm", "--python", PYTHON, "--json"]
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    told = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert told.returncode == 1, told.stderr
    (engine,) = json.loads(told.stdout)["engines"]
    found = {Path(library["name"]).name: library for library in engine["libraries"]}
    assert found["fits.so"]["error"] is None
    assert "torch ABI mismatch: it was built for another torch than the installed" in found["_C.so"]["meaning"]
    assert found["needs.so"]["meaning"] == "libgone.so.7 is missing"


def c10(torch: Path) -> list[str]:
    return [f"-L{torch / 'lib'}", "-l:libc10.so"]
