"""One table of options, read once into a frozen :class:`Settings`.

Each option has a command-line form ``--gpuserve-NAME``, an environment variable ``GPUSERVE_NAME`` and an ini key
``gpuserve_name``; the first that is set wins, in that order. A mark may override the limits of its own server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from ..home import expanded
from .option_values import (
    Source,
    assignments,
    choice,
    count,
    deadline,
    gpus,
    monotonic,
    number,
    place,
    seconds,
    stall,
    switch,
)

LIMITS = ("startup_timeout", "grace", "dump_timeout")
"""Limits that a ``gpuserve`` mark may set for its own server, stronger than the options of the same name."""


PLANNED_WORKERS: pytest.StashKey[int] = pytest.StashKey()
"""How many processes a run would use, where only a plan is made."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose for this session. Times in seconds.

    Attributes:
        action: ``run``, ``plan`` (show what would start, start nothing) or ``skip`` (skip every test with a server).
        soft: dump and report, never kill.
        gpus: which GPUs may be leased, as ``gpu_pool`` takes it.
        foreign: what to do while strangers' processes use them.
        lease_timeout: seconds to wait for GPUs.
        stall_timeout: seconds without any sign of progress after which a server is hung; ``auto``: learned per phase;
            None: nobody watches.
        session_deadline: moment (CLOCK_MONOTONIC) at which every server is dumped; None: no deadline.
        log_limit: bytes of a server's log that stay on the disk, and a quarter more; 0: no limit.
        artifacts: where incidents go; None: nowhere but the state directory.
        retain: ``failure``: a bundle of every incident; ``always``: one of every server, when it is stopped, too.
        keep: so many incidents stay among the artifacts; 0: all.
        max_uses: tests that one server may serve; 0: any number.
        override: what ``--gpuserve-set`` launches, stronger than marks.
        defaults: what the configuration file launches, weaker than marks.
        chosen: the options that were given on the command line or in the environment.
    """

    action: Literal["run", "plan", "skip"]
    soft: bool
    strict_arch: bool
    startup_timeout: float
    grace: float
    dump_timeout: float
    artifacts: Path | None
    session_deadline: float | None
    stall_timeout: float | Literal["auto"] | None = "auto"
    log_limit: int = 1 << 30
    retain: Literal["failure", "always"] = "failure"
    keep: int = 0
    gpus: str = "auto"
    foreign: Literal["wait", "skip", "fail", "ignore"] = "wait"
    lease_timeout: float = 3600.0
    max_uses: int = 0
    override: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()


class Option(NamedTuple):
    """A row of the table. ``parse(text, source)`` raises pytest.UsageError."""

    name: str
    parse: Callable[[str, Source], Any]
    default: str
    help: str
    metavar: str | None = None
    flag: bool = False

    @property
    def cli(self) -> str:
        return f"--gpuserve-{self.name}" if self.name else "--gpuserve"

    @property
    def key(self) -> str:
        return f"gpuserve_{self.name}".rstrip("_").replace("-", "_")

    def text(self, config: pytest.Config) -> tuple[str, Source]:
        """The winning text and its source; the default's source is the option itself."""
        given = config.getoption(self.key, None)
        if given is not None:
            return str(given), self.cli
        variable = self.key.upper()
        if os.environ.get(variable):
            return os.environ[variable], f"the environment variable {variable}"
        ini = config.getini(self.key)
        if ini not in (None, ""):
            return str(ini), f"{self.key} in {config.inipath or 'the configuration file'}"
        return self.default, self.cli

    def chosen(self, config: pytest.Config) -> bool:
        """True when the command line or the environment sets it."""
        return config.getoption(self.key, None) is not None or bool(os.environ.get(self.key.upper()))


def _check_place(path: Path, config: pytest.Config) -> None:
    """A place that somebody named for this session: told now, not when the first server has failed."""
    from ..report.files import unusable

    if why := unusable(path):
        source = next(option for option in OPTIONS if option.name == "artifacts").text(config)[1]
        raise pytest.UsageError(
            f"{source}: no incident can be written to {path}: {why}. Name another directory, or say off to have no "
            f"artifacts."
        )


