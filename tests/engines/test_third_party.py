"""Engines of other distributions: found by entry point, and told as what they are when they are broken."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pytest_gpuserve.engines import ENTRY_POINT_GROUP, engine_names, get_engine
from pytest_gpuserve.engines.base import ProcessRole, Rank
from pytest_gpuserve.errors import EngineError
from pytest_gpuserve.phases.reader import PhaseReader
from pytest_gpuserve.spec import ServerSpec

MODULE = """
from pytest_gpuserve.engines import Launch, LogGrammar, ReadyProbe
import re

class Mine:
    name = "mine"
    axes = {}
    grammar = LogGrammar(rank=re.compile(rb"(?!)"), rules=())
    def launch(self, spec, *, host, port, python): return Launch((python, "-m", "http.server", str(port)))
    def ready(self, spec): return ReadyProbe("/")
    def served_model(self, spec): return spec.model or ""
    def process_role(self, cmdline, comm): return None
    def own_timeout(self, launch): return None

ENGINE = Mine()

class Half:
    name = "half"
"""


@pytest.fixture(autouse=True)
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution ``gpuserve-mine`` with engines in it."""
    (tmp_path / "gpuserve_mine.py").write_text(MODULE)
    (tmp_path / "gpuserve_torn.py").write_text("import no_such_module_anywhere")
    info = tmp_path / "gpuserve_mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gpuserve-mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\nmine = gpuserve_mine:ENGINE\nkind = gpuserve_mine:Mine\n"
        "half = gpuserve_mine:Half\ntorn = gpuserve_torn:ENGINE\nsglang = gpuserve_mine:ENGINE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("gpuserve_mine", "gpuserve_torn"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_it_is_there_by_name() -> None:
    assert engine_names()[-4:] == ("half", "kind", "mine", "torn")
    assert get_engine("mine").name == "mine"
    assert not isinstance(get_engine("kind"), type), "a class stands for its instance"


def test_nobody_replaces_what_is_built_in() -> None:
    assert get_engine("sglang").name == "sglang"
    assert engine_names().count("sglang") == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "torn",
            "engine 'torn' (gpuserve_torn:ENGINE of gpuserve-mine) cannot be imported: ModuleNotFoundError: No mod",
        ),
        ("half", "engine 'half' (gpuserve_mine:Half of gpuserve-mine) has no axes, grammar, launch, ready"),
        (
            "nope",
            "there is no engine called 'nope'. Known engines: sim, command, sglang, vllm, llama_cpp, half, kind, mi",
        ),
    ],
)
def test_one_that_is_broken(name: str, told: str) -> None:
    with pytest.raises(EngineError) as caught:
        get_engine(name)
    assert told in str(caught.value)


def test_the_engine_of_the_documentation(tmp_path: Path) -> None:
    """docs/add-an-engine.md says what an engine is: its example is one."""
    page = Path(__file__).parents[2] / "docs" / "add-an-engine.md"
    found = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "gpuserve_mine.py").write_text(found[1])
    engine = get_engine("mine")
    assert type(engine).__name__ == "MyEngine"
    spec = ServerSpec.from_mapping({"engine": "mine", "model": "m", "tp": 2, "cuda_graph": "off"})
    argv = engine.launch(spec, host="127.0.0.1", port=1234, python="python").argv
    assert argv[-5:] == ("--host", "127.0.0.1", "--port", "1234", "--no-graphs")
    assert engine.process_role(["my_engine::worker_1"], "x") == ProcessRole("worker", Rank(tp=1))
    assert engine.ready(spec).path == "/health"
    reader = PhaseReader(engine.grammar)
    reader.feed(b"[rank0] loading weights\n[rank1] loading weights\n[rank1] shard 2/4\nGET /health\n", 1.0)
    assert {label: (phase.phase, phase.done) for label, phase in reader.ranks().items()} == {
        "TP0": ("weight_load", None),
        "TP1": ("weight_load", 2),
    }
    assert reader.heartbeats == 1
