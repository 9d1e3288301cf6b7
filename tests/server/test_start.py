"""From launch to ready, and every way not to get there: in time, with the reason, with nothing left."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.engines.base import Launch, ReadyProbe
from pytest_gpuserve.errors import EngineError, GpuserveError, ServerStartError, SpecError
from pytest_gpuserve.server import lifecycle, paths, ports
from pytest_gpuserve.server.paths import session_directory
from pytest_gpuserve.server.readiness import exit_text, log_tail, shown_tail
from pytest_gpuserve.server.reaper import look
from pytest_gpuserve.spec import ServerSpec
from pytest_gpuserve.text import escape

Wait = Callable[..., Any]


def incident_of(text: str, code: int, verdict: str = "hang") -> Callable[[Path, str], list[str]]:
    """An incident that says ``text`` and exits with ``code``."""

    def command(directory: Path, reason: str) -> list[str]:
        entry = {"time": 1, "reason": reason, "incident": "/evidence", "verdict": verdict, "text": text}
        line = json.dumps(entry) + "\n"
        return [
            sys.executable,
            "-c",
            f"open({str(directory / 'incidents.jsonl')!r}, 'a').write({line!r}); exit({code})",
        ]

    return command


def test_ready(serve: Any, state: Path) -> None:
    said: list[str] = []
    early: list[bool] = []

    def tell(text: str) -> None:
        said.append(text)
        early.extend(ready.exists() for ready in state.glob("sessions/*/*/ready"))

    server = serve(progress=tell)
    assert (server.directory / "ready").exists(), "what tells the watcher that the start-up is over"
    assert not early
    assert server.get("/health").text == "ok"
    assert server.url == f"http://127.0.0.1:{server.port}"
    assert said[0] == f"port {server.port} is open"
    assert server.exit_code() is None
    assert server.control.status()["armed"] == []
    assert (server.directory.stat().st_mode & 0o777, server.log_path.stat().st_mode & 0o777) == (0o700, 0o600)
    for name in ("supervisor.json", "server.json", "events.jsonl", "supervisor.log", "supervisor.sock"):
        assert (server.directory / name).stat().st_mode & 0o077 == 0, name


def test_the_environment(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/from/pytest")
    monkeypatch.setenv("FROM_PYTEST", "1")
    server = serve(gpus=("3", "GPU-abc"), spec={"env": {"FROM_SPEC": "2", "PYTHONFAULTHANDLER": "0"}})
    env = server.get("/env").json()
    assert env["GPUSERVE_COOKIE"] == server.record.cookie
    assert env["GPUSERVE_MARKERS"] == str(server.directory / "markers")
    assert env["CUDA_VISIBLE_DEVICES"] == "3,GPU-abc"
    assert env["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == str(server.directory / "flight.")
    assert "CUDA_COREDUMP_PIPE" not in env, "not asked for"
    assert env["PYTHONPATH"].split(os.pathsep)[1:] == ["/from/pytest"]
    assert env["PYTHONPATH"].split(os.pathsep)[0].endswith("pytest_gpuserve/diagnose/inject")
    assert (env["PYTHONUNBUFFERED"], env["PYTHONFAULTHANDLER"]) == ("1", "0")
    assert (env["FROM_PYTEST"], env["FROM_SPEC"], env["SPT_NOENV"]) == ("1", "2", "1")
    assert "GPUSERVE_COOKIE" not in os.environ


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("exit-after-said=3", "exited with code 3"),
        ("exit=0", "exited with code 0"),
        ("kill-self=9", "was killed by SIGKILL (signal 9), not by us"),
        ("daemonize", "exited with code 0"),
    ],
)
def test_an_exit_is_told_at_once(serve: Any, tagged: Any, what: str, text: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ServerStartError) as caught:
        serve("say=first words", what)
    assert time.monotonic() - begin < 5.0  # 2 s promised
    assert text in str(caught.value)
    assert caught.value.verdict == "crash"
    assert "first words" in str(caught.value)
    assert "serve.py" in str(caught.value)
    assert "the gpuserve mark decides it (engine, model, command, args" in str(caught.value)
    assert tagged.alive() == {}
    if what.startswith("exit-after"):
        assert "last words" in str(caught.value)
        assert "\x1b" not in str(caught.value)
        assert "\x07" not in str(caught.value)


def test_what_a_crashed_server_left_goes_with_it(serve: Any, tagged: Any) -> None:
    with pytest.raises(ServerStartError, match="exited with code 5"):
        serve("escape", "child", "exit=5")
    assert tagged.alive() == {}


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["/no/such/program", "{port}"], "/no/such/program: No such file or directory"),
        (["no-such-program-anywhere", "{port}"], "no-such-program-anywhere: not found in PATH"),
        (["/dev/null", "{port}"], "/dev/null: Permission denied"),
    ],
)
def test_a_program_that_cannot_be_run(serve: Any, command: list[str], text: str) -> None:
    with pytest.raises(EngineError) as caught:
        serve(spec={"command": command})
    assert text in str(caught.value)
    assert "change command" in str(caught.value)


def test_a_file_that_is_no_program(serve: Any, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    with pytest.raises(EngineError, match="Exec format error"):
        serve(spec={"command": [str(program), "{port}"]})


def test_a_directory_that_is_none(serve: Any) -> None:
    with pytest.raises(SpecError, match="cwd '/no/such/place' is no directory"):
        serve(spec={"cwd": "/no/such/place"})


@pytest.mark.parametrize("what", ["hang", "deaf", "gil", "kill-self=19"])
def test_the_budget(serve: Any, tagged: Any, what: str) -> None:
    with pytest.raises(ServerStartError) as caught:
        serve("say=loading", what, startup=0.8, incident=incident_of("rank 3 is to blame", 0))
    assert "rank 3 is to blame\nEvidence: /evidence" in str(caught.value)
    assert "start-up budget of 0.8 s (startup_timeout)" in str(caught.value)
    assert (caught.value.verdict, caught.value.incident) == ("hang", "/evidence")
    assert tagged.alive() == {}


def test_the_budget_without_an_incident(serve: Any, tagged: Any) -> None:
    with pytest.raises(ServerStartError, match="No incident was written") as caught:
        serve("say=loading", "hang", startup=3.0)
    assert caught.value.verdict == "hang"
    assert "loading" in str(caught.value)
    assert tagged.alive() == {}


def test_a_spared_server_gets_another_budget(serve: Any) -> None:
    """Soft mode: reported, not ended."""
    said: list[str] = []
    incident = incident_of("slow", 75, "slow")
    server = serve("sleep=3.5", startup=3.0, incident=incident, progress=said.append)
    assert server.get("/health").status_code == 200
    assert "the start-up budget is over; the server is spared and has as much again" in said
    assert [entry["verdict"] for entry in server.incidents()][:1] == ["slow"]


def test_a_spared_server_gets_no_third_budget(serve: Any, tagged: Any) -> None:
    """Nothing would ever end the wait for one that hangs: start-up is not on the test's clock."""
    with pytest.raises(ServerStartError, match=r"not ready within twice its start-up budget of 0\.7 s") as caught:
        serve("hang", startup=0.7, incident=incident_of("hang: TP3 waits", 75, "hang"))
    assert (caught.value.verdict, "TP3 waits" in str(caught.value)) == ("hang", True)
    assert tagged.alive() == {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupting_the_wait_ends_the_server(serve: Any, tagged: Any, wait_for: Wait) -> None:
    """It may come between the opening of a file and the line that closes it: then Python warns, and closes it."""

    def interrupt() -> None:
        wait_for(tagged.alive)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        serve("ignore-term", "child", "hang")
    thread.join()
    assert tagged.alive() == {}


# The port


def test_a_given_port_in_use_names_the_holder(serve: Any, tagged: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        begin = time.monotonic()
        with pytest.raises(
            ServerStartError, match=f"port {port} of 127.0.0.1 is in use by pid {os.getpid()} "
        ) as caught:
            serve(port=port)
        assert time.monotonic() - begin < 2.0
        assert caught.value.verdict == "port"
        assert tagged.alive() == {}


def test_a_stale_server_on_the_port_is_never_taken_for_ours(
    serve: Any, spec: Any, tagged: Any, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came between our look and the server's own bind, and it answers everything with 200."""
    stale: list[subprocess.Popen[bytes]] = []
    hand_over = ports.Port.hand_over

    def late(self: ports.Port) -> None:
        hand_over(self)
        argv = [sys.executable, str(programs / "serve.py"), str(self.number), "stale-server"]
        stale.append(subprocess.Popen(argv))
        while not list(ports.listeners(self.number)):
            time.sleep(0.01)

    monkeypatch.setattr(ports.Port, "hand_over", late)
    try:
        for what in (("hang",), ()):  # one that has not bound yet, one that dies of it
            with pytest.raises(ServerStartError) as caught:
                serve(*what)
            assert caught.value.verdict == "port"
            assert f"pid {stale[-1].pid} (" in str(caught.value)
            assert "stale-server" in str(caught.value)
            assert tagged.alive() == {}
    finally:
        for process in stale:
            process.kill()
            process.wait()


def test_other_hosts(serve: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(ServerStartError, match=r"192.0.2.1.* is no address of this machine") as caught:
        serve(host="192.0.2.1")
    assert caught.value.verdict == "config"
    assert time.monotonic() - begin < 2.0
    server = serve(host="0.0.0.0")
    assert server.url == f"http://127.0.0.1:{server.port}"


# The probe


class Probing:
    """The command engine with a one-token probe."""

    def __init__(self, path: str, ready: str = "/health") -> None:
        self._probe = ReadyProbe(ready, path, {"max_tokens": 1})

    def ready(self, spec: object) -> ReadyProbe:
        return self._probe

    def __getattr__(self, name: str) -> Any:
        return getattr(get_engine("command"), name)


@pytest.mark.parametrize(("status", "verdict"), [(200, None), (404, "config"), (500, "hang"), (429, "hang")])
def test_the_one_token_probe(
    serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: Any, status: int, verdict: str | None
) -> None:
    def start() -> lifecycle.Server:
        return lifecycle.start(
            spec(),
            Probing(f"/status/{status}"),
            parent=tmp_path,
            limits=lifecycle.Limits(startup=3.0 if verdict == "hang" else 30.0, grace=0.5, dump=5),
            incident=lambda directory, reason: [],
        )

    if verdict is None:
        start().stop()
    else:
        with pytest.raises(ServerStartError, match=f"/status/{status} answered {status}") as caught:
            start()
        assert caught.value.verdict == verdict


def test_a_ready_path_that_is_never_200_is_named(serve: Any) -> None:
    with pytest.raises(ServerStartError, match="GET /nowhere answered 404") as caught:
        serve(startup=3.0, spec={"ready": "/nowhere"})
    assert "It answered GET /nowhere with 404, to the end: change ready= in the gpuserve mark" in str(caught.value)


def test_a_ready_path_that_is_known_is_not_to_be_changed(serve: Any) -> None:
    """503 says that it is loading."""
    with pytest.raises(ServerStartError, match="GET /status/503 answered 503") as caught:
        serve(startup=3.0, spec={"ready": "/status/503"})
    assert "ready=" not in str(caught.value)


# The log


@pytest.mark.parametrize("what", ["binary", "long-line=100", "endless"])
def test_logs_of_all_kinds(serve: Any, what: str) -> None:
    server = serve(what)
    begin = time.monotonic()
    assert len(server.log_tail(50)) <= 64 << 10
    assert len(shown_tail(server.record)) < 20 * 310 + 500
    assert time.monotonic() - begin < 1.0
    server.stop()


def test_the_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == ""
    log.write_bytes(b"")
    assert log_tail(log) == ""
    log.write_bytes(b"one\n\x1b[1mtwo\x1b[0m\nbar 1%\rbar 50%\rbar 100%\r\n\xff\xfethree\n\n\n")
    assert log_tail(log) == "one\ntwo\nbar 100%\n\ufffd\ufffdthree"
    assert log_tail(log, 1) == "\ufffd\ufffdthree"
    record = SimpleNamespace(log=log, shown=escape)
    assert "\\x1b" not in shown_tail(record)  # type: ignore[arg-type]
    log.write_bytes(b"a" * 300_000 + b"\nend")
    assert log_tail(log, 1) == "end"


def test_exit_texts() -> None:
    assert exit_text(0) == "exited with code 0"
    assert exit_text(-11) == "was killed by SIGSEGV (signal 11), not by us"
    assert exit_text(-99) == "was killed by signal 99, not by us"


def test_leases_stay_open_until_nothing_is_left(serve: Any, tagged: Any, tmp_path: Path, wait_for: Wait) -> None:
    """The supervisor keeps the descriptors, the server does not get them."""
    import fcntl

    lock = os.open(tmp_path / "lease", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    server = serve(pass_fds=(lock,))
    os.close(lock)
    other = os.open(tmp_path / "lease", os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = [str(entry.readlink()) for entry in Path(f"/proc/{server.record.root.pid}/fd").iterdir()]
        assert str(tmp_path / "lease") not in held
        server.stop()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)


# What the engine made of its settings


class Printing:
    """An engine whose server prints the log of another."""

    name = "vllm"

    def __init__(self, argv: list[str], log: str) -> None:
        self._argv, self._log = argv, log

    def __getattr__(self, name: str) -> Any:
        return getattr(get_engine("command"), name)

    def launch(self, spec: Any, *, host: str, port: int, python: str) -> Launch:
        argv = [str(port) if word == "{port}" else word for word in self._argv]
        return Launch((*argv, f"say={self._log}"), {"VLLM_ATTENTION_BACKEND": "FLASHINFER"})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("INFO [cuda.py:420] Using AttentionBackendEnum.TRITON_ATTN backend.", "the server runs with TRITON_ATTN"),
        ("WARNING Unknown vLLM environment variable detected: VLLM_ATTENTION_BACKEND", "VLLM_ATTENTION_BACKEND and"),
        ("INFO [cuda.py:420] Using AttentionBackendEnum.FLASHINFER backend.", None),
        ("WARNING Unknown vLLM environment variable detected: VLLM_OF_THE_SHELL", None),
    ],
)
def test_a_server_that_runs_with_other_settings(
    spec: Any, tagged: Any, state: Path, line: str, told: str | None
) -> None:
    """It answers, and it is not what was asked for: refused, with the engine's own line."""
    engine = Printing(list(spec().command), line)
    wanted = ServerSpec.from_mapping({"engine": "vllm", "model": "m", "attention_backend": "flashinfer"})
    begin = {"parent": session_directory(), "limits": lifecycle.Limits(60, 0.5, 10), "incident": lambda *_: []}
    if told is None:
        lifecycle.start(wanted, engine, **begin).stop(0.0)
        return
    with pytest.raises(ServerStartError) as caught:
        lifecycle.start(wanted, engine, **begin)
    assert caught.value.verdict == "config"
    assert told in str(caught.value)
    assert line.partition(" ")[2] in str(caught.value)
    assert tagged.alive() == {}


@pytest.mark.parametrize("name", ["save", "spawn"])
def test_a_full_disk_is_told_in_a_sentence(serve: Any, tagged: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Not in a traceback, which would show the record with the key that was made for it."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lifecycle.ServerRecord if name == "save" else lifecycle._Attempt, name, full)
    with pytest.raises(ServerStartError, match=r"No space left on device.*GPUSERVE_STATE") as caught:
        serve()
    assert caught.value.verdict == "infra"
    assert str(session_directory()) in str(caught.value)
    assert caught.value.__suppress_context__
    assert tagged.alive() == {}


def test_a_session_that_cannot_be_written_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("GPUSERVE_STATE", str(tmp_path / "new"))
    monkeypatch.setattr(paths.json, "dump", full)
    with pytest.raises(GpuserveError, match=rf"{tmp_path}.* cannot be written: No space left on device"):
        session_directory()


# What is secret


def test_a_failed_start_says_nothing_secret_to_whoever_asked_for_it(state: Path) -> None:
    """The key of the command line, and one of the environment that stands where a long line is cut."""
    code = "import os, sys; print('x' * 288 + os.environ['MY_TOKEN']); print(sys.argv[2], flush=True); sys.exit(3)"
    words = [sys.executable, "-c", code, "--api-key", "Wq7pZabcdef12", "{port}"]
    spec = ServerSpec.from_mapping({"engine": "command", "command": words, "env": {"MY_TOKEN": "k9Rt5uVbnmqw34"}})
    with pytest.raises(ServerStartError, match="exited with code 3") as caught:
        start_it(spec)
    said = str(caught.value)
    assert "Wq7pZabcdef12" not in said
    assert "k9Rt5uV" not in said, "half of it is too much as well"
    assert len(set(re.findall("<secret-[0-9]", said))) == 2, "two things, told apart"


def test_nor_does_one_without_a_program_or_a_port() -> None:
    for words in (
        ["no-such-program", "--api-key=Wq7pZabcdef12", "{port}"],
        ["/dev/null", "--api-key", "Wq7pZabcdef12", "{port}"],
    ):
        with pytest.raises(EngineError) as caught:
            start_it(ServerSpec.from_mapping({"engine": "command", "command": words}))
        assert "Wq7pZabcdef12" not in str(caught.value)
        assert "<secret-1>" in str(caught.value)


def test_who_holds_a_port_is_told_without_its_secrets(tmp_path: Path) -> None:
    code = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(s.getsockname()[1]); "
    argv = [sys.executable, "-u", "-c", code + "time.sleep(600)", "--api-key", "Wq7pZabcdef12"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            (found,) = ports.answering("127.0.0.1", int(holder.stdout.readline()))
            told = ports.describe(found)
            stat = procfs.stat(holder.pid)
            assert stat is not None
            swept = look(stat.id, " ".join(argv)).command
        finally:
            holder.kill()
    assert f"pid {holder.pid} (" in told
    assert "Wq7pZabcdef12" not in told + swept
    assert "--api-key <secret-1>" in swept


def start_it(spec: ServerSpec) -> None:
    limits = lifecycle.Limits(startup=60, grace=0.5, dump=10)
    lifecycle.start(spec, get_engine("command"), parent=session_directory(), limits=limits, incident=lambda *_: [])
