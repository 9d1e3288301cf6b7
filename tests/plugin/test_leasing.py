"""GPUs of the session's servers: virtual ones, and fake ones that leak and that strangers use."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.server import lease_files

SERVER = """
import json, os
from pytest import mark
ARGV = ["{python}", "-m", "pytest_gpuserve.sim", "--tp", "{tp}", "--port", "{port}", "--model-path", "m"]

def gpu(tp, **more):
    return mark.gpuserve(engine="command", command=ARGV, tp=tp, ready="/health", **more)

def environment(server):
    from pytest_gpuserve import procfs
    return procfs.environ(server.record.root.pid)

def now(**changes):
    path = os.environ["FAKE_NVML"]
    values = dict(line.split(" ", 1) for line in open(path).read().splitlines())
    values.update({key.replace("_", "."): value for key, value in changes.items()})
    with open(path + ".new", "w") as file:
        file.write("".join(f"{key} {value}\\n" for key, value in values.items()))
    os.replace(path + ".new", path)
"""


CONFTEST = """
from pytest_gpuserve.engines.command import Command
Command.uses_gpus = True
import pytest_gpuserve.gpu as g, pytest_gpuserve.server.lease_status as s
g.pids_match = s.pids_match = lambda: True  # also where these tests run in a container
"""


@pytest.fixture(autouse=True)
def leases(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, project: Any) -> Path:
    """A private lease directory for the inner runs (``project`` clears our variables first)."""
    path = tmp_path_factory.mktemp("leases") / "all"
    monkeypatch.setattr(type(project), "environment", _with(type(project).environment, GPUSERVE_LEASES=str(path)))
    return path


def _with(prop: Any, **more: str) -> property:
    return property(lambda self: {**prop.fget(self), **more})


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = Path(__file__).parents[1] / "gpu" / "fake.py"
    spec = importlib.util.spec_from_file_location("plugin_tests_fake", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("fakenvml")
    if reason := module.build(directory):
        pytest.skip(reason)
    return module, directory


@pytest.fixture
def nvml(fake_library: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: Any) -> Any:
    module, directory = fake_library
    library = module.FakeNvml(directory, tmp_path / "gpus")
    monkeypatch.setattr(type(project), "environment", _with(type(project).environment, **library.environment))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


def test_a_server_sees_its_gpus_and_no_others(project: Any, nvml: Any, leases: Path) -> None:
    nvml.set(devices=4)
    project.write(
        conftest=CONFTEST,
        helper=SERVER,
        test_it="""
        from helper import environment, gpu

        @gpu(2)
        def test_two(server, gpuserve_pool):
            assert environment(server)["CUDA_VISIBLE_DEVICES"] == "0,1"
            assert environment(server)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
            other = gpuserve_pool.get(server.spec, env={"OTHER": "1"})
            assert environment(other)["CUDA_VISIBLE_DEVICES"] == "2,3"

        @gpu(4)
        def test_four(server):
            assert server.record.gpus == ("0", "1", "2", "3")

        @gpu(4)
        def test_too_much(server, gpuserve_pool):
            gpuserve_pool.get(server.spec, env={"OTHER": "1"})
        """,
    )
    result = project.run("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*needs 4 GPUs, and GPU 0, GPU 1, GPU 2, GPU 3 are still held by another server of*"])
    assert not [path.name for path in leases.iterdir() if not path.name.startswith(("device-", "mutex"))]
    project.assert_nothing_left()


def test_the_test_that_leaks_is_told_and_the_next_server_goes_elsewhere(project: Any, nvml: Any) -> None:
    nvml.set(devices=2)
    project.write(
        conftest=CONFTEST + "import pytest_gpuserve.plugin.leasing as l; l.SETTLE = 1.0",
        helper=SERVER,
        test_it="""
        from helper import environment, gpu, now

        @gpu(1)
        def test_leaks(server):
            now(used_0=20483)

        @gpu(1, env={"NEXT": "1"})
        def test_next(server):
            assert environment(server)["CUDA_VISIBLE_DEVICES"] == "1"

        @gpu(2)
        def test_both(server): pass
        """,
    )
    result = project.run("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_leaks*",
            "leak: command-tp1-* is gone, but GPU 0 holds 20483 MiB, 20480 MiB more than before the launch (3 MiB)*",
            "*needs 2 of 2 GPUs, but GPU 0 is in quarantine since test_it.py::test_leaks: GPU 0 holds 20483 MiB*",
        ]
    )


def test_memory_in_a_container_is_nobodys_leak(project: Any, nvml: Any) -> None:
    """NVML names no process there: it may be a stranger's, who is then waited for like any."""
    nvml.set(devices=2)
    project.write(
        conftest=CONFTEST.replace("True  #", "False  #") + "import pytest_gpuserve.plugin.leasing as l; l.SETTLE = 1.0",
        helper=SERVER,
        test_it="""
        import os, pathlib
        from helper import gpu, now

        @gpu(1)
        def test_one(server):
            now(used_0=20483)

        @gpu(1, env={"NEXT": "1"})
        def test_next(server):
            assert server.record.gpus == ("1",)
            assert not list(pathlib.Path(os.environ["GPUSERVE_LEASES"]).glob("quarantine-*"))
            now(used_0=3)

        @gpu(2)
        def test_both(server): pass
        """,
    )
    result = project.run("-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=3)
    text = re.sub(r"\s+", " ", result.stdout.str())
    assert "is gone, and GPU 0 holds 20483 MiB, 20480 MiB more than before the launch (3 MiB), and nobody" in text
    assert "leak:" not in text


def test_a_model_in_pytest_itself_stops_no_server(project: Any, nvml: Any) -> None:
    nvml.set(devices=1)
    project.write(
        conftest=CONFTEST,
        helper=SERVER,
        test_it="""
        import os
        from helper import gpu, now

        @gpu(1)
        def test_reference_model_in_pytest(server):
            now(used_0=506, pids_0=f"{os.getpid()}:503")

        @gpu(1, env={"A": "1"})
        def test_next(server): pass

        @gpu(1, env={"A": "2"})
        def test_another(server): pass
        """,
    )
    result = project.run("-p", "no:cacheprovider", "-p", "no:randomly", "--gpuserve-lease-timeout=20")
    result.assert_outcomes(passed=3)
    text = re.sub(r"\s+", " ", result.stdout.str())
    assert len(re.findall(r"GPU 0 is in use by pytest itself \(pid \d+\) of this session, 503 MiB\. ", text)) == 1


LEAKS = """
from helper import ARGV, gpu, now

def test_leaks(gpuserve_pool):
    server = gpuserve_pool.get(engine="command", command=ARGV, tp=1, ready="/health")
    assert server.get("/health").status_code == 200
    now(used_0=20483)
"""


def test_a_server_made_by_hand_that_leaks_fails_its_own_test(project: Any, nvml: Any) -> None:
    nvml.set(devices=2)
    project.write(
        conftest=CONFTEST + "import pytest_gpuserve.plugin.leasing as l; l.SETTLE = 1.0",
        helper=SERVER,
        test_it=LEAKS + '@gpu(1, env={"B": "1"})\ndef test_innocent(server): pass',
    )
    result = project.run("-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_leaks*", "leak: *(the last test on it: test_it.py::test_leaks). It ends when *"]
    )


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_a_leak_that_is_found_at_the_end_fails_the_session(project: Any, nvml: Any, workers: Any) -> None:
    """Another test, which would have used the server, is skipped: so it was stopped in nobody's teardown."""
    nvml.set(devices=1)
    project.write(
        conftest=CONFTEST
        + """
import pytest, pytest_gpuserve.plugin.leasing as l
l.SETTLE = 1.0
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.name == "test_never":
        pytest.skip("not today")
""",
        helper=SERVER,
        test_it="""
        from helper import gpu, now

        @gpu(1)
        def test_leaks(server): now(used_0=20483)

        @gpu(1)
        def test_never(server): pass
        """,
    )
    result = project.run("-p", "no:cacheprovider", "-p", "no:randomly", *workers)
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["leak: *(the last test on it: test_it.py::test_leaks)*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_gpu_that_is_lost_under_a_server_is_no_leak(project: Any, nvml: Any) -> None:
    nvml.set(devices=2)
    project.write(
        conftest=CONFTEST + "import pytest_gpuserve.plugin.leasing as l; l.SETTLE = 1.0",
        helper=SERVER,
        test_it="""
        from helper import gpu, now

        @gpu(1)
        def test_loses(server): now(lost_0=1)

        @gpu(1, env={"NEXT": "1"})
        def test_next(server): assert server.record.gpus == ("1",)
        """,
    )
    result = project.run("-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["infra: command-* is gone, but GPU 0 cannot be read: NVML says: GPU is lost.*"])
    assert "leak:" not in result.stdout.str()
    assert result.ret == pytest.ExitCode.TESTS_FAILED, "no test is to blame, but this was no good session"


@pytest.mark.parametrize(("choice", "outcome"), [("skip", "skipped"), ("fail", "errors")])
def test_strangers(project: Any, nvml: Any, choice: str, outcome: str) -> None:
    nvml.set(devices=1, used_0=71000, pids_0="4194304:70000")
    project.write(
        conftest=CONFTEST + "import pytest_gpuserve.server.leases as l; l.PATIENCE = 0.2",
        helper=SERVER,
        test_it="from helper import gpu\n@gpu(1)\ndef test_it(server): pass",
    )
    result = project.run(f"--gpuserve-foreign={choice}", "-rsE", "-p", "no:cacheprovider")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(["*GPU 0: pid 4194304, user *, 73.4 GB*"])


def test_more_virtual_gpus_than_there_are_skips_or_fails(project: Any) -> None:
    project.write(
        test_it="""
        from pytest import mark
        @mark.gpuserve(engine="sim", tp=4)
        def test_it(server): pass
        """
    )
    result = project.run("--gpuserve-gpus=virtual:2", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs 4 GPUs of one kind; this session may use 2 (GPU 0, 1)*"])
    project.run("--gpuserve-gpus=virtual:2", "--gpuserve-strict-arch").assert_outcomes(errors=1)
    result = project.run("--gpuserve-gpus=three")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


CELLS = """
import random
from pytest import mark

CELLS = [(tp, graph) for tp in (1, 2, 4) for graph in ("on", "off")]
tests = [(cell, n) for cell in CELLS for n in range(3)]
random.Random(1).shuffle(tests)

def make(tp, graph, n):
    @mark.gpuserve(engine="sim", tp=tp, cuda_graph=graph)
    def test(server):
        assert server.spec.tp == tp
    return test

for (tp, graph), n in tests:
    globals()[f"test_{tp}_{graph}_{n}"] = make(tp, graph, n)
"""


def test_workers_start_each_configuration_once_and_share_eight_gpus(project: Any, leases: Path) -> None:
    project.write(test_it=CELLS)
    run = project.start("-p", "no:randomly", "-n2", "--gpuserve-gpus=virtual:4", "-v")
    most, seen = 0, 0
    while run.poll() is None:
        held = [device for path in leases.glob("lease-*") for device in _devices(path)]
        most, seen = max(most, len(held)), seen + bool(held)
        assert len(set(held)) == len(held)
    result = project.wait(run)
    result.assert_outcomes(passed=18)
    assert seen
    assert most <= 4
    assert len(project.servers()) == 6, "one start a configuration"
    result.stdout.fnmatch_lines(["6 server starts for 6 configurations, reused 12 times"])
    assert not list(leases.glob("lease-*"))
    project.assert_nothing_left()
    again = project.run("--gpuserve=plan", "-n2", "--gpuserve-gpus=virtual:4")
    again.stdout.fnmatch_lines(["sim-tp4-*(4 GPUs, about *", "Expected: * from past runs of 6 of 6 servers."])


WAITING = """
import os, time
from pytest import mark

@mark.gpuserve(engine="sim", tp={tp})
def test_{tp}(server):
    while not os.path.exists("said"): time.sleep(0.05)
"""


def test_a_waiting_worker_says_who_holds_what(project: Any) -> None:
    """It has no terminal: its controller's shows the line while both tests still run."""
    project.write(test_one=WAITING.format(tp=1), test_two=WAITING.format(tp=2))
    run = project.start("-p", "no:randomly", "-n2", "--gpuserve-gpus=virtual:2")
    line = project.wait_for(
        lambda: re.search(r"^gpuserve: gw[01]: Waiting for (\d) of 2 GPUs: .*$", project.output("out.txt"), re.M),
        "line about the wait",
    )
    (project.path / "said").touch()
    project.wait(run).assert_outcomes(passed=2)
    assert re.search(r"GPU 0(-1)? held by pid \d+ \(.*sim-tp[12]\)", line[0])


def test_gpus_stay_leased_until_the_server_of_a_killed_pytest_is_gone(project: Any, leases: Path) -> None:
    project.write(
        test_it="""
        import time
        from pytest import mark
        @mark.gpuserve(engine="sim", tp=2, args={"ignore-term": True})
        def test_it(server):
            time.sleep(600)
        """
    )
    run = project.start("-p", "no:randomly", "--gpuserve-gpus=virtual:2", "--gpuserve-grace=3")
    root = project.wait_for(lambda: [found for path in project.servers() if (found := _root(path))], "server")[0]
    project.wait_for(lambda: lease_files.entries(leases, "lease"), "lease")
    run.kill()
    run.wait()
    looks = 0
    while True:
        held = bool(lease_files.entries(leases, "lease"))
        alive = procfs.same(root)
        assert held or not alive, "the GPUs were free while the server still lived"
        if not alive:
            break
        looks += held
    assert looks
    project.wait_for(lambda: not lease_files.entries(leases, "lease"), "end of the lease")


def _root(server: Path) -> procfs.ProcessId | None:
    found = json.loads((server / "server.json").read_text())["root"]
    return procfs.ProcessId(*found) if found else None


def test_a_server_ends_with_its_unit_also_after_a_worker_crashed(project: Any) -> None:
    project.write(
        test_it="""
        import os, pathlib
        from pytest import mark
        from pytest_gpuserve import procfs
        seen = pathlib.Path("seen")

        @mark.gpuserve(engine="sim", tp=2)
        class TestFirst:
            def test_one(self, server): pass
            def test_crash(self, server): os._exit(3)
            def test_three(self, server):
                seen.write_text(f"{server.record.root.pid} {server.record.root.start}")

        @mark.gpuserve(engine="sim", tp=1)
        def test_second(server):
            pid, start = map(int, seen.read_text().split())
            assert not procfs.same(procfs.ProcessId(pid, start)), "no other test wants it"
        """
    )
    result = project.run("-n1", "--gpuserve-gpus=virtual:4", "-p", "no:rerunfailures")
    result.assert_outcomes(passed=3, failed=1)


def _devices(path: Path) -> list[str]:
    try:
        return [device[0] for device in json.loads(path.read_text())["devices"]]
    except (OSError, ValueError):
        return []


def test_a_server_without_code_for_its_gpu_is_not_started(project: Any, nvml: Any) -> None:
    """The lease says which GPUs it gets; the engine's libraries say that they cannot serve them."""
    nvml.set(devices=1)
    kernels = Path(__file__).parents[1] / "data" / "kernels"
    project.write(
        conftest=CONFTEST
        + "from pytest_gpuserve.engines.kernels import Kernels\n"
        + 'Command.kernels = Kernels(required={"kernels": ("kernels/hopper.so",)})\n',
        helper=SERVER,
        test_it=f"""
        from helper import gpu

        @gpu(1, env={{"PYTHONPATH": {str(kernels.parent)!r}}})
        def test_it(server):
            pass
        """,
    )
    result = project.run("-p", "no:cacheprovider", "-o", "console_output_style=classic")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*server command-tp1-* was not started: this install cannot run on sm_120: kernels/hopper.so carries sm_80 *"]
    )
    assert not project.servers()
    project.assert_nothing_left()
