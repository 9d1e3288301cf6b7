"""Options: one table, three sources, and what is no value of its kind."""

from __future__ import annotations

import os
from datetime import datetime, timedelta

import pytest

from pytest_gpuserve.plugin.option_values import assignments, deadline
from pytest_gpuserve.plugin.options import OPTIONS

PRINT = """
from pytest_gpuserve.plugin.state import state_of
def pytest_report_header(config):
    s = state_of(config).settings
    return f"SETTINGS {s.action} {s.soft} {s.strict_arch} {s.startup_timeout} {s.grace} {s.artifacts} {s.defaults}"
"""


@pytest.fixture
def settings(project):
    project.write(conftest=PRINT, test_nothing="def test_nothing(): pass")

    def read(*arguments: str) -> str:
        result = project.here(*arguments)
        assert result.ret == 0
        return next(line for line in result.outlines if line.startswith("SETTINGS"))

    return read


def test_precedence_is_command_line_environment_ini_default(project, settings, monkeypatch):
    assert " 1800.0 " in settings()
    project.pytester.makeini("[pytest]\ngpuserve_startup_timeout = 11\ngpuserve_mode = soft\n")
    assert " True False 11.0 " in settings()
    monkeypatch.setenv("GPUSERVE_STARTUP_TIMEOUT", "12")
    assert " 12.0 " in settings()
    assert " 13.0 " in settings("--gpuserve-startup-timeout=13", "--gpuserve-strict-arch")
    assert " True 13.0 " in settings("--gpuserve-startup-timeout=13", "--gpuserve-strict-arch")


def test_every_option_has_an_ini_key_and_a_default_that_is_valid(project, settings):
    ini = "".join(f"{option.key} = {option.default}\n" for option in OPTIONS if option.default)
    project.pytester.makeini(f"[pytest]\naddopts = --strict-config\n{ini}")
    assert settings().startswith("SETTINGS run False False 1800.0 10.0")


def test_artifacts_are_relative_to_who_named_them(project, settings):
    inner = project.pytester.mkdir("inner")
    assert f" {project.path}/gpuserve-artifacts " in settings()
    project.pytester.makeini("[pytest]\ngpuserve_artifacts = there\n")
    (inner / "test_inner.py").write_text("def test_inner(): pass")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inner)
        assert f" {project.path}/there " in settings("--rootdir", str(project.path), "-c", "../tox.ini")
        assert f" {inner}/here " in settings("--gpuserve-artifacts=here", "-c", "../tox.ini")
    assert " None " in settings("--gpuserve-artifacts=off")
    result = project.here("--gpuserve-artifacts=")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--gpuserve-artifacts: it names no directory.*off*"])


@pytest.mark.parametrize(
    ("place", "why"),
    [("file", "is no directory"), ("file/x/y", "/file is no directory"), ("link/x", "/link is a link to nothing")],
)
def test_artifacts_that_cannot_be_are_refused_at_once_and_nothing_is_made(project, settings, monkeypatch, place, why):
    (project.path / "file").write_text("theirs")
    (project.path / "link").symlink_to("nowhere")
    assert settings(f"--gpuserve-artifacts={place}", "--gpuserve=plan"), "which writes nothing"
    refused = project.here(f"--gpuserve-artifacts={place}")
    monkeypatch.setenv("GPUSERVE_ARTIFACTS", place)
    for source, result in (("--gpuserve-artifacts", refused), ("GPUSERVE_ARTIFACTS", project.here())):
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"*{source}: no incident can be written to *{place}: *{why}. Name another*off*"])
    assert settings("--gpuserve-artifacts=not/there/yet")
    assert not (project.path / "not").exists()
    assert not (project.path / "nowhere").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_artifacts_where_this_user_may_not_write(project):
    (project.path / "theirs").mkdir(mode=0o500)
    result = project.here("--gpuserve-artifacts=theirs/x")
    result.stderr.fnmatch_lines(["*theirs/x: *theirs cannot be written by this user. Name*"])


def test_defaults_of_the_configuration_file(project, settings):
    project.pytester.makeini(
        "[pytest]\ngpuserve_engine = sim\ngpuserve_tp = 2\ngpuserve_defaults =\n  env.A=1\n  cuda_graph=off\n"
    )
    assert "{'env': {'A': '1'}, 'axes': {'cuda_graph': 'off'}, 'engine': 'sim', 'tp': '2'}" in settings()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpuserve=perhaps"], "--gpuserve: 'perhaps' is none of run, plan, skip"),
        (["--gpuserve-mode=hard"], "--gpuserve-mode"),
        (["--gpuserve-grace=0"], "--gpuserve-grace: '0' is no number of seconds"),
        (["--gpuserve-grace=10m"], "--gpuserve-grace"),
        (["--gpuserve-startup-timeout=inf"], "--gpuserve-startup-timeout"),
        (["--gpuserve-session-deadline=25:99"], "--gpuserve-session-deadline"),
        (["--gpuserve-session-deadline=2001-01-01T10:00"], "has already passed"),
        (["--gpuserve-set", "tp"], "--gpuserve-set: 'tp' is no KEY=VALUE"),
        (["--gpuserve-set", "quantization=fp8"], "--gpuserve-set: there is no 'quantization'"),
    ],
)
def test_a_wrong_option_is_one_paragraph(project, arguments, named):
    project.write(test_nothing="def test_nothing(): pass")
    result = project.here(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (error,) = [line for line in result.errlines if line.strip()]
    assert error.startswith("ERROR: ")
    assert named in error


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [("gpuserve_grace", "soon", "gpuserve_grace in "), ("gpuserve_strict_arch", "perhaps", "gpuserve_strict_arch in ")],
)
def test_a_wrong_ini_value_names_the_key_and_the_file(project, key, value, named):
    project.pytester.makeini(f"[pytest]\n{key} = {value}\n")
    result = project.here()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {named}*tox.ini*"])


def test_a_wrong_variable_is_named(project, monkeypatch):
    monkeypatch.setenv("GPUSERVE_GRACE", "-1")
    result = project.here()
    result.stderr.fnmatch_lines(["ERROR: the environment variable GPUSERVE_GRACE: '-1'*"])


def test_deadline_is_seconds_a_time_of_day_or_a_date():
    now = datetime(2031, 5, 4, 12, 0, 0).timestamp()
    assert deadline("90", "x", now) == now + 90
    assert deadline("12:30", "x", now) == now + 1800
    assert deadline("11:59:30", "x", now) == now + timedelta(days=1).total_seconds() - 30
    assert deadline("2031-05-04T13:00", "x", now) == now + 3600
    assert deadline("off", "x", now) is None


def test_assignments_put_flags_variables_and_axes_where_they_belong():
    lines = ["tp=4", "model=/m=1", "cuda_graph=off", "axes.overlap=on", "env.A=b=c", "env.N=1"]
    lines += ["args.--max=8", "args.--trust=", "args.--x=false", 'spec_decode={"eagle3": {"topk": 1}}']
    assert assignments(lines, "x") == {
        "tp": 4,
        "model": "/m=1",
        "axes": {"cuda_graph": "off", "overlap": "on", "spec_decode": {"eagle3": {"topk": 1}}},
        "env": {"A": "b=c", "N": "1"},
        "args": {"--max": 8, "--trust": None, "--x": False},
    }