OPTIONS: tuple[Option, ...] = (
    Option(
        "",
        choice("run", "plan", "skip"),
        "run",
        "run: start servers as tests need them; plan: show what would be started and start nothing; "
        "skip: skip every test that needs a server",
        "run|plan|skip",
    ),
    Option(
        "mode",
        choice("enforce", "soft"),
        "enforce",
        "enforce: a hung server is dumped, then ended; soft: dump and report, never kill",
        "enforce|soft",
    ),
    Option(
        "strict-arch",
        switch,
        "no",
        "fail instead of skip when the GPUs a test's sm marks ask for are missing",
        flag=True,
    ),
    Option("startup-timeout", seconds, "1800", "budget of a server's start-up, on its own clock", "SECONDS"),
    Option("grace", seconds, "10", "how long a server may take to end after SIGTERM", "SECONDS"),
    Option(
        "dump-timeout", seconds, "30", "budget for taking stacks at a deadline, before anything is killed", "SECONDS"
    ),
    Option("artifacts", place, "gpuserve-artifacts", "where incidents are written, or off", "DIR"),
    Option(
        "retain",
        choice("failure", "always"),
        "failure",
        "failure: write a bundle of every incident; always: of every server when it is stopped, too",
        "failure|always",
    ),
    Option(
        "keep-incidents",
        number,
        "200",
        "how many incidents stay among the artifacts: older ones of ours are removed; 0: all stay",
        "N",
    ),
    Option(
        "stall-timeout",
        stall,
        "auto",
        "how long a starting or asked server may show no sign of progress; auto: by phase; off: for ever",
        "SECONDS",
    ),
    Option(
        "log-limit",
        count,
        "1024",
        "megabytes of a server's log: there it is dumped, and ended if it prints one line over and over; of another "
        "only the beginning and the newest stay; 0: no limit",
        "MB",
    ),
    Option(
        "gpus",
        gpus,
        "auto",
        "GPUs that may be leased: auto, none, numbers or UUIDs as in CUDA_VISIBLE_DEVICES, or virtual:8 "
        "(eight that do not exist, to bound the servers of a machine without)",
        "GPUS",
    ),
    Option(
        "foreign",
        choice("wait", "skip", "fail", "ignore"),
        "wait",
        "while processes that are none of ours use the GPUs: wait for them, skip or fail the test, or start beside",
        "wait|skip|fail|ignore",
    ),
    Option("known-failures", lambda text, _: text, "", "file of cells that are expected to fail (docs/)", "FILE"),
    Option("lease-timeout", seconds, "3600", "how long a test may wait for GPUs that others hold", "SECONDS"),
    Option("max-uses", count, "0", "tests that one server may serve before a fresh one is started; 0: any number", "N"),
    Option(
        "session-deadline",
        deadline,
        "off",
        "dump and end every server then: seconds from now, a time of day (17:45) or a date and time",
        "WHEN",
    ),
    Option(
        "python",
        lambda text, _: text,
        "",
        "interpreter that runs the engine (default: the one that runs pytest)",
        "PATH",
    ),
)


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and ini key. Command-line defaults are None, so that the weaker sources can win."""
    group = parser.getgroup("gpuserve", "GPU inference servers under test (pytest-gpuserve)")
    for option in OPTIONS:
        text = f"{option.help} (default: {option.default or 'unset'}; {option.key.upper()}, ini {option.key})"
        if option.flag:
            group.addoption(option.cli, dest=option.key, action="store_const", const="yes", default=None, help=text)
        else:
            group.addoption(option.cli, dest=option.key, metavar=option.metavar, default=None, help=text)
        parser.addini(option.key, option.help, default="")
    group.addoption(
        "--gpuserve-set",
        dest="gpuserve_set",
        action="append",
        metavar="KEY=VALUE",
        help="change what every mark launches: tp=2, model=/m, cuda_graph=off, args.--log-requests=, env.NAME=x",
    )
    for key in ("engine", "model", "tp", "server"):
        parser.addini(f"gpuserve_{key}", f"default {key} of every server, weaker than marks", default="")
    parser.addini(
        "gpuserve_defaults", "KEY=VALUE lines, weaker than marks; keys as for --gpuserve-set", type="linelist"
    )


def read_settings(config: pytest.Config) -> Settings:
    """All options of this session.

    Raises:
        pytest.UsageError: one of them is no value of its kind.
    """
    values = {option.key: option.parse(*option.text(config)) for option in OPTIONS}
    chosen = tuple(option.cli for option in OPTIONS if option.chosen(config))
    where = values["gpuserve_artifacts"]
    base = config.invocation_params.dir if "--gpuserve-artifacts" in chosen else config.rootpath
    override = assignments(config.getoption("gpuserve_set", None) or (), "--gpuserve-set")
    artifacts = None if where == "off" else base / expanded(where)
    if artifacts is not None and "--gpuserve-artifacts" in chosen and values["gpuserve"] == "run":
        _check_place(artifacts, config)
    defaults = assignments(config.getini("gpuserve_defaults"), "gpuserve_defaults")
    for key in ("engine", "model", "tp", "server"):
        if config.getini(f"gpuserve_{key}") not in (None, ""):
            defaults[key] = config.getini(f"gpuserve_{key}")
    if values["gpuserve_python"]:
        layer = override if config.getoption("gpuserve_python", None) is not None else defaults
        layer.setdefault("python", values["gpuserve_python"])
    return Settings(
        action=values["gpuserve"],
        soft=values["gpuserve_mode"] == "soft",
        strict_arch=values["gpuserve_strict_arch"],
        startup_timeout=values["gpuserve_startup_timeout"],
        grace=values["gpuserve_grace"],
        dump_timeout=values["gpuserve_dump_timeout"],
        artifacts=artifacts,
        session_deadline=monotonic(values["gpuserve_session_deadline"]),
        stall_timeout=values["gpuserve_stall_timeout"],
        log_limit=values["gpuserve_log_limit"] << 20,
        retain=values["gpuserve_retain"],
        keep=values["gpuserve_keep_incidents"],
        gpus=values["gpuserve_gpus"],
        foreign=values["gpuserve_foreign"],
        lease_timeout=values["gpuserve_lease_timeout"],
        max_uses=values["gpuserve_max_uses"],
        override=override,
        defaults=defaults,
        chosen=(*chosen, "--gpuserve-set") if config.getoption("gpuserve_set", None) else chosen,
    )


def alarm_limit(dump_timeout: float) -> float:
    """Seconds an alarm may run; the rest of the dump budget is for ending the server and for the client to notice.

    Time for which it waits for a CPU is not counted, up to ``server.loop.STARVED`` of the limit.
    """
    return 0.8 * dump_timeout


def last_resort(dump_timeout: float) -> float:
    """Seconds after a test's timeout at which pytest-timeout itself acts: when a starved dump and all that follows it
    have had their time, since its thread method ends the process."""
    return 2 * dump_timeout


def incident_limit(dump_timeout: float) -> float:
    """Seconds an incident gives itself: it ends before the supervisor ends it."""
    return 0.85 * alarm_limit(dump_timeout)


def known_failures(config: pytest.Config) -> tuple[str, Source] | None:
    """The file of known failures and who named it; None when nobody did."""
    option = next(option for option in OPTIONS if option.name == "known-failures")
    text, source = option.text(config)
    return (text, source) if text else None


def keep_plan_here(config: pytest.Config) -> None:
    """A plan is made in one process: pytest-xdist must start no workers for it, but the plan is for as many."""
    if OPTIONS[0].text(config)[0] == "plan" and hasattr(config.option, "numprocesses"):
        asked = config.option.numprocesses
        config.stash[PLANNED_WORKERS] = (
            asked if isinstance(asked, int) and asked > 0 else len(config.option.tx or ()) or 1
        )
        config.option.numprocesses, config.option.dist, config.option.tx = 0, "no", []
