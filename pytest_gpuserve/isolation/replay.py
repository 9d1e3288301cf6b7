"""A search answered from launches that were made: to resume it, to look ahead, to end it early. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .search import Finding, Outcome, Question, Search

_UNLIKELY = 0.02
"""Questions that follow with less than this probability are not worth a launch before they are asked."""


def replay(run: Search, launches: Mapping[frozenset[int], Sequence[Outcome]]) -> Question | Finding:
    """Answer the questions of a fresh ``run`` from ``launches`` (outcomes in order, by deltas) as long as they last.

    Returns the first question that they do not answer, or the finding.
    """
    used = dict.fromkeys(launches, 0)
    try:
        question = next(run)
        while (taken := used.get(question.deltas, 0)) < len(launches.get(question.deltas, ())):
            used[question.deltas] = taken + 1
            question = run.send(launches[question.deltas][taken])
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    return question


def conclude_now(run: Search, launches: Mapping[frozenset[int], Sequence[Outcome]]) -> Finding:
    """What is known after ``launches``, when no further one is wanted."""
    question = replay(run, launches)
    if isinstance(question, Finding):
        return question
    try:
        run.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("a search asked on after its end")


def ahead(
    make: Callable[[], Search], launches: Mapping[frozenset[int], Sequence[Outcome]], width: int
) -> list[Question]:
    """Up to ``width`` launches that can run at the same time: the next question, then those that will follow most
    likely, whatever the answers are. Empty when the search is over."""
    found: list[Question] = []
    worlds = [(1.0, {key: list(outcomes) for key, outcomes in launches.items()})]
    while worlds and len(found) < width:
        worlds.sort(key=lambda world: -world[0])
        chance, answers = worlds.pop(0)
        question = replay(make(), answers)
        if not isinstance(question, Question):
            continue
        if sum(1 for known in found if known.deltas == question.deltas) <= len(answers.get(question.deltas, ())) - len(
            launches.get(question.deltas, ())
        ):
            found.append(question)
        outcomes: tuple[tuple[Outcome, float], ...] = (("fail", question.belief), ("pass", 1 - question.belief))
        for outcome, share in outcomes:
            if chance * share > _UNLIKELY:
                worlds.append(
                    (chance * share, {**answers, question.deltas: [*answers.get(question.deltas, ()), outcome]})
                )
    return found
