"""Fixtures for tests of the plugin: a project in a temporary directory, run by pytest in this process or in another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.errors import EngineError


class Project:
    """A directory with tests, a state directory of its own, and what is left of the runs in it."""

    def __init__(self, path: Path, state: Path, pytester: pytest.Pytester | None = None) -> None:
        self.path = path
        self.state = state
        self.pytester = pytester
        state.chmod(0o700)
        (path / "tox.ini").write_text("[pytest]\n")

    @property
    def environment(self) -> dict[str, str]:
        """Ours, less what would steer the inner run."""
        steering = ("GPUSERVE", "PYTEST_TIMEOUT", "PYTEST_ADDOPTS", "PYTEST_XDIST", "PYTEST_CURRENT")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
        return {**kept, "GPUSERVE_STATE": str(self.state), "PYTHONUNBUFFERED": "1"}

    def write(self, **files: str) -> None:
        """Test modules by name, such as ``test_one="def test_…"``."""
        for name, text in files.items():
            (self.path / f"{name}.py").write_text(cleandoc(text) + "\n")

    def here(self, *arguments: str) -> pytest.RunResult:
        """Run in this process with no other plugin: for what starts no server."""
        assert self.pytester is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
            return self.pytester.runpytest_inprocess("-p", "gpuserve", *arguments)

    def run(self, *arguments: str, timeout: float = 150, before: Sequence[str] = ()) -> pytest.RunResult:
        """Run in a process of its own, in the order of the files; ``before``: a command that starts it."""
        return self.wait(self.start("-p", "no:randomly", *arguments, before=before), timeout)

    def start(self, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a run and come back at once; its output goes to out.txt and err.txt."""
        with (self.path / "out.txt").open("wb") as out, (self.path / "err.txt").open("wb") as err:
            return subprocess.Popen(
                [*before, sys.executable, "-m", "pytest", *arguments],
                cwd=self.path,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, process: subprocess.Popen[bytes], timeout: float = 150) -> pytest.RunResult:
        """The end of a run that was started."""
        begun = time.monotonic()
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"still running after {timeout} s\n{self.output('out.txt')}") from None
        print(self.output("out.txt"), self.output("err.txt"))
        lines = [self.output(name).splitlines() for name in ("out.txt", "err.txt")]
        return pytest.RunResult(code, *lines, time.monotonic() - begun)

    def output(self, name: str) -> str:
        path = self.path / name
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, condition: Callable[[], Any], what: str, limit: float = 60) -> Any:
        """What ``condition`` returns once it is true."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.05)
        raise AssertionError(f"no {what} within {limit} s\n{self.output('out.txt')}")

    def servers(self) -> list[Path]:
        """Directories of the servers that were started, in the order of their start."""
        found = [path.parent for path in self.state.glob("sessions/*/*/server.json")]
        return sorted(found, key=lambda path: path.stat().st_ctime)

    def events(self, server: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (server / "events.jsonl").read_text().splitlines()]

    def incidents(self) -> list[Path]:
        """Directories of the incidents that were written."""
        return sorted(path.parent for path in self.path.glob("gpuserve-artifacts/*/incident.json"))

    def junit(self, name: str = "junit.xml") -> dict[str, ET.Element]:
        """Test cases of a junit file by name; where a test has two (its teardown failed too), the first."""
        cases: dict[str, ET.Element] = {}
        for case in ET.parse(self.path / name).iter("testcase"):
            cases.setdefault(case.get("name", ""), case)
        return cases

    def left(self) -> list[str]:
        """Processes of a server, a supervisor or a watcher of this project that still live."""
        state = str(self.state).encode()
        found = []
        for pid in procfs.pids():
            status = procfs.stat(pid)
            if pid == os.getpid() or status is None or not status.alive:
                continue
            environ, cmdline = (procfs.read(f"/proc/{pid}/{name}") for name in ("environ", "cmdline"))
            if state in cmdline or (procfs.COOKIE_VARIABLE.encode() in environ and state in environ):
                found.append(f"{pid} {procfs.cmdline(pid)}")
        return found

    def assert_nothing_left(self, limit: float = 15) -> None:
        """Every process is gone, at most ``limit`` seconds from now."""
        deadline = time.monotonic() + limit
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left

    def kill_all(self) -> None:
        for entry in self.left():
            pid = int(entry.split()[0])
            if procfs.stat(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def project(
    pytester: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Project]:
    """A project for one test."""
    project = Project(pytester.path, tmp_path_factory.mktemp("state"), pytester)
    for variable in set(os.environ) - set(project.environment):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("GPUSERVE_STATE", str(project.state))
    yield project
    project.kill_all()


@pytest.fixture(scope="module")
def new_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Project]]:
    """Makes projects whose one run several tests look at."""
    made: list[Project] = []

    def make() -> Project:
        made.append(Project(tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("state")))
        return made[-1]

    yield make
    for project in made:
        project.kill_all()


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines that only say which axes they have; for runs in this process that start nothing."""

    class Toy:
        uses_gpus = False

        def __init__(self, name: str, backends: tuple[str, ...]) -> None:
            self.name = name
            self.axes = {
                "spec_decode": ("base", "eagle3", "ngram", "homemade"),
                "cuda_graph": ("on", "off"),
                "attention_backend": backends,
            }

    engines = {"toy": Toy("toy", ("triton", "fa3")), "doll": Toy("doll", ("triton", "flashinfer"))}

    def get_engine(name: str) -> Toy:
        if name not in engines:
            raise EngineError(f"there is no engine called {name!r}. Known engines: {', '.join(engines)}.")
        return engines[name]

    monkeypatch.setattr("pytest_gpuserve.engines.get_engine", get_engine)


@pytest.fixture
def no_servers() -> str:
    """An inner conftest under which tests run as if they had their servers."""
    return NO_SERVERS


NO_SERVERS = """
import pytest

@pytest.fixture(scope="session")
def gpuserve_pool():
    class Pool:
        def for_test(self, item):
            return None
    return Pool()
"""
