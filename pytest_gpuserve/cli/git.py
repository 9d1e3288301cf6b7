"""The few git commands that bisect needs, as argv, with errors for people."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import GpuserveError
from ..text import one_line
from .signals import withheld

_LIMIT = 600.0
"""Seconds for one git command: a checkout of a large tree on a slow disk takes minutes."""


UPDATE = "git submodule update --init --recursive"


@dataclass(frozen=True, slots=True)
class Position:
    """Where HEAD is. ``branch`` None: detached."""

    commit: str
    branch: str | None = None

    def __str__(self) -> str:
        return self.branch or self.commit[:12]


class Git:
    """One work tree.

    Attributes:
        top: its root. here: where in it we were started. directory: of git, of this work tree alone.

    Raises:
        GpuserveError: (constructor) the directory is in no work tree, or there is no git.
    """

    def __init__(self, directory: Path) -> None:
        self.top = directory
        top = self("rev-parse", "--show-toplevel", why="gpuserve bisect needs a git work tree")
        self.here = Path(top) / self("rev-parse", "--show-prefix")
        self.top = Path(top)
        self.directory = Path(os.path.normpath(self.top / self("rev-parse", "--git-dir")))

    def __call__(self, *words: str, why: str = "") -> str:
        """Standard output, stripped.

        Raises:
            GpuserveError: git failed; ``why`` begins the message.
        """
        code, out, err = self.run(words)
        if code:
            said = one_line(err.strip() or out.strip(), 300)
            raise GpuserveError(f"{why + ': ' if why else ''}git {' '.join(words[:3])} failed: {said}")
        return out.strip()

    def run(self, words: Sequence[str]) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)."""
        env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        try:
            with withheld() as interrupts:
                child = subprocess.Popen(
                    ["git", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    cwd=self.top,
                    env=env,
                    start_new_session=True,  # Ctrl-C is for us
                )
        except FileNotFoundError:
            raise GpuserveError("there is no git on this machine. Install it, or run gpuserve judge by hand.") from None
        try:
            try:
                for number in interrupts:
                    signal.raise_signal(number)
                out, err = child.communicate(timeout=_LIMIT)
            except KeyboardInterrupt:  # one that is killed in a checkout leaves half a tree, and index.lock
                child.communicate(timeout=_LIMIT)
                raise
        except subprocess.TimeoutExpired:
            raise GpuserveError(f"git {' '.join(words[:3])} did not end within {_LIMIT:g} s.") from None
        finally:
            if child.poll() is None:
                child.kill()
                child.communicate()
        return child.returncode, out, err

    def commit(self, name: str, option: str) -> str:
        """The full hash of a commit.

        Raises:
            GpuserveError: there is no such commit.
        """
        code, out, _ = self.run(["rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"])
        if code:
            raise GpuserveError(f"{option} {one_line(name)}: there is no such commit in {self.top}.")
        return out.strip()

    def position(self) -> Position:
        """Where HEAD is.

        Raises:
            GpuserveError: there is no commit yet.
        """
        code, out, _ = self.run(["symbolic-ref", "--quiet", "HEAD"])  # --short is ambiguous beside a tag of that name
        branch = out.strip().removeprefix("refs/heads/") if code == 0 else None
        return Position(self.commit("HEAD", "HEAD"), branch)

    def changed(self, *, submodules: bool = True) -> str:
        """The tracked files that are changed, in few words; empty: none. No checkout touches those of submodules."""
        which = "--ignore-submodules=" + ("untracked" if submodules else "all")
        lines = self("status", "--porcelain", "--untracked-files=no", which).splitlines()
        if not lines:
            return ""
        count = f"{len(lines)} tracked file{'s' if len(lines) > 1 else ''}"
        return f"{count} of {self.top} ({one_line(lines[0].strip(), 80)}{'…' if len(lines) > 1 else ''})"

    def submodules(self) -> str:
        """Those that are at another commit than is recorded here, in few words, and what to do; empty: none."""
        _, out, _ = self.run(["submodule", "status", "--recursive"])  # it fails where .gitmodules does not fit
        moved = [
            line[1:].partition(" ")[2].rpartition(" (")[0] for line in out.splitlines() if line.startswith(("+", "U"))
        ]
        if not moved:
            return ""
        return (
            f"submodule {one_line(moved[0], 80)}{f' and {len(moved) - 1} more' if len(moved) > 1 else ''} at another "
            f"commit than {self.position()} records: {UPDATE}"
        )

    def check_clean(self) -> None:
        """Raises GpuserveError when tracked files are changed, or a bisection, merge or rebase is under way."""
        if moved := self.submodules():
            raise GpuserveError(f"there is {moved} puts that right; what is meant so has to be committed first.")
        if changed := self.changed():
            raise GpuserveError(
                f"there are changes in {changed}, and every checkout would carry them along or fail. Commit or stash "
                "them first."
            )
        for name, what in (
            ("BISECT_START", "a git bisect (end it with git bisect reset)"),
            ("rebase-merge", "a rebase"),
            ("rebase-apply", "a rebase"),
            ("MERGE_HEAD", "a merge"),
            ("CHERRY_PICK_HEAD", "a cherry-pick"),
            ("REVERT_HEAD", "a revert"),
        ):
            if (self.top / self("rev-parse", "--git-path", name)).exists():
                raise GpuserveError(f"{what} is under way in {self.top}. Finish it first.")

    def checkout(self, commit: str) -> None:
        """What a build or a test changed in tracked files is dropped; files that git does not know stay.

        Raises GpuserveError when such a file is in the way.
        """
        self("reset", "--quiet", "--hard")
        self("checkout", "--quiet", "--detach", commit, "--", why=f"{commit[:12]} cannot be checked out")

    def go_back(self, start: Position) -> None:
        """To where HEAD was, as :meth:`checkout`. A branch is checked out as one, wherever it is by now.

        Raises GpuserveError when that cannot be done.
        """
        if start.branch is None:
            self.checkout(start.commit)
            return
        self("reset", "--quiet", "--hard")
        self("checkout", "--quiet", start.branch, "--", why=f"{start.branch} cannot be checked out again")

    def is_ancestor(self, older: str, newer: str) -> bool:
        return self.run(["merge-base", "--is-ancestor", older, newer])[0] == 0

    def candidates(self, bad: str, good: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
        """Commits of ``bad`` that are in none of ``good``, newest first, and their parents."""
        lines = self("rev-list", "--topo-order", "--parents", bad, "--not", *good).splitlines()
        rows = [line.split() for line in lines]
        return [row[0] for row in rows], {row[0]: tuple(row[1:]) for row in rows}

    def subjects(self, commits: Sequence[str]) -> dict[str, str]:
        """First lines of their messages (foreign text, made safe)."""
        if not commits:
            return {}
        out = self("log", "--no-walk=unsorted", "--format=%H %s", *commits)
        pairs = (line.partition(" ") for line in out.splitlines())
        return {commit: one_line(subject, 100) for commit, _, subject in pairs}
