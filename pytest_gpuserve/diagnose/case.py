"""The evidence laid out for judging: who is there, who is not, and what each one does."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from ..gpu import Gpu
from ..vocabulary import PHASES, Phase
from .evidence import NO_PROGRESS, Evidence, LockFact, Witness
from .kernel import KernelWait, kernel_wait
from .mechanism import BUSY, READS, mechanism, spins
from .merge import Member, Merged, format_ranks, label_order, merge
from .model import ClassKind, Frame, RankClass
from .phase_frames import Reached, places
from .roles import rank_in
from .signatures import last_name

__all__ = ["BUSY", "READS", "Case", "is_stdlib", "own_leaf", "role_words", "same_primitive"]

_ROLE_WORDS = {
    "api": "the front end",
    "engine_core": "the engine core",
    "detokenizer": "the detokenizer",
    "scheduler": "the scheduler",
    "worker": "the worker",
}


class Case:
    """One server's evidence, prepared. Cheap views only; the rules in verdict.py decide."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.merged: Merged = merge(evidence.rounds)

    @cached_property
    def suspected(self) -> bool:
        """The incident was taken because something did not end in time."""
        called = any(fact.verdict in ("hang", "stalled") for fact in self.evidence.log)
        return called or self.evidence.reason in NO_PROGRESS

    @cached_property
    def ranks(self) -> tuple[Member, ...]:
        """Processes that do the ranks' work: tagged ones, else the engine's single worker process."""
        ranks = tuple(m for m in self.merged.members if m.rank and m.role != "engine_core")
        ranks = ranks or self.merged.ranks
        if ranks:
            return ranks
        for role in ("worker", "scheduler", "engine_core"):
            found = tuple(m for m in self.merged.members if m.role == role)
            if found:
                return found
        known = [m for m in self.merged.members if m.role not in ("api", "detokenizer")]
        return tuple(known or self.merged.members)

    @cached_property
    def others(self) -> tuple[Member, ...]:
        """Front end, engine core, detokenizer: everything that is no rank."""
        ranks = {m.label for m in self.ranks}
        return tuple(m for m in self.merged.members if m.label not in ranks and m.role != "other")

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Ranks that should be there, or once were, and are not."""
        seen = {m.label for m in self.merged.members if m.condition != "dead"}
        wanted = set(self.evidence.expected)
        if self.evidence.foreign or not self.merged.members:
            return ()
        tagged = any(m.rank for m in self.merged.members)
        if not tagged and len(wanted) <= 1:
            return ()
        gone = wanted - seen
        unranked = sum(
            m.role in ("worker", "scheduler") and not m.rank and not m.condition for m in self.merged.members
        )
        if unranked >= len(gone):
            return ()  # vLLM's workers have no rank in their titles before their device is up
        nameless = sum(m.role == "other" and m.has_stack for m in self.merged.members)
        reached = {label for label in gone if self.evidence.phases.get(label) is not None}
        if nameless >= len(gone) and not reached:
            return ()  # titles are set late: an untitled Python process may be that rank
        return tuple(sorted(gone, key=label_order))

    @cached_property
    def unnamed(self) -> tuple[str, ...]:
        """Ranks that are in no title yet and not known to be gone, where fewer processes than ranks have one."""
        if self.evidence.foreign or len(self.ranks) >= len(self.evidence.expected):
            return ()
        seen = {m.label for m in self.merged.members} | set(self.dead)
        return tuple(sorted(set(self.evidence.expected) - seen, key=label_order))

    @property
    def unnamed_words(self) -> str:
        """``TP1 has not told its name yet (pid 14587 is probably it)``; "" where every rank is known."""
        if not self.unnamed:
            return ""
        ranks = {m.label for m in self.ranks}
        pids = [
            m.process.pid
            for m in self.merged.members
            if m.role in ("worker", "scheduler", "other") and m.label not in ranks and m.has_stack and not m.condition
        ]
        one = len(self.unnamed) == 1
        who = f"{format_ranks(self.unnamed)} {'has not told its name' if one else 'have not told their names'} yet"
        if not pids:
            return who
        sure = "is probably it" if one and len(pids) == 1 else "may be it" if one else "may be among them"
        return f"{who} (pid {', '.join(map(str, pids[:8]))} {sure})"

    @cached_property
    def undumped(self) -> tuple[str, ...]:
        """Ranks that somebody else's dump does not hold."""
        if not self.evidence.foreign:
            return ()
        return tuple(sorted(set(self.evidence.expected) - {m.label for m in self.merged.members}, key=label_order))

    @cached_property
    def dead(self) -> dict[str, int | None]:
        """Label of every rank or role process that is gone, with its exit code where known."""
        found: dict[str, int | None] = {}
        for member in self.merged.members:
            if member.condition == "dead" and member.role not in ("helper", "compiler", "other"):
                code = member.facts.get("exit")
                found[member.label] = code if isinstance(code, int) else None
        for gone in self.evidence.departures:
            counts = rank_in(gone.label) is not None or self.evidence.server_exit is not None  # a helper may end
            if counts and gone.label not in ("api", *found) and self.absent(gone.label):
                found[gone.label] = gone.code
        names = {m.label for m in self.merged.members} | set(self.evidence.expected) | set(_ROLE_WORDS)
        for label, code in self.evidence.exits.items():
            if label in names and self.absent(label):
                found[label] = code
        for label in self.missing:
            found.setdefault(label, self.evidence.exits.get(label))
        return dict(sorted(found.items(), key=lambda item: label_order(item[0])))

    def absent(self, label: str) -> bool:
        """No living process has this label."""
        member = self.merged.by_label.get(label)
        return member is None or member.condition == "dead"

    @cached_property
    def stopped(self) -> tuple[Member, ...]:
        return tuple(m for m in self.merged.members if m.condition == "stopped")

    @cached_property
    def groups(self) -> tuple[tuple[RankClass, ...], ...]:
        """The ranks' classes, one tuple a role and parallel group. Rules for dead and stopped ranks come first."""
        labels = {m.label for m in self.ranks}
        found: dict[tuple[str, str], list[RankClass]] = {}
        for entry in self.merged.classes:
            if set(entry.ranks) <= labels:
                found.setdefault((entry.role, entry.group), []).append(entry)
        return tuple(tuple(classes) for classes in found.values())

    def kind(self, entry: RankClass) -> ClassKind:
        """A class's kind, with the kernel's word where the stack has no signature."""
        if entry.kind == "other" and all(self.wait(m).place == "lock" for m in self.merged.of(entry)):
            return "cause"
        return entry.kind

    @staticmethod
    def wait(member: Member) -> KernelWait:
        return kernel_wait(member.facts)

    @cached_property
    def compilers(self) -> tuple[str, ...]:
        """Names of compilers below the server that used CPU between the rounds, or came up in between.

        In a single round: those that are there, pools of Python workers left out, which stay when they are idle.
        """
        rounds = [
            [d for d in dumps if d.role.role == "compiler" and d.state not in "ZX"] for dumps in self.evidence.rounds
        ]
        if not rounds:
            return ()
        first = {d.process: float(d.facts.get("cpu_seconds") or 0.0) for d in rounds[0]}
        found: dict[str, None] = {}
        for dump in rounds[-1]:
            name = (dump.title.split() or ["compiler"])[0].rpartition("/")[2]
            used = float(dump.facts.get("cpu_seconds") or 0.0) - first.get(dump.process, 0.0)
            if len(rounds) == 1:
                alive = not name.startswith("python") and dump.state not in "Tt"
            else:
                alive = used > 0.05 or (dump.process not in first and not name.startswith("python"))
            if alive:
                found[name] = None
        return tuple(found)

    @cached_property
    def spinners(self) -> tuple[str, ...]:
        """Ranks that burn CPU in one place while every other rank of their group waits in a collective. Of two ranks
        none: one may spin where it waits for the other."""
        return self._held_up_by(spins)

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """Ranks that read files or have a compiler at work while every other rank of their group waits for them."""

        def works(member: Member) -> bool:
            found = mechanism(member)
            return found is not None and found.kind in ("build", "reads")

        return self._held_up_by(works, least=2)

    def _held_up_by(self, does: Callable[[Member], bool], least: int = 3) -> tuple[str, ...]:
        found: list[str] = []
        for group in self.groups:
            members = [m for entry in group for m in self.merged.of(entry)]
            some = [m for m in members if m.kind not in ("waits", "idle") and not m.condition and does(m)]
            others = [m for m in members if m not in some]
            if len(members) >= least and others and all(m.kind == "waits" for m in others):
                found += [m.label for m in some]
        return tuple(found)

    @cached_property
    def phases(self) -> Mapping[str, Reached]:
        """Where each rank is, by the log and by its stack."""
        return places(self.evidence.phases, {n: member.frames for n, member in self.merged.by_label.items()})

    @cached_property
    def phase(self) -> Phase | None:
        """The phase of the rank that is least far."""
        place = self.phase_of(())
        return place.phase if place else None

    def phase_of(self, labels: Iterable[str]) -> Reached | None:
        """Where the given ranks are, else the least of all."""
        known = [self.phases[label] for label in labels if label in self.phases] or list(self.phases.values())
        return min(known, key=lambda place: (PHASES.index(place.phase), place.over)) if known else None

    @cached_property
    def serving(self) -> bool:
        return self.phase in ("ready", "serving") or self.evidence.answers is not None

    def lock_of(self, labels: Iterable[str]) -> LockFact | None:
        """The lock that these processes wait for."""
        wanted = set(labels)
        return next((lock for lock in self.evidence.locks if wanted & set(lock.waiters)), None)

    @cached_property
    def gpu_witness(self) -> Witness | None:
        """N-1 GPUs spin in a collective at low power, one is idle: its rank does not take part (nccl #2379,
        sglang #33549). Only where GPUs and ranks can be matched."""
        gpus: Sequence[Gpu] = self.evidence.gpus
        ranks = sorted((m.label for m in self.merged.ranks if m.group == ""), key=label_order)
        used = [gpu.utilisation for gpu in gpus]
        if len(gpus) < 2 or len(ranks) != len(gpus) or any(u is None for u in used):
            return None
        idle = [n for n, u in enumerate(used) if u is not None and u <= 5]
        busy = [n for n, u in enumerate(used) if u is not None and u >= 95]
        if len(idle) != 1 or len(busy) != len(gpus) - 1:
            return None
        return Witness(
            "NVML", f"{gpus[idle[0]].label} is idle while the other {len(busy)} are at 100 %", (ranks[idle[0]],), "nccl"
        )

    @cached_property
    def spinning(self) -> str | None:
        """Words for GPUs at full utilisation and little power: a kernel that spins, where tokens stand still."""
        spin = [
            gpu
            for gpu in self.evidence.gpus
            if (gpu.utilisation or 0) >= 95 and gpu.power is not None and gpu.power < _spin_power(gpu)
        ]
        if not spin or len(spin) < len(self.evidence.gpus):
            return None
        return f"{len(spin)} GPU(s) at 100 % and only {max(g.power or 0 for g in spin):.0f} W: a kernel spins"

    @cached_property
    def witnesses(self) -> tuple[Witness, ...]:
        gpu = self.gpu_witness
        return (*self.evidence.witnesses, *((gpu,) if gpu else ()))


