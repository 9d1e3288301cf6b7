#!/usr/bin/env bash
# Known vulnerabilities of what is installed beside this package in PYTHON's environment.
# usage: audit.sh PYTHON     exit 0: none, or the advisory service cannot be reached (said on standard output); 1: some
set -euo pipefail
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q pip-audit
audit() { timeout 300 "$work/venv/bin/pip-audit" --no-deps --disable-pip --progress-spinner off --timeout 20 "$@" -r "$work/list"; }

# A version with published advisories: a service that does not find them answers nothing about ours either.
echo 'requests==2.19.0' > "$work/list"
service=
for name in pypi osv; do
    audit -s "$name" > "$work/out" 2>&1 || true
    if grep -q 'CVE-2018-18074\|GHSA-x84v-xcm2-53pg\|PYSEC-2018-28' "$work/out"; then service=$name; break; fi
done
if [ -z "$service" ]; then
    echo "NOT AUDITED: neither PyPI's advisories nor osv.dev can be reached from here (see SECURITY.md)."
    exit 0
fi
"$python" -m pip freeze --exclude-editable | grep '==' > "$work/list"
audit -s "$service" --strict --aliases on
