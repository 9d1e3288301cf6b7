"""``gpuserve bisect --good A --bad B -- pytest …``: the first bad commit, or the smallest range that skips allow.

The choice of commits is ours (isolation/bisect.py), not ``git bisect``'s: a verdict that a second test contradicts can
be taken back, and what was judged is kept in the git directory, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .. import shell
from ..errors import GpuserveError
from ..isolation.bisect import Range, contradicted, narrowed, next_commit, repeat_for, summary, tally
from ..isolation.judge import BAD, BROKEN, GOOD, Judged
from ..text import escape, one_line
from .bisect_state import NAME, State, bring_back, end_child, load
from .git import Git
from .isolate_state import fingerprint, lock
from .judge import INTERRUPTED, Settings, add_options, judge, settings
from .signals import as_interrupt

_ENDS = 3
"""Runs of the bad end that show how often it fails, where nobody says so."""

_PATIENCE = 5
"""Runs of the bad end, beyond those that a good commit gets, in which it must fail once."""

_AGAIN = 2
"""Further good runs for the good side of the answer: on it all rests. So many more for all, once one was missed."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuserve bisect --good A [--bad B] [options] -- pytest ARGS…"
    parser.epilog = (
        "Exit code: 0 the first bad commit; 1 a range of several; 2 usage, or ends that cannot be bisected; 128 this "
        "machine can test no commit; 130 interrupted: the same command goes on where it was."
    )
    parser.add_argument("--good", action="append", required=True, metavar="COMMIT", help="passes; may be repeated")
    parser.add_argument("--bad", default="HEAD", metavar="COMMIT", help="fails (default: HEAD)")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run of this command judged")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """See the epilog.

    Raises:
        GpuserveError: the work tree or the commits cannot be bisected; one paragraph why.
    """
    chosen = settings(arguments)
    with as_interrupt([]):
        try:
            git = Git(Path.cwd())
            held = lock(git.directory / "gpuserve-bisect.lock", "another gpuserve bisect works in this work tree")
            os.chdir(git.top)  # the directory where we were started may not exist at every commit
            try:
                return _bisect(arguments, chosen, git)
            finally:
                os.close(held)
        except KeyboardInterrupt:
            _say("gpuserve bisect: interrupted; the same command goes on where it was.")
            return INTERRUPTED


def _bisect(arguments: argparse.Namespace, chosen: Settings, git: Git) -> int:
    left = _left(git, fresh=arguments.fresh)
    git.check_clean()
    bad = git.commit(arguments.bad, "--bad")
    good = [git.commit(name, "--good") for name in arguments.good]
    for name, commit in zip(arguments.good, good, strict=True):
        _check_ends(git, name, commit, arguments.bad, bad)
    automatic = arguments.repeat is None and arguments.repro_rate is None
    place = str(git.here.relative_to(git.top))
    mark = fingerprint(bad, good, chosen.argv, chosen.build, str(arguments.signature), chosen.repeat, automatic, place)
    state = State(git, mark, shell.line(chosen.argv), bad, tuple(good), git.position(), repeat=chosen.repeat)
    if left is not None and left.fingerprint == mark and not arguments.fresh:
        state.verdicts, state.again = left.verdicts, left.again
        state.repeat = left.repeat if automatic else chosen.repeat
        if state.verdicts:
            _say(f"{tally(state.verdicts)} before; they are not repeated (--fresh forgets them).")
    elif left is not None and left.verdicts and not arguments.fresh:
        _say(f"What an earlier run judged is forgotten: it was another bisection ({left.title}).")
    bisection = Bisection(state, replace(chosen, repeat=state.repeat), _say, automatic, arguments.confidence)
    try:
        found = bisection.run()
    except _BrokenError as error:
        _say(f"gpuserve bisect: {error}")
        return BROKEN
    finally:
        if problem := state.go_back():
            _say(f"gpuserve bisect: {problem}")
        elif moved := git.submodules():
            _say(f"gpuserve bisect: it leaves {moved} puts that right.")
    for line in summary(found, state.verdicts, git.subjects([*found.candidates, *found.good])):
        _say(escape(line, 600))
    _say(f"{tally(state.verdicts)}; every step is in {chosen.log}.")
    return 0 if found.culprit else 1


def _left(git: Git, *, fresh: bool) -> State | None:
    """What an earlier run left, with HEAD back where that began.

    Raises:
        GpuserveError: HEAD cannot be brought back.
    """
    try:
        left = load(git)
    except ValueError as error:
        what = f"{git.directory / NAME} cannot be read ({one_line(str(error), 200)})"
        if not fresh and git.position().branch is None:
            raise GpuserveError(
                f"{what}, and HEAD is detached: an earlier run may have left it there. Check out where you want to "
                "begin, and give --fresh."
            ) from None
        _say(f"{what}: what an earlier run judged is forgotten.")
        return None
    if left is not None:
        end_child(left, _say)
        bring_back(left, _say)
    return left


def _check_ends(git: Git, name: str, commit: str, bad_name: str, bad: str) -> None:
    if commit == bad:
        raise GpuserveError(f"--good {name} and --bad {bad_name} are the same commit.")
    if git.is_ancestor(commit, bad):
        return
    if git.is_ancestor(bad, commit):
        raise GpuserveError(
            f"--good {name} comes after --bad {bad_name}: are they swapped? --good is the older commit, which passes. "
            "(To find what mended a failure, turn the test round, so that it fails where all is well.)"
        )
    raise GpuserveError(
        f"--good {name} is no ancestor of --bad {bad_name}, so it says nothing of what came between. "
        f"Name a good commit before it; git merge-base {name} {bad_name} is where they parted."
    )


class _BrokenError(GpuserveError):
    """This machine can test no commit."""


class Bisection:
    """One bisection."""

    def __init__(
        self, state: State, chosen: Settings, say: Callable[[str], None], automatic: bool, sure: float
    ) -> None:
        self._state = state
        self._git = state.git
        self._chosen = chosen
        self._say = say
        self._automatic = automatic
        self._sure = sure

    def run(self) -> Range:
        """Bisect, and test both sides of the answer again.

        Raises:
            GpuserveError: the bad end does not fail, or a good end does.
        """
        bad, good = self._state.bad, list(self._state.good)
        self._bad_end(bad)
        for commit in good:
            judged = self._judged(commit)
            if judged.code != GOOD:
                what = "fails too" if judged.code == BAD else "cannot be tested"
                raise GpuserveError(
                    f"--good {commit[:12]} {what} ({judged.reason}). Name an older commit that passes, or one that can "
                    "be tested."
                )
        there = set.intersection(*(set(self._state.verdicts[commit].tests) for commit in good))
        if tests := tuple(test for test in self._chosen.tests if test in there):  # others are younger than a good end
            self._chosen = replace(self._chosen, tests=tests, every=True)
        while True:
            found = self._narrow(bad, good)
            for commit in found.good:
                if commit not in self._state.again:  # a flaky failure may have missed the commit on which all rests
                    self._state.again.add(commit)
                    self._judge(commit, self._chosen.repeat + _AGAIN)
            wrong = contradicted(found, self._state.verdicts)
            if wrong is None:
                return found
            if wrong in good:
                why = self._state.verdicts[wrong].reason
                raise GpuserveError(
                    f"--good {wrong[:12]} failed when it was tested again ({why}): the failure is older. Name an older "
                    "good commit, and raise --repeat."
                )
            self._say(f"{wrong[:12]} failed when it was tested again: it is bad, and the search goes on before it.")
            bad = wrong
            self._chosen = replace(self._chosen, repeat=self._chosen.repeat + _AGAIN)
            for commit in [c for c, judged in self._state.verdicts.items() if judged.code == GOOD and c not in good]:
                if self._git.is_ancestor(wrong, commit):
                    del self._state.verdicts[commit]  # it holds a bad commit, so it was missed as well

    def _narrow(self, bad: str, good: list[str]) -> Range:
        """Test commits until no test would make the range smaller."""
        while True:
            known = [c for c, judged in self._state.verdicts.items() if judged.code == GOOD]
            candidates, parents = self._git.candidates(bad, [*good, *known])
            older = [
                c for c in candidates if c != bad and c in self._state.verdicts and self._state.verdicts[c].code == BAD
            ]
            if older:
                bad = older[-1]
                continue
            skipped = [
                c for c in candidates if c in self._state.verdicts and self._state.verdicts[c].code not in (GOOD, BAD)
            ]
            found = narrowed(candidates, bad, parents, skipped)
            commit = next_commit(found, parents)
            if commit is None:
                return found
            self._say(f"{len(found.candidates)} candidates; testing {commit[:12]}")
            self._judge(commit)

    def _bad_end(self, commit: str) -> None:
        """The bad end must fail. How it fails is what is sought from here on, and how often decides on repeats."""
        known = self._state.verdicts.get(commit)
        if known is not None and known.code == BAD:
            self._seek(known)
            return
        self._state.checkout(commit)
        failed: list[Judged] = []
        runs = 0
        once = replace(self._chosen, repeat=1, tests=())
        least = _ENDS if self._automatic else 1
        while runs < least or (not failed and runs < max(least, self._chosen.repeat) + _PATIENCE):
            judged = self._tested(once)
            runs += 1
            if judged.code == BROKEN:
                raise _BrokenError(judged.reason)
            if judged.code == BAD:
                failed.append(judged)
                self._seek(judged)
                once = replace(self._chosen, repeat=1, tests=())
            elif judged.code != GOOD:
                break
        if not failed:
            what = "passes" if judged.code == GOOD else "cannot be tested"
            raise GpuserveError(
                f"--bad {commit[:12]} {what} ({judged.reason}; {runs} runs), so there is nothing to bisect. "
                + (
                    "Is the test the right one? A failure that shows rarely needs --repro-rate."
                    if judged.code == GOOD
                    else "Name a bad commit that can be tested."
                )
            )
        if self._automatic:
            self._chosen = replace(self._chosen, repeat=repeat_for(len(failed), runs, self._sure))
            self._say(
                f"The bad end failed in {len(failed)} of {runs} runs: a commit is good after "
                f"{self._chosen.repeat} good run{'s' if self._chosen.repeat > 1 else ''}."
            )
        self._keep(commit, replace(failed[-1], tests=self._chosen.tests))

    def _seek(self, judged: Judged) -> None:
        """This failure, and that the tests which failed so pass where a commit is good."""
        tests = tuple(dict.fromkeys((*self._chosen.tests, *judged.tests)))
        self._chosen = replace(self._chosen, target=self._chosen.target or judged.signature, tests=tests)

    def _judged(self, commit: str) -> Judged:
        return self._state.verdicts.get(commit) or self._judge(commit)

    def _judge(self, commit: str, repeat: int | None = None) -> Judged:
        self._state.checkout(commit)
        judged = self._tested(replace(self._chosen, repeat=repeat or self._chosen.repeat))
        if judged.code == BROKEN:
            raise _BrokenError(judged.reason)
        self._keep(commit, judged)
        return judged

    def _tested(self, chosen: Settings) -> Judged:
        """What HEAD is.

        Raises:
            GpuserveError: what ran was no state of the project.
        """
        judged = judge(chosen, self._say, cwd=self._git.here, started=self._state.started)
        if judged.code in (GOOD, BAD) and (moved := self._git.submodules()):
            raise GpuserveError(f"what was tested had {moved} has to be the --build, or part of it.")
        return judged

    def _keep(self, commit: str, judged: Judged) -> None:
        """Remember a verdict, on disk too. A commit that failed once stays bad."""
        known = self._state.verdicts.get(commit)
        if known is None or known.code != BAD:
            self._state.verdicts[commit] = judged
        self._state.repeat = self._chosen.repeat
        self._state.save()


def _say(line: str) -> None:
    print(line, flush=True)
