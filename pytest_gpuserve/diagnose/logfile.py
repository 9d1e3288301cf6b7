"""Logs as streams of bytes, whatever they are packed in: plain, .gz, .bz2, .xz, .zst, UTF-16, or a pipe that we were
handed (standard input, ``<(...)`` of a shell)."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TextIO

from .. import foreign
from ..errors import GpuserveError
from ..phases.reader import parts

CHUNK: Final = 1 << 18
"""Bytes that are held at a time."""

MOST: Final = 4 << 30
"""Bytes of one log that are read, unpacked."""

LARGEST: Final = 16 << 30
"""Bytes of a plain log that is read at all: lines are counted in what is left out."""

PATIENCE: Final = 60.0
"""Seconds that a pipe other than standard input has to end: at a terminal somebody would wait in vain."""

_HANDED: Final = re.compile(r"/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+")
_UNPACKER: Final = 256 << 20
"""Bytes that .xz may ask for as its dictionary: ``xz -9`` asks for 64 MiB."""

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstandard"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"BZh", "bzip2"),
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


class Readable(Protocol):
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
        problem: why reading ended early (a truncated archive, a log without end), or None.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.problem: str | None = None

    def chunks(self, most: int | None = None) -> Iterator[bytes | Gap]:
        """The content, unpacked, at most :data:`CHUNK` bytes at a time and :data:`MOST` in all. What is left out of a
        plain file of more than ``most`` bytes is a :class:`Gap` between two chunks.

        A damaged archive ends early, with ``problem`` set. What a server writes while its log is read is not read.

        Raises:
            LogError: no such file, no regular one, not readable, or packed in a way that cannot be unpacked here.
        """
        try:
            with unpacked(self.name) as stream:
                if isinstance(stream, io.BufferedReader) and stream.seekable():
                    yield from self._plain(stream, most)
                else:
                    yield from self._stream(stream)
        except DAMAGE as error:
            self.problem = f"{self.name} is damaged or incomplete ({error}): only what could be unpacked was read"
        except OSError as error:
            raise LogError(f"{self.name} cannot be read: {error.strerror or error}.") from None

    def _plain(self, file: io.BufferedReader, most: int | None) -> Iterator[bytes | Gap]:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST:
            raise LogError(f"{self.name} is larger than {LARGEST >> 30} GiB: give what matters alone (tail -c 1G).")
        if size > MOST:
            self.problem = f"{self.name} is longer than {MOST >> 30} GiB: its beginning and its end were read"
        yield from _ends(file, min(most or MOST, MOST))

    def _stream(self, stream: Readable) -> Iterator[bytes]:
        left = MOST
        while left > 0 and (chunk := stream.read(min(CHUNK, left))):
            left -= len(chunk)
            yield chunk
        if not left and stream.read(1):
            self.problem = (
                f"{self.name} is longer than {MOST >> 30} GiB unpacked: only its beginning was read, so give what "
                f"matters alone (tail -c 1G)"
            )


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


@contextmanager
def unpacked(name: str) -> Iterator[Readable]:
    """Its content from the start, each time: a pipe is read once, and kept.

    Raises:
        LogError: as :meth:`LogFile.chunks`.
        OSError: it cannot be read; one of :data:`DAMAGE` while it is read: it is damaged.
    """
    try:
        raw = _kept(name) or foreign.opened(name)
    except FileNotFoundError:
        raise LogError(f"{name}: there is no such file.") from None
    except IsADirectoryError:
        raise LogError(
            f"{name} is a directory: name the logs in it (several logs of one server are read together)."
        ) from None
    with raw:
        head = raw.read(8) or b""
        raw.seek(0)
        kind = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
        if kind == "gzip":
            with gzip.open(raw) as stream:
                yield stream
        elif kind == "xz":
            yield _Xz(raw)
        elif kind == "bzip2":
            with bz2.open(raw) as stream:
                yield stream
        elif kind == "zstandard":
            with _zstandard(name, raw) as stream:
                yield stream
        elif head.startswith(_UTF16):
            yield _Utf16(raw)
        else:
            yield raw


def _kept(name: str) -> BinaryIO | None:
    """What came through a pipe that we were handed; None: ``name`` is none."""
    if name == "-":
        if sys.stdin is None:
            raise LogError("standard input is closed: name a file, or give it one (gpuserve explain - < FILE).")
        spool = _spooled(sys.stdin)
    elif _HANDED.fullmatch(name) and Path(name).is_fifo():
        spool = _spooled(name, Path(name).stat().st_ino)
    else:
        return None
    os.lseek(spool, 0, os.SEEK_SET)
    return open(os.dup(spool), "r+b")  # no BufferedReader: its size is not the log's, where it was cut


@cache
def _spooled(source: str | TextIO, inode: int = 0) -> int:
    """Descriptor of what a pipe held up to its end, or :data:`MOST` of it: whoever reads it again finds it there.
    ``inode`` tells two pipes of one name apart."""
    with tempfile.TemporaryFile() as spool:
        if isinstance(source, str):
            with open(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as pipe:
                _copy(_patient(pipe, source), spool)
        else:
            _copy(source.buffer.read, spool)
        return os.dup(spool.fileno())


def _copy(read: Callable[[int], bytes | None], spool: BinaryIO) -> None:
    left = MOST + 1
    while left > 0 and (chunk := read(min(CHUNK, left))):
        left -= spool.write(chunk)
    spool.flush()


def _patient(pipe: io.RawIOBase, name: str) -> Callable[[int], bytes | None]:
    end = time.monotonic() + PATIENCE

    def read(size: int) -> bytes | None:
        if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            raise LogError(f"{name} did not end within {PATIENCE:g} s: write it to a file, and name that.")
        return pipe.read(size)

    return read


class _Utf16:
    """As UTF-8: what a shell of Windows writes."""

    def __init__(self, raw: BinaryIO) -> None:
        self._text = io.TextIOWrapper(raw, "utf-16", errors="replace", newline="")

    def read(self, size: int, /) -> bytes:
        return self._text.read(max(1, size // 4)).encode(errors="replace")  # a character has at most 4 bytes


class _Xz:
    """lzma.open has no limit of memory."""

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._unpacker = lzma.LZMADecompressor(memlimit=_UNPACKER)

    def read(self, size: int, /) -> bytes:
        data = b""
        while not data:
            packed = b""
            if self._unpacker.eof:  # perhaps another stream follows, after padding
                if not (packed := (self._unpacker.unused_data or self._packed.read(CHUNK)).lstrip(b"\0")):
                    return b""
                self._unpacker = lzma.LZMADecompressor(memlimit=_UNPACKER)
            elif self._unpacker.needs_input and not (packed := self._packed.read(CHUNK)):
                raise EOFError("it ends before its end-of-stream marker")
            data = self._unpacker.decompress(packed, size)
        return data


@contextmanager
def _zstandard(name: str, raw: BinaryIO) -> Iterator[Readable]:
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
    os.lseek(raw.fileno(), 0, os.SEEK_SET)  # it has been read ahead
    process = subprocess.Popen([program, "-dcq"], stdin=raw, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    output = process.stdout
    assert output is not None
    try:
        with output:
            yield output
            ended = not output.read(1)
        if ended and process.wait(timeout=10):
            raise EOFError("zstd could not unpack all of it")
    finally:
        process.kill()
        process.wait()
