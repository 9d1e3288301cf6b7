"""Rules that need no comparison of stacks: who is gone, stopped, answering, moving, idle."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace

from .case import READS, Case
from .evidence import Departure
from .finding import Finding
from .merge import format_ranks
from .proc_facts import exit_words
from .roles import rank_in
from .rules_stacks import odd_ones
from .signatures import by_id

_BRIEF = 30.0
"""Seconds that are too short where the watcher's window is not known."""
_APART = 0.3
"""Seconds between two ends in which the second may have followed from the first; nearer ones are a tie."""
_TOLD = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, 0)
"""How a process ends that was asked to."""
_PARTS = ("engine_core", "scheduler", "worker", "detokenizer")
"""Processes that a server does not work without; ranks that are gone are told by Case.dead."""
_FATAL = ("oom", "unsupported_arch", "config", "port", "infra", "crash", "leak")


def exited(case: Case) -> Finding | None:
    """The server, or one of its ranks or roles, is gone."""
    evidence = case.evidence
    if evidence.server_exit is None and not case.dead:
        return None
    memory = evidence.memory
    fatal = _fatal(case)
    went = _went_first(case)
    dead: tuple[str, ...]
    if went is not None:
        dead = () if went.label == "api" else (went.label,)
    elif evidence.server_exit is not None and _unseen(case, {k for k, code in case.dead.items() if code is not None}):
        dead = ()
    else:
        dead = _first_to_die(case.dead)
        if len(dead) > 1 and not any(rank_in(m.label) and m.label not in case.dead for m in case.ranks):
            dead = ()  # all are gone in the same way: one took the others with it, or somebody ended them all
    killed = [label for label, code in case.dead.items() if code in (-9, 137)]
    oom = memory is not None and bool(memory.oom_kills) and (bool(killed) or evidence.server_exit in (-9, 137))
    order = _order_of_exits(case, went)
    if fatal:
        fatal = _with_the_first(case, fatal, went) if went and dead else fatal
        fatal = fatal if fatal.culprits or not dead else fatal.blaming(dead)
        return fatal.noting(*order) if went and went.label in fatal.culprits else fatal
    what = _went_words(case, went) if went and dead and len(_gone(case)) > 1 else _exits(case)
    if oom and memory is not None:
        return Finding(
            "oom",
            f"{what}: the kernel killed {memory.oom_kills} process(es) for memory",
            culprits=tuple(killed) or dead,
            advice="Give the job more memory, or load with fewer threads or without a second copy in shared memory.",
            facts=((f"oom_kill rose by {memory.oom_kills}", "cgroup and /proc/vmstat"),),
            confidence=0.95,
        )
    advice = ""
    if killed and not oom:
        advice = "SIGKILL came from outside (somebody, or the kernel where its log cannot be read)."
    known = all(code is not None for code in case.dead.values())
    waiting = [m for m in case.ranks if not m.condition and m.kind in ("waits", "other")]
    if dead and waiting and evidence.server_exit is None:
        what += (
            f"; {format_ranks(m.label for m in waiting)} still wait" + ("s" if len(waiting) == 1 else "") + " for it"
        )
    return Finding(
        "crash",
        what,
        culprits=dead,
        advice=advice,
        facts=order,
        confidence=0.95 if known or went else 0.8,
        layer="process",
        first=went.label if went and dead else "",
    )


def _went_first(case: Case) -> Departure | None:
    """Who had ended while all others were still there; None where nobody saw that, or where it ended as processes do
    that are told to, or not everybody's end was seen."""
    gone = _gone(case)
    if not gone or _unseen(case, set()):
        return None
    first, rest = gone[0], [d for d in gone[1:] if d.label != gone[0].label]
    if first.code in _TOLD or (first.code is None and not _fatal(case)):
        return None
    near = [d for d in rest if d.at - first.at < _APART]
    if near and first.label in (silent := {label for fact in case.evidence.log for label in fact.silent}):
        # somebody lost a peer before all were killed: of those that printed no error, who ended before the others
        near = [d for d in near if d.label in silent and d.at <= first.at]
    return None if near else first


def _unseen(case: Case, known: set[str]) -> bool:
    """Whether a rank is gone of whose end nobody knows more: it may have been the first."""
    seen = known | {d.label for d in case.evidence.departures}
    return any(rank_in(label) and case.absent(label) for label in {*case.dead, *case.evidence.expected} - seen)


