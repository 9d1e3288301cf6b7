"""The pages in a real browser, opened from a file: ``tox -e browser``; skipped without Chromium."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from pytest_gpuserve.report.html import write_incident_page, write_session_page

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: install the extra browser")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no chromium and chromedriver in PATH"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)
ALERT = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Browser:
    """One Chromium with a fresh profile."""

    def __init__(self, profile):
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for switch in (*SWITCHES, f"--user-data-dir={profile}"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_script_timeout(60)

    def open(self, path, *, scheme="light", width=1280, script=True):
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.cdp("Emulation.setScriptExecutionDisabled", value=not script)
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.cdp("Emulation.setFocusEmulationEnabled", enabled=True)
        self.driver.get(Path(path).as_uri())
        return self

    def cdp(self, command, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def js(self, source, *arguments):
        return self.driver.execute_script(f"return {source}", *arguments)

    def count(self, selector):
        return self.js("[...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).length", selector)

    def texts(self, selector):
        return self.js(
            "[...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).map(e => e.innerText)",
            selector,
        )

    def type(self, selector, *keys):
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.CSS_SELECTOR, selector).send_keys(*keys)

    def console(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("chrome", "devtools", "about:", "data:"))]


@pytest.fixture(scope="module")
def browser():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        made = Browser(profile)
        try:
            yield made
        finally:
            made.driver.quit()


@pytest.fixture
def page(scene, tmp_path):
    """The page of an incident with hostile lines in its log."""
    made = scene()
    beat = '[2026-11-29 22:29:21] INFO: 127.0.0.1:53842 - "GET /metrics HTTP/1.1" 200 OK'
    made.log += [beat, beat, ALERT, f"[2026-11-29 22:29:01 TP3] ERROR {ALERT}"]
    made.incident["text"] += ALERT
    return write_incident_page(made.write(tmp_path / "incident"))


@pytest.fixture
def session(scene, tmp_path):
    artifacts = tmp_path / "artifacts"
    write_incident_page(scene().write(artifacts / "one"), above=True)
    cells = [
        {
            "id": f"sim-{spec}-{graph}",
            "values": {"spec_decode": spec, "cuda_graph": graph},
            "verdict": "hang" if graph == "on" else "ready",
            "phase": "cuda_graph" if graph == "on" else None,
        }
        for spec in ("base", "eagle3")
        for graph in ("on", "off")
    ]
    matrix = {"cells": cells, "conclusion": [{"kind": "cause", "text": ALERT}], "incidents": {"sim-base-on": "one"}}
    (artifacts / "matrix.json").write_text(json.dumps(matrix))
    runs = [
        {"number": n, "stage": "search", "deltas": ["eagle3"], "outcome": "fail", "verdict": "hang"} for n in (1, 2)
    ]
    (artifacts / "isolate.json").write_text(json.dumps({"command": "python -m x", "runs": runs, "result": {}}))
    ours = {"schema": "gpuserve.results/1", "outcome": "failed", "reason": ALERT}
    lines = [{**ours, "nodeid": f"t.py::test_{n}"} for n in range(3)]
    (artifacts / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return write_session_page(artifacts)


@pytest.mark.parametrize("which", ["page", "session"])
def test_opens_from_a_file_without_an_error_and_asks_nobody(browser, request, which):
    path = request.getfixturevalue(which)
    browser.open(path)
    assert browser.console() == []
    assert browser.requests() == [path.as_uri()]
    assert browser.js("document.scripts.length") == 1
    assert browser.js("document.images.length") == 0
    assert browser.js("document.documentElement.classList.contains('scripted')")
    assert browser.js("document.documentElement.scrollWidth") <= 1280


def test_what_is_not_ours_does_not_run(browser, page):
    """Even if something got through the escaping: the policy names our script alone."""
    source = page.read_text()
    page.write_text(source.replace("</main>", "<script>document.title = 'owned'</script><p onclick=x></p></main>"))
    browser.open(page)
    assert browser.js("document.title") == "hang: sglang-tp8"
    assert any("Content Security Policy" in message for message in browser.console())


@pytest.mark.parametrize("width", [1280, 390])
def test_fits_the_width(browser, page, session, width):
    for path in (page, session):
        browser.open(path, width=width)
        assert browser.js("document.documentElement.scrollWidth") <= width
    browser.open(page, width=width)
    box = browser.js("(r => [r.left, r.right])(document.querySelector('svg.bars').getBoundingClientRect())")
    assert 0 < box[0] < box[1] <= width


def test_stacks_are_filtered_by_rank_and_by_function(browser, page):
    browser.open(page)
    assert browser.count("#stacks .node") == 3
    browser.type("#stacks .filter", "TP3")
    assert [text.split()[0] for text in browser.texts("#stacks .node .node")] == ["TP3"]
    assert browser.texts("#stacks-count") == ["1 call paths"]
    browser.js(
        "(f => { f.value = 'TP4-9, all_reduce'; f.dispatchEvent(new Event('input')); })(arguments[0])", *found(browser)
    )
    assert [text.split()[0] for text in browser.texts("#stacks .node .node")] == ["TP0-2,4-7"]
    browser.js(
        "(f => { f.value = 'no_such_function'; f.dispatchEvent(new Event('input')); })(arguments[0])", *found(browser)
    )
    assert browser.count("#stacks .node") == 0
    browser.js("(f => { f.value = ''; f.dispatchEvent(new Event('input')); })(arguments[0])", *found(browser))
    browser.js("[...document.querySelectorAll('.chip')].find(c => c.textContent === 'TP4-7').click()")
    assert [text.split()[0] for text in browser.texts("#stacks .node .node")] == ["TP0-2,4-7"]
    assert browser.js("document.querySelector('#stacks .node details').open")  # a chip does not fold


def found(browser):
    return [browser.js("document.querySelector('#stacks .filter')")]


def test_folds_with_the_keyboard_alone(browser, page):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    summary = "#stacks .node .node > details > summary"
    opened = "document.querySelector('#stacks .node .node > details').open"
    browser.js("document.querySelector('#stacks .node .node > details > summary').focus()")
    assert browser.js(opened)
    browser.type(summary, Keys.ENTER)
    assert not browser.js(opened)
    browser.type(summary, Keys.SPACE)
    assert browser.js(opened)
    reached = set()
    browser.js("document.activeElement.blur()")
    for _ in range(90):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        reached.add(browser.js("document.activeElement.tagName + ' ' + document.activeElement.className"))
    for wanted in ("A skip", "SUMMARY ", "INPUT filter", "SELECT rank", "INPUT grep", "BUTTON chip", "BUTTON pick"):
        assert any(name.startswith(wanted) for name in reached), (wanted, reached)


def test_the_log_is_filtered_and_its_folds_open(browser, page):
    browser.open(page)
    assert browser.count("#log .lines li") == 42
    assert browser.texts("#log .fold summary")[0].startswith("2 lines folded: ")
    browser.js("document.querySelector('#log .fold').open = true")
    assert browser.count("#log .lines li") == 44
    browser.js(
        "(r => { r.value = 'TP3'; r.dispatchEvent(new Event('change')); })(document.querySelector('#log .rank'))"
    )
    assert browser.count("#log .lines li") == 6
    assert browser.texts("#log-count") == ["6 of 44 lines"]
    browser.type("#log .grep", "error")
    assert browser.count("#log .lines li") == 1
    assert browser.texts("#log .lines li") == [f"[2026-11-29 22:29:01 TP3] ERROR {ALERT}"]


def test_a_stack_is_copied_whole(browser, page):
    browser.open(page)
    browser.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.js("[...document.querySelectorAll('.copy.stack')][1].click()")
    copied = browser.driver.execute_async_script(
        "const done = arguments[0];"
        "setTimeout(() => navigator.clipboard.readText().then(done, e => done(String(e))), 300)"
    )
    assert copied.splitlines() == [
        "TP3 (outermost call first)",
        "  run_scheduler srt/scheduler.py:164",
        "  capture srt/runner.py:95",
        "  run_kernels srt/runner.py:120",
        "  synchronize torch/cuda.py:21",
    ]
    assert browser.texts(".toast") == ["Copied"]


def test_curves_are_picked_and_read(browser, page):
    browser.open(page)
    browser.js("document.querySelector('#gpu-memory .pick[data-name=\"GPU 2\"]').click()")
    assert browser.js("document.querySelectorAll('#gpu-memory .curve.off').length") == 7
    browser.js(
        "(f => { const b = f.getBoundingClientRect(); f.dispatchEvent(new PointerEvent('pointermove', "
        "{clientX: b.left + b.width * 0.9, clientY: b.top + 5, bubbles: true})); })"
        "(document.querySelector('#gpu-memory .field'))"
    )
    assert browser.js("document.querySelector('#gpu-memory .readout').textContent") == "+54.0 s: GPU 2 75.0 GiB"


def test_the_axis_of_the_columns_is_chosen(browser, session):
    browser.open(session)
    heads = "#matrix0 .grid thead tr:last-child th"
    assert browser.texts(heads) == ["spec_decode", "on", "off"]
    browser.js(
        "(p => { p.value = 'spec_decode'; p.dispatchEvent(new Event('change')); })(document.querySelector('.pivot'))"
    )
    assert browser.texts(heads) == ["cuda_graph", "base", "eagle3"]
    browser.js("[...document.querySelectorAll('.cell a')].find(a => a.checkVisibility()).click()")
    assert browser.js("document.title") == "hang: sglang-tp8"
    browser.js("document.querySelector('.crumb a').click()")
    assert browser.js("document.title") == "GPU servers: 1 incident"


def test_without_script_everything_can_be_read(browser, page):
    browser.open(page, script=False)
    root = browser.cdp("DOM.getDocument", depth=0)["root"]["nodeId"]

    def shown(selector):
        """Boxes of the elements that are laid out."""
        found = browser.cdp("DOM.querySelectorAll", nodeId=root, selector=selector)["nodeIds"]
        boxes = 0
        for node in found:
            with contextlib.suppress(Exception):  # no box: not displayed
                boxes += bool(browser.cdp("DOM.getBoxModel", nodeId=node))
        return boxes

    assert shown("html.scripted") == 0
    assert shown("svg.bars") == 1
    assert shown("#stacks .frames") == 3
    assert shown("#log .lines li") >= 42
    assert shown(".tools") == shown(".copy") == 0  # what would do nothing is not there


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["page", "session"])
def test_accessible_by_axe(browser, request, which, scheme):
    axe = os.environ.get("GPUSERVE_AXE")
    if not axe:
        pytest.skip("GPUSERVE_AXE does not name axe.min.js (docs/page.md)")
    browser.open(request.getfixturevalue(which), scheme=scheme)
    browser.js("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.cdp("Runtime.evaluate", expression=Path(axe).read_text())
    result = browser.driver.execute_async_script(
        "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']}).then(done, e => done(String(e)))"
    )
    told = [
        (v["id"], v["help"], [(n["target"], n.get("failureSummary", "")[:300]) for n in v["nodes"][:3]])
        for v in result["violations"]
    ]
    assert not told, json.dumps(told, indent=1)


def test_prints_unfolded(browser, page):
    browser.open(page)
    pdf = base64.b64decode(browser.cdp("Page.printToPDF")["data"])
    assert pdf.startswith(b"%PDF")
    browser.js("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.js("document.querySelectorAll('main details:not([open])').length") == browser.js(
        "document.querySelectorAll('#log details').length"
    )
    browser.js("window.dispatchEvent(new Event('afterprint'))")


def test_paints_soon_whatever_its_size(browser, scene, tmp_path):
    made = scene(ranks=64, seconds=400, hang=200, gpus=64)
    made.log *= 30
    browser.open(write_incident_page(made.write(tmp_path / "incident")))
    deadline = time.monotonic() + 20
    painted = []
    while not painted and time.monotonic() < deadline:
        painted = browser.js("performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)")
    assert painted
    assert painted[0] < 10_000  # far less on a machine that does nothing else: benchmarks/page.py
    assert browser.js("document.querySelectorAll('.dense').length") == 1
