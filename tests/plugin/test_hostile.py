"""A server whose every word is an attack, from its command line to its last line: nothing is obeyed, forged or written
elsewhere, on whatever way it goes to people."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.cli import main

ATTACKS = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "</details></td></table><h1>owned</h1>",
    "\x1b[2J\x1b]8;;https://evil.example/\x07click\x1b]8;;\x07\x9b31m\x1b]0;title\x07",
    "\u202egnp.exe\u2066\u200b\ufeff",
    "::error file=/etc/passwd,line=1::owned",
    "  ::add-mask::owned",
    "::stop-commands::owned",
    "##[add-mask]owned ##vso[task.setvariable variable=x]owned ##teamcity[buildStop]",
    "%0A::error::owned%0D%0A::set-env name=PATH::owned",
    "[click](javascript:alert(1)) ![x](https://evil.example/x.png) `code` ```` | cell | **bold** <!--",
    "../../../../owned /etc/passwd $(touch owned) `touch owned` '; touch owned; '",
    "x" * 5000,
    "section_start:1:x\r\x1b[0Ksection",
)

SERVER = r'''
"""Logs all it is given to say, then does what it is told: hang, crash or die."""
import http.server, json, os, sys, threading, time
from pathlib import Path
from setproctitle import setproctitle

how, port, attacks = sys.argv[1], int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())

def say():
    for attack in attacks:
        data = attack.encode("utf-8", "surrogatepass").replace(b"%0A", b"%0A")
        os.write(1, data + b"\n[2031-02-11 10:00:14 TP0] " + data + b"\0\n")
        os.write(1, b"[2031-02-11 10:00:14 TP0] Scheduler hit an exception: Traceback (most recent call last):\n")
        os.write(1, b'  File "' + data[:300] + b'", line 1, in ' + data[:300] + b"\n")
        os.write(1, b"RuntimeError: " + data + b"\n\n")

def owned(name):
    exec(compile(f"def {'f' * 200}(): time.sleep(600)\n{'f' * 200}()", name, "exec"), {"time": time})

setproctitle("sglang::scheduler_TP0 " + " ".join(attacks)[:3000].replace("\0", ""))
say()
if how == "crash":
    raise RuntimeError("\n".join(attacks))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": attacks[0]}]}).encode())

    def do_POST(self):
        say()
        if how == "die":
            os._exit(7)
        owned(attacks[0] + attacks[4] + attacks[3])

server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
threading.Thread(target=owned, args=("\n::error::owned\x1b[2J",), name="\x1b[2J<script>", daemon=True).start()
time.sleep(600)
'''

TESTS = """
import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ATTACKS = json.loads((HERE / "attacks.json").read_text())


def command(how):
    words = [word.replace("{", "{{").replace("}", "}}") for word in ATTACKS]
    return pytest.mark.gpuserve(
        engine="command", ready="/health", startup_timeout=60, model=ATTACKS[0], env={"EVIL": ATTACKS[2] + ATTACKS[4]},
        command=[sys.executable, str(HERE / "evil.py"), how, "{port}", str(HERE / "attacks.json"), *words],
    )


@command("crash")
def test_crash(server):
    pass


@command("die")
def test_die(server):
    server.post("/x", json={"prompt": ATTACKS[0]}, timeout=20)


@command("hang")
@pytest.mark.timeout(6)
def test_hang(server):
    server.post("/x", json={"prompt": ATTACKS[0]})


@pytest.mark.gpuserve(engine="sim", tp=2, startup_timeout=60, args={"served-model-name": ATTACKS[0] + ATTACKS[4]})
@pytest.mark.timeout(8)
def test_name(server):
    server.dump(ATTACKS[4])
    raise RuntimeError(server.model)
