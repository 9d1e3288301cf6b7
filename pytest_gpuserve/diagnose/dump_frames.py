"""Threads of a pasted dump and their frames, in the form of each tool."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from .dump_lines import without_note
from .model import Frame, ThreadStack

Tool = Literal["py-spy", "faulthandler", "pystack", "gdb", "traceback"]
"""``gdb``: lldb, eu-stack and coredumpctl too. ``traceback``: Python's own form, as pytest-timeout prints it."""

_PYSPY = re.compile(r"^(?P<indent>\s*)(?P<name>\S.*) \((?P<file>[^()]*(?:\([^()]*\)[^()]*)?)\)$")
_PYSPY_COLUMNS = re.compile(r"^(?P<indent>\s+)(?P<name>[\w.<>]+)\s+(?P<file>[^\s()]+\.py:\d+)(?:\s.*)?$")
_FAULT = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')
_PYSTACK = re.compile(
    r'^\s*\((?P<kind>Python|C|Cython)\) File "(?P<file>.*)", line (?P<line>\d+), in (?P<name>.+?)'
    r"(?: \(inlined\))?(?: \((?P<module>[^()]+)\))?$"
)
_TRACEBACK = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+|\?), in (?P<name>.+)$')
_GDB = re.compile(r"^\s*#(?P<number>\d+)\s+(?:(?P<address>0x[0-9a-f]+)(?: in)?\s*)?(?P<rest>.*)$")
_GDB_PYTHON = re.compile(
    r"(?:^\s*\(?|^_?PyEval_\w+ \(.*?)\bFrame 0x[0-9a-f]+, for file (?P<file>.+?), line (?P<line>\d+), "
    r"in (?P<name>[^\s(]+)"
)
_GDB_PLACE = re.compile(
    r"(?:^|\s)(?:(?:at|from) (?P<file>\S+?)(?::(?P<line>\d+))?|\((?P<module>[^()\s]+) \+ 0x[0-9a-f]+\))$"
)
_LLDB = re.compile(
    r"^\s*(?:\* )?frame #\d+: (?P<address>0x[0-9a-f]+) (?P<module>[^\s`]+)`(?P<name>.+?)(?: \+ \d+)?"
    r"(?: at (?P<file>[^\s:]+):(?P<line>\d+)(?::\d+)?)?$"
)
_INTERPRETER = re.compile(r"^_?Py(Eval|Object|Function|Method|CFunction)|^_?PyEval|^(method|cfunction)_vectorcall")
_SIDE_ROOTS = frozenset({"_bootstrap", "clone", "clone3", "__clone", "__clone3", "start_thread"})


