"""The lease directory: files whose kernel lock (flock) is the truth, so that a death frees everything.

``/tmp/gpuserve-leases`` (or ``$GPUSERVE_LEASES``), sticky and shared by all users of the machine; containers that do
not share it do not share leases. Files are 0644; one whose lock nobody holds is dead. Anybody may put anything there:
what is no regular file is not opened (a FIFO would make us wait), and told (:func:`strange`).

    mutex                       held for a moment while somebody decides
    device-<name>               locked by whoever holds that GPU
    ticket-<age>-<pid>-<hex>    locked by a waiter; JSON: what it waits for
    lease-<age>-<pid>-<hex>     locked by a holder; JSON: what it holds, and for what
    quarantine-<name>-<hex>     a GPU that did not come back; JSON: why, which processes, its memory before
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import foreign, procfs
from ..errors import GpuserveError
from .lease_policy import Device

VARIABLE = "GPUSERVE_LEASES"
DEFAULT = "/tmp/gpuserve-leases"
"""Not $TMPDIR: it differs between users and jobs, and who does not look in the same place shares nothing."""

STALE = 60.0
"""Seconds without a sign of life after which a live process's ticket no longer holds others up (it is stopped)."""

_KINDS = ("ticket-", "lease-", "quarantine-")


class LeaseError(GpuserveError):
    """No lease. ``kind`` says why.

    too_few: this session's GPUs can never serve it. foreign: a stranger's process is on the GPU. quarantine: a GPU did
    not come back from an earlier server. unreadable: NVML does not answer. timeout. directory: it cannot be used.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def place() -> Path:
    """Where the lease directory is, or would be: not made here."""
    return Path(os.environ.get(VARIABLE) or DEFAULT)


def directory() -> Path:
    """The directory, made when it is missing.

    Raises:
        LeaseError: it cannot be made, is a link or a file, or others could exchange files in it.
    """
    path = place()
    advice = f"or set ${VARIABLE} to a directory that every user of the GPUs can write."
    try:
        path.mkdir(mode=0o700, parents=bool(os.environ.get(VARIABLE)))
        path.chmod(0o1777)
    except FileExistsError:
        pass
    except OSError as error:
        raise LeaseError(
            f"The directory of GPU leases cannot be made: {error}. Have it made with mode 1777, {advice}", "directory"
        ) from None
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise LeaseError(
            f"{path} should be the directory of GPU leases but is a link or a file. Remove it, {advice}", "directory"
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise LeaseError(
            f"{path} is writable by all and not sticky: others could exchange locks. Make it so (chmod +t), {advice}",
            "directory",
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise LeaseError(
            f"{path}, the directory of GPU leases, cannot be written by this user. Give it mode 1777, {advice}",
            "directory",
        )
    return path


def open_lock(path: Path) -> int:
    """A descriptor of the lock file, made when it is missing; never follows a link.

    Raises:
        LeaseError: it is a link or not ours to read, or the disk is full.
    """
    while True:
        try:
            # Without O_CREAT: the kernel refuses that for another user's file in a sticky directory
            # (fs.protected_regular), and flock needs no right to write.
            return foreign.descriptor(path, follow=False)
        except FileNotFoundError:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                continue
            except OSError as error:
                raise _unusable(path, error) from None
            os.fchmod(descriptor, 0o644)
            return descriptor
        except OSError as error:
            raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError) -> LeaseError:
    """Never advises what would take their locks from running sessions."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = f"Make room on the disk of {path.parent}"
    elif _strange(path):
        advice = f"It belongs to {_whose(path)}: have {path} removed"
    else:
        advice = f"It belongs to {_whose(path)}, and must be a file that all can read"
    return LeaseError(
        f"The file {path.name} of GPU leases cannot be used: {error.strerror}. {advice}, or set ${VARIABLE} to another "
        "directory, the same one for all users of the GPUs.",
        "directory",
    )


def strange(root: Path) -> list[str]:
    """A sentence for each of the first things that have a name of ours and are no regular files: nobody reads them.
    (A lock that is none is an error for who needs it.)"""
    named = sorted(path for path in root.iterdir() if path.name.startswith(_KINDS))
    return [
        f"{path} is no regular file, and ignored; it belongs to {_whose(path)}: have it removed"
        for path in itertools.islice(filter(_strange, named), 3)
    ]


