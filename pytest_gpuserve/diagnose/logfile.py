"""Logs as streams of bytes, whatever they are packed in: plain, .gz, .bz2, .xz, .zst, or standard input."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol

from ..errors import GpuserveError
from ..phases.reader import parts

CHUNK = 1 << 18
"""Bytes that are held at a time."""

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstandard"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"BZh", "bzip2"),
)
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class LogError(GpuserveError):
    """A log cannot be read; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Gap:
    """So many line ends were not read."""

    lines: int


class LogFile:
    """One log, read once from the start.

    Attributes:
        name: as the user wrote it.
        problem: why reading ended early (a truncated archive), or None.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.problem: str | None = None

    def chunks(self, most: int | None = None) -> Iterator[bytes | Gap]:
        """The content, unpacked, at most :data:`CHUNK` bytes at a time. What is left out of a plain file of more than
        ``most`` bytes is a :class:`Gap` between two chunks.

        A damaged archive ends early, with ``problem`` set.

        Raises:
            LogError: no such file, a directory, not readable, or packed in a way that cannot be unpacked here.
        """
        try:
            with _opened(self.name) as stream:
                if most is not None and isinstance(stream, io.BufferedReader) and stream.seekable():
                    yield from _ends(stream, most)
                while chunk := stream.read(CHUNK):
                    yield chunk
        except _DAMAGE as error:
            self.problem = f"{self.name} is damaged or incomplete ({error}): only what could be unpacked was read"
        except OSError as error:
            raise LogError(f"{self.name} cannot be read: {error.strerror or error}.") from None


def _ends(file: io.BufferedReader, most: int) -> Iterator[bytes | Gap]:
    """The beginning and the end of a file as it is now."""
    for begin, end in parts(os.fstat(file.fileno()).st_size, most):
        lines, skipped = 0, file.tell() < begin
        while chunk := file.read(min(CHUNK, begin - file.tell())):
            lines += chunk.count(b"\n")
        if skipped:
            yield Gap(lines)
        while chunk := file.read(min(CHUNK, end - file.tell())):
            yield chunk
    file.seek(0, os.SEEK_END)


@contextmanager
def _opened(name: str) -> Iterator[_Readable]:
    if name == "-":
        yield sys.stdin.buffer
        return
    path = Path(name)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise LogError(f"{name}: there is no such file.") from None
    if stat.S_ISDIR(mode):
        raise LogError(f"{name} is a directory: name the logs in it (several logs of one server are read together).")
    with path.open("rb") as raw:
        head = raw.peek(8)[:8] if isinstance(raw, io.BufferedReader) else b""
        kind = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
        if kind == "gzip":
            with gzip.open(raw) as stream:
                yield stream
        elif kind == "xz":
            with lzma.open(raw) as stream:
                yield stream
        elif kind == "bzip2":
            with bz2.open(raw) as stream:
                yield stream
        elif kind == "zstandard":
            with _zstandard(name, raw) as stream:
                yield stream
        else:
            yield raw


@contextmanager
def _zstandard(name: str, raw: IO[bytes]) -> Iterator[_Readable]:
    """The standard library's reader (Python 3.14), else an installed one, else the zstd program."""
    for module in ("compression.zstd", "backports.zstd", "zstandard"):
        try:
            library: Any = import_module(module)
        except ImportError:
            continue
        if module == "zstandard":
            stream = library.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        else:
            stream = library.open(raw)
        try:
            with stream:
                yield stream
        except library.ZstdError as error:
            raise EOFError(str(error)) from None
        return
    program = shutil.which("zstd")
    if program is None:
        raise LogError(
            f"{name} is packed with zstandard, which this Python cannot unpack: install the zstandard package "
            f"or the zstd program, or unpack it first."
        )
    with open(name, "rb") as packed:  # its own descriptor: ours has been read ahead
        process = subprocess.Popen([program, "-dcq"], stdin=packed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    output = process.stdout
    assert output is not None
    try:
        with output:
            yield output
        if process.wait(timeout=10):
            raise EOFError("zstd could not unpack all of it")
    finally:
        process.kill()
        process.wait()
