"""Bisection over commits: how often to test each, when it is over, what it proved. Pure: git is cli/bisect.py's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .judge import BAD, GOOD, Judged, repeats


@dataclass(frozen=True, slots=True)
class Range:
    """Where the first bad commit is.

    Attributes:
        candidates: newest first; one commit of them is the first bad one.
        bad: the oldest commit that is known to be bad, one of the candidates.
        good: the newest commits that are known to be good (several beside a merge).
        skipped: candidates that could not be tested.
    """

    candidates: tuple[str, ...]
    bad: str
    good: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def culprit(self) -> str | None:
        """The first bad commit; None where skips leave several."""
        return self.bad if len(self.candidates) == 1 else None

    @property
    def untested(self) -> tuple[str, ...]:
        """Candidates whose test would narrow the range; none: it is as small as the skips allow."""
        return tuple(c for c in self.candidates if c != self.bad and c not in self.skipped)


def narrowed(
    candidates: Sequence[str], bad: str, parents: Mapping[str, Collection[str]], skipped: Collection[str]
) -> Range:
    """The range, from ``git rev-list bad --not good…`` (newest first) and the parents of each of these commits."""
    inside = set(candidates)
    edge = dict.fromkeys(parent for commit in candidates for parent in parents.get(commit, ()) if parent not in inside)
    return Range(tuple(candidates), bad, tuple(edge), tuple(c for c in candidates if c in skipped and c != bad))


def next_commit(range_: Range, parents: Mapping[str, Collection[str]]) -> str | None:
    """The untested candidate that halves the range best, as git chooses it: as many candidates among its ancestors
    as not. None: nothing is left to test. Commits that cannot be tested come in runs, so it keeps away from those."""
    inside = set(range_.candidates)
    sizes: dict[str, int] = {}
    for commit in range_.untested:
        seen, queue = {commit}, [commit]
        while queue:
            for parent in parents.get(queue.pop(), ()):
                if parent in inside and parent not in seen:
                    seen.add(parent)
                    queue.append(parent)
        sizes[commit] = len(seen)
    place = {commit: n for n, commit in enumerate(range_.candidates)}
    skipped = [place[commit] for commit in range_.skipped]

    def worth(commit: str) -> tuple[float, int]:
        near = min((abs(place[commit] - n) for n in skipped), default=len(place))
        return min(sizes[commit], len(place) - sizes[commit]) * (1 - 0.7**near), -place[commit]

    return max(range_.untested, key=worth, default=None)


def repeat_for(failed: int, runs: int, sure: float) -> int:
    """Good runs that a commit needs, where the bad end failed in ``failed`` of ``runs``; always failed: one, since both
    sides of the answer are tested again."""
    if failed >= runs:
        return 1
    return repeats((failed + 0.5) / (runs + 1), 1 - sure)


def summary(found: Range, verdicts: Mapping[str, Judged], subjects: Mapping[str, str]) -> list[str]:
    """The answer with the verdicts of both sides."""

    def line(commit: str) -> str:
        judged = verdicts.get(commit)
        said = f": {judged.word}, {judged.reason}" if judged else ""
        return f"{commit[:12]} {subjects.get(commit, '')}{said}"

    if found.culprit is not None:
        lines = [f"First bad commit: {found.culprit}"]
    else:
        lines = [
            f"The first bad commit is one of these {len(found.candidates)}; those in between cannot be tested, so "
            "there is no smaller range:"
        ]
    lines += [f"  bad side:  {line(found.bad)}"]
    lines += [f"  skipped:   {line(commit)}" for commit in found.candidates if commit in found.skipped]
    lines += [f"  good side: {line(commit)}" for commit in found.good]
    return lines


def contradicted(found: Range, verdicts: Mapping[str, Judged]) -> str | None:
    """A good neighbour that turned out bad when it was tested again; None: the answer stands."""
    return next((commit for commit in found.good if commit in verdicts and verdicts[commit].code == BAD), None)


def tally(verdicts: Mapping[str, Judged]) -> str:
    """``12 commits tested: 5 good, 4 bad, 3 skipped``."""
    words = [judged.word for judged in verdicts.values()]
    good, bad = words.count("good"), words.count("bad")
    return f"{len(words)} commits tested: {good} good, {bad} bad, {len(words) - good - bad} skipped"


__all__ = ["BAD", "GOOD", "Range", "contradicted", "narrowed", "next_commit", "repeat_for", "summary", "tally"]
