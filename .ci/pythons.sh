#!/usr/bin/env bash
# A short part of the tests on every other Python that pyproject.toml names and this machine has, on PATH or in pyenv;
# NOT RUN is said of the rest, and that is no failure. tox runs all tests on them.
# usage: pythons.sh PYTHON       PYTHON's own version is left out: the rest of the gate is for it
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

version() { "$1" -c 'import sys, ensurepip, venv; print("%d.%d" % sys.version_info[:2])' 2> /dev/null; }
candidates() { # what may be a Python of version $1: shims and broken installations are among them
    type -ap "python$1" python3 || true
    command -v pyenv > /dev/null || return 0
    pyenv versions --bare | grep -x "${1/./\\.}\([.-].*\)\?" | while read -r name; do
        echo "$(pyenv prefix "$name")/bin/python"
    done
}
find_python() {
    while IFS= read -r path; do
        if [ "$(version "$path")" = "$1" ]; then echo "$path"; return; fi
    done < <(candidates "$1")
}

own=$(version "$1")
"$1" -m venv "$work/tools"
"$work/tools/bin/pip" install -q uv
for wanted in $(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml); do
    [ "$wanted" != "$own" ] || continue
    python=$(find_python "$wanted")
    [ -n "$python" ] || { echo "NOT RUN: Python $wanted is not here"; continue; }
    printf -- '--- Python %s: %s (%ss)\n' "$wanted" "$python" "$SECONDS"
    "$work/tools/bin/uv" venv -q --python "$python" "$work/$wanted"
    "$work/tools/bin/uv" pip install -q --python "$work/$wanted" -e '.[test]'
    "$work/$wanted/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist worksteal \
        tests/plugin/test_examples.py::test_hang examples/quickstart tests/diagnose/test_stacks.py tests/test_spec.py
done
