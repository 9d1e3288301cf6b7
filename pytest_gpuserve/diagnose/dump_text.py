"""Stack dumps as people paste them: py-spy, faulthandler, pystack, gdb, lldb, eu-stack, coredumpctl, pytest-timeout,
mixed with anything else.

One reader for all: a header says which tool wrote the thread that follows, and frames of that tool are taken until the
next header. Lines that fit nothing are skipped, so a whole server log may be fed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .dump_frames import Thread, Tool
from .dump_lines import Line, heading, sorted_by_writer
from .model import ThreadStack

_PROCESS = (
    re.compile(r"^Process (?P<pid>\d+): (?P<title>.*)$"),
    re.compile(r"[Pp]y-?[Ss]py dump for PID (?P<pid>\d+)"),
    re.compile(r"^PID (?P<pid>\d+) - (?P<title>.*)$"),
    re.compile(r"^Stack dump for \S+ +(?P<pid>\d+)(?: +\S+){8} +(?P<title>.*)$"),  # ray stack, as ps shows it
    re.compile(r"^(?:Attaching to (?:program: .*, )?process|process) (?P<pid>\d+)\b"),
    re.compile(r"^.{0,60}\bgdb\b.{0,80}?\s(?:-p|--pid|attach)[ =]?(?P<pid>\d+)\b"),
    re.compile(r"^(?:Message: )?Process (?P<pid>\d+) \(.*\) of user \d+ dumped core"),
)
_VERSION = re.compile(r"^Python v\d\S* \(")
_NEW_DUMP = re.compile(r"^(?:Fatal Python error: |>>> Call stack dump|Timeout \(\d+:\d\d:\d\d)")
_FATAL = re.compile(r"^(?:Message: )?(Fatal Python error: .{1,200}|Process \d+ \(.*\) of user \d+ dumped core)")
_THREAD: tuple[tuple[Tool, re.Pattern[str]], ...] = (
    (
        "py-spy",
        re.compile(
            r"^Thread (?:(?P<tid>0x[0-9a-fA-F]+|\d+|<\w+>)(?:/0x[0-9a-fA-F]+)? )?"  # the number is often left out
            r"\((?P<activity>idle|active)(?P<gil>\+gil)?\)(?:: \"(?P<name>.*)\")?$"
        ),
    ),
    (
        "faulthandler",
        re.compile(
            r"^(?:(?P<current>Current thread)|Thread) (?P<ident>0x[0-9a-fA-F]+) (?:\[(?P<name>.*)\] )?"
            r"\(most recent call first\):"
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
    ("gdb", re.compile(r"^Thread (?P<number>\d+)(?: \((?P<inside>.*)\))?:$")),
    ("gdb", re.compile(r"^TID (?P<tid>\d+):$")),
    ("gdb", re.compile(r"^Stack trace of thread (?P<tid>\d+):$")),
    ("gdb", re.compile(r"^(?:\* )?thread #(?P<number>\d+)(?:, |$)")),
    ("traceback", re.compile(r"^~+ Stack of (?P<name>.*) \((?P<ident>\d+)\) ~+$")),
)
_HEADERS = ("Thread ", "Current thread ", "Traceback for ", "TID ", "[Switching to thread ", "Stack trace ", "~")
_SWITCH = re.compile(r"^\[Switching to thread (?P<number>\d+) \(.*?(?:LWP (?P<tid>\d+))?\)")
_PY_BT = re.compile(r"^\s*Traceback \(most recent call first\):$")
_BOTTOM = re.compile(r"^\s*#0\s")


@dataclass
class Process:
    """A process being read.

    Attributes:
        prefix: what names a rank: the log prefix of its first line, or the heading above it.
        certain: py-spy's second header line was seen: a dump, even if no thread follows.
        fatal: what the interpreter or the kernel says it died of.
    """

    pid: int | None = None
    title: str = ""
    prefix: str = ""
    certain: bool = False
    fatal: str = ""
    threads: list[Thread] = field(default_factory=list)

    def stacks(self) -> tuple[ThreadStack, ...]:
        """Threads in the dump's order. The main one: tid = pid, else named or numbered so, else where the tool puts
        it, which is no thread that was started by another."""
        if not self.threads:
            return ()
        threads = self.threads
        by_pid = [t for t in threads if t.tid is not None and t.tid == self.pid]
        by_name = [t for t in threads if t.name == "MainThread"] or [t for t in threads if t.number == 1]
        likely = [t for t in threads if not t.is_side] or threads
        usual = likely[0] if threads[0].tool == "py-spy" else likely[-1]
        main = (by_pid or by_name or [usual])[0]
        return tuple(t.stack(t is main) for t in threads)


def read_processes(lines: Iterable[str]) -> Iterator[Process]:
    """The processes whose stacks ``lines`` hold, in order. Never raises, whatever the lines are."""
    for of_one_writer in sorted_by_writer(lines):
        reader = _Reader()
        for line in of_one_writer:
            reader.feed(line)
        reader.close(Process())
        yield from reader.done


class _Reader:
    """Reads lines that one process, or several one after another, wrote."""

    def __init__(self) -> None:
        self.done: list[Process] = []
        self.process = Process()
        self.thread: Thread | None = None

    def feed(self, line: Line) -> None:
        text = line.text.lstrip()
        depth = len(line.text) - len(text)
        inside = self.thread is not None and self.thread.indent is not None and depth > self.thread.indent
        if inside:  # among the arguments and locals of a frame
            return
        if not (self._process_header(text, line) or self._dump_header(text, line) or self._thread_header(text, line)):
            self._frame(line)

    def close(self, process: Process) -> None:
        """Put the process away that was read, and go on with ``process``."""
        if self.process.threads or self.process.certain:
            self.done.append(self.process)
        self.process, self.thread = process, None

    def _process_header(self, text: str, line: Line) -> bool:
        found = next((found for pattern in _PROCESS if (found := pattern.search(text))), None)
        if found is None:
            rank = heading(text)
            if rank:
                self.close(Process(prefix=rank))
            return bool(rank)
        pid = int(found["pid"])
        if self.process.threads or self.process.certain or self.process.pid not in (None, pid):
            same = self.process.pid == pid and not self.process.threads
            self.close(Process(prefix=self.process.prefix if same else ""))
        self.process.pid, self.process.prefix = pid, self.process.prefix or line.prefix
        self.process.title = found.groupdict().get("title") or self.process.title
        self.process.fatal = _fatal(text) or self.process.fatal
        self.thread = None
        return True

    def _dump_header(self, text: str, line: Line) -> bool:
        if self.process.pid is not None and not self.process.threads and _VERSION.match(text):
            self.process.certain = True
            return True
        if not _NEW_DUMP.match(text):
            return False
        if self.process.threads:
            self.close(Process(prefix=line.prefix))
        self.process.fatal, self.thread = _fatal(text), None
        return True

    def _thread_header(self, text: str, line: Line) -> bool:
        thread = _thread(text, self.process)
        if thread is None:
            return False
        process = self.process
        if any(known is thread for known in process.threads):  # back to it, for its Python frames
            self.thread = thread
            return True
        if _begins_another(thread, line.prefix, process):
            self.close(Process())
            process = self.process
        if not process.threads and process.pid is None:
            process.prefix, process.pid = process.prefix or line.prefix, line.pid
        thread.prefix = line.prefix
        process.threads.append(thread)
        self.thread = thread
        return True

    def _frame(self, line: Line) -> None:
        thread = self.thread
        if thread is None or thread.tool == "gdb":  # gdb prints no header for a process of one thread
            bottom, python = _BOTTOM.match(line.text), _PY_BT.match(line.text)
            if thread is not None and ((bottom and thread.frames) or (python and thread.python)):
                self.close(Process())
            if self.thread is None and (bottom or python):
                self.thread = Thread("gdb", self.process.pid)
                self.process.prefix = self.process.prefix or line.prefix
                self.process.threads.append(self.thread)
        if self.thread is not None and not self.thread.take(line.text):
            self.thread = None


def active(said: bool | None, owns_gil: bool | None, *, numbered: bool) -> bool | None:
    """What py-spy's word "active" is worth. Of a thread whose kernel number it does not know (a Python before 3.11 that
    it did not stop) it cannot tell, and says it of every thread; of the GIL's owner it is still the best guess."""
    return None if said and not owns_gil and not numbered else said


