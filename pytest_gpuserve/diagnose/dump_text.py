"""Stack dumps as people paste them: py-spy, faulthandler, pystack, gdb, eu-stack, mixed with anything else.

One reader for all: a header says which tool wrote the thread that follows, and frames of that tool are taken until the
next header. Lines that fit nothing are skipped, so a whole server log may be fed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from .model import Frame, ThreadStack

Tool = Literal["py-spy", "faulthandler", "pystack", "gdb"]

_LONGEST = 8192
"""Characters of a line that are looked at: no frame is longer, and an endless line must not cost time."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(
    r"(?:\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\s"  # CI runners
    r"|\([A-Za-z][^()]{0,80}\bpid=\d+[^()]{0,40}\)\s"  # vLLM, ray
    r"|\[[^\[\]]{0,80}\b(?:rank ?\d+|[TPDE]P\d+)\b[^\[\]]{0,40}\]:?\s?"  # torch, SGLang
    r"|[\w.-]{1,60}\s*\|\s)"  # docker compose
)
_PID_IN_PREFIX = re.compile(r"\bpid=(\d+)")

_PROCESS = (
    re.compile(r"^Process (?P<pid>\d+): (?P<title>.*)$"),
    re.compile(r"[Pp]y-?[Ss]py dump for PID (?P<pid>\d+)"),
    re.compile(r"^PID (?P<pid>\d+) - (?P<title>.*)$"),
    re.compile(r"^(?:Attaching to (?:program: .*, )?process|process) (?P<pid>\d+)\b"),
)
_VERSION = re.compile(r"^Python v\d\S* \(")
_NEW_DUMP = re.compile(r"^(Fatal Python error: |>>> Call stack dump|Timeout \(\d+:\d\d:\d\d)")
_THREAD: tuple[tuple[Tool, re.Pattern[str]], ...] = (
    (
        "py-spy",
        re.compile(
            r"^Thread (?P<tid>0x[0-9a-fA-F]+|\d+)(?:/0x[0-9a-fA-F]+)? "
            r"\((?P<activity>idle|active)(?P<gil>\+gil)?\)(?:: \"(?P<name>.*)\")?$"
        ),
    ),
    (
        "faulthandler",
        re.compile(
            r"^(?:Current thread|Thread) (?P<ident>0x[0-9a-fA-F]+) (?:\[(?P<name>.*)\] )?\(most recent call first\):"
        ),
    ),
    (
        "pystack",
        re.compile(r"^Traceback for thread (?P<tid>\d+) \(.*\) \[(?P<status>.*)\] \(most recent call last\):"),
    ),
    (
        "gdb",
        re.compile(r"^Thread (?P<number>\d+) \((?:Thread 0x[0-9a-f]+)?[^\"]*?(?:\(?LWP (?P<tid>\d+)\)?)?[^\"]*\):$"),
    ),
    ("gdb", re.compile(r"^Thread (?P<number>\d+) \((?P<inside>.*)\):$")),
    ("gdb", re.compile(r"^TID (?P<tid>\d+):$")),
)
_SWITCH = re.compile(r"^\[Switching to thread (?P<number>\d+) \(.*?(?:LWP (?P<tid>\d+))?\)")
_PY_BT = re.compile(r"^\s*Traceback \(most recent call first\):$")

_PYSPY_FRAME = re.compile(r"^(?P<indent>\s*)(?P<name>\S.*) \((?P<file>[^()]*(?:\([^()]*\)[^()]*)?)\)$")
_FAULT_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')
_PYSTACK_FRAME = re.compile(
    r'^\s*\((?P<kind>Python|C|Cython)\) File "(?P<file>.*)", line (?P<line>\d+), in (?P<name>.+?)'
    r"(?: \(inlined\))?(?: \((?P<module>[^()]+)\))?$"
)
_GDB_FRAME = re.compile(r"^\s*#(?P<number>\d+)\s+(?:(?P<address>0x[0-9a-f]+)(?: in)?\s*)?(?P<rest>.*)$")
_GDB_PYTHON = re.compile(r"^\(?Frame 0x[0-9a-f]+, for file (?P<file>.+?), line (?P<line>\d+), in (?P<name>[^\s(]+)")
_GDB_PLACE = re.compile(r"(?:^|\s)(?P<word>at|from) (?P<file>\S+?)(?::(?P<line>\d+))?$")
_PY_BT_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<name>.+)$')
_INTERPRETER = re.compile(r"^_?Py(Eval|Object|Function|Method|CFunction)|^_?PyEval|^(method|cfunction)_vectorcall")


