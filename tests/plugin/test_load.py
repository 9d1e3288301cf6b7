"""The installed but unused plugin: what it imports, and what it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pytest_gpuserve.plugin import marks

AT_LOAD = {
    "pytest_gpuserve",
    "pytest_gpuserve.home",
    "pytest_gpuserve.plugin",
    "pytest_gpuserve.plugin.fixtures",
    "pytest_gpuserve.plugin.hooks",
    "pytest_gpuserve.plugin.marks",
    "pytest_gpuserve.plugin.newhooks",
    "pytest_gpuserve.plugin.option_values",
    "pytest_gpuserve.plugin.options",
    "pytest_gpuserve.plugin.state",
}
"""Ours, when pytest has loaded its plugins and read its options."""

IN_A_SESSION = AT_LOAD | {
    "pytest_gpuserve.errors",
    "pytest_gpuserve.plugin.collect",
    "pytest_gpuserve.plugin.order",
}
"""Ours, after a session whose tests want no server."""

NEVER = {"requests", "pynvml", "jinja2", "psutil", "setproctitle", "urllib3", "tomllib", "pytest_gpuserve.gpu"}

PROBE = """
import json, sys
import pytest

class Probe:
    @pytest.hookimpl(trylast=True)
    def pytest_configure(self):
        self.loaded = set(sys.modules)

probe = Probe()
bare = [] if sys.argv[1] == "with" else ["-p", "no:gpuserve"]
code = pytest.main(["-q", "-p", "no:cacheprovider", *bare, *sys.argv[2:]], plugins=[probe])
print("\\n" + json.dumps({"code": int(code), "loaded": sorted(probe.loaded), "end": sorted(sys.modules)}))
"""


def session(project, which: str, *arguments: str) -> dict:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, which, *arguments],
        cwd=project.path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_modules_imported_at_plugin_load_are_an_exact_list(project):
    project.write(test_it="def test_it(): pass")
    plain, ours = session(project, "without"), session(project, "with")
    assert (plain["code"], ours["code"]) == (0, 0)
    loaded = set(ours["loaded"]) - set(plain["loaded"])
    assert {name for name in loaded if name.startswith("pytest_gpuserve")} == AT_LOAD
    assert {name for name in loaded if not name.startswith("pytest_gpuserve")} == set()
    at_end = set(ours["end"]) - set(plain["end"])
    assert at_end == IN_A_SESSION
    assert not at_end & NEVER


def test_inert_until_a_server_is_asked_for(project, monkeypatch):
    """Collecting marked tests starts, probes and writes nothing."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    project.write(
        test_it="""
        from pytest import mark
        @mark.sm120
        @mark.gpuserve(engine="sim", tp=8)
        @mark.gpuserve_matrix(axes={"cuda_graph": ["on", "off"]})
        def test_it(server): raise RuntimeError
        """,
        conftest="""
        import os, socket, subprocess, sys
        FORBIDDEN = {"socket.connect", "socket.bind", "subprocess.Popen", "os.posix_spawn", "os.fork", "os.mkdir"}
        def hook(event, args):
            if event in FORBIDDEN and not (event == "os.mkdir" and "__pycache__" in str(args[0])):
                print("TOUCHED", event, args)
                os._exit(9)
        sys.addaudithook(hook)
        """,
    )
    for arguments in (
        ["--collect-only", "-q"],
        ["--gpuserve=plan"],
        ["--gpuserve=skip"],
        ["-m", "cuda_graph_off", "--co"],
    ):
        result = project.run("-p", "gpuserve", "-p", "no:cacheprovider", *arguments)
        assert result.ret == 0, result.outlines
        assert "TOUCHED" not in result.stdout.str()
    assert list(project.state.iterdir()) == []


@pytest.mark.parametrize("arguments", [(), ("-n2",)])
def test_every_mark_of_the_list_passes_strict_markers(project, arguments):
    project.write(test_it="def test_it(): pass")
    names = [
        *sorted(marks.TRAITS),
        *(f"sm{n}" for n in marks.ARCHITECTURES),
        "sm_min",
        "gpuserve",
        "gpuserve_matrix",
        "cell",
    ]
    assert {"spec_base", "eagle3", "cuda_graph_on", "cuda_graph_off", "attn_triton", "attn_flash_attn", "sm75"} <= set(
        names
    )
    result = project.run("--strict-markers", "-m", "not (" + " or ".join(names) + ")", *arguments)
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("missing", [("no:timeout",), ("no:xdist",), ("no:timeout", "no:xdist", "no:terminal")])
def test_works_without(project, missing):
    project.write(test_it="def test_it(): pass")
    arguments = [word for name in missing for word in ("-p", name)]
    assert project.run("--strict-config", "--strict-markers", *arguments).ret == 0


def test_header_only_when_asked(project):
    project.write(test_it="def test_it(): pass")
    assert "gpuserve:" not in project.here().stdout.str()
    assert "gpuserve:" in project.here("-v").stdout.str()
    project.here("--gpuserve-mode=soft").stdout.fnmatch_lines(
        ["gpuserve: run, soft (nothing is killed), start-up 1800 s*"]
    )
    project.here("-v").stdout.fnmatch_lines(["gpuserve: pytest-timeout is off, so a hung server is ended only by*"])
