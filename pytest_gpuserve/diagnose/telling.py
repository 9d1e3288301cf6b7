"""Which of a process's threads says where it is? Most wait by design."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .model import Frame, ProcessDump, ThreadStack
from .signatures import Match, folded, last_name, match

_IDLE_NAMES = re.compile(
    r"(?i)tqdm|heartbeat|monitor|watchdog|resource_tracker|pydevd|IOLoop|asyncio_\d|ThreadPoolExecutor|QueueFeeder|"
    r"QueueManagement|uvicorn|prometheus|otel|grpc|usage|zmq|mq-client|output_handler|AnyIO worker|InductorSubproc|"
    r"subproc_worker_timer|process_(?:in|out)put_sockets|WorkerAsyncOutput|signal-callback|_read_thread"
)
_IDLE_LEAVES = frozenset(
    {
        ("threading.py", "wait"),
        ("threading.py", "_wait_for_tstate_lock"),
        ("queue.py", "get"),
        ("thread.py", "_worker"),
        ("selectors.py", "select"),
        ("_monitor.py", "run"),
        ("popen_fork.py", "poll"),
        ("connection.py", "poll"),
        ("connection.py", "_recv"),
        ("connection.py", "recv"),
    }
)
_LOCAL_WAITS = frozenset({"threading.py", "queue.py", "_base.py", "futures.py", "synchronize.py", "queues.py"})
_AUTOGRAD = re.compile(r"torch/autograd/(?:graph|__init__)\.py$")
_REQUEST_THREADS = re.compile(
    r"^process_request_thread \(.*socketserver\.py\)$|^run \(.*anyio/_backends/_asyncio\.py\)$"
)
_SERVING = re.compile(
    r"(?:^|/)(?:socket|ssl|selectors|socketserver|queue|threading)\.py$|(?:^|/)http/server\.py$"
    r"|werkzeug/serving\.py$|anyio/_backends/_asyncio\.py$"
)
"""Files that a request's thread is in while it waits for a request, or for its next one."""


def is_idle(thread: ThreadStack) -> bool:
    """True for side threads that wait by design: progress bars, watchdogs, pools, I/O threads."""
    frames = [f for f in folded(thread.frames) if not f.native]
    if not frames:
        return True
    if thread.main or thread.owns_gil:
        return False
    if _IDLE_NAMES.search(thread.name or ""):
        return True
    if thread.active:
        return False
    leaf = frames[0]
    simple = (leaf.file.rpartition("/")[2], last_name(leaf.name)) in _IDLE_LEAVES and len(frames) <= 3
    return simple or len(frames) == 1


def telling(dump: ProcessDump) -> tuple[ThreadStack | None, Match | None]:
    """The thread that says where a process is, and the signature found in it.

    The main thread, unless it only waits for another thread of its process (a queue, a future) while that one works,
    or accepts requests that have a thread each, in a server that we do not know.
    """
    main = dump.main
    if main is None:
        return None, None
    found = match(main)
    frames = [f for f in folded(main.frames) if not f.native]
    waits_inside = bool(frames) and _waits_inside(frames[0])
    if dump.role.role == "other" and _accepts(frames, found):
        at_work = [(t, match(t)) for t in dump.threads if t is not main and _handles_a_request(t)]
        return max(at_work, key=_says_most, default=(main, found))
    if found and (found.signature.kind == "idle" or not waits_inside):
        return main, found
    others = [(t, match(t)) for t in dump.threads if t is not main and not is_idle(t)]
    holders = [(t, m) for t, m in others if t.owns_gil and m and m.signature.gil]
    if holders:
        return holders[0]
    if waits_inside and not found:
        best = max(others, key=_says_most, default=(main, None))
        if best[1] or best[0].active:
            return best
    return main, found


def _says_most(pair: tuple[ThreadStack, Match | None]) -> tuple[bool, bool, int]:
    thread, found = pair
    return bool(found), bool(thread.active), len(thread.frames)


def _accepts(frames: Sequence[Frame], found: Match | None) -> bool:
    """A main thread between two requests: an event loop, or the loop of the standard library's servers."""
    if found:
        return found.signature.id == "event-loop-idle"
    return any(last_name(f.name) == "serve_forever" and f.file.endswith("socketserver.py") for f in frames[:2])


def _handles_a_request(thread: ThreadStack) -> bool:
    """It was made for a request, or lent to one, and is in a program's code. Threads of other pools may do anything."""
    frames = [f for f in folded(thread.frames) if not f.native]
    return any(_REQUEST_THREADS.match(f"{last_name(f.name)} ({f.file})") for f in frames[-2:]) and not all(
        _SERVING.search(f.file) for f in frames
    )


def _waits_inside(leaf: Frame) -> bool:
    """It waits for another thread of its process: autograd runs ``backward`` on a thread for each device."""
    return leaf.file.rpartition("/")[2] in _LOCAL_WAITS or _AUTOGRAD.search(leaf.file) is not None
