"""A cgroup (v2) of one server's own, where this user may make one: whatever leaves its parent, its session and its
environment stays in it, and the kernel kills all of it in one step. Standard library only, as supervisor.py."""

# ruff: noqa: PTH102, PTH106, PTH118, PTH119, PTH120
from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

PREFIX = "gpuserve-"


def ours(path: str) -> bool:
    """Whether this is where :func:`make` makes one: what a journal says is not taken on trust."""
    return path.startswith("/") and ".." not in path.split("/") and os.path.basename(path).startswith(PREFIX)


def own() -> str:
    """The directory of this process's cgroup; "" where there is no cgroup v2."""
    with suppress(OSError, IndexError), open("/proc/self/cgroup") as groups, open("/proc/self/mountinfo") as mounts:
        path = next((line[3:].strip() for line in groups if line.startswith("0::/")), "")
        for line in mounts:
            left, _, right = line.partition(" - ")
            root, mount = left.split()[3:5]
            if path and right.startswith("cgroup2 ") and root == "/" and "/.." not in path:
                return os.path.join(mount, path.lstrip("/")).rstrip("/")
    return ""


def make(name: str) -> str:
    """A new cgroup below our own; "" where we may not, or where the kernel (before 5.14) cannot kill one."""
    path = os.path.join(parent, PREFIX + name) if (parent := own()) else ""
    with suppress(OSError):
        if path:
            os.mkdir(path)
            if os.access(os.path.join(path, "cgroup.kill"), os.W_OK):
                return path
            os.rmdir(path)
    return ""


def enter(path: str) -> None:
    """Put this process into it, and with it all that it will start."""
    with suppress(OSError):
        _write(path, "cgroup.procs", "0")


def members(path: str) -> set[int]:
    """Pids in it; none once it is gone."""
    with suppress(OSError, ValueError), open(os.path.join(path, "cgroup.procs")) as file:
        return {int(line) for line in file} - {0} if path else set()
    return set()


def kill(path: str, spare: Collection[int]) -> bool:
    """SIGKILL to all in it, in one step; nothing while one of ``spare`` is in it."""
    if not (found := members(path)) or not found.isdisjoint(spare):
        return False
    with suppress(OSError):
        _write(path, "cgroup.kill", "1")
        return True
    return False


def remove(path: str) -> None:
    """Give it back; what is left in it (a daemon that others use) goes where we are."""
    if ours(path):
        for pid in members(path):
            with suppress(OSError):
                _write(os.path.dirname(path), "cgroup.procs", str(pid))
        with suppress(OSError):
            os.rmdir(path)


def _write(path: str, name: str, text: str) -> None:
    fd = os.open(os.path.join(path, name), os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