def _gone(case: Case) -> list[Departure]:
    """Departures of those that are gone for good, the first one first."""
    gone = [d for d in case.evidence.departures if d.label in case.dead or d.label == "api"]
    return sorted(gone, key=lambda d: d.at)


def _order_of_exits(case: Case, first: Departure | None) -> tuple[tuple[str, str], ...]:
    if first is None:
        return ()
    later = [(d.at - first.at, d.label) for d in _gone(case) if d.label != first.label]
    went = f"{first.label} (pid {first.pid}) was the first to go ({exit_words(first.code)})"
    after = f"; {later[0][1]} went {later[0][0]:.1f} s later" if later else ""
    return ((went + after, "watcher"),)


def _with_the_first(case: Case, fatal: Finding, went: Departure) -> Finding:
    """The error in the log, and who was gone first: an error of somebody who lost a peer is a victim's."""
    if not any(fact.lost for fact in case.evidence.log):
        return fatal
    what = f"{_went_words(case, went)}; the error of a rank that lost it: {fatal.what}"
    how = "unknown" if went.code is None else "killed" if went.code in (-9, 137) else "ended"
    advice = _OF_A_DEATH[how].format(who=went.label)
    return replace(fatal, culprits=(went.label,), what=what, advice=advice, confidence=0.95, first=went.label)


_OF_A_DEATH = {
    "killed": "Find out who sent SIGKILL to {who}: the kernel for memory (dmesg, oom_kill), or somebody outside.",
    "unknown": "Find out how {who} ended (last lines, dmesg, oom_kill): it printed no error, and the others followed.",
    "ended": "Look at the last lines of {who}: it ended by itself and printed no error, and the others followed.",
}


def _went_words(case: Case, went: Departure) -> str:
    """``TP1 was gone first (killed by SIGKILL), 0.04 s before TP0,2-3``."""
    later = [d for d in _gone(case) if d.label != went.label and rank_in(d.label)]
    before = f", {later[0].at - went.at:.2f} s before {format_ranks(d.label for d in later)}" if later else ""
    return f"{went.label} was gone first ({exit_words(went.code)}){before}"


def _first_to_die(dead: Mapping[str, int | None]) -> tuple[str, ...]:
    """Of several that are gone, those that the others followed: a rank that is killed or crashes takes its peers with
    it, which end by themselves (an exit code), abort, or are told to end."""

    def order(code: int | None) -> int:
        if code is None or code in _TOLD:
            return 3
        return 2 if code > 0 else 1 if code == -signal.SIGABRT else 0

    first = min((order(code) for code in dead.values()), default=0)
    return tuple(label for label, code in dead.items() if order(code) == first)


def _exits(case: Case) -> str:
    parts = [f"{label} is gone ({exit_words(code)})" for label, code in case.dead.items()]
    if case.evidence.server_exit is not None:
        parts.insert(0, f"the server is gone ({exit_words(case.evidence.server_exit)})")
    return ", ".join(parts[:6]) + (f" and {len(parts) - 6} more" if len(parts) > 6 else "")


def _fatal(case: Case) -> Finding | None:
    facts = [fact for fact in case.evidence.log if fact.verdict in _FATAL]
    if not facts:
        return None
    fact = min(facts, key=lambda f: _FATAL.index(f.verdict or "crash") > _FATAL.index("crash"))
    known = {m.label for m in case.merged.ranks} | set(case.dead)
    known |= (
        set(case.evidence.expected) if case.evidence.server_exit is not None else set()
    )  # nobody is left to be seen
    culprits = (fact.rank,) if fact.rank and fact.rank in known else ()
    what = f"{fact.rank}: {fact.claim}" if fact.rank and fact.rank not in fact.claim else fact.claim
    return Finding(
        fact.verdict or "crash", what, culprits=culprits, facts=((fact.claim, fact.witness),), confidence=0.9
    )


def hidden_failure(case: Case) -> Finding | None:
    """An error in the log of a start while every process lives: one rank failed, the others wait for it in the next
    collective. A server that was handed to a test and of which nobody ended has outlived what it printed."""
    broke = any(d.label in _PARTS and d.code not in _TOLD for d in case.evidence.departures)
    outlived = case.evidence.ready and not broke
    return None if case.evidence.answers or outlived else _fatal(case)