@dataclass
class Thread:
    """A thread being read.

    Attributes:
        ident: its pthread id as printed, where the tool has no thread id.
        frames: in the tool's order: outermost first from pystack, else innermost first.
        python: Python frames that gdb knows beside the C frames, innermost first.
        indent: column of py-spy's frames; what stands further in are arguments and locals.
        prefix: log prefix of its header.
        last: nothing of the same process follows.
    """

    tool: Tool
    tid: int | None = None
    name: str | None = None
    active: bool | None = None
    owns_gil: bool | None = None
    ident: str | None = None
    prefix: str = ""
    frames: list[Frame] = field(default_factory=list)
    python: list[Frame] = field(default_factory=list)
    indent: int | None = None
    last: bool = False

    def stack(self, main: bool) -> ThreadStack:
        frames = list(reversed(self.frames)) if self.tool == "pystack" else list(self.frames)
        if self.python:  # gdb's py-bt beside its bt: the C frames below the innermost Python frame, then Python
            inner = next((n for n, f in enumerate(frames) if _INTERPRETER.match(f.name)), len(frames))
            frames = frames[:inner] + self.python
        return ThreadStack(self.tid, self.name, main, tuple(frames), self.active, self.owns_gil)


@dataclass
class Process:
    """A process being read.

    Attributes:
        prefix: log prefix of its first line, where a rank may be named.
        certain: py-spy's second header line was seen: a dump, even if no thread follows.
    """

    pid: int | None = None
    title: str = ""
    prefix: str = ""
    certain: bool = False
    threads: list[Thread] = field(default_factory=list)

    def stacks(self) -> tuple[ThreadStack, ...]:
        """Threads in the dump's order. The main one: tid = pid, else named so, else where the tool puts it."""
        if not self.threads:
            return ()
        threads = self.threads
        by_pid = [t for t in threads if t.tid is not None and t.tid == self.pid]
        by_name = [t for t in threads if t.name == "MainThread"]
        usual = threads[0] if threads[0].tool == "py-spy" else threads[-1]
        main = (by_pid or by_name or [usual])[0]
        return tuple(t.stack(t is main) for t in threads)


def read_processes(lines: Iterable[str]) -> Iterator[Process]:
    """The processes whose stacks ``lines`` hold, in order. Never raises, whatever the lines are."""
    process = Process()
    thread: Thread | None = None
    for raw in lines:
        prefix, line = _split(raw)
        if header := _process_header(line):
            if process.threads or process.certain:
                yield process
            if process.threads or process.pid not in (None, header.pid):
                process = Process()
            process.pid, process.prefix = header.pid, process.prefix or prefix
            process.title = header.title or process.title
            thread = None
            continue
        if process.pid is not None and not process.threads and _VERSION.match(line):
            process.certain = True
            continue
        if _NEW_DUMP.match(line):
            if process.threads:
                yield process
                process = Process(prefix=prefix)
            thread = None
            continue
        if found := _thread_header(line, process):
            if _begins_another(found, prefix, process):
                yield process
                process = Process()
            if not process.threads and process.pid is None:
                process.prefix = prefix
                if inside := _PID_IN_PREFIX.search(prefix):
                    process.pid = int(inside[1])
            thread = found
            if not any(known is thread for known in process.threads):
                thread.prefix = prefix
                process.threads.append(thread)
            continue
        if thread is None or thread.tool == "gdb":
            bottom = re.match(r"^#0\s", line)
            if bottom and thread is not None and thread.frames:  # the next process, without any header
                yield process
                process, thread = Process(), None
            if thread is None and (bottom or _PY_BT.match(line)):  # gdb prints no header for a process of one thread
                thread = Thread("gdb", process.pid)
                process.threads.append(thread)
        if thread is not None:
            _take_frame(thread, line)
    if process.threads or process.certain:
        yield process


def _split(raw: str) -> tuple[str, str]:
    """Log prefix and the rest of a line, colours removed."""
    line = _ANSI.sub("", raw[:_LONGEST]).rstrip()
    end = 0
    while found := _PREFIX.match(line, end):
        end = found.end()
    return line[:end], line[end:]


def _process_header(line: str) -> Process | None:
    for pattern in _PROCESS:
        if found := pattern.search(line):
            return Process(int(found["pid"]), found.groupdict().get("title") or "")
    return None


