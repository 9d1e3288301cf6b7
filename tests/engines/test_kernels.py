"""Whether an install's kernels serve a GPU: found as the engine finds them, refused before a launch, cached."""

from __future__ import annotations

import os
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_gpuserve.engines import get_engine, kernels
from pytest_gpuserve.engines.base import Engine
from pytest_gpuserve.engines.fatbin import Arch, DeviceCode, read
from pytest_gpuserve.engines.kernels import Kernels, find_libraries, purposes, unsupported
from pytest_gpuserve.errors import ServerStartError
from pytest_gpuserve.server import lifecycle
from pytest_gpuserve.server.paths import session_directory
from pytest_gpuserve.spec import ServerSpec

DATA = Path(__file__).parent.parent / "data" / "kernels"
SGLANG = {
    "torch/lib/libtorch_cuda.so": "ptx",
    "sgl_kernel/flash_ops.abi3.so": "hopper",
    "sgl_kernel/flashmla_ops.abi3.so": "exact",
    "sgl_kernel/sm90/common_ops.abi3.so": "plain",
    "sgl_kernel/sm100/common_ops.abi3.so": "plain",
    "sgl_kernel/spatial_ops.abi3.so": "plain",
}
VLLM = {
    "torch/lib/libtorch_cuda.so": "ptx",
    "vllm/_C.abi3.so": "plain",
    "vllm/_flashmla_C.abi3.so": "hopper",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": "ptx",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": "hopper",
}


@pytest.fixture
def site(tmp_path: Path) -> Callable[..., Path]:
    """Makes a directory of packages with real device code in their libraries."""

    def make(layout: dict[str, str], **changes: str) -> Path:
        folder = tmp_path / f"site{len(list(tmp_path.iterdir()))}"
        for name, source in {**layout, **changes}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(DATA / f"{source}.so", path)
            (folder / name.partition("/")[0] / "__init__.py").touch()
        return folder

    return make


def spec_of(folder: Path, engine: str = "sglang", **values: object) -> ServerSpec:
    env = {"PYTHONPATH": str(folder)}
    return ServerSpec.from_mapping({"engine": engine, "model": "org/tiny", "env": env, **values})


def why(folder: Path, *capabilities: tuple[int, int], engine: str = "sglang", **values: object) -> str | None:
    spec = spec_of(folder, engine, **values)
    return unsupported(spec, get_engine(engine), python=sys.executable, capabilities=capabilities)


@pytest.mark.parametrize(
    ("values", "capability", "told"),
    [
        (
            {"attention_backend": "fa3"},
            (12, 0),
            "fa3 cannot run on sm_120: sgl_kernel/flash_ops.abi3.so carries sm_80 ",
        ),
        ({"attention_backend": "fa3"}, (10, 0), "fa3 cannot run on sm_100"),
        ({"attention_backend": "fa3"}, (9, 0), None),
        ({"attention_backend": "fa3"}, (8, 9), None),
        ({"attention_backend": "flashmla"}, (12, 0), None),
        ({"attention_backend": "flashmla"}, (12, 1), "flashmla cannot run on sm_121"),  # it carries 120a
        ({"attention_backend": "triton"}, (12, 0), None),
        ({"attention_backend": "triton"}, (12, 1), None),
        ({"attention_backend": {"triton": {"prefill": "fa3"}}}, (12, 0), "attention backend fa3 cannot"),
        ({"args": {"decode-attention-backend": "fa3"}}, (12, 0), "attention backend fa3 cannot"),
        ({"args": {"--attention_backend": "fa3"}}, (12, 0), "attention backend fa3 cannot"),
        ({"spec_decode": {"eagle3": {"draft_attention_backend": "fa3"}}}, (12, 0), "attention backend fa3 cannot"),
        ({}, (12, 0), None),
        ({}, (10, 0), "this install cannot run on sm_100: sgl_kernel/sm100/common_ops.abi3.so carries sm_80 sm_90"),
    ],
)
def test_sglang(site: Any, values: dict[str, object], capability: tuple[int, int], told: str | None) -> None:
    found = why(site(SGLANG), capability, **values)
    assert found is None if told is None else told in (found or "")


@pytest.mark.parametrize(
    ("backend", "capability", "told"),
    [
        ("flash_attn", (12, 0), None),  # FlashAttention 2, by PTX
        ("FLASHMLA", (12, 0), "attention backend flashmla cannot run on sm_120: vllm/_flashmla_C"),
        ("flash_attn_mla", (12, 0), "flash_attn_mla cannot run on sm_120: vllm/vllm_flash_attn/_vllm_fa3_C"),
        ("flash_attn_mla", (9, 0), None),
        ("triton", (12, 0), None),
    ],
)
def test_vllm(site: Any, backend: str, capability: tuple[int, int], told: str | None) -> None:
    found = why(site(VLLM), capability, engine="vllm", attention_backend=backend)
    assert found is None if told is None else told in (found or "")


def test_a_torch_that_was_not_built_for_the_gpu(site: Any) -> None:
    found = why(site(SGLANG, **{"torch/lib/libtorch_cuda.so": "hopper"}), (12, 0))
    assert found is not None
    assert "torch/lib/libtorch_cuda.so carries sm_80 sm_86 sm_90a, and nothing for this GPU" in found
    assert "Install a build of torch" in found


