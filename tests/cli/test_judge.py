"""``gpuserve judge``: real pytest runs, real exit codes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.cli.judge import read_signature
from pytest_gpuserve.cli.pytest_probe import run_session
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.isolation.signature import Signature

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]


class Place:
    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "pytest.ini").write_text("[pytest]\n")

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUSERVE")}
        (self.path / "state").mkdir(mode=0o700, exist_ok=True)
        return {**kept, "GPUSERVE_STATE": str(self.path / "state"), "XDG_CACHE_HOME": str(self.path / "cache")}

    def start(self, text: str, *options: str, pytest: list[str] | None = None) -> subprocess.Popen[str]:
        (self.path / "test_it.py").write_text(cleandoc(text) + "\n")
        return subprocess.Popen(
            [sys.executable, "-m", "pytest_gpuserve.cli", "judge", *options, "--", *(pytest or PYTEST)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.path,
            env=self.environment,
        )

    def judge(self, text: str, *options: str, pytest: list[str] | None = None) -> tuple[int, str]:
        process = self.start(text, *options, pytest=pytest)
        out, _ = process.communicate(timeout=120)
        print(out)
        return process.returncode, out

    @property
    def log(self) -> list[str]:
        return (self.path / "bisect.log").read_text().splitlines()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


KILLED = "import os, signal\ndef test_it(): os.kill(os.getpid(), signal.SIGKILL)"

OURS = """
import pytest
@pytest.mark.gpuserve(engine="sim")
def test_it(server): pass
"""
WRONG_GPU = """
import pytest
@pytest.mark.sm120
@pytest.mark.gpuserve(engine="sglang", model="m", tp=64)
def test_it(server): pass
"""

FAILS_ONCE = """
import pathlib, pytest
def test_it():
    if not pathlib.Path("ran").exists():
        pathlib.Path("ran").touch()
        assert 1 == 2
    AGAIN
