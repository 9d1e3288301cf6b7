"""Libraries that load, and every way not to; each in a process of its own, after torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gpuserve.diagnose.loading import Loaded, meaning, try_loading

Build = Callable[..., Path]

GOOD = "int good(void) { return 1; }"
ABI = "extern int _ZN3c105ErrorC2EOS0_(void); int f(void) { return _ZN3c105ErrorC2EOS0_(); }"
DIES = "#include <stdlib.h>\n__attribute__((constructor)) static void begin(void) { abort(); }"
ALONE = """#include <stdlib.h>
__attribute__((constructor)) static void begin(void) { if (getenv("ANOTHER")) abort(); setenv("ANOTHER", "1", 1); }"""
HANGS = "#include <unistd.h>\n__attribute__((constructor)) static void begin(void) { sleep(100); }"


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Compiles a shared library from C."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def make(name: str, source: str, *options: str) -> Path:
        path = tmp_path / name
        (tmp_path / f"{name}.c").write_text(source)
        argv = [compiler, "-shared", "-fPIC", "-o", str(path), str(tmp_path / f"{name}.c"), *options]
        subprocess.run(argv, check=True, timeout=60)
        return path

    return make


def load(
    tmp_path: Path, *libraries: Path, torch: str = "__version__ = '2.9.1'", limit: float = 60
) -> dict[str, Loaded]:
    (tmp_path / "site").mkdir(exist_ok=True)
    (tmp_path / "site" / "torch.py").write_text(torch)
    env = {"PYTHONPATH": str(tmp_path / "site")}
    return {Path(item.name).name: item for item in try_loading(sys.executable, libraries, env=env, limit=limit)}


def test_one_library_s_trouble_is_its_own(build: Build, tmp_path: Path) -> None:
    build("libgone.so.7", GOOD)
    needs = build("needs.so", GOOD, f"-L{tmp_path}", "-Wl,--no-as-needed", "-l:libgone.so.7")
    (tmp_path / "libgone.so.7").unlink()
    good = build("good.so", GOOD)
    build("libc10.so", GOOD)  # of another version: without the symbol
    bound = (f"-L{tmp_path}", "-Wl,--no-as-needed", "-lc10", f"-Wl,-rpath,{tmp_path}", "-Wl,-z,now")
    found = load(tmp_path, build("abi.so", ABI, *bound), build("dies.so", DIES), good, needs, tmp_path / "missing.so")
    assert list(found) == ["torch", "abi.so", "dies.so", "good.so", "needs.so", "missing.so"]
    assert (found["torch"].error, found["torch"].version) == (None, "2.9.1")
    assert found["good.so"].error is None
    assert found["abi.so"].meaning == "torch ABI mismatch: it was built for another torch than the installed 2.9.1"
    assert found["dies.so"].error == "loading it ends the process with SIGABRT"
    assert found["needs.so"].meaning == "libgone.so.7 is missing"
    assert "missing.so" in (found["missing.so"].error or "")


def test_a_library_that_names_no_library_of_torch_proves_no_mismatch(build: Build, tmp_path: Path) -> None:
    """It loads where torch's symbols are global, as some loaders of plugins make them."""
    found = load(tmp_path, build("loose.so", ABI, "-Wl,-z,now"))["loose.so"]
    assert "undefined symbol" in (found.error or "")
    assert (found.meaning or "").startswith("it names none of torch's libraries as needed")


def test_a_library_that_hangs_costs_its_limit_alone(build: Build, tmp_path: Path) -> None:
    found = load(tmp_path, build("hangs.so", HANGS), build("good.so", GOOD), limit=2)
    assert found["hangs.so"].error == "loading it did not come back within 2 s"
    assert found["good.so"].error is None


def test_two_that_exclude_each_other_both_load(build: Build, tmp_path: Path) -> None:
    """vLLM's CPU builds for AVX2 and AVX-512: each alone is right, and one of them is all that the engine loads."""
    libraries = [build(name, ALONE) for name in ("avx2.so", "avx512.so", "other.so")]
    found = load(tmp_path, build("good.so", GOOD), *libraries, build("dies.so", DIES))
    assert [item.error for name, item in found.items() if name != "dies.so"] == [None] * 5
    assert "SIGABRT" in (found["dies.so"].error or "")


def test_torch_comes_first(build: Build, tmp_path: Path) -> None:
    """What torch has loaded is there for the libraries after it."""
    provider = build("libprovider.so", "int _ZN3c105ErrorC2EOS0_(void) { return 1; }")
    torch = f"import ctypes\nctypes.CDLL({str(provider)!r}, ctypes.RTLD_GLOBAL)"
    assert load(tmp_path, build("abi.so", ABI, "-Wl,-z,now"), torch=torch)["abi.so"].error is None


def test_without_torch_nothing_is_said_of_the_rest(build: Build, tmp_path: Path) -> None:
    found = load(tmp_path, build("good.so", GOOD), torch="raise ImportError('libcudart.so.13: no such thing')")
    assert list(found) == ["torch"]
    assert found["torch"].error == "libcudart.so.13: no such thing"
    assert list(load(tmp_path, torch="import os; os._exit(3)").values()) == [
        Loaded("torch", "loading it ends the process with exit code 3")
    ]


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    assert try_loading("/no/such/python", []) == [Loaded("/no/such/python", "cannot be run: No such file or directory")]
    (found,) = try_loading("/bin/false", [])
    assert found.error == "ends the process with exit code 1"


@pytest.mark.parametrize(
    ("error", "means"),
    [
        ("/x/common_ops.so: undefined symbol: _ZNK3c106SymInt22maybe_as_int_slow_pathEv", "torch ABI mismatch"),
        ("/x/_C.abi3.so: undefined symbol: _ZN2at4_ops5zeros4callEN3c108ArrayRef", "than the installed 2.9.1"),
        ("/x/_C.so: undefined symbol: aoti_torch_get_data_ptr", "torch ABI mismatch"),
        ("/x/_C.so: undefined symbol: PyUnicode_READ", "another version of Python"),
        ("/x/_C.so: undefined symbol: cuTensorMapEncodeIm2colWide, version libcuda.so.1", "for a newer driver"),
        ("/x/_C.so: undefined symbol: _ZN4folly3fooEv", "other libraries"),
        ("libcuda.so.1: cannot open shared object file: No such file or directory", "NVIDIA driver"),
        ("libnuma.so.1: cannot open shared object file: No such file or directory", "libnuma1"),
        ("libcudart.so.12: cannot open shared object file: No such file or directory", "CUDA runtime of another"),
        ("libfoo.so: cannot open shared object file: No such file or directory", "libfoo.so is missing"),
        ("/lib/libm.so.6: version `GLIBC_2.38' not found (required by /x/_C.so)", "older than GLIBC_2.38"),
    ],
)
def test_what_a_loader_means(error: str, means: str) -> None:
    assert means in (meaning(error, "2.9.1") or "")


def test_what_is_not_known_is_not_explained() -> None:
    assert meaning("invalid ELF header") is None