def answering(case: Case) -> Finding | None:
    if not case.evidence.answers:
        return None
    test = _stuck(case)
    return Finding(
        "ready",
        f"the server answers: a completion sent just now came back{test}",
        confidence=0.95,
        facts=(("a completion sent just now came back", "HTTP"),),
    )


def resumed(case: Case) -> Finding | None:
    """Nothing moved when its stacks were asked for; since then it has given its answers."""
    evidence, progress = case.evidence, case.evidence.progress
    if evidence.reason != "no_progress" or evidence.answers is False or evidence.requests:
        return None
    if progress is None or progress.state != "idle":
        return None
    return Finding(
        "ready",
        "it answered while its stacks were taken: no request is in flight any more",
        confidence=0.8,
        facts=(("no request is in flight any more", "watcher"),),
    )


def _stuck(case: Case) -> str:
    """What a healthy server says of a test that did not end in time; one that only asked for a dump did nothing."""
    test, late = case.evidence.test, case.suspected or case.evidence.reason == "session_deadline"
    return f"; {test} is stuck in its own code, not in the server" if test and late else ""


def stopped(case: Case) -> Finding | None:
    """SIGSTOP outranks all stacks; a whole tree that is stopped was paused by somebody."""
    stopped = case.stopped
    if not stopped:
        return None
    labels = tuple(m.label for m in stopped)
    facts = tuple((f"{m.label} (pid {m.process.pid}) is in state T", "/proc/PID/stat") for m in stopped[:8])
    if len(stopped) == len(case.merged.members) and len(stopped) > 1:
        return Finding(
            "hang",
            "every process of the server is stopped (SIGSTOP or a debugger)",
            advice="Send SIGCONT.",
            facts=facts,
            confidence=0.9,
            layer="process",
        )
    advice = f"Send SIGCONT to pid {', '.join(str(m.process.pid) for m in stopped[:8])} to let it go on."
    return Finding("hang", "", culprits=labels, advice=advice, facts=facts, confidence=0.97, layer="process")


def flooding(case: Case) -> Finding | None:
    """It prints one line without end, so that nothing else comes of it: every other sign of life is that line."""
    line = case.evidence.flood
    if not line:
        return None
    return Finding(
        "hang",
        f"it prints one line over and over, more than a megabyte a second: {line!r}",
        advice="Look for the loop that prints it; the stacks show where it is.",
        facts=((f"the end of the log is this line alone: {line!r}", "log"),),
        confidence=0.9,
        layer="process",
    )


def spinning(case: Case) -> Finding | None:
    """A rank burns CPU in one place while all others wait for it, and nothing else moves: the rank is certain, and how
    certain the hang is, time tells."""
    progress = case.evidence.progress
    if not case.suspected or progress is None or not case.spinners or case.compilers or case.workers:
        return None
    if progress.state == "moving" and any(not sign.startswith("(") for sign in progress.moving):
        return None
    still = max(progress.still or 0.0, case.evidence.after or 0.0 if not progress.moving else 0.0)
    window = (progress.window or 2 * _BRIEF) / 2  # the watcher's has twice the time while only CPU moves
    culprits = case.spinners
    who = format_ranks(culprits)
    fact = (
        f"{who} {'use' if len(culprits) > 1 else 'uses'} CPU in one place, and nothing else moves",
        "/proc and py-spy",
    )
    if progress.state != "hung" and still < window:
        return Finding(
            "undecided",
            "",
            culprits=culprits,
            undecided=f"{still:.0f} s are too short to tell slow from hung, but all others wait for {who}",
            facts=(fact,),
            confidence=0.4,
        )
    return Finding("hang", "", culprits=culprits, facts=(fact,), confidence=0.6)