def _spin_power(gpu: Gpu) -> float:
    """Watts below which full utilisation is a spin; boards differ, and a data-centre board idles at 70 W and more."""
    small = bool(gpu.memory_total) and (gpu.memory_total or 0) < 32 << 30
    return 60.0 if small else 220.0


_STDLIB = frozenset(sys.stdlib_module_names)


def is_stdlib(frame: Frame) -> bool:
    """True for frames of the standard library: two ranks in ``Condition.wait`` are not in the same place for that."""
    path = frame.file
    if path.startswith("<frozen"):
        return True
    if "site-packages" in path or "dist-packages" in path:
        return False
    if re.search(r"/lib/python3\.\d+/", path):
        return True
    return path.split("/")[0].removesuffix(".py") in _STDLIB and not path.startswith("/")


def own_leaf(member: Member) -> tuple[str, str] | None:
    """The leaf-most frame outside the standard library, as (function, file name)."""
    for frame in member.frames:
        if not frame.native and not is_stdlib(frame):
            return last_name(frame.name), frame.file.rpartition("/")[2]
    return None


def same_primitive(a: Sequence[Member], b: Sequence[Member]) -> bool:
    """Both wait in the same function, called from different places: different steps of one exchange."""
    leaves = {own_leaf(m) for m in (*a, *b)}
    waits = {kernel_wait(m.facts).place for m in (*a, *b)}
    return (
        len(leaves) == 1 and None not in leaves and len(waits) == 1 and not any(kernel_wait(m.facts).local for m in a)
    )


def role_words(label: str, roles: Mapping[str, str]) -> str:
    """``the engine core`` for a label that is a role."""
    return _ROLE_WORDS.get(roles.get(label, label), label)
