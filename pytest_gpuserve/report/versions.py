"""versions.json: what ran on what. Asked of the engine's own interpreter, in a child, without importing an engine."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from .. import __version__, procfs
from ..gpu import Gpu
from .child import output

SCHEMA: Final = "gpuserve.versions/1"

PACKAGES: Final = (
    "sglang", "vllm", "torch", "triton", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "sgl-kernel",
    "sglang-kernel", "flash-attn", "deep-gemm", "deep-ep", "nixl", "mooncake-transfer-engine", "xgrammar",
    "transformers", "tokenizers", "compressed-tensors", "cuda-python", "cuda-bindings", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13", "nvidia-cutlass-dsl", "numpy", "ray", "setproctitle", "pytest",
    "pytest-gpuserve",
)  # fmt: skip
"""Distributions whose versions maintainers ask for."""

_PROGRAM: Final = """
import importlib.metadata as metadata, importlib.util, json, re, sys
packages, commits, torch = {}, {}, {}
for name in sys.argv[1:]:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    packages[name] = found.version
    try:
        commit = json.loads(found.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id")
    except ValueError:
        commit = None
    if commit:
        commits[name] = commit
if "torch" in packages:
    spec = importlib.util.find_spec("torch")  # finds it; to import it takes seconds and touches the driver
    for place in (spec and spec.submodule_search_locations) or ():
        try:
            text = open(place + "/version.py").read()
        except OSError:
            continue
        for key in ("cuda", "hip", "git_version"):
            value = re.search(r"(?m)^" + key + r"\\b[^=\\n]*= *'([^']+)'", text)
            if value:
                torch[key] = value[1]
print(json.dumps({"python": sys.version.split()[0], "packages": packages, "commits": commits, "torch": torch}))
"""


def of_interpreter(python: str, limit: float) -> tuple[dict[str, Any], str | None]:
    """``{"python", "packages", "commits", "torch"}`` of an interpreter, and why they are not known."""
    text, problem = output([python, "-c", _PROGRAM, *PACKAGES], limit)
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found, problem = {}, f"{python} printed something else than asked"
    return (found if isinstance(found, dict) else {}), problem


def topology(limit: float) -> tuple[str | None, str | None]:
    """How the GPUs are connected (``nvidia-smi topo -m``), and why that is not known; neither without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None or not Path("/proc/driver/nvidia").exists():
        return None, None
    text, problem = output([program, "topo", "-m"], limit)
    return (re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip() or None), problem


def machine() -> dict[str, Any]:
    """Kernel, distribution, processors and memory; read from files, so that nothing can hang."""
    info = procfs.read("/proc/meminfo").decode(errors="replace")
    total = re.search(r"MemTotal:\s+(\d+) kB", info)
    cpu = re.search(r"(?m)^model name\s*:\s*(.+)$", procfs.read("/proc/cpuinfo").decode(errors="replace"))
    driver = re.search(r"Kernel Module\D*([\d.]+)", procfs.read("/proc/driver/nvidia/version").decode(errors="replace"))
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "system": _system(),
        "libc": " ".join(platform.libc_ver()) or None,
        "cpu": cpu[1].strip() if cpu else None,
        "cpus": os.cpu_count(),
        "memory": int(total[1]) * 1024 if total else None,
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        "driver": driver[1] if driver else None,
    }


def to_json(
    interpreter: Mapping[str, Any], gpus: Iterable[Gpu], topology: str | None, problems: Iterable[str]
) -> dict[str, Any]:
    """The object of schema ``gpuserve.versions/1``."""
    return {
        "schema": SCHEMA,
        "gpuserve": __version__,
        **interpreter,
        "machine": machine(),
        "gpus": [
            {"name": gpu.name, "capability": gpu.capability, "memory": gpu.memory_total, "index": gpu.index}
            for gpu in gpus
        ],
        "topology": topology,
        "problems": list(problems),
    }


def _system() -> str | None:
    found = re.search(r'(?m)^PRETTY_NAME="?([^"\n]+)', procfs.read("/etc/os-release").decode(errors="replace"))
    return found[1] if found else None
