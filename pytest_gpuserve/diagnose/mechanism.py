"""What holds a process up, from witnesses that every program has: CPU, the kernel, wake-ups, the GIL. Pure.

The stack says where it is; this says how it is stuck there. What no witness tells is not said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .conduct import STILL
from .kernel import kernel_wait
from .merge import Member
from .signatures import Signature

Kind = Literal["spin", "gil", "poll", "sleep", "pipe", "futex", "build", "reads"]

BUSY = 0.5
"""Cores: a process that uses more between two rounds is busy."""

READS = 1_000_000
"""Bytes per second from storage that count as loading."""

POLLS = 2.5
"""Wake-ups a second, beside those of the dumper: a loop that looks again and again."""

_NO_STORAGE = ("socket", "pipe", "child", "poll")
"""Places in the kernel where nobody waits for a file's contents."""

_STARVED = 0.05
"""Cores that are a spin, too, when the process wanted a CPU in every round: the machine has too few."""


@dataclass(frozen=True, slots=True)
class Mechanism:
    """``verb``: what it does, to follow a rank; ``seen``: the witnesses, to follow the place; ``advice``: a sentence
    with ``{who}`` for the rank."""

    kind: Kind
    verb: str
    seen: str
    advice: str


def mechanism(member: Member) -> Mechanism | None:
    """How a process that waits for no peer is held up, or what it works at; None where no witness says more than its
    stack. A single round tells little: what moves takes two."""
    if member.condition or member.kind in ("waits", "idle"):
        return None
    seen = member.conduct
    place = kernel_wait(member.facts).place
    if seen.child:
        return Mechanism(
            "build",
            "has a compiler at work",
            f"{seen.child} below it uses CPU",
            "Let {who} finish its build; keep the caches of the JIT compilers between runs, or build before the test.",
        )
    if (member.read or 0) > READS:
        return Mechanism(
            "reads",
            "reads files",
            f"{(member.read or 0) / 1e6:.0f} MB/s from storage",
            "{who} still reads: put the files on a local disk, or read them once before the test.",
        )
    if not seen.stays:
        return None
    if spins(member):
        return _spin(member)
    idle = (member.cpu or 0.0) <= STILL and not seen.running
    if seen.gil == seen.rounds and idle and place != "lock":
        how = {"sleep": ", and the thread sleeps", "futex": ", and the thread waits in a futex"}.get(place, "")
        return Mechanism(
            "gil",
            "holds the GIL in a C call that does not return",
            f"it owned the GIL in {seen.rounds} of {seen.rounds} looks and used no CPU{how}",
            "No other thread and no signal handler of {who} can run until that C call returns: it should release the "
            "GIL. Its C frames say what it waits for (stacks/*.native.json).",
        )
    if place == "sleep" and (seen.wakes or 0.0) > POLLS:
        return Mechanism(
            "poll",
            "polls for something that does not come",
            f"it sleeps and looks again, {seen.wakes:.0f} times a second",
            "Find out what the loop of {who} looks for: a file or a lock that somebody who died left behind, or a "
            "flag that nobody sets.",
        )
    if place == "sleep" and seen.wakes is not None:
        return Mechanism(
            "sleep",
            "sleeps",
            f"one sleep call that did not end in {seen.rounds} looks",
            "Find out what {who} waits for in that sleep: a device synchronisation may sleep so.",
        )
    if place == "pipe" and "read" in str(member.facts.get("wchan") or member.facts.get("syscall")):
        return Mechanism(
            "pipe",
            "reads from a pipe to which nobody writes",
            f"it was empty in {seen.rounds} of {seen.rounds} looks",
            "Find out who should be at the other end of the pipe that {who} reads: it is dead, or waits itself.",
        )
    if place == "futex" and idle:
        return Mechanism(
            "futex",
            "waits for a lock or an event of another thread or process that does not come",
            "asleep in futex",
            "Find out who should give the lock, or set the event, for which {who} waits: its other threads, or a "
            "process that shares memory with it.",
        )
    return None


def spins(member: Member) -> bool:
    """It stays in one place and burns a CPU there, or wants to, and reads nothing."""
    seen, used = member.conduct, member.cpu or 0.0
    if member.condition or not seen.stays or seen.child or (member.read or 0) > READS:
        return False
    return used > BUSY or (used > _STARVED and seen.running == seen.rounds)


def _spin(member: Member) -> Mechanism:
    seen = member.conduct
    if seen.gil == seen.rounds:
        inside, where = ", with the GIL", "py-spy top -p PID"
    elif seen.gil == 0 and member.dumper.startswith("py-spy"):
        inside, where = ", outside Python", "stacks/*.native.json, or perf top -p PID"
    else:
        inside, where = "", "stacks/*.native.json, or py-spy top -p PID"
    return Mechanism(
        "spin",
        "runs without end",
        f"in the same place in {seen.rounds} of {seen.rounds} looks, {100 * (member.cpu or 0.0):.0f} % of a core"
        + inside,
        f"Look for the loop in which {{who}} burns CPU ({where}).",
    )


def contradicted(signature: Signature, member: Member) -> bool:
    """A weak signature says what a call further out is for. Work that its layer stands for moves something; a process
    that only sleeps, waits or spins further in does other things than that, and so does one that the kernel keeps
    waiting for a lock, or for others where storage is said to be at work."""
    if not signature.weak or signature.kind != "cause":
        return False
    found = mechanism(member)
    if found is None:
        where = kernel_wait(member.facts).place if member.conduct.stays and not member.condition else ""
        return where == "lock" or (signature.layer == "storage" and where in _NO_STORAGE)
    if found.kind in ("build", "reads"):
        return signature.layer == "storage" and found.kind == "build"
    return found.kind != "spin" or signature.layer == "storage"
