#!/usr/bin/env bash
# A quick part of the tests as an ordinary user, with a home of its own. As root: as nobody, from a copy it may read.
# usage: other_user.sh PYTHON       PYTHON has this package's test extra
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
some="examples/quickstart tests/test_spec.py tests/plugin/test_examples.py tests/server/test_places.py tests/server/test_tree.py"
if [ "$(id -u)" != 0 ]; then
    echo "The whole gate runs as uid $(id -u): nothing to do."
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir "$work/home" "$work/tmp" "$work/copy"
tar -c --exclude=./.git --exclude=./.venv --exclude=__pycache__ . | tar -x -C "$work/copy"
as_nobody() {
    setpriv --reuid nobody --regid nogroup --clear-groups \
        env -i PATH="$PATH" LANG=C.UTF-8 LD_LIBRARY_PATH="$work/python/lib" HOME="$work/home" TMPDIR="$work/tmp" PYTHONDONTWRITEBYTECODE=1 "$@"
}
real=$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
if ! as_nobody "$real" -c '' 2> /dev/null; then # an interpreter in root's home: a copy of its installation, libpython with it
    mkdir "$work/python"
    tar -c -C "$("$python" -c 'import sys; print(sys.base_prefix)')" --exclude=__pycache__ --exclude='lib/python3*/test' \
        --exclude='lib/python3*/site-packages' --exclude='*.a' . | tar -x -C "$work/python"
    real=$work/python/bin/python3
fi
"$real" -m venv "$work/venv"
"$work/venv/bin/pip" install -q -e "$work/copy[test]"
chown -R nobody:nogroup "$work/home" "$work/tmp" "$work/copy"
cd "$work/copy"
# shellcheck disable=SC2086
as_nobody "$work/venv/bin/python" -m pytest -q -p no:cacheprovider ${2:-$some}
