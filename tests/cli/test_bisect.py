"""``gpuserve bisect`` on real repositories, and ``git bisect run gpuserve judge``."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pytest_gpuserve import procfs
from pytest_gpuserve.cli.bisect_state import State, end_child, load
from pytest_gpuserve.cli.git import Git
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.server.paths import here

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist"]
TEST = """\
import state

def test_it():
    if state.OTHER:
        raise RuntimeError("another failure")
    assert not (state.BROKEN and state.strikes()), "the planted failure"
"""
STRIKES = """
def strikes():
    from pathlib import Path
    path = Path(__file__).with_name("draws")
    count = int(path.read_text()) if path.exists() else 0
    path.write_text(str(count + 1))
    return count % EVERY == EVERY - 1
"""


class Repository:
    """``count`` commits; the one at ``culprit`` brings the failure."""

    def __init__(self, path: Path, count: int, culprit: int, *, skip: set[int], other: set[int], every: int) -> None:
        self.path = path / "repository"
        self.path.mkdir()
        self.state = path / "state"
        self.state.mkdir(mode=0o700)
        self.git("init", "-q", "-b", "main")
        (self.path / "test_it.py").write_text(TEST)
        (self.path / "pytest.ini").write_text("[pytest]\n")
        (self.path / ".gitignore").write_text("__pycache__\nbisect.log\ndraws\ngpuserve-artifacts\n")
        self.commits = []
        for number in range(count):
            (self.path / "state.py").write_text(
                f"NUMBER = {number}\nBROKEN = {number >= culprit}\nBUILDS = {number not in skip}\n"
                f"OTHER = {number in other}\nEVERY = {every}\n{STRIKES}"
            )
            self.git("add", "-A")
            self.git("commit", "-q", "-m", f"change {number}")
            self.commits.append(self.git("rev-parse", "HEAD"))

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSERVE", "GIT_"))}
        own = {"GPUSERVE_STATE": str(self.state), "XDG_CACHE_HOME": str(self.state), "PYTHONDONTWRITEBYTECODE": "1"}
        return {**kept, **own}

    def git(self, *words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, *words]
        return subprocess.run(command, cwd=self.path, check=True, capture_output=True, text=True).stdout.strip()

    def command(self, *options: str, good: int = 0, bad: int | None = -1, tests: tuple[str, ...] = ()) -> list[str]:
        """``bad`` None: the default, HEAD."""
        ends = ["--good", self.commits[good], *([] if bad is None else ["--bad", self.commits[bad]])]
        build = ["--build", f"{sys.executable} -c 'import state; raise SystemExit(not state.BUILDS)'"]
        ours = [sys.executable, "-m", "pytest_gpuserve.cli", "bisect"]
        return [*ours, *ends, *build, *options, "--", *PYTEST, *tests]

    def bisect(
        self, *options: str, good: int = 0, bad: int | None = -1, tests: tuple[str, ...] = (), inside: str = "."
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*options, good=good, bad=bad, tests=tests),
            cwd=self.path / inside,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        print(done.stdout, done.stderr)
        return done

    def killed(self, *options: str) -> list[str]:
        """A bisection from ``main``, to its default end, that SIGKILL ended half way; the commits it had judged."""
        process = subprocess.Popen(
            self.command("--repeat", "1", *options, bad=None),
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 120
            while not self.kept.exists() or len(json.loads(self.kept.read_text())["verdicts"]) < 3:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        assert self.git("rev-parse", "HEAD") not in (self.commits[0], self.commits[-1]), "in the middle"
        return list(json.loads(self.kept.read_text())["verdicts"])

    @property
    def kept(self) -> Path:
        return self.path / ".git" / "gpuserve-bisect.json"

    @property
    def head(self) -> str:
        """The branch, or a hash where HEAD is detached."""
        here = self.git("rev-parse", "--symbolic-full-name", "HEAD")
        return here if here != "HEAD" else self.git("rev-parse", "HEAD")

    @property
    def log(self) -> list[str]:
        return (self.path / "bisect.log").read_text().splitlines()


def repository(path: Path, count: int = 12, culprit: int = 7, **changes) -> Repository:
    return Repository(path, count, culprit, **{"skip": set(), "other": set(), "every": 1, **changes})


def test_the_first_bad_commit_with_both_sides(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    done = repo.bisect("--repeat", "1")
    assert done.returncode == 0
    assert f"First bad commit: {repo.commits[7]}" in done.stdout
    assert re.search(rf"bad side:  {repo.commits[7][:12]} change 7: bad, .*AssertionError", done.stdout)
    assert re.search(rf"good side: {repo.commits[6][:12]} change 6: good, 1 passed", done.stdout)
    assert repo.git("symbolic-ref", "--short", "HEAD") == "main", "back where it was"
    assert len(repo.log) <= 2 + 4 + 1
    steps = len(repo.log)
    again = repo.bisect("--repeat", "1")
    assert f"First bad commit: {repo.commits[7]}" in again.stdout
    assert len(repo.log) == steps, "what was judged before is not judged again"


def test_skips_leave_the_smallest_range(tmp_path: Path) -> None:
    repo = repository(tmp_path, culprit=6, skip={5}, other={4})
    repo.git("checkout", "-q", "--detach", "main")
    head = repo.git("rev-parse", "HEAD")
    done = repo.bisect("--repeat", "1")
    assert done.returncode == 1
    assert "one of these 3" in done.stdout
    assert re.search(rf"bad side:  {repo.commits[6][:12]}", done.stdout)
    assert re.search(rf"skipped:   {repo.commits[5][:12]} .*the build failed", done.stdout)
    assert re.search(rf"skipped:   {repo.commits[4][:12]} .*another failure: .*RuntimeError", done.stdout)
    assert re.search(rf"good side: {repo.commits[3][:12]}", done.stdout)
    assert repo.git("rev-parse", "HEAD") == head


@pytest.mark.parametrize(
    ("arrange", "options", "text"),
    [
        ("dirty", {}, "1 tracked file of"),
        ("bisecting", {}, "a git bisect"),
        ("none", {"good": 9, "bad": 3}, "are they swapped?"),
        ("none", {"good": -1, "bad": -1}, "the same commit"),
        ("none", {"good": 8, "bad": 11}, "fails too"),
        ("none", {"good": 0, "bad": 5}, "there is nothing to bisect"),
    ],
)
def test_what_cannot_be_bisected(tmp_path: Path, arrange: str, options: dict[str, int], text: str) -> None:
    repo = repository(tmp_path)
    if arrange == "dirty":
        (repo.path / "state.py").write_text("changed\n")
    elif arrange == "bisecting":
        repo.git("bisect", "start")
    done = repo.bisect("--repeat", "1", **options)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert repo.git("symbolic-ref", "--short", "HEAD") == "main"
    if arrange == "dirty":
        assert (repo.path / "state.py").read_text() == "changed\n", "the user's change is still there"


def test_a_commit_that_does_not_exist(tmp_path: Path) -> None:
    repo = repository(tmp_path, count=2, culprit=1)
    repo.commits[0] = "no-such-name"
    done = repo.bisect()
    assert (done.returncode, "there is no such commit" in done.stderr) == (2, True)


def test_a_missed_failure_is_taken_back(tmp_path: Path) -> None:
    """It fails every second time: with one run a commit, some bad ones look good at first."""
    repo = repository(tmp_path, count=10, culprit=3, every=2)
    done = repo.bisect("--repeat", "1")
    assert f"First bad commit: {repo.commits[3]}" in done.stdout
    assert "failed when it was tested again: it is bad" in done.stdout


def test_a_bad_end_that_fails_now_and_then_decides_on_repeats(tmp_path: Path) -> None:
    repo = repository(tmp_path, count=3, culprit=2, every=2)
    done = repo.bisect("--confidence", "0.9")
    assert f"First bad commit: {repo.commits[2]}" in done.stdout
    assert "The bad end failed in 1 of 3 runs: a commit is good after 5 good runs." in done.stdout


SKIPPED = """\
import pytest, state