def _thread_header(line: str, process: Process) -> Thread | None:
    if not line.startswith(("Thread ", "Current thread ", "Traceback for ", "TID ", "[Switching to thread ")):
        return None
    for tool, pattern in _THREAD:
        if found := pattern.match(line):
            groups = found.groupdict()
            lwp = re.search(r"LWP (\d+)", groups.get("inside") or "")
            tid = lwp[1] if lwp else groups.get("tid") or ""
            thread = Thread(tool, int(tid) if tid.isdigit() else None, groups.get("name"))
            thread.ident = groups.get("ident") or tid or None
            if activity := groups.get("activity"):
                thread.active, thread.owns_gil = activity == "active", bool(groups.get("gil"))
            if (status := groups.get("status")) is not None:
                thread.owns_gil = "Has the GIL" in status
            thread.last = groups.get("number") == "1"  # gdb counts down to the main thread
            return thread
    if (found := _SWITCH.match(line)) and process.threads:  # "thread 3", then py-bt, after a full backtrace
        tid = found["tid"]
        return next((t for t in process.threads if tid and t.tid == int(tid)), None)
    return None


def _begins_another(thread: Thread, prefix: str, process: Process) -> bool:
    """True when ``thread`` cannot belong to ``process``: dumps of several processes follow one another unannounced."""
    if not process.threads or any(known is thread for known in process.threads):
        return False
    before = process.threads[-1]
    if before.tool != thread.tool:
        return True
    if thread.ident is not None and any(t.ident == thread.ident for t in process.threads):
        return True
    if thread.name == "MainThread" and any(t.name == "MainThread" for t in process.threads):
        return True
    if _tag(prefix) != _tag(before.prefix):
        return True
    return before.last or (before.tool == "pystack" and _is_outermost(before))


def _tag(prefix: str) -> str:
    """What of a prefix names the writer: times change from line to line."""
    return re.sub(r"\d[\d:.,TZ-]{7,}", "", prefix)


def _is_outermost(thread: Thread) -> bool:
    """pystack prints the main thread last; nothing but a program's top is rooted in a module."""
    python = [f for f in thread.frames if not f.native]
    return bool(python) and python[0].name in ("<module>", "_run_module_as_main")


def _take_frame(thread: Thread, line: str) -> None:
    if thread.tool == "py-spy":
        _take_pyspy(thread, line)
    elif thread.tool == "faulthandler":
        if found := _FAULT_FRAME.match(line):
            thread.frames.append(Frame(found["name"], found["file"], _number(found["line"])))
    elif thread.tool == "pystack":
        if found := _PYSTACK_FRAME.match(line):
            native = found["kind"] == "C"
            module = (found["module"] or found["file"]) if native else None
            thread.frames.append(Frame(found["name"], found["file"], _number(found["line"]), module))
    else:
        _take_gdb(thread, line)


def _take_pyspy(thread: Thread, line: str) -> None:
    found = _PYSPY_FRAME.match(line)
    if not found:
        return
    indent = len(found["indent"].expandtabs(4))
    if thread.indent is None:
        thread.indent = indent
    if indent != thread.indent:  # arguments and locals stand further in
        return
    file, _, number = found["file"].rpartition(":")
    if file and number.isdigit():
        thread.frames.append(Frame(found["name"], file, int(number)))
    else:  # py-spy prints no line for native frames
        thread.frames.append(Frame(found["name"], found["file"], None, _module(found["file"])))


def _take_gdb(thread: Thread, line: str) -> None:
    if found := _PY_BT_FRAME.match(line):
        thread.python.append(Frame(found["name"], found["file"], int(found["line"])))
        return
    if found := _GDB_FRAME.match(line):
        if python := _GDB_PYTHON.match(found["rest"]):
            thread.python.append(Frame(python["name"], python["file"], int(python["line"])))
            return
        name = re.split(r"\s+\(|\s+at\s|\s+from\s|\s+-\s", found["rest"], maxsplit=1)[0].strip()
        place = _GDB_PLACE.search(found["rest"])
        file = place["file"] if place else ""
        name = name if name not in ("", "??") else found["address"] or "??"
        thread.frames.append(Frame(name, file, _number(place["line"]) if place else None, file or "?"))
    elif (
        thread.frames and line.startswith("  ") and (place := _GDB_PLACE.search(line)) and thread.frames[-1].file == ""
    ):
        thread.frames[-1] = replace(
            thread.frames[-1], file=place["file"], line=_number(place["line"]), module=place["file"]
        )


def _module(file: str) -> str | None:
    return None if file.endswith((".py", ".pyx")) or file.startswith("<") else file


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
