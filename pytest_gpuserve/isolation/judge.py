"""What runs of pytest say of a commit, as ``git bisect run`` must be told. Pure.

``git bisect run`` reads 0 as good, 125 as "cannot be tested", 1 to 127 as bad and 128 to 255 as "stop". pytest's own
codes do not fit: 5 (no test), 4 (usage), 3 (internal error) and 2 (interrupted) would be bad, and a run in which every
test was skipped, 0, would be good. So good needs a test that passed, and bad a test that failed as it should.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..shape import Maybe, checked
from ..vocabulary import COLLECTION, LOST_PROCESS
from .signature import ENVIRONMENT, Signature

GOOD, BAD, SKIP, BROKEN = 0, 1, 125, 128
"""Exit codes. BROKEN: going on makes no sense: this machine, or the command, can test no commit."""

_REPORT = {
    "nodeid": str,
    "outcome": str,
    "ours": bool | None,
    "roots": Maybe([str]),
    **dict.fromkeys(("reason", "error", "verdict", "phase", "incident"), str | None),
}

_HOST = re.compile(
    r"has no GPU that|needs \d+ GPU|excluded on sm|CUDA driver version is insufficient|no CUDA-capable device|"
    r"Xid (48|62|63|64|74|79|92|94|95|119|120|140)\b|fallen off the bus|GPU is lost"
)
"""In a reason: this machine cannot test any commit."""

_FULL = re.compile(r"OSError: \[Errno (28|122)\]")
"""So begins the reason of a test for which there was no space left, or no quota: the machine's trouble."""


@dataclass(frozen=True, slots=True)
class Report:
    """One test, as plugin/results.py tells it.

    Attributes:
        outcome: passed, failed, skipped or error; a test that failed in set-up, teardown or an attempt before its last
            failed; one that was not called is no passed one.
        ours: it was skipped by us, not by the project.
        reason: why it was skipped or how it failed, one line of foreign text.
        error: class of the exception.
    """

    nodeid: str
    outcome: str
    ours: bool = False
    reason: str = ""
    error: str | None = None
    verdict: str | None = None
    phase: str | None = None
    roots: tuple[str, ...] = ()
    incident: str | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Report:
        """Raises ValueError for what plugin/results.py did not write."""
        checked(raw, _REPORT)
        return cls(
            nodeid=raw["nodeid"],
            outcome=raw["outcome"],
            ours=bool(raw.get("ours")),
            reason=raw.get("reason") or "",
            error=raw.get("error"),
            verdict=raw.get("verdict") or None,
            phase=raw.get("phase") or None,
            roots=tuple(raw.get("roots") or ()),
            incident=raw.get("incident") or None,
        )

    @property
    def signature(self) -> Signature:
        """Of a failure: the server's, else the machine's where its disk is full, else the exception."""
        if self.verdict:
            return Signature(self.verdict, self.phase, frozenset(self.roots))
        kind = "infra" if _FULL.match(self.reason) else "test"
        return Signature(kind, None, frozenset({self.error or "failed"}))


@dataclass(frozen=True, slots=True)
class Session:
    """One run of pytest. ``code``: as of Popen.returncode; ``reports`` None: our plugin did not report; ``whole``: it
    came to its end, and was not cut short by pytest.exit or os._exit, which may give any exit code."""

    code: int
    reports: tuple[Report, ...] | None
    whole: bool = True
    timed_out: bool = False

    @property
    def failed(self) -> list[Report]:
        return [report for report in self.reports or () if report.outcome == "failed"]

    @property
    def passed(self) -> list[Report]:
        return [report for report in self.reports or () if report.outcome == "passed"]


@dataclass(frozen=True, slots=True)
class Judged:
    """What to tell git. ``signature``: of the failure, where the commit is bad; ``tests``: node ids that failed
    so; of a good one, those of the sought tests that passed."""

    code: int
    reason: str
    signature: Signature | None = None
    tests: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        return {GOOD: "good", BAD: "bad", SKIP: "skip"}.get(self.code, "abort")


