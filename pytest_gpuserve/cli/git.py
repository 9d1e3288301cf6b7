"""The few git commands that bisect needs, as argv, with errors for people."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..errors import GpuserveError
from ..text import one_line

_LIMIT = 600.0
"""Seconds for one git command: a checkout of a large tree on a slow disk takes minutes."""


class Git:
    """One work tree.

    Raises:
        GpuserveError: (constructor) the directory is in no work tree, or there is no git.
    """

    def __init__(self, directory: Path) -> None:
        self.top = directory
        self.top = Path(self("rev-parse", "--show-toplevel", why="gpuserve bisect needs a git work tree"))
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
            done = subprocess.run(
                ["git", *words],
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                cwd=self.top,
                env=env,
                timeout=_LIMIT,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            raise GpuserveError("there is no git on this machine. Install it, or run gpuserve judge by hand.") from None
        except subprocess.TimeoutExpired:
            raise GpuserveError(f"git {' '.join(words[:3])} did not end within {_LIMIT:g} s.") from None
        return done.returncode, done.stdout, done.stderr

    def commit(self, name: str, option: str) -> str:
        """The full hash of a commit.

        Raises:
            GpuserveError: there is no such commit.
        """
        code, out, _ = self.run(["rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"])
        if code:
            raise GpuserveError(f"{option} {one_line(name)}: there is no such commit in {self.top}.")
        return out.strip()

    def position(self) -> str:
        """Where HEAD is: a branch, or a hash when it is detached."""
        code, out, _ = self.run(["symbolic-ref", "--quiet", "--short", "HEAD"])
        return out.strip() if code == 0 else self("rev-parse", "HEAD")

    def check_clean(self) -> None:
        """Raises GpuserveError when tracked files are changed, or a bisection, merge or rebase is under way."""
        changed = self("status", "--porcelain", "--untracked-files=no")
        if changed:
            count = len(changed.splitlines())
            raise GpuserveError(
                f"{count} tracked files of {self.top} are changed ({one_line(changed.splitlines()[0].strip(), 80)}…), "
                "and every checkout would carry them along or fail. Commit or stash them first."
            )
        for name, what in (
            ("BISECT_START", "a git bisect (end it with git bisect reset)"),
            ("rebase-merge", "a rebase"),
            ("rebase-apply", "a rebase"),
            ("MERGE_HEAD", "a merge"),
        ):
            if (self.top / self("rev-parse", "--git-path", name)).exists():
                raise GpuserveError(f"{what} is under way in {self.top}. Finish it first.")

    def checkout(self, where: str) -> None:
        """What a build or a test changed in tracked files is dropped; files that git does not know stay.

        Raises GpuserveError when such a file is in the way.
        """
        self("reset", "--quiet", "--hard")
        self("checkout", "--quiet", where, "--", why=f"{where[:12]} cannot be checked out")

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