"""


@pytest.mark.parametrize(
    ("text", "arguments", "code", "said"),
    [
        ("def test_it(): pass", [], 0, "GOOD (0): 1 passed"),
        ("def test_it(): assert 1 == 2", [], 1, "BAD (1): test_it.py::test_it: test (AssertionError) assert 1 == 2"),
        ("import pytest\ndef test_it(): pytest.skip('x')", [], 125, "all 1 were skipped"),
        ("import pytest\ndef test_it(): pytest.exit('x', returncode=0)", [], 125, "before its session was over"),
        ("import os\ndef test_a(): pass\ndef test_b(): os._exit(0)", [], 125, "before its session was over"),
        ("def test_it(): pass\ndef test_b(): assert 0", ["-k", "nothing"], 125, "no test was selected"),
        ("def test_it(: pass", [], 125, "test_it.py could not be collected: SyntaxError: "),
        (
            "import no_such",
            [],
            125,
            "test_it.py could not be collected: ModuleNotFoundError: No module named 'no_such'",
        ),
        ("import no_such", ["--continue-on-collection-errors"], 125, "could not be collected"),
        ("import no_such", ["test_it.py::test_it"], 125, "could not be collected"),
        ("import no_such", ["-n", "1"], 125, "could not be collected"),
        ("def test_it(): pass", ["--no-such-option"], 125, "exit code 4 (wrong usage)"),
        (KILLED, [], 125, "killed by signal 9"),
        (KILLED, ["-n", "1"], 125, "did not end, its process did: worker 'gw0' crashed"),
        (KILLED + "\ndef test_b(): assert 0", ["-n", "1"], 1, "test_b"),
        ("import os\ndef test_it(): os._exit(0)", [], 125, "before its session was over"),
        ("def test_it(): pass", ["-p", "no:gpuserve"], 128, "did not report any test"),
        (OURS, ["--gpuserve=skip"], 125, "was skipped by us"),
        (WRONG_GPU, [], 128, "this machine cannot test it"),
        ("def test_it(): raise OSError(28, 'No space left on device')", [], 125, "trouble of the machine: test_it.py"),
        ("def test_it(): pass", ["-n", "1"], 0, "GOOD"),
        (OURS, ["--gpuserve=skip", "-n", "1"], 125, "was skipped by us"),
        ("def test_it(): assert 0", ["--setup-only"], 125, "no test passed"),
        ("def test_it(): assert 0", ["--setup-plan"], 125, "no test passed"),
        ("import pytest\ndef test_it(): pass\ndef test_b(): pytest.skip('x')", [], 0, "1 passed, 1 skipped"),
    ],
)
def test_exit_codes(place: Place, text: str, arguments: list[str], code: int, said: str) -> None:
    found, out = place.judge(text, pytest=[*PYTEST, *arguments])
    assert (found, said in out) == (code, True)
    assert len(place.log) == 1
    assert f"\t{code}\t" in place.log[0]


@pytest.mark.parametrize("arguments", [[], ["-n", "1"]])
@pytest.mark.parametrize("again", ["pass", "pytest.skip('x')", "pytest.xfail('x')"])
def test_a_failure_that_a_rerun_hides_is_one(place: Place, again: str, arguments: list[str]) -> None:
    text = cleandoc(FAILS_ONCE).replace("AGAIN", again)
    code, out = place.judge(text, pytest=[*PYTEST, "--reruns", "1", *arguments])
    assert (code, "BAD (1): test_it.py::test_it: test (AssertionError)" in out) == (1, True)


@pytest.mark.parametrize("arguments", [[], ["-n", "1"]])
def test_a_rerun_that_hides_nothing(place: Place, arguments: list[str]) -> None:
    code, out = place.judge("def test_it(): pass", pytest=[*PYTEST, "--reruns", "1", *arguments])
    assert (code, "GOOD (0): 1 passed\n" in out) == (0, True)


def test_an_internal_error_with_a_hidden_exit_code(place: Place) -> None:
    (place.path / "conftest.py").write_text(
        "def pytest_runtest_logfinish(nodeid):\n    if nodeid.endswith('test_a'): raise ValueError('x')\n"
        "def pytest_sessionfinish(session): session.exitstatus = 0\n"
    )
    code, out = place.judge("def test_a(): pass\ndef test_b(): assert 0")
    assert "INTERNALERROR" in out
    assert (code, "before its session was over" in out) == (125, True)


@pytest.mark.parametrize("how", ["shouldfail", "shouldstop"])
def test_a_session_that_a_plugin_stops_with_a_hidden_exit_code(place: Place, how: str) -> None:
    (place.path / "conftest.py").write_text(
        f"def pytest_runtest_teardown(item): item.session.{how} = 'x'\n"
        "def pytest_sessionfinish(session): session.exitstatus = 0\n"
    )
    code, out = place.judge("def test_a(): pass\ndef test_b(): assert 0")
    assert (code, "before its session was over" in out) == (125, True)


def test_every_session_of_a_command_must_end(place: Place) -> None:
    wrapper = place.path / "pytest"
    wrapper.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nfor test in ('test_a', 'test_b'):\n"
        f"    subprocess.run([*{PYTEST!r}, '-k', test, *sys.argv[1:]])\n"
    )
    wrapper.chmod(0o755)
    text = "import os\ndef test_a(): pass\ndef test_b(): END"
    code, out = place.judge(text.replace("END", "os._exit(0)"), pytest=["./pytest"])
    assert (code, "before its session was over" in out) == (125, True)
    code, out = place.judge(text.replace("END", "pass"), pytest=["./pytest"])
    assert (code, "2 passed" in out) == (0, True)


LAUNCHER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: None)
raise SystemExit(subprocess.run(sys.argv[2:]).returncode)
"""
"""As ``uv run``: not for it is Ctrl-C, it waits for its child."""


@pytest.fixture
def launcher(place: Place) -> list[str]:
    (place.path / "uv").write_text(f"#!{sys.executable}\n{LAUNCHER}")
    (place.path / "uv").chmod(0o755)
    return ["./uv", "run"]


@pytest.mark.parametrize("before", [["A=1"], ["env", "A=1"], ["A=1", "./uv", "run"]])
def test_what_may_stand_before_pytest(place: Place, launcher: list[str], before: list[str]) -> None:
    text = "import os\ndef test_it(): assert os.environ['A'] == '1'"
    code, out = place.judge(text, pytest=[*before, *PYTEST])
    assert (code, "GOOD (0): 1 passed" in out) == (0, True)


