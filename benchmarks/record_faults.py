"""Record the bundle of a real run for every fault of the embedded engine: data of tests/report/test_fault_issues.py.

Run: ``python benchmarks/record_faults.py OUT [--only KIND ...] [--jobs 3]``, on a machine that has little else to do.
Names of this machine are replaced (paths, kernel, CPU) and the hashes of the bundle made anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

FAULTS = (
    "sleep@cuda_graph:rank=2", "spin@cuda_graph:rank=1", "gil@weight_load:rank=3", "flock@cuda_graph:rank=2",
    "stale_lock@cuda_graph:rank=1", "pipe@distributed_init:rank=2", "stop@weight_load:rank=3",
    "die@cuda_graph:rank=1:after=4", "exit@weight_load:rank=2:code=3:after=4", "raise@weight_load:rank=1:after=4",
    "oom@weight_load:rank=2:after=4", "skip_collective@cuda_graph:rank=3", "symmetric@cuda_graph",
    "slow@weight_load:rank=1:how=compile:for=90", "deaf@serving:requests=1", "wedge@serving",
    "flock@weight_load:rank=2", "symmetric@weight_load", "sleep@kv_cache:rank=2", "pipe@kv_cache:rank=3",
    "gil@compile:rank=1",
)  # fmt: skip
"""What is injected; deaths come a few seconds later, as in a real start-up, when the ranks have their titles."""
VLLM = ("pipe@kv_cache:rank=3",)
"""With these the engine plays vLLM, else SGLang."""

TEST = """
import pytest

@pytest.mark.gpuserve(engine="sim", tp=4, startup_timeout={budget}, args={{"fault": "{fault}", "flavor": "{flavor}"}})
@pytest.mark.timeout(40)
def test_{kind}(server):
    body = {{"model": server.model, "prompt": "2+2=", "max_tokens": 4, "temperature": 0}}
    for _ in range(2):
        assert server.post("/v1/completions", json=body, timeout=60).ok
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=3)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpuserve-record-") as name:
        project = Path(name)
        for fault in FAULTS:
            kind, test = fault.partition("@")[0], name_of(fault)
            if not options.only or kind in options.only or test in options.only:
                flavor = "vllm" if fault in VLLM else "sglang"
                given = {"kind": kind, "fault": fault, "flavor": flavor, "budget": 40 if kind == "slow" else 90}
                (project / f"test_{test}.py").write_text(TEST.format(**given))
        command = [sys.executable, "-m", "pytest", f"-n{options.jobs}", "--dist=loadfile", "-q"]
        command += ["--gpuserve-stall-timeout=15", "--gpuserve-artifacts=artifacts", "-p", "no:cacheprovider"]
        environment = {**os.environ, "GPUSERVE_STATE": str(project / "state")}
        subprocess.run(command, cwd=project, env=environment, check=False, stdout=sys.stderr)
        for incident in sorted((project / "artifacts").glob("*/incident.json")):
            record(incident.parent, project, options.out)
    return 0


def name_of(fault: str) -> str:
    """Its kind; with the phase where the kind is recorded in several, but for the first."""
    kind, _, where = fault.partition("@")
    first = next(other for other in FAULTS if other.startswith(f"{kind}@"))
    return kind if fault == first else f"{kind}_{where.partition(':')[0]}"


def record(bundle: Path, project: Path, out: Path) -> None:
    """One directory as a zip without the names of this machine."""
    incident = json.loads((bundle / "incident.json").read_text())
    name = name_of(next(word for word in incident["argv"] if word.startswith("--fault=")).partition("=")[2])
    files = {
        str(path.relative_to(bundle)): scrubbed(path.read_text(), project)
        for path in sorted(bundle.rglob("*"))
        if path.is_file() and path.suffix != ".html"
    }
    manifest = json.loads(files["bundle.json"])
    manifest["files"] = {
        name: {"size": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        for name, text in files.items()
        if name in manifest["files"]
    }
    files["bundle.json"] = json.dumps(manifest, indent=1)
    with zipfile.ZipFile(out / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for name, text in files.items():
            target.writestr(zipfile.ZipInfo(f"{bundle.name}/{name}", (2026, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    print(f"{name}: {incident['verdict']} in {incident['phase']}, {', '.join(incident['culprits']) or 'nobody'}")


def scrubbed(text: str, project: Path) -> str:
    """Longest names first, so that none is a part of another."""
    home = str(Path("~").expanduser())
    names = {
        os.environ["PATH"]: "/usr/bin",
        os.environ["PATH"].replace(home, "~"): "/usr/bin",
        sys.executable: "/opt/venv/bin/python3",
        str(project / "state"): "/srv/state",
        str(project): "/srv/project",
        str(Path(__file__).parents[1]): "/srv/gpuserve",
        sys.base_prefix: "/usr/local",
        sys.prefix: "/opt/venv",
        os.uname().release: "6.8.0-generic",
        **dict.fromkeys(_models(), "AMD EPYC"),
    }
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, names[name])
        if name.startswith(home + "/"):
            text = text.replace("~" + name.removeprefix(home), names[name])  # as the bundle's own redaction writes it
    cut = "/".join(Path(__file__).parts[:2]).replace("//", "/")  # a message that ends in the middle of a path
    text = re.sub(rf'(?<=\\"){re.escape(cut)}(?=")', "/srv", text)
    return re.sub(r"/tmp/python-build[^/]*/", "/usr/src/", text)


def _models() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}


if __name__ == "__main__":
    sys.exit(main())