@dataclass
class Thread:
    """A thread being read.

    Attributes:
        ident: its pthread id as printed, where the tool has no thread id.
        number: the debugger's; its 1 is the main thread.
        current: faulthandler's "Current thread", of which a dump has one.
        prefix: log prefix of its header.
        frames: in the tool's order: outermost first from pystack and traceback, else innermost first.
        python: Python frames that gdb knows beside the C frames, innermost first.
        indent: column of py-spy's frames; what stands further in are arguments and locals.
    """

    tool: Tool
    tid: int | None = None
    name: str | None = None
    active: bool | None = None
    owns_gil: bool | None = None
    ident: str | None = None
    number: int | None = None
    current: bool = False
    prefix: str = ""
    frames: list[Frame] = field(default_factory=list)
    python: list[Frame] = field(default_factory=list)
    indent: int | None = None

    def innermost_first(self) -> list[Frame]:
        frames = list(reversed(self.frames)) if self.tool in ("pystack", "traceback") else list(self.frames)
        if self.python:  # gdb's py-bt beside its bt: the C frames below the innermost Python frame, then Python
            inner = next((n for n, f in enumerate(frames) if _INTERPRETER.match(f.name)), len(frames))
            frames = frames[:inner] + self.python
        return frames

    def stack(self, main: bool) -> ThreadStack:
        return ThreadStack(self.tid, self.name, main, tuple(self.innermost_first()), self.active, self.owns_gil)

    @property
    def is_side(self) -> bool:
        """Its outermost frame starts threads: the main thread has none."""
        frames = self.innermost_first()
        return any(frame.name in _SIDE_ROOTS for frame in frames[-2:])

    @property
    def is_program(self) -> bool:
        """Its outermost Python frame is a module: nothing but a program's top is rooted there."""
        python = [frame for frame in self.innermost_first() if not frame.native]
        return bool(python) and python[-1].name in ("<module>", "_run_module_as_main")

    def take(self, line: str) -> bool:
        """Read a line that may be a frame. False where it ends the stack."""
        if self.tool == "py-spy":
            self._take_pyspy(without_note(line))
        elif self.tool == "faulthandler":
            if found := _FAULT.match(line):
                self.frames.append(Frame(found["name"], found["file"], _number(found["line"])))
        elif self.tool == "pystack":
            if found := _PYSTACK.match(line):
                native = found["kind"] == "C"
                module = (found["module"] or found["file"]) if native else None
                self.frames.append(Frame(found["name"], found["file"], _number(found["line"]), module))
        elif self.tool == "traceback":
            if found := _TRACEBACK.match(line):
                self.frames.append(Frame(found["name"], found["file"], _number(found["line"])))
            return not line or line[:1].isspace()
        else:
            self._take_gdb(line)
        return True

    def _take_pyspy(self, line: str) -> None:
        found = _PYSPY_COLUMNS.match(line) or _PYSPY.match(line)
        if not found:
            return
        indent = len(found["indent"].expandtabs(4))
        if self.indent is None:
            self.indent = indent
        if indent != self.indent:  # arguments and locals stand further in
            return
        name = found["name"].rstrip()
        file, _, number = found["file"].rpartition(":")
        if file and number.isdigit():
            self.frames.append(Frame(name, file, int(number)))
        else:  # py-spy prints no line for native frames
            self.frames.append(Frame(name, found["file"], None, _module(found["file"])))

    def _take_gdb(self, line: str) -> None:
        if found := _TRACEBACK.match(line):
            self.python.append(Frame(found["name"], found["file"], _number(found["line"])))
        elif found := _GDB.match(line):
            rest = found["rest"]
            if self._take_gdb_python(rest) and rest.startswith(("(", "Frame")):  # py-bt-full: no C frame
                return
            name = re.split(r"\s+\(|\s+at\s|\s+from\s|\s+-\s", rest, maxsplit=1)[0].strip()
            place = _GDB_PLACE.search(rest)
            file = (place["file"] or place["module"]) if place else ""
            name = name if name not in ("", "??", "n/a") else found["address"] or "??"
            module = _module(file) if file else "?"  # torch's watchdog writes Python frames in this form
            self.frames.append(Frame(name, file, _number(place["line"]) if place else None, module))
        elif found := _LLDB.match(line):
            file = found["file"] or found["module"]
            name = found["name"].partition("(")[0] or found["name"]
            self.frames.append(Frame(name, file, _number(found["line"]), found["module"]))
        elif not self._take_gdb_python(line) and line[:1].isspace() and (place := _GDB_PLACE.search(line)):
            file = place["file"] or place["module"]
            if self.frames and self.frames[-1].file == "":  # the terminal was narrow
                self.frames[-1] = replace(self.frames[-1], file=file, line=_number(place["line"]), module=file)

    def _take_gdb_python(self, text: str) -> bool:
        """A Python frame that gdb shows as the interpreter's argument; the same one may be several functions'."""
        found = _GDB_PYTHON.search(text)
        if found:
            frame = Frame(found["name"], found["file"], int(found["line"]))
            if self.python[-1:] != [frame]:
                self.python.append(frame)
        return found is not None


def _module(file: str) -> str | None:
    return None if file.endswith((".py", ".pyx")) or file.startswith("<") else file


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
