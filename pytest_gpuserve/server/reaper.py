"""What dead sessions left, freed: processes, files in /dev/shm, lease files, old logs. Only what is proved to be ours.

Ports need nothing: the kernel frees them with their holders. What there is to free: leftovers.py.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import procfs
from ..errors import GpuserveError
from ..text import one_line
from . import cgroup
from . import dead_sessions as dead
from .asking import ask_tree
from .control import end_request
from .leftovers import (
    Leftover,
    Seen,
    carried,
    find_leftovers,
    in_our_namespace,
    look,
    of_session,
    present,
    with_processes,
)
from .paths import existing_state
from .record import COOKIE

__all__ = ["COOKIE", "Leftover", "Seen", "Swept", "find_leftovers", "free", "in_our_namespace", "look"]
__all__ += ["sweep_dead_sessions"]


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did.

    Attributes:
        ended: processes that are gone now. left: those that the kernel, or the limit, did not let die.
        spared: daemons that others use.
        unlinked: names in /dev/shm. kept: those that stay, with the reason.
        waiting: servers that their supervisors are still ending.
        removed: directories of old sessions.
        problems: what could not be done, one sentence each. complete: the time was enough.
    """

    ended: tuple[Seen, ...] = ()
    left: tuple[Seen, ...] = ()
    spared: tuple[Seen, ...] = ()
    unlinked: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    removed: int = 0
    problems: tuple[str, ...] = ()
    complete: bool = True

    @property
    def text(self) -> str:
        """One paragraph for a person, escaped; "" when there is nothing to tell (old logs are nothing to tell)."""
        parts = []
        if self.ended:
            parts.append(f"Ended what dead sessions left: {_some(self.ended)}")
        if self.unlinked:
            parts.append(f"Unlinked in /dev/shm: {_some(self.unlinked)}")
        if self.left:
            parts.append(f"Could not end {_some(self.left)}")
        if self.spared:
            parts.append(
                f"Spared, since others may use them (where nobody does, end them by pid): {_some(self.spared)}"
            )
        if self.kept:
            parts.append(f"Kept {_some(self.kept)}")
        if not self.complete:
            parts.append("Sweeping up after dead sessions was not done within its limit")
        parts += [one_line(problem) for problem in self.problems]
        return f"{'. '.join(parts)}." if parts else ""


def sweep_dead_sessions(limit: float = 10.0) -> Swept:
    """Free what this user's dead sessions left. To be called before the first server of a session; never raises.

    Costs some milliseconds when there is nothing to free, and at most about ``limit`` seconds: what is not done then
    is the next sweep's.
    """
    deadline = time.monotonic() + limit
    try:
        if (root := existing_state()) is None:
            return _sweep_leases(Swept())
        sessions, todo = dead.look(root)
        if not todo and not any(dead.outdated(session) for session in sessions):
            return _sweep_leases(Swept())
        with dead.alone(root, deadline) as alone:
            if not alone:
                return Swept(problems=("Another session is still sweeping up after dead ones",))
            sessions, todo = dead.look(root)
            leftovers = [found for session in todo for found in of_session(session)]
            swept = free(leftovers, limit=max(0.1, deadline - time.monotonic()))
            if not swept.left and swept.complete:
                for session in todo:
                    if _finished(session):
                        dead.clear(session)
                        dead.mark(session)
            removed = dead.remove(sessions, deadline)
        return _sweep_leases(replace(swept, removed=removed))
    except GpuserveError as error:  # no server will start there either, and says so again
        return Swept(problems=(str(error).removesuffix("."),))
    except Exception as error:  # whatever it is: a sweep must not cost anybody a test
        return Swept(problems=(f"Sweeping up after dead sessions failed ({type(error).__name__}: {error})",))


def free(leftovers: Sequence[Leftover], *, grace: float = 0.0, limit: float = 10.0) -> Swept:
    """End the processes and unlink the files of those leftovers that wait for nobody.

    SIGTERM, SIGKILL after ``grace`` seconds, resource trackers last; daemons that others use are spared.
    """
    deadline = time.monotonic() + limit
    waiting = tuple(f"{found.name}: {found.waits}" for found in leftovers if found.waits)
    problems = tuple(f"{found.name}: {found.problem}" for found in leftovers if found.problem)
    todo = [found for found in leftovers if not found.waits and not found.problem]
    if not todo:
        return Swept(waiting=waiting, problems=problems)
    carriers = carried(deadline)
    todo = [with_processes(found, carriers) for found in todo]
    requests = [end_request(found.cookie, grace, found.group) for found in todo if found.processes]
    if files := {inode: name for found in todo for inode, name in (found.files or {}).items()}:
        requests.append({"do": "clean", "files": files})
    words, complete = ask_tree(requests, max(0.1, deadline - time.monotonic()))
    for found in todo:
        cgroup.remove(found.group)
    seen = {process.id: process for found in todo for process in found.processes}
    alive = {id for id in seen if procfs.same(id)}
    shared = {pid for word, *rest in words if word == "shared" for pid in rest}
    spared = [one for found in todo for one in found.spared] + [seen[id] for id in alive if id.pid in shared]
    there = present()
    unknown = {rest[1] for word, *rest in words if word == "shm" and rest[0] in there and str(rest[0]) not in files}
    return Swept(
        ended=tuple(process for id, process in seen.items() if id not in alive),
        left=tuple(process for id, process in seen.items() if id in alive and id.pid not in shared),
        spared=tuple({one.id: one for one in spared if procfs.same(one.id)}.values()),
        unlinked=tuple(str(rest[0]) for word, *rest in words if word == "unlinked"),
        kept=(
            *(f"/dev/shm/{rest[0]} ({rest[1]})" for word, *rest in words if word == "kept"),
            *(f"/dev/shm/{name} (no supervisor noted whose it is)" for name in sorted(unknown)),
        ),
        waiting=waiting,
        problems=problems,
        complete=complete,
    )


def _sweep_leases(swept: Swept) -> Swept:
    """Remove lease files that no lock holds; their GPUs are free without that. What is no file there is told."""
    from . import lease_files

    root = Path(os.environ.get(lease_files.VARIABLE) or lease_files.DEFAULT)
    with contextlib.suppress(OSError, GpuserveError):
        if stat.S_ISDIR(root.lstat().st_mode):
            lease_files.sweep(found := lease_files.directory())
            return replace(swept, problems=(*swept.problems, *lease_files.strange(found)))
    return swept


def _finished(session: dead.Session) -> bool:
    """Nothing is left and nothing can come, or (files that somebody holds, a record that nobody can read) it is not
    worth another try."""
    found = list(of_session(session))
    if any(leftover.waits or not leftover.settled for leftover in found):
        return False
    tried = any(leftover.files or leftover.problem for leftover in found)
    return not tried or time.time() - dead.changed(session.path) > dead.KEEP


def _some(things: Sequence[object]) -> str:
    shown = ", ".join(one_line(str(thing), 160) for thing in things[:5])
    return f"{shown} and {len(things) - 5} more" if len(things) > 5 else shown
