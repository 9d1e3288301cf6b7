"""A server's API key: made for one start, seen by nobody else, sent by everything of ours."""

from __future__ import annotations

import json
import os
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.engines.base import Launch
from pytest_gpuserve.report import incident
from pytest_gpuserve.server.api_key import authorise
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.paths import session_directory
from pytest_gpuserve.server.record import load
from pytest_gpuserve.spec import ServerSpec
from pytest_gpuserve.watch.metrics import Poller

VARIABLE = Launch(("x",), key_variable="THE_KEY")
CONFIG = Launch(("x", "--port", "1"), key_config="--config")


def spec(**more: Any) -> ServerSpec:
    return ServerSpec.from_mapping({"engine": "sim", "tp": 2, **more})


def test_in_the_environment(tmp_path: Path) -> None:
    launch, key = authorise(spec(), VARIABLE, tmp_path, {})
    assert key
    assert len(key) > 30
    assert launch.env == {"THE_KEY": key}
    assert launch.argv == VARIABLE.argv
    assert authorise(spec(), VARIABLE, tmp_path, {})[1] != key


def test_in_a_private_file_where_the_engine_has_no_variable(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        launch, key = authorise(spec(), CONFIG, tmp_path, {})
    finally:
        os.umask(old)
    assert launch.argv[:-1] == ("x", "--port", "1", "--config")
    path = Path(launch.argv[-1])
    assert path.read_text() == f"api-key: {key}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key
    assert key not in " ".join(launch.argv)
    with pytest.raises(FileExistsError):  # nor through a link that somebody put there
        authorise(spec(), CONFIG, tmp_path, {})


@pytest.mark.parametrize(
    ("more", "launch", "environ", "key"),
    [
        ({"args": {"api_key": False}}, VARIABLE, {}, None),
        ({"args": {"--api-key": False}}, CONFIG, {}, None),
        ({"args": {"api_key": "mine"}}, Launch(("x", "--api-key", "mine"), key_variable="THE_KEY"), {}, "mine"),
        ({}, Launch(("x", "--api-key=mine"), key_config="--config"), {}, "mine"),
        ({}, Launch(("x",), {"THE_KEY": "mine"}, key_variable="THE_KEY"), {"THE_KEY": "inherited"}, "mine"),
        ({}, Launch(("x",), {"THE_KEY": None}, key_variable="THE_KEY"), {"THE_KEY": "inherited"}, None),
        ({}, VARIABLE, {"THE_KEY": "inherited"}, "inherited"),
        ({}, Launch(("x",)), {}, None),
    ],
)
def test_what_the_user_says_stands(
    tmp_path: Path, more: dict[str, Any], launch: Launch, environ: dict[str, str], key: str | None
) -> None:
    assert authorise(spec(**more), launch, tmp_path, environ) == (launch, key)
    assert not list(tmp_path.iterdir())


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("flavor", ["sglang", "vllm"])
def test_a_server_asks_for_it_and_nothing_shows_it(tmp_path: Path, flavor: str) -> None:
    engine = get_engine("sim")
    server = start(
        spec(args={"flavor": flavor}),
        engine,
        parent=session_directory(),
        limits=Limits(startup=120, grace=0.5, dump=60),
        incident=lambda directory, reason: incident.command(directory, tmp_path / "artifacts", reason, limit=50),
    )
    try:
        key = server.api_key
        assert load(server.directory).api_key == key
        assert status(f"{server.url}/v1/models") == 401
        assert status(f"{server.url}/v1/models", Authorization=f"Bearer {key}") == 200
        assert server.post("/v1/completions", json={"model": server.model, "prompt": "x"}).status_code == 200
        assert server.get("/v1/models", headers={"Authorization": "Bearer other"}).status_code == 401
        assert server.metrics()
        poller = Poller(server.url, "/v1/models", headers=server.record.headers)
        assert poller._get() is not None
        assert Poller(server.url, "/v1/models")._get() is None
        pids = [server.record.root.pid, *procfs.descendants(server.record.root.pid)]
        assert not [pid for pid in pids if key in " ".join(procfs.cmdline(pid))]
        assert (server.directory / "server.json").stat().st_mode & 0o077 == 0
        where = server.dump()
        told = json.loads((where / "incident.json").read_text())
        assert told["probe"]["answers"] is True
        assert json.loads((where / "server.json").read_text())["answers"]["/v1/models"]
        shown = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file() and key in path.read_text()]
        assert shown == []
        assert key not in repr(server.record)
        if flavor == "sglang":  # as SGLang does, it prints all its options
            assert key in server.log_path.read_text()
    finally:
        server.stop()