def test_every_gpu_of_the_server_counts(site: Any) -> None:
    folder = site(SGLANG)
    assert why(folder, (9, 0), (9, 0), attention_backend="fa3") is None
    assert "sm_120" in (why(folder, (9, 0), (12, 0), attention_backend="fa3") or "")


def test_nothing_is_claimed_without_evidence(site: Any, tmp_path: Path) -> None:
    assert why(site({}), (12, 0), attention_backend="fa3") is None, "not installed at all"
    assert why(site(dict.fromkeys(SGLANG, "host")), (12, 0), attention_backend="fa3") is None, "a build for CPUs"
    assert why(site(SGLANG), attention_backend="fa3") is None, "no GPU that we know"
    assert why(site(SGLANG), (12, 0), attention_backend="fa3", args={"device": "cpu"}) is None
    spec = ServerSpec.from_mapping({"engine": "sglang", "model": "m", "attention_backend": "fa3"})
    engine = get_engine("sglang")
    assert unsupported(spec, engine, python="/no/such/python", capabilities=[(12, 0)]) is None
    command = ServerSpec.from_mapping({"engine": "command", "command": ["x"]})
    assert unsupported(command, get_engine("command"), python=sys.executable, capabilities=[(12, 0)]) is None
    broken = site(SGLANG)
    data = bytearray((DATA / "hopper.so").read_bytes())
    at = data.index(b"\x50\xed\x55\xba") + 16
    header, payload = struct.unpack_from("<IQ", data, at + 4)
    struct.pack_into("<Q", data, at + header + payload + 8, 1 << 50)  # what the second entry says of its size
    (broken / "sgl_kernel/flash_ops.abi3.so").write_bytes(data)
    assert read(broken / "sgl_kernel/flash_ops.abi3.so") == DeviceCode((Arch(80),), damaged=True)
    assert why(broken, (12, 0), attention_backend="fa3") is None, "a container that cannot be read through"
    (broken / "sgl_kernel/flash_ops.abi3.so").write_bytes(b"not a library")
    assert why(broken, (12, 0), attention_backend="fa3") is None
    missing = find_libraries(engine.kernels, spec_of(broken), sys.executable)  # type: ignore[attr-defined]
    assert [lib.problem for lib in missing if lib.name.startswith("sgl_kernel/flash_ops")] == ["no 64-bit ELF file"]


def test_an_alternative_that_serves_is_enough(site: Any) -> None:
    table = Kernels(backends={"x": ("pkg/one*", "pkg/deep/*.so"), "y": ("pkg/one*",), "z": ("pkg/none*",)})
    folder = site({"pkg/one.so": "hopper", "pkg/deep/two.so": "plain"})
    libraries = find_libraries(table, spec_of(folder), sys.executable)
    assert [library.name for library in libraries] == ["pkg/one.so", "pkg/deep/two.so"]
    found = {purpose.name: purpose.serves for purpose in purposes(table.backends, libraries, (12, 0))}
    assert found == {"x": True, "y": False, "z": None}


def test_a_library_is_read_once_until_it_changes(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site(SGLANG)
    asked: list[Path] = []
    monkeypatch.setattr(kernels, "read", lambda path: asked.append(path) or read(path))
    starts: list[str] = []
    ask = kernels.ask
    monkeypatch.setattr(kernels, "ask", lambda argv, *rest: starts.append(argv[0]) or ask(argv, *rest))
    first = why(folder, (12, 0), attention_backend="fa3")
    assert len(asked) == 4
    assert why(folder, (12, 0), attention_backend="fa3") == first
    assert len(asked) == 4
    library = folder / "sgl_kernel/flash_ops.abi3.so"
    shutil.copy(DATA / "plain.so", library)
    os.utime(library, ns=(1, time.time_ns()))
    assert why(folder, (12, 0), attention_backend="fa3") is None
    assert asked[4:] == [library]
    assert len(starts) == 1, "the interpreter is asked once where its packages are"
    for kept in (Path(os.environ["XDG_CACHE_HOME"]) / "gpuserve" / "libraries").iterdir():
        kept.write_text("{broken")
    assert why(folder, (12, 0), attention_backend="fa3") is None


def test_such_a_server_is_not_started(site: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUSERVE_STATE", str(tmp_path / "state"))
    command = get_engine("command")
    program = tmp_path / "started"
    engine = SimpleNamespace(
        launch=command.launch,
        ready=command.ready,
        own_timeout=command.own_timeout,
        served_model=command.served_model,
        process_role=command.process_role,
        name="command",
        kernels=get_engine("sglang").kernels,  # type: ignore[attr-defined]
    )
    spec = ServerSpec.from_mapping(
        {
            "engine": "command",
            "command": ["sh", "-c", 'touch "$0"', str(program), "{port}"],
            "args": {"attention-backend": "fa3"},
            "env": {"PYTHONPATH": str(site(SGLANG))},
        }
    )
    limits = lifecycle.Limits(20, 0.1, 5)
    start = {"parent": session_directory(), "limits": limits, "incident": lambda *_: []}
    with pytest.raises(ServerStartError) as caught:
        lifecycle.start(spec, cast(Engine, engine), capabilities=[(12, 0)], **start)
    assert caught.value.verdict == "unsupported_arch"
    assert "was not started: attention backend fa3 cannot run on sm_120" in str(caught.value)
    assert not program.exists()
    with pytest.raises(ServerStartError, match="exited with code"):
        lifecycle.start(spec, cast(Engine, engine), capabilities=[(9, 0)], **start)
    assert program.exists()