def test_cpu(): pass

def test_sought():
    if 2 <= state.NUMBER <= 4:
        pytest.skip("not today")
    assert not state.BROKEN
"""


def test_a_commit_that_skips_the_sought_test_is_not_good(tmp_path: Path) -> None:
    repo = repository(tmp_path, count=7, culprit=2)
    (repo.path / "test_skipped.py").write_text(SKIPPED)  # git does not know it: it is there at every commit
    done = repo.bisect("--repeat", "1", tests=("test_skipped.py",))
    assert done.returncode == 1, "a range: the commits that skip it, and the first that fails"
    assert "test_skipped.py::test_sought, which is sought, was skipped" in done.stdout
    assert {line.split("\t")[2] for line in repo.log if line.split("\t")[1] in repo.commits[2:5]} == {"skip"}


GONE = """\
import state

if not 3 <= state.NUMBER <= 4:
    def test_first(): assert state.NUMBER < 2

def test_second(): assert state.NUMBER < 6

if state.NUMBER >= 6:
    def test_new(): assert 0
"""


def test_a_commit_without_one_of_the_sought_tests_is_not_good(tmp_path: Path) -> None:
    """The commit that brings a broken test back is not the one that broke it; a test that no good end has is not
    asked for."""
    repo = repository(tmp_path, count=7, culprit=9)
    (repo.path / "test_gone.py").write_text(GONE)
    done = repo.bisect("--repeat", "1", tests=("test_gone.py",))
    assert "test_gone.py::test_first, which is sought, was not run" in done.stdout
    assert f"First bad commit: {repo.commits[2]}" in done.stdout


def test_git_bisect_run(tmp_path: Path) -> None:
    repo = repository(tmp_path, skip={5})
    repo.git("bisect", "start", repo.commits[-1], repo.commits[0])
    judge = [sys.executable, "-m", "pytest_gpuserve.cli", "judge"]
    build = ["--build", f"{sys.executable} -c 'import state; raise SystemExit(not state.BUILDS)'"]
    done = subprocess.run(
        ["git", "bisect", "run", *judge, *build, "--", *PYTEST],
        cwd=repo.path,
        env=repo.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert f"{repo.commits[7]} is the first bad commit" in done.stdout


def test_killed_it_goes_on_where_it_was_and_head_comes_back(tmp_path: Path) -> None:
    """After SIGKILL HEAD is detached at some commit, and the default --bad HEAD means the branch all the same."""
    repo = repository(tmp_path)
    before = repo.killed()
    done = repo.bisect("--repeat", "1", bad=None)
    assert done.returncode == 0
    assert "was killed and left HEAD at" in done.stdout
    assert f"{len(before)} commits tested" in done.stdout
    assert f"First bad commit: {repo.commits[7]}" in done.stdout
    assert repo.head == "refs/heads/main"
    judged = [line.split("\t")[1] for line in repo.log]
    again = {repo.commits[6]}  # the good side is tested once more
    assert sorted(set(judged) | again) == sorted({*judged}), judged
    assert all(judged.count(commit) == 1 for commit in before if commit not in again), judged


@pytest.mark.parametrize("ends", ["another test", "another end", "fresh"])
def test_what_was_killed_does_not_become_part_of_another_bisection(tmp_path: Path, ends: str) -> None:
    repo = repository(tmp_path)
    repo.killed()
    options = {
        "another test": {"tests": ("test_it.py",)},
        "another end": {"good": 1},
        "fresh": {},
    }[ends]
    done = repo.bisect("--repeat", "1", *(["--fresh"] if ends == "fresh" else []), bad=None, **options)
    assert f"First bad commit: {repo.commits[7]}" in done.stdout
    assert "are not repeated" not in done.stdout
    if ends != "fresh":
        assert (
            f"it was another bisection (--good {repo.commits[0][:12]} --bad {repo.commits[-1][:12]} --" in done.stdout
        )
    assert repo.head == "refs/heads/main"


def test_changes_in_what_was_killed_are_nobodys_to_drop(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    repo.killed()
    middle = repo.head
    (repo.path / "state.py").write_text("changed\n")
    done = repo.bisect("--repeat", "1", bad=None)
    assert done.returncode == 2
    assert "it began at main and left HEAD at" in done.stderr
    assert "git reset --hard" in done.stderr
    assert (repo.head, (repo.path / "state.py").read_text()) == (middle, "changed\n")


def test_head_stays_where_a_person_put_it_since(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    repo.killed()
    repo.git("checkout", "-q", "-b", "mine", repo.commits[9])
    done = repo.bisect("--repeat", "1", bad=None)
    assert f"First bad commit: {repo.commits[7]}" in done.stdout
    assert "was killed" not in done.stdout
    assert repo.head == "refs/heads/mine"


def test_a_branch_beside_a_tag_of_its_name(tmp_path: Path) -> None:
    repo = repository(tmp_path, count=4, culprit=2)
    repo.git("tag", "main", repo.commits[1])
    done = repo.bisect("--repeat", "1", bad=None)
    assert f"First bad commit: {repo.commits[2]}" in done.stdout
    assert repo.head == "refs/heads/main"


def test_from_a_folder_which_some_commits_do_not_have(tmp_path: Path) -> None:
    repo = repository(tmp_path, count=2, culprit=1)
    inside = repo.path / "inside"
    for name, there, broken in (("a", True, False), ("b", False, False), ("c", True, False), ("d", True, True)):
        if there:
            inside.mkdir(exist_ok=True)
            (inside / "test_there.py").write_text(f"def test_it(): assert not {broken}, {name!r}\n")
        else:
            repo.git("rm", "-q", "-r", "inside")
        repo.git("add", "-A")
        repo.git("commit", "-q", "-m", name)
        repo.commits.append(repo.git("rev-parse", "HEAD"))
    log = ["--log", str(tmp_path / "bisect.log")]
    ours = [sys.executable, "-m", "pytest_gpuserve.cli", "bisect", "--repeat", "1", *log, "--good", repo.commits[2]]
    done = subprocess.run(
        [*ours, "--", *PYTEST, "test_there.py"],
        cwd=inside,
        env=repo.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert f"First bad commit: {repo.commits[5]}" in done.stdout
    assert "Traceback" not in done.stderr
    assert repo.head == "refs/heads/main"
    assert (inside / "test_there.py").exists()


def test_a_state_that_cannot_be_read(tmp_path: Path) -> None:
    repo = repository(tmp_path, count=3, culprit=1)
    repo.kept.write_text("[" * 200_000)
    done = repo.bisect("--repeat", "1", bad=None)
    assert f"First bad commit: {repo.commits[1]}" in done.stdout
    assert "cannot be read (it is nested too deeply): what an earlier run judged is forgotten" in done.stdout
    repo.kept.write_text("{}")
    repo.git("checkout", "-q", "--detach", "main")
    done = repo.bisect("--repeat", "1", bad=None)
    assert (done.returncode, "HEAD is detached: an earlier run may have left it there" in done.stderr) == (2, True)


def test_where_head_is_left_is_said_when_it_cannot_come_back(tmp_path: Path) -> None:
    """The test leaves a file where there is none at that commit, and the branch has one of that name."""
    repo = repository(tmp_path, count=3, culprit=2)
    (repo.path / "made.txt").write_text("theirs")
    repo.git("add", "-A")
    repo.git("commit", "-q", "-m", "made")
    repo.commits.append(repo.git("rev-parse", "HEAD"))
    build = f"{sys.executable} -c \"open('made.txt', 'a').close()\""
    done = repo.bisect("--repeat", "1", "--build", build, bad=None)
    assert "Traceback" not in done.stderr
    assert "HEAD is left at" in done.stdout
    assert "git checkout main" in done.stdout
    (repo.path / "made.txt").unlink()
    done = repo.bisect("--repeat", "1", bad=None)
    assert f"First bad commit: {repo.commits[2]}" in done.stdout
    assert repo.head == "refs/heads/main"


SLEEPS = """\
import os, signal, time

