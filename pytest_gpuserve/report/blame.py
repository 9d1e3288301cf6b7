"""Is the server to blame, so that it must be ended, or is it spared? Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..vocabulary import LOG_LIMIT

EXIT_KILL = 0
EXIT_SPARE = 75

LOG_OPTION = "its limit (--gpuserve-log-limit; gpuserve run --log-limit)"
_HEALTHY = frozenset({"ready", "slow", "degraded"})


@dataclass(frozen=True, slots=True)
class Witnesses:
    """What the decision rests on.

    Attributes:
        soft: nothing is ever killed (``--gpuserve-mode=soft``).
        broken: labels of ranks that are stopped, dead or missing.
        answers: a one-token completion, just sent, was answered; None: none could be sent.
        reachable: the health page answered; None: not asked.
        test_waits: the test's process waits for an answer from the server; None: cannot be seen.
        flood: its log repeats one line without end.
        verdict: what the evidence says.
    """

    soft: bool = False
    broken: tuple[str, ...] = ()
    answers: bool | None = None
    reachable: bool | None = None
    test_waits: bool | None = None
    flood: bool = False
    verdict: str = "undecided"


@dataclass(frozen=True, slots=True)
class Decision:
    """``kill``: end the server. ``why``: a clause for the report."""

    kill: bool
    why: str

    @property
    def exit_code(self) -> int:
        return EXIT_KILL if self.kill else EXIT_SPARE


def fate(kill: bool, reason: str) -> str:
    """The word before the reason of a decision: a server that had ended by itself was not spared either."""
    return "ended" if kill or reason == "exited" else "spared"


def decide(reason: str, seen: Witnesses) -> Decision:
    """Who pays. A start-up budget is a promise, kept whatever the server does; all else is about evidence."""
    if reason == "manual":
        return Decision(False, "somebody asked for the stacks")
    decision = _decide(reason, seen)
    if seen.soft and decision.kill:
        return Decision(False, f"mode=soft: it would have been ended ({decision.why})")
    return decision


def _decide(reason: str, seen: Witnesses) -> Decision:
    if reason == "startup_budget":
        return Decision(True, "it was not ready within its start-up budget")
    if reason == "exited":
        return Decision(False, "it had exited by itself")
    if reason == LOG_LIMIT:
        if seen.flood and not seen.answers:
            return Decision(True, f"it prints one line over and over, and its log reached {LOG_OPTION}")
        return Decision(False, f"its log reached {LOG_OPTION}; of what it prints from here on only the newest is kept")
    if seen.answers:
        return Decision(False, "it answers: a completion sent just now came back")
    if seen.broken:
        return Decision(True, f"{', '.join(seen.broken[:8])} stopped, dead or missing")
    if reason == "no_progress":
        if seen.verdict in _HEALTHY:
            return Decision(False, f"it moves ({seen.verdict})")
        return Decision(True, "nothing of it moved")
    if seen.answers is False:
        return Decision(True, "a completion sent just now was not answered")
    if not seen.reachable:
        return Decision(True, "it does not answer" if seen.reachable is False else "it could not be asked in time")
    if seen.test_waits is not False:
        return Decision(True, "the test waits for its answer")
    return Decision(False, "it answers its health page, and the test does not wait for it")
