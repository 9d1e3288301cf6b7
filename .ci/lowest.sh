#!/usr/bin/env bash
# A quick part of the tests with the lowest versions of the direct dependencies (tox -e py311-lowest runs all of them).
# usage: lowest.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$1" -m venv "$work/tools"
"$work/tools/bin/pip" install -q uv
"$work/tools/bin/uv" venv -q --python "$1" "$work/venv"
"$work/tools/bin/uv" pip install -q --python "$work/venv" --resolution lowest-direct -e '.[test]'
"$work/tools/bin/uv" pip freeze --python "$work/venv" | grep -i '^pytest\|^requests\|^psutil\|^py-spy\|^nvidia\|^setproctitle\|^allpairspy'
"$work/venv/bin/python" -m pytest -q -p no:cacheprovider examples/quickstart tests/test_spec.py tests/isolation/test_matrix.py \
    tests/isolation/test_conclude.py tests/plugin/test_options.py tests/plugin/test_resolve.py tests/diagnose/test_merge.py \
    tests/diagnose/test_verdict.py tests/redaction/test_redact.py tests/gpu/test_gpu.py
