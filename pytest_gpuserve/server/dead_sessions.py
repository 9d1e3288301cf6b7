"""Directories of dead sessions: which they are, when they have been swept, when they go."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import foreign, procfs
from ..procfs import ProcessId
from .paths import MARKER, SCRATCH, SESSIONS, here

KEEP = 3 * 86400.0
"""Seconds that the directory of a dead session stays after nothing of it was left: its logs may still be wanted."""

KEEP_ELSEWHERE = 30 * 86400.0
"""The same, from the last change on, where pids tell nothing: another boot, container, or machine on one home."""

SWEPT = ".swept"
_NAME = re.compile(r"([1-9][0-9]*)-([0-9]+)-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Session:
    """A directory of a dead session. ``elsewhere``: pids tell nothing; ``swept``: since when nothing is left of it."""

    path: Path
    owner: ProcessId
    elsewhere: bool
    swept: float | None


def look(root: Path) -> tuple[list[Session], list[Session]]:
    """All dead sessions, and those of them that may have left something."""
    place, found = here(), list[Session]()
    for path, owner in _named(root):
        with contextlib.suppress(OSError, ValueError):
            if one := _session(path, owner, place):
                found.append(one)
    return found, [session for session in found if not session.elsewhere and session.swept is None]


def living(root: Path) -> Iterator[Path]:
    """Directories of sessions whose process lives, here."""
    place = here()
    for path, owner in _named(root):
        with contextlib.suppress(OSError, ValueError):
            if procfs.same(owner) and _marked(path) == place:
                yield path


def _named(root: Path) -> Iterator[tuple[Path, ProcessId]]:
    """Directories of this user that are named as sessions are, and the process in the name."""
    folder, entries = root / SESSIONS, list[os.DirEntry[str]]()
    with contextlib.suppress(OSError):
        entries = list(os.scandir(folder)) if own(folder.lstat(), stat.S_ISDIR) else []
    for entry in entries:
        name, ours = _NAME.fullmatch(entry.name), False
        with contextlib.suppress(OSError):
            ours = own(entry.stat(follow_symlinks=False), stat.S_ISDIR)
        if name is not None and ours:
            yield Path(entry.path), ProcessId(int(name[1]), int(name[2]))


def _marked(path: Path) -> object:
    """Where it was made, as its marker says; None where that is not ours.

    Raises:
        OSError, ValueError: it has none that can be read.
    """
    ours = own(os.lstat(path / MARKER), stat.S_ISREG)
    try:
        return json.loads(foreign.whole(path / MARKER, 1 << 16)) if ours else None
    except RecursionError:
        return None


def _session(path: Path, owner: ProcessId, place: Mapping[str, object]) -> Session | None:
    """None: it is no session of ours, or it lives."""
    with contextlib.suppress(FileNotFoundError):
        mark = os.lstat(path / SWEPT)
        return Session(path, owner, False, mark.st_mtime)
    if (made := _marked(path)) is None:
        return None
    elsewhere = made != place
    if not elsewhere and procfs.same(owner):
        return None
    return Session(path, owner, elsewhere, None)


def own(found: os.stat_result, kind: Callable[[int], bool]) -> bool:
    """Whether a file is of this kind (stat.S_ISDIR ...) and this user's."""
    return kind(found.st_mode) and found.st_uid == os.geteuid()


def mark(session: Session) -> None:
    """Note that nothing is left of it."""
    with contextlib.suppress(OSError):
        os.close(os.open(session.path / SWEPT, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def clear(session: Session) -> None:
    """Remove what is of no use without its process, never through a link."""
    import shutil

    with contextlib.suppress(OSError):
        for path in session.path.glob(f"{SCRATCH}*"):
            if own(path.lstat(), stat.S_ISDIR):
                shutil.rmtree(path, ignore_errors=True)


def outdated(session: Session) -> bool:
    """Whether nobody will want its logs any more."""
    now = time.time()
    if session.swept is not None:
        return now - session.swept > KEEP
    return session.elsewhere and now - changed(session.path) > KEEP_ELSEWHERE


def changed(path: Path) -> float:
    """When something in a session's directory, or directly in one of its servers', was changed last."""
    newest = 0.0
    for folder, folders, files in os.walk(path, followlinks=False):
        for name in ("", *files):
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(os.path.join(folder, name)).st_mtime)  # noqa: PTH118
        if Path(folder) != path:
            folders.clear()
    return newest


def remove(sessions: Sequence[Session], deadline: float) -> int:
    """Remove the directories of outdated sessions as far as the time goes, never through a link."""
    import shutil

    count = 0
    for session in sessions:
        if time.monotonic() > deadline:
            break
        with contextlib.suppress(OSError):
            if outdated(session) and own(os.lstat(session.path / MARKER), stat.S_ISREG):
                shutil.rmtree(session.path)
                count += 1
    return count


@contextlib.contextmanager
def alone(root: Path, deadline: float) -> Iterator[bool]:
    """True inside the lock of all sweeps of this state directory; the workers of a run all sweep at the same time."""
    descriptor = os.open(root / "sweep.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.05)
            else:
                yield True
                return
    finally:
        os.close(descriptor)
