"""A session on a machine that has next to nothing left."""

from __future__ import annotations

import resource
import subprocess

FULL = "mount -t tmpfs -o size=16k tmpfs /dev/shm && head -c 16384 /dev/zero > /dev/shm/full"


def test_few_descriptors_no_home_and_a_full_dev_shm(project, monkeypatch):
    """``ulimit -n 64``, HOME and the caches where nothing can be written, /dev/shm full; and a hang in it."""
    project.write(
        test_it="""
        import os, pytest

        def ask(server):
            body = {"model": server.model, "prompt": "x", "max_tokens": 2}
            server.post("/v1/completions", json=body).raise_for_status()

        @pytest.mark.gpuserve(engine="sim", tp=2)
        def test_answers(server):
            ask(server)

        @pytest.mark.timeout(5)
        @pytest.mark.gpuserve(engine="sim", tp=2, args={"fault": "sleep@serving:rank=1"})
        def test_hangs(server):
            ask(server)
        """
    )
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, f"/proc/self/{name}")
    mine = ["unshare", "-m", "sh", "-c", f'{FULL} && exec "$@"', "sh"]
    may = subprocess.run([*mine, "true"], capture_output=True, check=False).returncode == 0
    few = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh"]
    result = project.run("-p", "no:cacheprovider", before=[*(mine if may else []), *few], timeout=240)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*TP1*"])
    (incident,) = project.incidents()
    assert "scheduler_TP1" in (incident / "stacks.txt").read_text()
    project.assert_nothing_left()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