def judge_session(
    session: Session, target: Signature | None, tests: Sequence[str] = (), *, every: bool = False
) -> Judged:
    """One run. ``target``: the failure that is sought; None: any failure of a test that is not the machine's.
    ``tests``: those that failed so elsewhere; without them no run is good, and of others only a server's failure is
    theirs, since the class of an exception tells nothing from another. ``every``: each of them must have passed, not
    one alone: all of them are there elsewhere."""
    if session.reports is None:
        if session.code in (0, 1, 5):
            return Judged(
                SKIP if tests else BROKEN,  # elsewhere it was reported
                f"pytest ended with exit code {session.code}, and pytest-gpuserve did not report any test: it is not "
                "installed for this pytest, or switched off (-p no:gpuserve), or a launcher hides the variable "
                "GPUSERVE_RESULTS from it",
            )
        return Judged(SKIP, _code_text(session))
    failed = session.failed
    sought = [r for r in failed if _sought(r, target) and (r.verdict or not tests or r.nodeid in tests)]
    if sought:
        first = sought[0]
        return Judged(BAD, f"{first.nodeid}: {first.signature}{_short(first.reason)}", first.signature, _alike(sought))
    hosts = [r for r in session.reports if r.outcome != "passed" and (r.ours or r.verdict) and _HOST.search(r.reason)]
    if hosts:
        return Judged(BROKEN, f"this machine cannot test it: {hosts[0].nodeid}:{_short(hosts[0].reason)}")
    if failed:
        first = failed[0]
        what = "trouble of the machine" if first.signature.verdict in ENVIRONMENT else "another failure"
        return Judged(SKIP, f"{what}: {first.nodeid}: {first.signature}{_short(first.reason)}")
    lost = [r for r in session.reports if r.error == COLLECTION]
    if lost:
        return Judged(SKIP, f"{lost[0].nodeid or 'a test module'} could not be collected:{_short(lost[0].reason)}")
    died = [r for r in session.reports if r.error == LOST_PROCESS]
    if died:
        return Judged(SKIP, f"{died[0].nodeid} did not end, its process did:{_short(died[0].reason)}")
    if session.timed_out or session.code not in (0, 1, 5):
        return Judged(SKIP, _code_text(session))
    if not session.whole:
        return Judged(SKIP, f"{_code_text(session)} before its session was over: not every test had its turn")
    ours = [r for r in session.reports if r.outcome == "skipped" and r.ours]
    if ours:
        return Judged(SKIP, f"{ours[0].nodeid} was skipped by us:{_short(ours[0].reason)}")
    if not session.passed:
        count = len(session.reports)
        return Judged(SKIP, "no test was selected" if not count else f"no test passed: all {count} were skipped")
    if session.code != 0:
        return Judged(SKIP, f"{_code_text(session)}, and no test failed (an error in collection?)")
    if tests:
        silent = [r for r in session.reports if r.nodeid in tests and r.outcome != "passed"]
        if silent:
            what = f"{silent[0].nodeid}, which is sought, was skipped"
            return Judged(SKIP, f"{what}, so it tells nothing:{_short(silent[0].reason)}")
    passed = {r.nodeid for r in session.passed}
    missing = [test for test in tests if test not in passed]
    if missing and (every or len(missing) == len(tests)):
        return Judged(SKIP, f"{missing[0]}, which is sought, was not run")
    there = tuple(test for test in tests if test in passed)
    return Judged(GOOD, f"{len(passed)} passed{_skipped(session)}", tests=there)


def decided(results: Sequence[Judged], repeat: int) -> Judged | None:
    """What several runs of one commit say; None: run again.

    One failure proves that the commit is bad. Good needs ``repeat`` good runs; of runs that say nothing, half as many
    again are forgiven.
    """
    if not results:
        return None
    last = results[-1]
    if last.code in (BAD, BROKEN):
        return last
    good = [one for one in results if one.code == GOOD]
    if len(good) >= repeat:
        last = good[-1]
        return last if repeat == 1 else replace(last, reason=f"{last.reason} in {len(good)} of {len(good)} runs")
    lost = len(results) - len(good)
    return last if lost > (repeat - 1) // 2 else None


def repeats(rate: float, miss: float) -> int:
    """Good runs after which a failure that shows in ``rate`` of them was missed with probability ``miss`` at most."""
    if not 0 < rate <= 1 or not 0 < miss < 1:
        raise ValueError("rate must be above 0 and at most 1, miss between 0 and 1")
    return 1 if rate == 1 else max(1, math.ceil(math.log(miss) / math.log(1 - rate) - 1e-9))


def confidence(rate: float, runs: int) -> float:
    """Probability that a commit is good which passed ``runs`` times, if a bad one fails in ``rate`` of the runs and
    half of the commits are bad."""
    miss = (1 - rate) ** runs
    return 1 / (1 + miss)


def _sought(report: Report, target: Signature | None) -> bool:
    if target is None:
        return report.signature.verdict not in ENVIRONMENT
    return report.signature.same(target)


def _alike(failed: Sequence[Report]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r.nodeid for r in failed if r.signature.same(failed[0].signature)))


def _code_text(session: Session) -> str:
    if session.timed_out:
        return "pytest did not end within its limit"
    if session.code < 0:
        return f"pytest was killed by signal {-session.code}"
    meaning = {2: "interrupted", 3: "internal error", 4: "wrong usage", 5: "no test selected"}.get(session.code)
    return f"pytest ended with exit code {session.code}{f' ({meaning})' if meaning else ''}"


def _skipped(session: Session) -> str:
    count = len({r.nodeid for r in session.reports or () if r.outcome == "skipped"})
    return f", {count} skipped" if count else ""


def _short(reason: str) -> str:
    line = reason.strip().splitlines()[0] if reason.strip() else ""
    return f" {line[:200]}" if line else ""