def test_it():
    if not os.path.exists("ran"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("ran.part", "w").write(str(os.getpid()))
        os.rename("ran.part", "ran")
        time.sleep(500)
    import state
    assert not state.BROKEN
"""


def test_what_a_killed_one_had_started_does_not_run_beside_the_next(tmp_path: Path) -> None:
    """Its pytest does not hear SIGTERM, which a dying parent sends."""
    repo = repository(tmp_path, count=3, culprit=2)
    (repo.path / "test_sleeps.py").write_text(SLEEPS)
    process = subprocess.Popen(
        repo.command("--repeat", "1", bad=None, tests=("test_sleeps.py",)), cwd=repo.path, env=repo.environment
    )
    deadline = time.monotonic() + 60
    while not (repo.path / "ran").exists() or "child" not in json.loads(repo.kept.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    pid = int((repo.path / "ran").read_text())
    assert procfs.process_id(pid) is not None
    done = repo.bisect("--repeat", "1", bad=None, tests=("test_sleeps.py",))
    assert f"was killed and left pid {pid} (" in done.stdout
    assert f"First bad commit: {repo.commits[2]}" in done.stdout
    assert procfs.process_id(pid) is None
    assert "left pid" not in repo.bisect("--repeat", "1", bad=None, tests=("test_sleeps.py",)).stdout


def test_nobody_elses_process_is_ended(tmp_path: Path) -> None:
    """Another of that number, or one of another boot or container."""
    repo = repository(tmp_path, count=1)
    git = Git(repo.path)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        ours = procfs.process_id(process.pid)
        other = procfs.ProcessId(ours.pid, ours.start - 1)
        said: list[str] = []
        for child in ((other, here()), (ours, {**here(), "boot": "another"}), (ours, {**here(), "pid_namespace": 1})):
            state = State(git, "mark", "pytest", repo.commits[0], (), git.position(), child=child)
            state.save()
            end_child(load(git), said.append)
            assert (process.poll(), said) == (None, [])
        State(git, "mark", "pytest", repo.commits[0], (), git.position(), child=(ours, here())).save()
        end_child(load(git), said.append)
        assert process.wait() == -signal.SIGTERM
        assert len(said) == 1


def test_submodules(tmp_path: Path) -> None:
    """The culprit is in a submodule; without an update at each commit, what is tested is no state of the project."""
    library = repository(tmp_path, count=3, culprit=2)
    (tmp_path / "outer").mkdir()
    repo = repository(tmp_path / "outer", count=1, culprit=9)
    allow = ("-c", "protocol.file.allow=always")
    repo.git(*allow, "submodule", "--quiet", "add", str(library.path), "inner")
    (repo.path / "test_inner.py").write_text("from inner.state import BROKEN\ndef test_it(): assert not BROKEN\n")
    for commit in library.commits:
        subprocess.run(["git", "checkout", "-q", commit], cwd=repo.path / "inner", check=True)
        repo.git("add", "-A")
        repo.git("commit", "-q", "-m", "inner")
        repo.commits.append(repo.git("rev-parse", "HEAD"))
    done = repo.bisect("--repeat", "1", good=1, tests=("test_inner.py",))
    assert done.returncode == 2
    assert "what was tested had submodule inner at another commit than" in done.stderr
    assert "git submodule update --init --recursive has to be the --build" in done.stderr
    build = "git submodule update --init --recursive"
    done = repo.bisect("--repeat", "1", "--build", build, good=1, tests=("test_inner.py",))
    assert f"First bad commit: {repo.commits[3]}" in done.stdout
    assert "gpuserve bisect: it leaves submodule inner at another commit than main records" in done.stdout
    done = repo.bisect("--repeat", "1", good=1, tests=("test_inner.py",))
    assert done.returncode == 2
    assert "submodule inner at another commit than main records: git submodule update" in done.stderr


def test_two_at_once(tmp_path: Path) -> None:
    repo = repository(tmp_path, count=2, culprit=1)
    with (repo.path / ".git" / "gpuserve-bisect.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = repo.bisect()
    assert (done.returncode, "another gpuserve bisect works in this work tree" in done.stderr) == (2, True)


def test_git_is_never_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a checkout: it ends first, since it would leave index.lock and half a tree."""
    repo = repository(tmp_path, count=2, culprit=1)
    git = Git(repo.path)
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\ntouch began\nwhile [ ! -e interrupted ]; do sleep 0.05; done\nsleep 0.5\ntouch ended\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")

    def interrupt() -> None:
        while not (repo.path / "began").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        (repo.path / "interrupted").touch()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        git("status")
    thread.join()
    assert (repo.path / "ended").exists()


def test_git_is_not_forgotten_when_the_interrupt_comes_as_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = repository(tmp_path, count=1)
    git = Git(repo.path)
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        git("status")
    assert started[0].returncode == 0, "it came to its end before anything else is done in the work tree"
    assert signal.getsignal(signal.SIGINT) is before


def test_files_that_git_does_not_know_are_never_overwritten(tmp_path: Path) -> None:
    """``notes.txt`` is tracked in the middle only; at the end it is the user's own."""
    repo = repository(tmp_path, count=2)
    (repo.path / "notes.txt").write_text("theirs")
    repo.git("add", "-A")
    repo.git("commit", "-q", "-m", "notes")
    middle = repo.git("rev-parse", "HEAD")
    repo.git("rm", "-q", "notes.txt")
    repo.git("commit", "-q", "-m", "no notes")
    (repo.path / "notes.txt").write_text("mine")
    git = Git(repo.path)
    with pytest.raises(GpuserveError, match="cannot be checked out"):
        git.checkout(middle)
    assert (repo.path / "notes.txt").read_text() == "mine"
    (repo.path / "state.py").write_text("changed by a build")
    git.checkout(repo.commits[0])
    assert "NUMBER = 0" in (repo.path / "state.py").read_text()
    assert (repo.path / "notes.txt").read_text() == "mine"
