#!/usr/bin/env bash
# The HTML pages in Chromium, where it is here or Debian has it for us; else NOT RUN is said, and that is no failure.
# usage: browser.sh PYTHON      PYTHON has this package and its extras test and browser
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
found() { command -v chromium > /dev/null && command -v chromedriver > /dev/null; }
not_run() { echo "NOT RUN: the pages in a browser: $1"; exit 0; }

if ! found && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "installing Debian's chromium and chromium-driver"
    install=(apt-get install -y -qq --no-install-recommends chromium chromium-driver)
    if timeout 40 "${install[@]}" --download-only > /dev/null 2>&1; then  # never cut off while it unpacks
        "${install[@]}" > /dev/null 2>&1 || true
    fi
fi
found || not_run "no chromium and chromedriver here, and they cannot be installed"
"$python" -c 'import selenium' 2> /dev/null || not_run "no selenium for $python"
timeout 30 chromium --headless --no-sandbox --disable-gpu --dump-dom about:blank > /dev/null 2>&1 \
    || not_run "this chromium does not start"
timeout 600 "$python" -m pytest -q -p no:cacheprovider tests/report/html/test_browser.py