def _fatal(text: str) -> str:
    found = _FATAL.match(text)
    return found[1] if found else ""


def _thread(text: str, process: Process) -> Thread | None:
    """The thread that ``text`` is the header of; one of ``process`` where gdb goes back to it."""
    if not text.startswith(_HEADERS) and "thread #" not in text[:10]:
        return None
    for tool, pattern in _THREAD:
        if found := pattern.match(text):
            groups = found.groupdict()
            lwp = re.search(r"LWP (\d+)", groups.get("inside") or "")
            tid = lwp[1] if lwp else groups.get("tid") or ""
            thread = Thread(tool, int(tid) if tid.isdigit() else None, groups.get("name"))
            thread.ident = groups.get("ident") or tid or None
            thread.number = int(groups["number"]) if groups.get("number") else None
            thread.current = bool(groups.get("current"))
            if activity := groups.get("activity"):
                thread.owns_gil = bool(groups.get("gil"))
                thread.active = active(activity == "active", thread.owns_gil, numbered=not tid.startswith("0x"))
            if (status := groups.get("status")) is not None:
                thread.owns_gil = "Has the GIL" in status
            return thread
    if (found := _SWITCH.match(text)) and process.threads:  # "thread 3", then py-bt, after a full backtrace
        tid = found["tid"]
        return next((t for t in process.threads if tid and t.tid == int(tid)), None)
    return None


def _begins_another(thread: Thread, prefix: str, process: Process) -> bool:
    """True when ``thread`` cannot belong to ``process``: dumps of several processes follow one another unannounced."""
    if not process.threads:
        return False
    before = process.threads[-1]
    if before.tool != thread.tool or _tag(prefix) != _tag(before.prefix):
        return True
    for known in process.threads:
        if thread.ident is not None and known.ident == thread.ident:
            return True
        if known.name == thread.name == "MainThread" or (known.current and thread.current):
            return True
        if thread.number is not None and known.number == thread.number:
            return True
    if before.number == 1:  # gdb counts down to the main thread; who counts up has just begun
        return len(process.threads) > 1
    return before.tool in ("pystack", "faulthandler") and before.is_program  # they end with the main thread


def _tag(prefix: str) -> str:
    """What of a prefix names the writer: times and numbers change from line to line."""
    return re.sub(r"\d[\d:.,TZ-]{7,}|^\[\d+\]", "", prefix)