def moving(case: Case) -> Finding | None:
    """Something moves that a hang does not move."""
    progress = case.evidence.progress
    facts: list[tuple[str, str]] = []
    if case.compilers:
        facts.append((f"{', '.join(case.compilers[:4])} below the server used CPU", "/proc between two rounds"))
    loading = [m for m in case.ranks if (m.read or 0) > READS]
    if loading:
        rate = sum(m.read or 0 for m in loading) / 1e6
        facts.append((f"{format_ranks(m.label for m in loading)} read {rate:.0f} MB/s from storage", "/proc/PID/io"))
    seen = progress is not None and progress.state == "moving"
    if seen and progress is not None:
        what = ", ".join(progress.moving[:4]) or progress.last or "the server"
        facts.append((f"moved within the last samples: {what}", "watcher"))
    if not facts:
        return None
    if not seen and progress is not None and progress.state == "hung" and not case.compilers and not loading:
        return None
    if seen and case.serving and case.evidence.reason == "manual" and _all_idle(case):
        return None
    if len(facts) == 1 and seen and (brief := _too_short(case)):
        return brief
    return Finding(
        "slow",
        "",
        culprits=case.workers,
        facts=tuple(facts),
        confidence=0.9,
        advice=_progress_advice(case),
        slow=True,
    )


def _too_short(case: Case) -> Finding | None:
    """A test's time that was over before the watcher could call a hang, and nothing but CPU moved: a rank that spins
    and one that works look alike that early."""
    progress, after = case.evidence.progress, case.evidence.after
    if progress is None or after is None or not case.suspected or after >= (progress.window or _BRIEF):
        return None
    if any(not sign.startswith("(") for sign in progress.moving):
        return None
    odd = odd_ones(case) or tuple(m.label for m in case.ranks if len(case.ranks) == 2)
    differ = ""
    if len(odd) == 2 == len(case.ranks):
        differ = "; the two ranks are in different places" if any(len(group) > 1 for group in case.groups) else ""
    elif odd:
        differ = f"; {format_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from the other ranks"
    moved = ", ".join(sign.strip("()") for sign in progress.moving[:4])
    only = f"only {moved} moved" if moved else "nothing has moved of late"
    return Finding(
        "undecided",
        "",
        undecided=f"{after:.0f} s are too short to tell slow from hung ({only}){differ}",
        advice="With a longer time limit, or asked again while it goes on (gpuserve dump), it can be told.",
        confidence=0.4,
    )


def _progress_advice(case: Case) -> str:
    for entry in (c for group in case.groups for c in group):
        signature = by_id().get(entry.signature or "")
        if signature and signature.progressive and not (signature.weak and case.workers):
            return signature.advice
    return ""


def nothing_asked(case: Case) -> Finding | None:
    """Idle because nothing was asked is health."""
    evidence = case.evidence
    if evidence.answers is False or evidence.requests or evidence.reason in ("request_timeout", "no_progress"):
        return None
    if evidence.reason == "startup_budget" or not _all_idle(case):
        return None
    known = evidence.requests == 0
    test = _stuck(case) if known else ""
    return Finding(
        "ready",
        f"every process is idle and no request is in flight{test}" if known else "every process is idle",
        confidence=0.85 if known else 0.6,
    )


def _all_idle(case: Case) -> bool:
    entries = [c for group in case.groups for c in group]
    engine = [m for m in case.others if m.role == "engine_core"]
    return bool(entries) and all(c.kind == "idle" for c in entries) and all(m.kind == "idle" for m in engine)


def without_stacks(case: Case) -> Finding | None:
    """No stack at all: counters, GPUs and kernel states still say something (home-ops #13342)."""
    if any(m.has_stack for m in case.merged.members):
        return None
    progress = case.evidence.progress
    still = progress is not None and progress.state in ("hung", "suspect")
    if case.spinning and (still or case.suspected):
        return Finding(
            "hang",
            f"no stack could be taken, and the GPUs decide: {case.spinning}",
            facts=((case.spinning, "NVML"),),
            layer="gpu",
            confidence=0.7,
        )
    if still and case.suspected:
        return Finding("hang", "nothing moves; no stack could be taken", confidence=0.6)
    return Finding("undecided", "no stack could be taken", confidence=0.3)


def frozen_places(case: Case) -> Finding | None:
    """Nothing singles a rank out, yet the watcher, or a request that got no answer, says that nothing moves."""
    progress = case.evidence.progress
    frozen = (progress is not None and progress.state == "hung") or case.evidence.answers is False
    if not frozen and not case.suspected:
        return None
    return Finding(
        "hang" if frozen or not case.merged.moving else "undecided",
        "",
        confidence=0.5,
        undecided="the stacks name no rank: they form no majority",
    )
