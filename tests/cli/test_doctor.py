"""``gpuserve doctor``: the machine, the libraries of an install, and what cannot run where."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.cli import doctor, main
from pytest_gpuserve.diagnose import checkup
from pytest_gpuserve.gpu import Gpu, Reading

DATA = Path(__file__).parent.parent / "data" / "kernels"
HOPPER = Reading(
    (Gpu(0, "GPU-0", "Toy H", capability=(9, 0), memory_total=1 << 37, memory_used=1 << 30),), None, "580.1"
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SGLang as an interpreter with this PYTHONPATH has it."""
    folder = tmp_path / "site"
    for name, source in {
        "torch/lib/libtorch_cuda.so": "ptx",
        "sgl_kernel/flash_ops.abi3.so": "hopper",
        "sgl_kernel/sm100/common_ops.abi3.so": "plain",
        "sglang/nothing.so": "host",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DATA / f"{source}.so", folder / name)
        (folder / name.partition("/")[0] / "__init__.py").write_text("__version__ = '2.9.1'\n")
    info = folder / "sglang-0.5.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.9\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GPUSERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(doctor, "checkup", lambda reading: iter([checkup.Check("kernel", True, "Linux")]))
    monkeypatch.setattr(doctor, "query", lambda limit: Reading((), "no driver."))
    return folder


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_which_backends_cannot_run_there(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--engine", "sglang", "--arch", "sm120", "--no-load"]) == 0
    out = capsys.readouterr().out
    assert f"sglang 0.5.9 in {site}/sglang" in out
    assert "sgl_kernel/flash_ops.abi3.so         sm_80 sm_86 sm_90a\n" in out
    assert (
        "on sm_120 attention backend fa3 cannot run: sgl_kernel/flash_ops.abi3.so carries sm_80 sm_86 sm_90a\n" in out
    )
    assert "flashmla" not in out, "nothing is installed that could be judged"
    assert "necessary, not sufficient" in out


def test_the_gpus_at_hand_are_judged_for(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "query", lambda limit: HOPPER)
    code, found = as_json(capsys, "--no-load")
    assert code == 0
    assert (found["schema"], found["driver"], found["gpus"][0]["capability"]) == (doctor.SCHEMA, "580.1", [9, 0])
    (engine,) = [engine for engine in found["engines"] if engine["version"]]
    assert (engine["engine"], engine["version"]) == ("sglang", "0.5.9")
    assert engine["required"] == {"sm_90": {"torch": True, "sgl_kernel": True}}
    assert engine["attention_backends"] == {"sm_90": {"fa3": True, "flashmla": None}}
    assert {library["name"]: library["archs"] for library in engine["libraries"]} == {
        "sgl_kernel/flash_ops.abi3.so": ["sm_80", "sm_86", "sm_90a"],
        "sgl_kernel/sm100/common_ops.abi3.so": ["sm_80", "sm_90", "sm_120"],
        "torch/lib/libtorch_cuda.so": ["sm_80", "compute_90"],
    }


def test_an_install_without_code_for_a_gpu_is_wrong(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(capsys, "--engine", "sglang", "--arch", "12.0", "--arch", "sm100", "--no-load")
    assert code == 1
    required = found["engines"][0]["required"]
    assert required == {"sm_120": {"torch": True, "sgl_kernel": True}, "sm_100": {"torch": True, "sgl_kernel": False}}
    assert main(["doctor", "--engine", "sglang", "--arch", "sm100", "--no-load"]) == 1
    assert "WRONG  on sm_100 nothing runs: sgl_kernel/sm100/common_ops.abi3.so carries" in capsys.readouterr().out


def test_whether_they_load(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Libraries of nvcc without the CUDA runtime: an undefined symbol, named as what it is."""
    code, found = as_json(capsys, "--engine", "sglang")
    assert code == 1
    engine = found["engines"][0]
    (torch,) = engine["imported_first"]
    assert torch == {"module": "torch", "version": "2.9.1", "loads": True, "error": None, "meaning": None}
    loads = {library["name"]: library for library in engine["libraries"]}
    assert loads["torch/lib/libtorch_cuda.so"]["loads"] is None, "torch's own are torch's business"
    flash = loads["sgl_kernel/flash_ops.abi3.so"]
    assert flash["loads"] is False
    assert "cuda" in flash["error"].lower()
    (site / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: \\x1b[31mno')")
    assert main(["doctor", "--engine", "sglang"]) == 1
    out = capsys.readouterr().out
    assert "WRONG  torch cannot be imported: libcudart.so.13: \\x1b[31mno" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["--engine", "vllm"], 1, "WRONG  vllm is not installed for "),
        (["--engine", "sim"], 0, "sim brings no compiled kernels"),
        (["--engine", "nope"], 2, "there is no engine called 'nope'"),
        (["--arch", "blackwell"], 2, "--arch: 'blackwell' is no architecture: write sm120, 120 or 12.0."),
        (["--engine", "vllm", "--python", "/no/such/python"], 2, "--python /no/such/python cannot be run"),
    ],
)
def test_what_cannot_be_looked_at(
    site: Path, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, told: str
) -> None:
    assert main(["doctor", *argv]) == code
    said = capsys.readouterr()
    assert told in said.out + said.err
    assert "Traceback" not in said.err


def test_nothing_installed_and_no_gpu(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    assert main(["doctor"]) == 0
    assert f"no engine with kernels of its own is installed for {sys.executable}" in capsys.readouterr().out


def test_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSERVE_STATE", str(tmp_path / "state"))
    found = {check.name: check for check in checkup.checkup(HOPPER)}
    assert found["GPUs"].ok
    assert "1 by NVML, driver 580.1" in found["GPUs"].text
    assert found["kernel"].ok
    assert found["stacks"].ok is not None
    assert "py-spy" in found["stacks"].text
    assert str(tmp_path / "state") in found["state"].text
    assert set(found) >= {"/dev/shm", "memory", "nvcc", "ninja"}
    lost = {check.name: check for check in checkup.checkup(Reading((Gpu(0, error="GPU is lost"),)))}
    assert lost["GPUs"].ok is False
    assert "GPU 0: GPU is lost" in lost["GPUs"].text
    monkeypatch.setattr(checkup.machine, "shm_free", lambda: 64 << 20)
    monkeypatch.setattr(checkup.tools, "find", lambda name, python: ())
    poor = {check.name: check for check in checkup.checkup(Reading((), "no driver."))}
    assert (poor["GPUs"].ok, poor["/dev/shm"].ok, poor["stacks"].ok) == (None, False, False)
    assert "64 MiB free: too little for NCCL" in poor["/dev/shm"].text
    assert "py-spy is not installed" in poor["stacks"].text


def test_a_machine_without_ptrace(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = checkup.tools.Attempt(trouble="refused", message="Permission denied (os error 13)")
    monkeypatch.setattr(checkup.tools, "pyspy", lambda *_, **__: refused)
    (stacks,) = [check for check in checkup.checkup(HOPPER) if check.name == "stacks"]
    assert stacks.ok is False
    assert "py-spy cannot take one: Permission denied (os error 13)" in stacks.text
    assert "SYS_PTRACE" in stacks.text
