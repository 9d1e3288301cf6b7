#!/bin/sh
# Real SGLang on the CPU in a virtual environment of its own (11 GB). x86-64, CPython 3.11, a C compiler.
# usage: install.sh VENV [PIP OPTION...]
set -eu
venv=$1
shift
"${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "$@" sglang==0.5.23 py-spy
# SGLang's kernels link the CUDA driver library for one function, which the CPU path never calls: let it be found.
mkdir -p "$venv/driver"
echo 'int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) { return 100; }' |
    "${CC:-cc}" -x c -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$venv/driver/libcuda.so.1" -
LD_LIBRARY_PATH="$venv/driver" "$venv/bin/python" -c 'import sglang; print("SGLang", sglang.__version__)'