"""

ANNOTATION = re.compile(r"::error file=test_evil\.py,title=(?:hang|crash|undecided|config)%3A [a-z0-9._-]+::[^\r\n]*")


@pytest.fixture(scope="module", params=["-v --tb=long -rA", "-n1 --tb=native -vv", "-q --tb=short"])
def run(request: pytest.FixtureRequest, new_project: Any) -> Any:
    project = new_project()
    (project.path / "attacks.json").write_text(json.dumps(ATTACKS))
    project.write(evil=SERVER, test_evil=TESTS)
    summary = project.path / "summary.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GITHUB_ACTIONS", "true")
        patch.setenv("GITHUB_STEP_SUMMARY", str(summary))
        more = ("--junitxml=junit.xml", "--html=report.html", "--color=no", "--gpuserve-dump-timeout=15")
        result = project.run(*request.param.split(), *more, timeout=280)
    outcomes = result.parseoutcomes()
    assert outcomes.get("failed", 0) + outcomes.get("errors", outcomes.get("error", 0)) == 4, outcomes
    assert len(project.incidents()) >= 4
    return project, summary


def odd(text: str) -> set[str]:
    """Characters that a terminal obeys, or that nobody sees."""
    return {hex(ord(c)) for c in text if c not in "\n\t" and unicodedata.category(c)[0] == "C"}


def commands(text: str) -> list[str]:
    """What GitHub's runner, or another's, would take for a command."""
    lines = re.split(r"[\r\n]+", text)
    return [line for line in lines if line.lstrip().startswith("::") or re.search(r"##\w*\[", line)]


def test_the_terminal(run: Any) -> None:
    """The test's own exception is pytest's to show; it is only raised where the words are ours."""
    project, _ = run
    text = project.output("out.txt") + project.output("err.txt")
    assert "owned" in text
    ours = "\n".join(
        line
        for line in text.splitlines()
        if not line.startswith(("E   RuntimeError: <script", "RuntimeError: <script"))
    )
    assert odd(ours) == set()
    found = commands(ours)
    assert found
    assert [line for line in found if not ANNOTATION.fullmatch(line)] == []
    assert max(map(len, found)) < 20_000


def test_the_jobs_summary(run: Any) -> None:
    _, summary = run
    text = summary.read_text()
    rows = text.rstrip().splitlines()
    assert rows[0].startswith("### gpuserve")
    assert all(len(re.split(r"(?<!\\)\|", row)) == 7 for row in rows[4:])
    assert harmless_markdown(text)
    assert odd(text) == set()


def harmless_markdown(text: str) -> bool:
    """Outside of fences there is no tag, no link, no picture, no code that is open; every fence is closed."""
    fence, paragraphs = "", []
    for line in text.splitlines():
        if fence:
            fence = "" if line == fence else fence
        elif opened := re.fullmatch(r"(`{3,})[a-z]*", line):
            fence = opened[1]
        else:
            paragraphs.append(line)
    assert not fence
    prose = "\n".join(paragraphs).replace("<sub>", "").replace("</sub>", "")
    assert not re.search(r"<[A-Za-z/!?]", prose)
    assert not re.search(r"(?<!\\)\]\(", prose)
    assert not re.search(r"(?<!\\)`", prose)
    return True


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def assert_harmless_page(text: str) -> None:
    tags = Tags(text).found
    assert [tag for tag, _ in tags].count("script") == 1
    assert not {tag for tag, _ in tags} & {"img", "iframe", "object", "embed", "link", "base", "form"}
    for _, attributes in tags:
        assert not any(name.startswith("on") for name in attributes)
        assert not (attributes.get("href") or "").lower().startswith(("javascript", "data"))


def test_every_bundle(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, _ = run
    for path in project.incidents():
        for file in sorted(path.rglob("*")):
            assert not file.is_symlink()
            if file.is_file():
                text = file.read_text()
                if file.suffix in (".md", ".txt", ".sh", ".html"):
                    assert odd(text) == set(), file
                    assert "section_start:1:x\r" not in text
                if file.suffix in (".json", ".jsonl"):
                    assert text.isascii(), file
                if file.suffix == ".md":
                    harmless_markdown(text)
                if file.suffix == ".html":
                    assert_harmless_page(text)
        for options in ([], ["--issue"], ["--check"], ["--json"]):
            main(["explain", str(path), *options])
            out = capsys.readouterr().out
            assert odd(out) == set()
            assert commands(out) == [] or options == ["--json"]
            assert options != ["--json"] or out.isascii()
    assert_harmless_page((project.path / "gpuserve-artifacts" / "index.html").read_text())


def test_repro_starts_what_was_started_and_nothing_else(run: Any, tmp_path: Path) -> None:
    project, _ = run
    shell = shutil.which("sh")
    assert shell is not None
    seen = 0
    for path in project.incidents():
        script = (path / "repro.sh").read_text()
        launched = json.loads((path / "server.json").read_text())["argv"]
        if not any(word.endswith("/evil.py") for word in launched):
            continue
        seen += 1
        (tmp_path / "bin").mkdir(exist_ok=True)
        script = re.sub(r"(?m)^exec \S+", f"exec {tmp_path}/bin/show", script)
        script = re.sub(r"(?m)^exit .*", "", script)
        (tmp_path / "bin" / "show").write_text('#!/bin/sh\nprintf "%s\\n" "$#"\n')
        (tmp_path / "bin" / "show").chmod(0o755)
        done = subprocess.run([shell, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert (done.returncode, done.stderr, int(done.stdout)) == (0, "", len(launched) - 1)
        assert [entry.name for entry in tmp_path.iterdir()] == ["bin"]
    assert seen


def test_junit_and_pytest_html(run: Any) -> None:
    project, _ = run
    raw = (project.path / "junit.xml").read_text()
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f]", raw)
    for name in ("test_crash", "test_die", "test_hang"):
        case = project.junit()[name]
        found = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        assert Path(found["gpuserve_incident"] or "").parent == project.path / "gpuserve-artifacts"
        assert all(odd(text or "") == set() for text in case.itertext())
    page = (project.path / "report.html").read_text()
    assert "<script>alert(1)" not in page
    assert "onerror=alert" not in re.sub(r"&[a-z]+;|&#\d+;", "", re.sub(r'data-jsonblob="[^"]*"', "", page))


def test_nothing_is_written_elsewhere(run: Any) -> None:
    project, _ = run

    def strange() -> Iterator[str]:
        known = {"attacks.json", "evil.py", "test_evil.py", "tox.ini", "out.txt", "err.txt", "summary.md"}
        known |= {"junit.xml", "report.html", "assets", "gpuserve-artifacts", "__pycache__", ".pytest_cache"}
        yield from (entry.name for entry in project.path.iterdir() if entry.name not in known)
        for folder, _, files in os.walk(project.path / "gpuserve-artifacts"):
            yield from (name for name in (*files, Path(folder).name) if not re.fullmatch(r"[A-Za-z0-9._-]+", name))

    assert list(strange()) == []
    project.assert_nothing_left()
