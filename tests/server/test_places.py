"""Where files go, which port is taken, what a record says, what the command engine makes of a template."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.cli import main
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.engines.flags import cache_root
from pytest_gpuserve.errors import EngineError, GpuserveError, ServerStartError, SpecError
from pytest_gpuserve.redaction.redact import Redactor
from pytest_gpuserve.server import paths, ports
from pytest_gpuserve.server.record import load
from pytest_gpuserve.spec import ServerSpec


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Directories


def test_the_state_directory_is_private(state: Path) -> None:
    assert paths.state_root() == state
    assert mode(state) == 0o700
    assert paths.existing_state() == state
    session = paths.session_directory()
    assert session == paths.session_directory()
    assert mode(session) == mode(session.parent) == 0o700
    pid, start, word = session.name.split("-")
    assert (int(pid), len(word)) == (os.getpid(), 8)
    assert int(start) > 0


def test_a_directory_that_was_there_keeps_its_mode(state: Path) -> None:
    state.mkdir()
    state.chmod(0o755)
    session = paths.session_directory()
    assert (mode(state), mode(session.parent), mode(session)) == (0o755, 0o700, 0o700)


@pytest.mark.parametrize("bits", [0o1777, 0o777, 0o775])
def test_a_directory_that_others_may_write(state: Path, bits: int) -> None:
    state.mkdir()
    state.chmod(bits)
    for use in (paths.state_root, paths.existing_state, paths.session_directory):
        with pytest.raises(GpuserveError, match=rf"others? .*may write .*{bits:04o}.* one that is not there"):
            use()
    assert (mode(state), list(state.iterdir())) == (bits, [])


def test_sessions_behind_a_link_are_refused(state: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    state.mkdir()
    (state / "sessions").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GpuserveError, match="sessions is a link"):
        paths.session_directory()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("chosen", [True, False])
def test_who_only_looks_makes_nothing(
    state: Path, monkeypatch: pytest.MonkeyPatch, chosen: bool, tmp_path: Path
) -> None:
    if not chosen:
        monkeypatch.delenv("GPUSERVE_STATE")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    before = sorted(tmp_path.iterdir())
    assert paths.existing_state() is None
    assert main(["reap"]) in (0, 1)
    assert sorted(tmp_path.iterdir()) == before


def test_a_cache_that_others_may_write_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    assert cache_root() == tmp_path / "gpuserve"
    cache_root().chmod(0o777)
    assert cache_root() == tmp_path / "tmp" / f"gpuserve-cache-{os.getuid()}"
    assert mode(tmp_path / "gpuserve") == 0o777


@pytest.mark.parametrize("kind", ["link", "file", "below a file"])
def test_a_state_directory_that_cannot_be_used(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        state.symlink_to(tmp_path / "elsewhere")
    else:
        state.write_text("")
    if kind == "below a file":
        monkeypatch.setenv("GPUSERVE_STATE", str(state / "below"))
    with pytest.raises(GpuserveError, match=r"GPUSERVE_STATE=.* cannot be used"):
        paths.state_root()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_another_users_state_directory(state: Path) -> None:
    state.mkdir()
    os.chown(state, 12345, 12345)
    with pytest.raises(GpuserveError, match="belongs to another user"):
        paths.state_root()


def test_a_user_whose_home_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uid without a name, as a container may have: no traceback, and no directory that is called ~."""

    def unknown(user: object) -> None:
        raise KeyError(user)

    for name in ("HOME", "GPUSERVE_STATE", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("getpwuid", "getpwnam"):
        monkeypatch.setattr(pwd, name, unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    assert paths.state_root().parent == cache_root().parent == tmp_path / "temporary"
    assert Redactor().redact("File ~/a.py") == "File ~/a.py"
    monkeypatch.setenv("GPUSERVE_STATE", "~nobody/x")
    assert paths.state_root() == tmp_path / "~nobody" / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    cache_root()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["temporary", "~nobody"]


def test_the_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUSERVE_STATE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert paths.state_root() == tmp_path / "xdg" / "gpuserve"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert paths.state_root() == tmp_path / "home" / ".local" / "state" / "gpuserve"
    (tmp_path / "nothing").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert paths.state_root() == tmp_path / f"gpuserve-{os.getuid()}"
    assert mode(tmp_path / f"gpuserve-{os.getuid()}") == 0o700


def test_server_directories_are_numbered(tmp_path: Path) -> None:
    spec = ServerSpec.from_mapping({"engine": "x" * 400})
    first, second = paths.server_directory(tmp_path, spec), paths.server_directory(tmp_path, spec)
    assert (first.name[:3], second.name[:3]) == ("1-x", "2-x")
    assert mode(first) == 0o700
    assert len(first.name) < 200


def test_a_long_path_is_no_trouble_for_the_socket(serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setenv("GPUSERVE_STATE", str(deep / "state"))
    server = serve()
    assert len(str(server.directory)) > 250
    assert server.control.status()["ok"]
    server.stop()


def test_a_record_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(GpuserveError, match="is no directory of a server"):
        load(tmp_path)
    for text in ("", "[]", "{}", '{"owner": null}'):
        (tmp_path / "server.json").write_text(text)
        with pytest.raises(GpuserveError, match="cannot be read"):
            load(tmp_path)


# Ports


def test_two_sessions_never_hold_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "FIRST", 31000)
    monkeypatch.setattr(ports, "LAST", 31600)
    held = [ports.hold("127.0.0.1") for _ in range(20)]
    assert len({port.number for port in held}) == 20
    held[0].hand_over()  # to a server that has not bound it yet
    code = (
        "from pytest_gpuserve.server import ports\nfrom pytest_gpuserve.errors import ServerStartError\n"
        f"for number in {[port.number for port in held]}:\n"
        "    try: ports.hold('127.0.0.1', number); print('took', number)\n"
        "    except ServerStartError as error: assert error.verdict == 'port'\n"
    )
    argv = [sys.executable, "-c", code]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == ""
    for port in held:
        port.release()
        port.release()
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.count("took") == 20


@pytest.mark.parametrize("reuse", [True, False])
def test_a_port_handed_over_can_be_bound(reuse: bool) -> None:
    port = ports.hold("127.0.0.1")
    port.hand_over()
    with socket.socket() as server:
        if reuse:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port.number))
        server.listen()
    port.release()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_listeners_and_their_holders(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.socket(family)
        listener.bind((host, 0))
    except OSError:
        pytest.skip("no IPv6 here")
    with listener:
        listener.listen()
        number = listener.getsockname()[1]
        asked = "::1" if host == "::1" else "127.0.0.1"
        (found,) = ports.answering(asked, number)
        assert (found.address, found.port, found.uid) == (host, number, os.geteuid())
        assert ports.holders(found.inode) == [os.getpid()]
        assert ports.foreign([found], [os.getpid()]) is None
        assert ports.foreign([found], [1, os.getppid()]) == found
        assert f"pid {os.getpid()} (" in ports.describe(found)
        with pytest.raises(ServerStartError, match=f"pid {os.getpid()}"):
            ports.hold("127.0.0.1", number)
    assert ports.answering(asked, number) == []


@pytest.mark.parametrize(
    ("host", "argv", "told"),
    [
        ("0.0.0.0", ["serve", "--host", "127.0.0.1"], ["0.0.0.0"]),
        ("0.0.0.0", ["serve", "--host=0.0.0.0"], []),
        ("0.0.0.0", ["serve", "0.0.0.0"], []),
        ("127.0.0.2", ["serve"], []),
    ],
)
def test_a_listener_that_others_reach(host: str, argv: list[str], told: list[str]) -> None:
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        assert ports.open_to_others(listener.getsockname()[1], argv) == told


def test_the_address_that_answers() -> None:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        number = one.getsockname()[1]
        other.bind(("127.0.0.2", number))
        one.listen()
        other.listen()
        assert [found.address for found in ports.answering("127.0.0.1", number)] == ["127.0.0.1"]
        assert [found.address for found in ports.answering("127.0.0.2", number)] == ["127.0.0.2"]
        assert ports.answering("127.0.0.3", number) == []


def test_no_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_try", lambda host, number: None)
    begin = time.monotonic()
    with pytest.raises(ServerStartError, match="all in use"):
        ports.hold("127.0.0.1")
    assert time.monotonic() - begin < 2


# The command engine


@pytest.fixture
def argv() -> Callable[..., list[str]]:
    def make(*command: str, **more: object) -> list[str]:
        spec = ServerSpec.from_mapping({"engine": "command", "command": list(command), **more})
        return list(get_engine("command").launch(spec, host="127.0.0.1", port=8123, python="/py").argv)

    return make


def test_a_template_is_filled_in(argv: Callable[..., list[str]], tmp_path: Path) -> None:
    command = ["{python}", "-m", "x", "--at={host}:{port}", "{model}", "{tp}", "plain", "{{x}}"]
    assert argv(*command, model=str(tmp_path), tp=2) == [
        *("/py", "-m", "x", "--at=127.0.0.1:8123", str(tmp_path), "2", "plain", "{x}")
    ]
    assert argv("a", '{"json": {"port": {port}}}', "{", "x{0}") == ["a", '{"json": {"port": 8123}}', "{", "x{0}"]


def test_args_become_flags(argv: Callable[..., list[str]]) -> None:
    args = {"max_len": 5, "--Raw_flag": "x", "-q": None, "on": True, "off": False, "f": 0.5}
    assert argv("a{port}", args=args) == ["a8123", "--Raw_flag", "x", "-q", "--f", "0.5", "--max-len", "5", "--on"]


@pytest.mark.parametrize(
    ("error", "text", "keys"),
    [
        (SpecError, "needs a command", {}),
        (SpecError, "unknown placeholder {prot}", {"command": ["a", "{port}", "{prot}"]}),
        (SpecError, "needs a model", {"command": ["a{port}", "{model}"]}),
        (SpecError, 'never says {port}.*port of its own.*"env", "PORT={port}"', {"command": ["a", "{{port}}"]}),
        (SpecError, "does not exist", {"command": ["a{port}", "{model}"], "model": "/no/such/model"}),
        (SpecError, "does not exist", {"command": ["a{port}"], "model": "./no/such/model"}),
        (EngineError, "cuda_graph", {"command": ["a"], "cuda_graph": "on"}),
    ],
)
def test_bad_commands(error: type[Exception], text: str, keys: dict[str, object]) -> None:
    spec = ServerSpec.from_mapping({"engine": "command", **keys})
    with pytest.raises(error, match=text):
        get_engine("command").launch(spec, host="127.0.0.1", port=1, python="python")


def test_the_ready_path() -> None:
    def path(**keys: object) -> str:
        return get_engine("command").ready(ServerSpec.from_mapping({"engine": "command", **keys})).path

    assert (path(), path(ready="/v1/models"), path(ready="up")) == ("/health", "/v1/models", "/up")
