"""What ``gpuserve bisect`` keeps in the git directory: what was judged, and how to bring HEAD back after a SIGKILL."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import procfs, shell
from ..errors import GpuserveError
from ..isolation.judge import BAD, GOOD, SKIP, Judged
from ..isolation.signature import SHAPE as SIGNATURE
from ..isolation.signature import Signature
from ..procfs import ProcessId
from ..report.files import Store
from ..server.gpu_holders import end
from ..server.paths import here
from ..shape import OBJECT, Maybe, read
from ..text import one_line
from .git import Git, Position

NAME = "gpuserve-bisect.json"
SCHEMA = "gpuserve.bisect/2"

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_SHAPE = {
    "schema": (SCHEMA,),
    "fingerprint": str,
    "command": str,
    "bad": str,
    "good": [str],
    "start": {"commit": str, "branch": str | None},
    "at": [str],
    "repeat": int,
    "again": [str],
    "child": Maybe({"pid": int, "start": int, "here": OBJECT}),
    "verdicts": {str: {"code": (GOOD, BAD, SKIP), "reason": str, "signature": Maybe(SIGNATURE), "tests": Maybe([str])}},
}


@dataclass(slots=True)
class State:
    """One bisection.

    Attributes:
        fingerprint: of the ends, the command and its options.
        command: what is run at every commit, for people.
        bad, good: the ends, as hashes.
        start: where HEAD was before.
        at: where HEAD may be while it is not back; empty: it is.
        repeat: good runs that a commit needs. again: good commits that were tested once more.
        verdicts: by commit, the last one counts.
        child: the build or the pytest that was started last, and where that number means it.
    """

    git: Git
    fingerprint: str
    command: str
    bad: str
    good: tuple[str, ...]
    start: Position
    at: tuple[str, ...] = ()
    repeat: int = 1
    again: set[str] = field(default_factory=set)
    verdicts: dict[str, Judged] = field(default_factory=dict)
    child: tuple[ProcessId, dict[str, Any]] | None = None

    @property
    def title(self) -> str:
        """Which bisection it is, for people; foreign text made safe."""
        good = " ".join(f"--good {commit[:12]}" for commit in self.good)
        return f"{good} --bad {self.bad[:12]} -- {one_line(self.command, 200)}"

    def save(self) -> None:
        """Raises GpuserveError: it cannot be written."""
        verdicts = {
            commit: {
                "code": one.code,
                "reason": one.reason,
                "signature": one.signature.to_json() if one.signature else None,
                "tests": list(one.tests),
            }
            for commit, one in self.verdicts.items()
        }
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "command": self.command,
            "bad": self.bad,
            "good": list(self.good),
            "start": {"commit": self.start.commit, "branch": self.start.branch},
            "at": list(self.at),
            "repeat": self.repeat,
            "again": sorted(self.again),
            "verdicts": verdicts,
        }
        if self.child is not None:
            process, place = self.child
            content["child"] = {"pid": process.pid, "start": process.start, "here": place}
        try:
            Store(self.git.directory, None, 0o600).write_json(NAME, content)
        except OSError as error:
            raise GpuserveError(f"{self.git.directory / NAME} cannot be written: {error.strerror}.") from None

    def started(self, pid: int) -> None:
        """A child of this process, which must not outlive it."""
        process = procfs.process_id(pid)
        self.child = (process, here()) if process else None
        self.save()

    def checkout(self, commit: str) -> None:
        """HEAD at a commit; that it is away is on disk before it is.

        Raises:
            GpuserveError: it cannot be checked out.
        """
        self.at = (*self.at[-1:], commit)
        self.save()
        self.git.checkout(commit)

    def go_back(self) -> str:
        """HEAD where it was. What a person must do, where that fails; empty: nothing."""
        if not self.at:
            return ""
        try:
            self.git.go_back(self.start)
        except GpuserveError as error:
            back = self.start.branch or f"--detach {self.start.commit}"
            return f"HEAD is left at {self.git.position()}: {error} Make that good, then: git checkout {back}"
        self.at = ()
        self.save()
        return ""


def load(git: Git) -> State | None:
    """What an earlier run left; None: nothing.

    Raises:
        ValueError: it cannot be read; why.
    """
    try:
        raw = read(git.directory / NAME, _SHAPE)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(error.strerror) from None
    start = Position(raw["start"]["commit"], raw["start"].get("branch"))
    commits = [raw["bad"], *raw["good"], start.commit, *raw["at"], *raw["again"], *raw["verdicts"]]
    if strange := [commit for commit in commits if not _COMMIT.fullmatch(commit)]:
        raise ValueError(f"{one_line(strange[0], 60)} is no commit")
    if start.branch is not None and git.run(["check-ref-format", "--branch", start.branch])[0]:
        raise ValueError(f"{one_line(start.branch, 60)} is no branch")
    verdicts = {
        commit: Judged(
            one["code"],
            one["reason"],
            Signature.from_json(one["signature"]) if one.get("signature") else None,
            tuple(one.get("tests") or ()),
        )
        for commit, one in raw["verdicts"].items()
    }
    return State(
        git,
        raw["fingerprint"],
        raw["command"],
        raw["bad"],
        tuple(raw["good"]),
        start,
        tuple(raw["at"]),
        max(1, raw["repeat"]),
        set(raw["again"]),
        verdicts,
        (ProcessId(child["pid"], child["start"]), child["here"]) if (child := raw.get("child")) else None,
    )


def end_child(left: State, say: Callable[[str], None]) -> None:
    """End what an earlier run had started, if exactly that is still there: it would run beside ours.

    Raises:
        GpuserveError: it does not end.
    """
    if left.child is None or left.child[1] != here() or not procfs.same(left.child[0]):
        return
    process = left.child[0]
    name = f"pid {process.pid} ({one_line(shell.line(procfs.cmdline(process.pid)), 200)})"
    if end([process]):
        raise GpuserveError(
            f"an earlier gpuserve bisect was killed, and {name}, which it had started, is still there: it does not end "
            f"by SIGKILL (it waits in the kernel). The same command goes on when it is gone."
        )
    say(f"An earlier gpuserve bisect was killed and left {name}, which it had started: that was ended.")


def bring_back(left: State, say: Callable[[str], None]) -> None:
    """HEAD where it was before an earlier run that did not come to its end, unless somebody moved it since.

    Raises:
        GpuserveError: it cannot be brought back, or somebody's changes would be lost.
    """
    if not left.at:
        return
    here = left.git.position()
    if here.branch is not None or here.commit not in left.at:
        left.at = ()  # a person saw to it
        left.save()
        return
    if changed := left.git.changed(submodules=False):
        raise GpuserveError(
            f"an earlier gpuserve bisect was killed: it began at {left.start} and left HEAD at {here}, with changes in "
            f"{changed}. If its build or its test made them, git reset --hard drops them, and the same command goes on."
        )
    if problem := left.go_back():
        raise GpuserveError(f"an earlier gpuserve bisect was killed. {problem}")
    say(f"An earlier gpuserve bisect was killed and left HEAD at {here}; it is back at {left.start}, where that began.")
