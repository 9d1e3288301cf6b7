"""Where raw files live: one private directory a user, one directory a session, one a server."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import procfs
from ..errors import GpuserveError
from ..home import expanded, unfit, xdg
from ..spec import ServerSpec

STATE_VARIABLE = "GPUSERVE_STATE"

MARKER = ".gpuserve"
"""File in a session's directory: where its pids mean something, ``{"boot", "pid_namespace"}``. What has none is not
ours to sweep or to remove."""

SESSIONS = "sessions"

SCRATCH = "scratch-"
"""How directories in a session's begin that go with it: a sweep removes them at once, not days later as the logs."""

_sessions: dict[tuple[int, Path], Path] = {}


def state_root() -> Path:
    """The state directory, made (0700) where it is missing. One that was there keeps its mode: what we put into it is
    private by itself, and one that others may write is refused.

    ``$GPUSERVE_STATE``, else ``$XDG_STATE_HOME/gpuserve``, else ``~/.local/state/gpuserve``, else (no home, or one that
    cannot be written) ``gpuserve-<uid>`` in the system's temporary directory.

    Raises:
        GpuserveError: ``$GPUSERVE_STATE`` is set and cannot be used, or there is no usable place at all.
    """
    problem: str | None = "there is no home directory"
    for path in _places():
        if path.is_absolute() and (problem := _made(path) or _unfit(path)) is None:
            return path
    chosen = os.environ.get(STATE_VARIABLE)
    what = f"{STATE_VARIABLE}={chosen} cannot be used" if chosen else "no directory for logs and sockets"
    raise GpuserveError(
        f"{what}: {problem}. Or set {STATE_VARIABLE} to another directory of yours, or to one that is not there: it is "
        "made, for you alone."
    )


def existing_state() -> Path | None:
    """The state directory where there is one: for those who only look.

    Raises:
        GpuserveError: as :func:`state_root`.
    """
    return state_root() if any(os.path.lexists(path) for path in _places()) else None


def session_directory() -> Path:
    """``sessions/<pid>-<starttime>-<8 hex>`` of this process, made once a process (a fork gets its own)."""
    root = state_root()
    key = (os.getpid(), root)
    if key not in _sessions:
        me = procfs.process_id(os.getpid())
        start = me.start if me else 0
        path = root / SESSIONS / f"{os.getpid()}-{start}-{secrets.token_hex(4)}"
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.mkdir(mode=0o700)
            with open(os.open(path / MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                json.dump(here(), file)
        except OSError as error:
            raise GpuserveError(
                f"{path} cannot be written: {error.strerror}. Make room there, or set {STATE_VARIABLE} to a directory "
                f"elsewhere."
            ) from None
        _sessions[key] = path
    return _sessions[key]


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A directory of this process, removed at the end; where that is a SIGKILL, by the next sweep.

    Raises:
        GpuserveError: it cannot be made.
    """
    parent = session_directory()
    try:
        directory = tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{name}-", dir=parent)
    except OSError as error:
        raise GpuserveError(f"{parent} cannot be written: {error.strerror}. Make room there.") from None
    with directory as path:
        yield Path(path)


def here() -> dict[str, object]:
    """The kernel's boot and the pid namespace that this process lives in: elsewhere pids mean other processes."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        namespace = 0
    return {"boot": procfs.read("/proc/sys/kernel/random/boot_id").decode().strip(), "pid_namespace": namespace}


def server_directory(parent: Path, spec: ServerSpec) -> Path:
    """A new directory ``<n>-<spec.id>`` in ``parent``, 0700."""
    number = 1 + sum(path.is_dir() for path in parent.iterdir())
    while True:
        path = parent / f"{number}-{spec.id[:120]}"  # a name may have 255 bytes, and files with it are longer
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return path


def _places() -> Sequence[Path]:
    """Where the state directory may be: the first that can be used."""
    if chosen := os.environ.get(STATE_VARIABLE):
        return (expanded(chosen).absolute(),)
    return xdg("XDG_STATE_HOME", "~/.local/state") / "gpuserve", Path(tempfile.gettempdir()) / f"gpuserve-{os.getuid()}"


def _made(path: Path) -> str | None:
    """None: it is there, or was made; else why not."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        return f"{path} is no directory"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _unfit(path: Path) -> str | None:
    """None when nobody else can exchange what is in it; else why it cannot be used. Changes nothing."""
    try:
        if why := unfit(path):
            return why
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR((path / SESSIONS).lstat().st_mode):
                return f"{path / SESSIONS} is a link or no directory"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None
