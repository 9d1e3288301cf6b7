"""Files that others named or wrote: a regular one is read up to a limit, and nothing that could block or never end.

Every reader of a path that a user, a server or a bundle chose goes through here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Final

MOST_JSON: Final = 16 << 20
"""Bytes of a document (JSON, TOML) that is parsed as a whole: in memory it takes up to 25 times as much."""

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def opened(path: str | Path, *, folder: int | None = None, follow: bool = True) -> BufferedReader:
    """A regular file, open for reading: :func:`descriptor`'s, as a file."""
    return open(descriptor(path, folder=folder, follow=follow), "rb")


def descriptor(path: str | Path, *, folder: int | None = None, follow: bool = True) -> int:
    """A regular file, open for reading; pipes, sockets, devices and terminals are none. Never waits for anybody.

    Args:
        folder: descriptor of the directory that ``path`` is relative to.
        follow: through a link in its last part.

    Raises:
        OSError: there is none, it cannot be read, or it is no regular file.
    """
    try:
        found = os.open(path, _READ | (0 if follow else os.O_NOFOLLOW), dir_fd=folder)
    except ValueError as error:  # a NUL in its name
        raise FileNotFoundError(errno.ENOENT, str(error)) from None
    except OSError as error:
        if error.errno == errno.ENXIO:  # what a socket answers
            raise _no_file(path) from None
        raise
    mode = os.fstat(found).st_mode
    if stat.S_ISREG(mode):
        return found
    os.close(found)
    raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path)) if stat.S_ISDIR(mode) else _no_file(path)


def opened_below(root: str | Path, name: str) -> BufferedReader:
    """A regular file below ``root``; no part of ``name`` may be a link or lead out.

    Raises:
        OSError: as :func:`opened`.
    """
    *folders, last = name.split("/")
    if ".." in (*folders, last):
        raise FileNotFoundError(errno.ENOENT, "it leads out of its directory", name)
    handle = os.open(root, _FOLDER)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = inner
        return opened(last, folder=handle, follow=False)
    except ValueError as error:
        raise FileNotFoundError(errno.ENOENT, str(error), name) from None
    finally:
        os.close(handle)


def beginning(path: str | Path, most: int) -> bytes:
    """At most ``most`` bytes from its start.

    Raises:
        OSError: as :func:`opened`.
    """
    with opened(path) as file:
        return file.read(most) or b""  # None: of a file of the kernel's that has nothing now


def whole(path: str | Path, most: int = MOST_JSON) -> bytes:
    """All of a file, for what is of no use when it is cut.

    Raises:
        OSError: as :func:`opened`; it is larger than ``most``.
    """
    with opened(path) as file:
        data = file.read(most + 1) or b""
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
    return data


def until_now(file: BufferedReader) -> Callable[[int], bytes]:
    """Reads no more of a file than it holds now: one that grows as fast as it is read would never end."""
    left = os.fstat(file.fileno()).st_size

    def read(size: int) -> bytes:
        nonlocal left
        data = file.read(min(size, left)) or b""
        left -= len(data)
        return data

    return read


def _no_file(path: str | Path) -> OSError:
    return OSError(
        errno.EINVAL, "it is no regular file (a pipe, a socket or a device), and nothing else is read", str(path)
    )