@pytest.mark.parametrize("options", [["-I", "-m", "pytest"], ["-B", "-mpytest"]])
def test_options_of_the_interpreter(place: Place, options: list[str]) -> None:
    code, out = place.judge("def test_it(): pass", pytest=[sys.executable, *options, "-q"])
    assert (code, "GOOD (0): 1 passed" in out) == (0, True)


@pytest.mark.parametrize("command", [["make", "test"], ["sh", "-c", "pytest -q"], ["tox", "-e", "x", "--", "-k", "a"]])
def test_a_command_that_hides_pytest_is_told_what_to_write(place: Place, command: list[str]) -> None:
    code, out = place.judge("def test_it(): pass", pytest=command)
    assert code == 128
    assert f"no pytest can be seen in {shlex.join(command)}" in out
    assert "Write the pytest command that it runs, for example: gpuserve judge -- pytest" in out


def test_a_limit_ends_what_a_launcher_started(
    place: Place, launcher: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.path / "test_it.py").write_text(RUNNING)
    monkeypatch.setenv("GPUSERVE_STATE", str(place.path / "state"))
    session = run_session([*launcher, *PYTEST], cwd=place.path, stopped=(place.path / "running").exists)
    assert session.timed_out
    assert session.whole is False, "it was interrupted"
    assert procfs.process_id(int((place.path / "pid").read_text())) is None, "its pytest was left"


def test_every_session_of_one_process_is_told(place: Place) -> None:
    """pytest.main one after the other, each exit code ignored."""
    (place.path / "pytest").write_text(
        f"#!{sys.executable}\nimport pytest\nfor test in ('test_a', 'test_b'):\n"
        f"    pytest.main([*{PYTEST[3:]!r}, '-k', test])\n"
    )
    (place.path / "pytest").chmod(0o755)
    code, out = place.judge("def test_a(): pass\ndef test_b(): assert 0", pytest=["./pytest"])
    assert (code, "BAD (1): test_it.py::test_b" in out) == (1, True)


NESTED = """
import subprocess, sys, pytest
def test_it(tmp_path):
    (tmp_path / "test_inner.py").write_text("def test_inner(): assert 0")
    words = ["-p", "no:cacheprovider", str(tmp_path)]
    assert pytest.main(words) == 1
    assert subprocess.run([sys.executable, "-m", "pytest", *words]).returncode == 1
"""


def test_what_a_test_runs_is_not_told(place: Place) -> None:
    code, out = place.judge(NESTED)
    assert (code, "GOOD (0): 1 passed" in out) == (0, True)


def test_what_fails_because_it_is_interrupted_is_no_failure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.path / "test_it.py").write_text(
        "import time\ndef test_it():\n    open('running', 'w').close()\n    try:\n        time.sleep(500)\n"
        "    except KeyboardInterrupt:\n        assert 0\n"
    )
    monkeypatch.setenv("GPUSERVE_STATE", str(place.path / "state"))
    session = run_session(PYTEST, cwd=place.path, stopped=(place.path / "running").exists)
    assert session.timed_out
    assert session.failed == []


def test_a_hang_is_told_from_other_failures(place: Place) -> None:
    text = """
    import pytest
    @pytest.mark.gpuserve(engine="sim", tp=2, args={"fault": "FAULT", "shards": 1})
    def test_it(server): assert server.get("/health").ok
    """
    arguments = [*PYTEST, "--gpuserve-stall-timeout=5"]
    code, _ = place.judge(
        text.replace("FAULT", "sleep@cuda_graph:rank=1"), "--save-signature", "sought.json", pytest=arguments
    )
    assert code == 1
    saved = json.loads((place.path / "sought.json").read_text())
    assert (saved["verdict"], saved["phase"]) == ("hang", "cuda_graph")
    code, out = place.judge(text.replace("FAULT", "exit@weight_load:code=3"), "--signature", "last", pytest=arguments)
    assert (code, "another failure" in out) == (125, True)


def test_a_signature_knows_the_tests_that_failed_so(place: Place) -> None:
    text = "import pytest\ndef test_a(): pass\ndef test_b(): DO"
    assert place.judge(text.replace("DO", "assert 0"), "--save-signature", "sought.json")[0] == 1
    for do, code in (("pytest.skip('x')", 125), ("pass", 0)):
        assert place.judge(text.replace("DO", do), "--signature", "sought.json")[0] == code


