"""Known places to hang, as data: ``signatures.toml`` beside this file.

A signature names frames, leaf-most first, as ``"function|other @ file"``. Functions match on the last dotted part
(``ModelRunner.load_model`` is ``load_model``: dumpers differ in whether they print the class), ``*`` is a wildcard.
Files match on their path's end, whichever of the two is longer (py-spy shortens paths); ``*`` alone is any file.
The first frame must be among the ``depth`` leaf-most frames, so that ``load_model`` five levels above a collective
is no cause; the others follow further out, gaps allowed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, resources
from typing import Any

from .model import ClassKind, Frame, ThreadStack

DEPTH = 8
"""How far from the leaf a signature may begin, in folded frames."""

_LOCALS = ".<locals>"
_CLONE = re.compile(
    r"@@?[A-Z][\w.]*$|(?:\.(?:(?:constprop|isra|part|lto_priv|llvm)\.\d+|(?:cold|localalias)(?:\.\d+)?))+$"
)


def last_name(name: str) -> str:
    """``Scheduler.run.<locals>.step`` -> ``step``; names of native functions lose arguments, templates, symbol versions
    (``poll@GLIBC_2.2.5``) and what compilers append to copies (``wait.constprop.0``)."""
    name = _CLONE.sub("", name)
    if "(" in name and not name.startswith("("):
        name = name.partition("(")[0]
    if "<" in name and _LOCALS not in name and "::" in name:
        name = name.partition("<")[0]
    return name.rpartition("::" if "::" in name else ".")[2] or name


@dataclass(frozen=True, slots=True)
class FramePattern:
    """One ``function @ file`` of a signature."""

    text: str
    names: re.Pattern[str]
    files: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> FramePattern:
        names, _, files = text.partition("@")
        alternatives = "|".join(re.escape(name.strip()).replace(r"\*", ".*") for name in names.strip().split("|"))
        return cls(text, re.compile(f"(?:{alternatives})"), tuple(f.strip() for f in (files.strip() or "*").split("|")))

    def matches(self, frame: Frame) -> bool:
        if not self.names.fullmatch(last_name(frame.name)) and not self.names.fullmatch(frame.name):
            return False
        place = (frame.module or frame.file).replace("\\", "/")
        return any(_same_file(pattern, place) or _same_file(pattern, frame.file) for pattern in self.files)


def _same_file(pattern: str, path: str) -> bool:
    if pattern == "*":
        return True
    if "*" in pattern:
        return re.search("(?:^|/)" + re.escape(pattern).replace(r"\*", "[^/]*") + "$", path) is not None
    return path == pattern or path.endswith("/" + pattern) or ("/" in pattern and pattern.endswith("/" + path))


@dataclass(frozen=True, slots=True)
class Signature:
    """One entry of the data file.

    Attributes:
        id: stable name, kebab case; verdicts quote it.
        kind: cause (holds others up), waits (for a peer: a victim), idle (healthy, nothing to do).
        title: what the process is doing, to follow "rank 3 ...".
        frames: leaf-most first.
        layer: what is to blame when every rank is there (gpu, nccl, network, ipc, lock, jit, storage, rendezvous ...).
        explanation, advice: for people; one or two sentences each.
        together: advice where every rank is in this place, instead of ``advice``.
        sources: URLs of the reports it rests on.
        since, fixed_in: versions, where known (``"sglang 0.5.10"``).
        depth: how far from the leaf the first frame may be.
        within: frames that must be somewhere further out, in any order.
        gil: the thread must own the GIL.
        lock: the process waits for a lock: its holder is looked for.
        progressive: normal work that takes long; a hang only when nothing moves.
        weak: used only when nothing else matches.
    """

    id: str
    kind: ClassKind
    title: str
    frames: tuple[FramePattern, ...]
    layer: str = ""
    explanation: str = ""
    advice: str = ""
    together: str = ""
    sources: tuple[str, ...] = ()
    since: str = ""
    fixed_in: str = ""
    depth: int = DEPTH
    within: tuple[FramePattern, ...] = ()
    gil: bool = False
    lock: bool = False
    progressive: bool = False
    weak: bool = False

    @classmethod
    def from_mapping(cls, entry: Mapping[str, Any]) -> Signature:
        """From one table of the data file.

        Raises:
            TypeError: unknown or missing keys.
            ValueError: a kind that does not exist, or no frames.
        """
        values = dict(entry)
        for key in ("frames", "within"):
            values[key] = tuple(FramePattern.parse(text) for text in values.get(key, ()))
        values["sources"] = tuple(values.get("sources", ()))
        signature = cls(**values)
        if signature.kind not in ("cause", "waits", "idle") or not signature.frames:
            raise ValueError(f"signature {signature.id!r}: needs frames and a kind of cause, waits or idle")
        return signature

    def find(self, frames: Sequence[Frame]) -> tuple[int, int] | None:
        """Indexes of the leaf-most and outermost frame of the match in ``frames`` (leaf first, folded), or None."""
        python = 0
        for start, frame in enumerate(frames):
            if (python if not frame.native else start) >= self.depth:  # native frames are how a Python one waits
                if python >= self.depth:
                    break
                continue
            python += not frame.native
            if not self.frames[0].matches(frame):
                continue
            end = start
            for pattern in self.frames[1:]:
                end = next((n for n in range(end + 1, len(frames)) if pattern.matches(frames[n])), -1)
                if end < 0:
                    break
            if end >= 0 and all(any(p.matches(f) for f in frames[start + 1 :]) for p in self.within):
                return start, end
        return None


@lru_cache(maxsize=1)
def load() -> tuple[Signature, ...]:
    """All signatures of the data file, in its order."""
    text = resources.files(__package__).joinpath("signatures.toml").read_text("utf-8")
    return tuple(Signature.from_mapping(entry) for entry in read_toml(text)["signature"])


def read_toml(text: str) -> dict[str, Any]:
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return dict(toml.loads(text))


@lru_cache(maxsize=1)
def by_id() -> dict[str, Signature]:
    return {signature.id: signature for signature in load()}


@dataclass(frozen=True, slots=True)
class Match:
    """A signature found in a thread; ``frames`` are folded, ``start`` and ``end`` as in :meth:`Signature.find`."""

    signature: Signature
    frames: tuple[Frame, ...]
    start: int
    end: int

    @property
    def cut(self) -> tuple[Frame, ...]:
        """Frames without what lies below the match: how a wait is implemented makes no difference. An idle loop is
        cut above all of its steps, since one rank may be seen polling and another checking its pools."""
        return self.frames[self.end if self.signature.kind == "idle" else self.start :]


def match(thread: ThreadStack, signatures: Iterable[Signature] | None = None) -> Match | None:
    """The signature that says most about a thread: not weak before weak, leaf-most before further out, more frames
    before fewer, then cause before waits before idle."""
    frames = folded(thread.frames)
    best: tuple[tuple[int, int, int, int], Match] | None = None
    for signature in load() if signatures is None else signatures:
        if signature.gil and not thread.owns_gil:
            continue
        found = signature.find(frames)
        if found is None:
            continue
        size = len(signature.frames) + len(signature.within)
        rank = (int(signature.weak), found[0], -size, ("cause", "waits", "idle").index(signature.kind))
        if best is None or rank < best[0]:
            best = (rank, Match(signature, frames, *found))
    return best[1] if best else None


_BOOT_NAMES = frozenset(
    {
        "_bootstrap",
        "_bootstrap_inner",
        "spawn_main",
        "_main",
        "<module>",
        "_run_module_as_main",
        "_run_code",
        "run_code",
        "<listcomp>",
        "<lambda>",
        "decorate_context",
    }
)
_WRAPPERS = frozenset(
    {"wrapper", "_fn", "inner", "decorated", "_wrapped_call_impl", "sync_wrapper", "_auto_dump_wrapper"}
)
_WRAPPER_FILES = frozenset({"c10d_logger.py", "_contextlib.py", "otel.py", "nvtx_utils.py", "api_logging.py"})
_RUN_FILES = frozenset({"process.py", "threading.py", "<string>"})


def is_helper(frame: Frame) -> bool:
    """Boot and helper frames say nothing about where a process is: interpreter start, decorators, bare addresses."""
    name = last_name(frame.name)
    if frame.native:
        return name.startswith("0x") or name in ("??", "???", "thread_run", "start_thread", "clone", "clone3", "_start")
    if name in _BOOT_NAMES:
        return True
    file = frame.file.rpartition("/")[2]
    if name == "run" and file in _RUN_FILES:
        return True
    return name in _WRAPPERS and (file in _WRAPPER_FILES or name == "_wrapped_call_impl")


def folded(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Leaf-first frames without helpers; all of them where nothing would be left."""
    kept = tuple(frame for frame in frames if not is_helper(frame))
    return kept or tuple(frames)