def _strange(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return not stat.S_ISREG(path.lstat().st_mode)
    return False


def _whose(path: Path) -> str:
    with contextlib.suppress(OSError):
        return user(path.lstat().st_uid)
    return "nobody that can be told"


def try_lock(path: Path) -> int | None:
    """The exclusive lock of ``path`` as a descriptor, or None when somebody has it. Closing it frees the lock."""
    while True:
        descriptor = open_lock(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _still_there(path, descriptor):
            return descriptor
        os.close(descriptor)  # a cleaner of /tmp removed the file between our open and our lock


def locked(path: Path) -> bool:
    """True when somebody holds the lock of this file."""
    try:
        descriptor = foreign.descriptor(path, follow=False)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def stuck_locks(root: Path, devices: Iterable[Device]) -> str:
    """Who keeps the locks of all decisions and of these devices although it cannot let go of them (it is stopped, or in
    a driver); "" when nobody does. Everybody else has them for a moment only."""
    parts = []
    for path in (root / "mutex", *(device(root, which) for which in devices)):
        for pid in _lockers(path):
            found = procfs.stat(pid)
            if found and found.state in "TtD":
                how = (
                    f"is stopped (kill -CONT {pid} lets it go on)" if found.state in "Tt" else "is stuck in the kernel"
                )
                parts.append(f"the lock {path.name} is held by pid {pid} ({owner(pid)}), which {how}")
    return "; ".join(parts)


def _lockers(path: Path) -> set[int]:
    """Processes that took the lock of this file, as far as they can be seen from here."""
    try:
        inode = str(path.lstat().st_ino)
    except OSError:
        return set()
    lines = (line.split() for line in procfs.read("/proc/locks").decode(errors="replace").splitlines())
    return {int(part[4]) for part in lines if part[1] == "FLOCK" and part[5].rpartition(":")[2] == inode} - {0, -1}


def _still_there(path: Path, descriptor: int) -> bool:
    try:
        there, ours = path.lstat(), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


@contextlib.contextmanager
def mutex(root: Path, limit: float) -> Iterator[bool]:
    """Yields True inside the lock of all decisions, False when it was not to be had within ``limit`` seconds."""
    deadline = time.monotonic() + limit
    descriptor = try_lock(root / "mutex")
    while descriptor is None and time.monotonic() < deadline:
        time.sleep(0.005)
        descriptor = try_lock(root / "mutex")
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Entry:
    """A live ticket or lease: its file, and what it says."""

    path: Path
    body: dict[str, Any]
    heartbeat: float

    @property
    def key(self) -> str:
        return key(self.path)


def key(path: Path) -> str:
    """Of a ticket or lease: sorts by age, unique."""
    return path.name.partition("-")[2]


def device(root: Path, which: Device) -> Path:
    """The lock file of a device."""
    return root / f"device-{which.name.replace('/', '_')}"


def announce(root: Path, kind: str, body: dict[str, Any]) -> tuple[Path, int]:
    """Write a ticket or lease and lock it, in that order for us, at once for everybody else (renamed when locked)."""
    me = procfs.process_id(os.getpid())
    body = {**body, "pid": os.getpid(), "start": me.start if me else 0, "user": user(os.getuid()), "since": time.time()}
    # CLOCK_MONOTONIC is one for all processes of a machine, so names sort by age
    name = f"{time.monotonic_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}"
    fresh = root / f".{name}"
    try:
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(fresh, error) from None
    try:
        os.fchmod(descriptor, 0o644)
        os.write(descriptor, json.dumps(body).encode())
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = root / f"{kind}-{name}"
        fresh.rename(path)
    except BaseException as error:
        os.close(descriptor)
        fresh.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unusable(fresh, error) from None
        raise
    return path, descriptor


def withdraw(path: Path, descriptor: int) -> None:
    """Undo :func:`announce`."""
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(descriptor)


def entries(root: Path, kind: str) -> list[Entry]:
    """Live tickets or leases, oldest first; dead ones are removed where the sticky bit lets us."""
    found = []
    for path in sorted(root.glob(f"{kind}-*")):
        if not locked(path):
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        with contextlib.suppress(OSError):
            if (body := body_of(path)) is not None:
                found.append(Entry(path, body, path.lstat().st_mtime))
    return found


def body_of(path: Path) -> dict[str, Any] | None:
    """What a ticket or lease says, which anybody may have written; None where that is nothing."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        body = json.loads(read(path))
        return body if isinstance(body, dict) else None
    return None


def sweep(root: Path) -> None:
    """Remove what dead holders and waiters left, where the sticky bit lets us."""
    for kind in ("lease", "ticket"):
        entries(root, kind)
    for path in root.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > STALE and not locked(path):
                path.unlink()


def read(path: Path) -> bytes:
    """At most 64 KiB of a file, no link followed."""
    with foreign.opened(path, follow=False) as file:
        return file.read(1 << 16)


def user(uid: int) -> str:
    """Login name, or the number."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def owner(pid: int) -> str | None:
    """User of a live process, None when it is gone (or is a pid of another namespace)."""
    try:
        return user(Path(f"/proc/{pid}").stat().st_uid)
    except OSError:
        return None
