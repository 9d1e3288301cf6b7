"""Every hook of the plugin, each a line or two of delegation. What costs time to import is imported when needed."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from . import marks, options
from .fixtures import gpuserve_cell, gpuserve_pool, gpuserve_server, server
from .state import LACKS, PROBLEM, STATE, WANTED, State, state_of, uses_pool

__all__ = ["gpuserve_cell", "gpuserve_pool", "gpuserve_server", "server"]


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from . import newhooks

    pluginmanager.add_hookspecs(newhooks)


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    marks.remember_file(config)
    options.keep_plan_here(config)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    marks.register(config)
    config.stash[STATE] = state = State(config, options.read_settings(config))
    if state.distributes:
        from .xdist import Controller

        config.pluginmanager.register(Controller(state), "gpuserve-controller")
    if (known := options.known_failures(config)) is not None:
        from .known import register

        register(config, *known)
    if state.distributes or state.is_worker:
        from .distribution import install

        install(config, state)
    if os.environ.get("GPUSERVE_RESULTS"):  # gpuserve judge and isolate read one line a test
        from . import results

        results.register(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    from .order import Order

    session.config.pluginmanager.register(Order(state_of(session.config)), "gpuserve-order")


def pytest_report_header(config: pytest.Config) -> list[str]:
    state = state_of(config)
    if not state.settings.chosen and config.get_verbosity() < 1:
        return []
    from .terminal import header

    return header(state)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("gpuserve_matrix") is not None:
        from .matrix import generate

        generate(metafunc, state_of(metafunc.config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    return True if state_of(session.config).settings.action == "plan" else None  # terminal.py shows it


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    state = state_of(item.config)
    state.test_begins(item, nextitem)
    try:
        return (yield)
    finally:
        state.test_ended(item)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if uses_pool(item) or PROBLEM in item.stash:
        state = state_of(item.config)
        state.clock.restart(item)
        with state.clock.paused():  # GPUs may have to be asked
            from .checks import check

            check(item, state)
    elif marks.names_an_architecture(item):
        state = state_of(item.config)
        with state.clock.paused():
            from .checks import check_gpus

            check_gpus(item, state)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    if (wanted := item.stash.get(WANTED, None)) is not None and wanted.expect:
        from .figures import check

        check(item, state_of(item.config))
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    if uses_pool(item):
        state_of(item.config).clock.restart(item)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
    fixtures = state_of(request.config).fixtures
    fixtures.append(request)
    try:
        return (yield)
    finally:
        fixtures.pop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if not uses_pool(item) and LACKS not in item.stash and state_of(item.config).pool is None:
        return (yield)
    from .outcome import Outcome

    outcome = Outcome(item, call, state_of(item.config))
    return outcome.apply((yield))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    return state_of(item.config).clock.set_timer(item, settings)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    state_of(item.config).clock.cancelled()


def pytest_enter_pdb(config: pytest.Config) -> None:
    state_of(config).clock.debugger_entered()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    state = state_of(config)
    if not state.is_worker and (state.counted or state.settings.action == "plan"):
        from .terminal import summary

        summary(terminalreporter, state)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    state = state_of(session.config)
    state.session_finished()
    if state.counted and state.ledger.unpinned and not state.is_worker and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if state.counted and state.ledger.figures and not state.is_worker:
        from .figures import finish

        finish(session, state)
