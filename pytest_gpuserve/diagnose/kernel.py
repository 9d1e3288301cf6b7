"""What the kernel tells of a sleeping process: a witness beside the stacks, for any program in any language."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Place = Literal["lock", "child", "disk", "pipe", "socket", "futex", "sleep", "poll", "device", "cpu", ""]


@dataclass(frozen=True, slots=True)
class KernelWait:
    """Where a main thread sleeps. ``local`` means that no peer of the server is waited for."""

    place: Place
    words: str
    local: bool = False


_TABLE: tuple[tuple[str, KernelWait], ...] = (
    (
        r"locks_lock_inode_wait|flock_lock_inode_wait|flock",
        KernelWait("lock", "waits for a file lock (flock)", True),
    ),
    (r"fcntl_setlk|posix_lock_inode_wait|fcntl_setlkw", KernelWait("lock", "waits for a file lock (fcntl)", True)),
    (r"do_wait\b|wait4|waitid|wait_consider_task", KernelWait("child", "waits for a child process", True)),
    (
        r"folio_wait|wait_on_page|io_schedule|rq_qos_wait|rpc_wait_bit|nfs\w*_wait|wait_on_bit|bit_wait_io|cl_sync_io"
        r"|filemap_fault|fuse_|request_wait_answer|jbd2|xfs_|ext4_|blk_",
        KernelWait("disk", "waits for storage", True),
    ),
    (r"(?:anon_)?pipe_read|pipe_wait_readable|pipe_wait\b", KernelWait("pipe", "reads from a pipe")),
    (r"(?:anon_)?pipe_write|pipe_wait_writable", KernelWait("pipe", "writes to a full pipe")),
    (
        r"unix_stream|unix_wait|sk_wait_data|sk_stream|inet_csk|tcp_|skb_wait|skb_recv|__skb|sock_alloc|accept|recvfrom"
        r"|recvmsg|recvmmsg|sendto|sendmsg|connect",
        KernelWait("socket", "waits on a socket"),
    ),
    (r"futex", KernelWait("futex", "waits for another thread or process (futex)")),
    (r"nanosleep", KernelWait("sleep", "sleeps")),
    (r"poll|select|epoll|ep_", KernelWait("poll", "polls descriptors")),
    (r"ioctl|nv\w*_|rm_|os_acquire|uvm_", KernelWait("device", "is inside a device driver")),
    (r"running|sched_yield", KernelWait("cpu", "runs on a CPU")),
)
_COMPILED = tuple((re.compile(f"(?:{pattern})"), wait) for pattern, wait in _TABLE)
_NOTHING = KernelWait("", "")
_SLEEPS = next(wait for _, wait in _TABLE if wait.place == "sleep")

RESTARTED = "restart_syscall"
"""A call that a signal or a tracer interrupted, and that goes on; which one it was, the kernel no longer says."""

NO_DESCRIPTORS = " of no descriptors"
"""Follows the name of a select or poll that only its timeout ends: a sleep, as Python's is before 3.11."""


def kernel_wait(facts: Mapping[str, Any]) -> KernelWait:
    """From the facts of a dump: ``wchan`` first (readable without permission), then ``syscall``; but only the latter
    tells a sleep by select or poll from their other uses."""
    if str(facts.get("syscall")).endswith(NO_DESCRIPTORS):
        return _SLEEPS
    for key in ("wchan", "syscall"):
        value = str(facts.get(key) or "")
        if not value or value == "0":
            continue
        for pattern, wait in _COMPILED:
            if pattern.match(value):
                return wait
        for pattern, wait in _COMPILED:
            if pattern.search(value):
                return wait
    return _NOTHING