def test_the_build(place: Place) -> None:
    code, out = place.judge("def test_it(): pass", "--build", f"{sys.executable} -c 'raise SystemExit(7)'")
    assert (code, "the build failed with exit code 7" in out) == (125, True)
    code, out = place.judge("def test_it(): pass", "--build", "./no-such-build")
    assert (code, "cannot be run" in out) == (125, True)


def test_flaky_runs_are_repeated(place: Place) -> None:
    text = """
    from pathlib import Path
    def test_it():
        path = Path("count")
        path.write_text(str(int(path.read_text() if path.exists() else 0) + 1))
        assert path.read_text() != "LIMIT"
    """
    code, out = place.judge(text.replace("LIMIT", "3"), "--repro-rate", "0.8", "--confidence", "0.99")
    assert (code, (place.path / "count").read_text()) == (1, "3"), "the third of three runs failed"
    (place.path / "count").unlink()
    code, out = place.judge(text.replace("LIMIT", "9"), "--repro-rate", "0.8", "--confidence", "0.99")
    assert (code, (place.path / "count").read_text()) == (0, "3")
    assert "good with confidence 99.21% at a repro rate of 0.8" in out


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (["--repeat", "x"], PYTEST),
        (["--repeat", "0"], PYTEST),
        (["--repro-rate", "2"], PYTEST),
        (["--signature", "/no/such/incident"], PYTEST),
        (["--signature", "last"], PYTEST),
        (["--build", " "], PYTEST),
        (["--build", "A=1"], PYTEST),
        (["--timeout", "-5"], PYTEST),
        (["--gpu-wait", "nan"], PYTEST),
        ([], ["make", "test"]),
    ],
)
def test_a_mistake_never_reads_as_bad(place: Place, options: list[str], command: list[str]) -> None:
    code, out = place.judge("def test_it(): pass", *options, pytest=command)
    assert code == 128
    assert "Traceback" not in out


def test_each_commit_has_kernel_caches_of_its_own(place: Place) -> None:
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=place.path, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=place.path, check=True, capture_output=True, text=True)
    text = f"import os\ndef test_it(): assert '{head.stdout.strip()}' in os.environ['TRITON_CACHE_DIR']"
    assert place.judge(text)[0] == 0
    assert place.judge(text, "--shared-caches")[0] == 1
    assert head.stdout.strip() in place.log[0]


RUNNING = """
import os, time
def test_it():
    open('pid', 'w').write(str(os.getpid()))
    open('running', 'w').close()
    time.sleep(500)
"""


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_its_pytest_is_told(place: Place) -> None:
    with place.start(RUNNING) as process:
        try:
            until((place.path / "running").exists)
        finally:
            process.kill()
    pid = int((place.path / "pid").read_text())
    until(lambda: procfs.process_id(pid) is None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted(place: Place, number: signal.Signals) -> None:
    process = place.start(RUNNING)
    try:
        until((place.path / "running").exists)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "interrupted" in out
    assert procfs.process_id(int((place.path / "pid").read_text())) is None, "its pytest was left"


def test_a_limit_needs_no_sigint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell without job control has its background jobs ignore SIGINT; what never hears it is ended all the same."""
    monkeypatch.setenv("GPUSERVE_STATE", str(tmp_path / "state"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_it():\n    open('running', 'w').close()\n    time.sleep(500)\n"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        session = run_session(PYTEST, cwd=tmp_path, stopped=(tmp_path / "running").exists)
        took = time.time() - (tmp_path / "running").stat().st_mtime
    finally:
        signal.signal(signal.SIGINT, before)
    assert session.timed_out
    assert session.code == -signal.SIGTERM
    assert took < 25, "30 s are for one that hears SIGINT"


def test_signatures_are_read_from_incidents(tmp_path: Path) -> None:
    (tmp_path / "incident.json").write_text('{"verdict": "hang", "phase": "serving", "classes": []}')
    assert read_signature(str(tmp_path)) == (Signature("hang", "serving"), ())
    (tmp_path / "incident.json").write_text("[]")
    with pytest.raises(GpuserveError, match="holds no failure"):
        read_signature(str(tmp_path / "incident.json"))
