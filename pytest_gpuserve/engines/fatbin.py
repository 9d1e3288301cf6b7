"""For which GPU architectures does a shared library carry code? Read from its ELF sections; nothing of it is run.

nvcc puts device code into sections ``.nv_fatbin`` and ``__nv_relfatbin``: containers (magic 0xBA55ED50) of entries,
each for one architecture, as machine code (SASS) or as PTX, which the driver can compile. Only headers are read, so a
library of a gigabyte takes milliseconds, and compressed payloads need not be unpacked. Layout and flags are as seen in
what nvcc 12.6 to 13.0 wrote, with LZ4 and with zstd.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, cast

Suffix = Literal["", "a", "f"]
Capability = tuple[int, int]
"""Compute capability of a GPU: (12, 0)."""

_MAGIC: Final = struct.pack("<I", 0xBA55ED50)
_SECTIONS: Final = (b".nv_fatbin", b"__nv_relfatbin")
_KINDS: Final[dict[int, Literal["ptx", "sass"]]] = {
    1: "ptx",
    2: "sass",
}  # others (LTO-IR, ...) cannot be run as they are
_EXACT: Final = 0x100000
_FAMILY: Final = 0x200000
_NO_FAMILY: Final = frozenset({(10, 1)})  # Thor, which CUDA 13 renamed to 11.0, is not of 10.0's family
_MOST: Final = 1 << 20
"""Entries of one library that are ever looked at, and section headers."""
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Arch:
    """What one piece of device code was built for: ``sm_120a`` (SASS) or ``compute_90`` (PTX).

    Attributes:
        number: 120 for compute capability 12.0.
        suffix: ``a``: architecture-specific, ``f``: family-specific.
    """

    number: int
    suffix: Suffix = ""
    kind: Literal["sass", "ptx"] = "sass"

    def __str__(self) -> str:
        return f"{'sm' if self.kind == 'sass' else 'compute'}_{self.number}{self.suffix}"

    @classmethod
    def parse(cls, text: str) -> Arch:
        """The reverse of ``str()``. Raises ValueError."""
        found = re.fullmatch(r"(sm|compute)_(\d{2,4})([af]?)", text)
        if not found:
            raise ValueError(f"{text!r} is no architecture")
        return cls(int(found[2]), cast(Suffix, found[3]), "sass" if found[1] == "sm" else "ptx")

    def serves(self, capability: Capability) -> bool:
        """Whether a GPU can run it: ``a`` on exactly this architecture, SASS within the major version upwards, ``f``
        within the family upwards, other PTX on everything later (CUDA programming guide, "compatibility")."""
        own = divmod(self.number, 10)
        if self.suffix == "a":
            return capability == own
        if self.kind == "ptx" and not self.suffix:
            return capability >= own
        if self.suffix == "f" and own != capability and (own in _NO_FAMILY or capability in _NO_FAMILY):
            return False
        return capability[0] == own[0] and capability[1] >= own[1]


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """What :func:`read` found. ``archs`` is sorted and empty in a library without device code; ``damaged``: a container
    did not hold what it announced, so there may be more."""

    archs: tuple[Arch, ...] = ()
    damaged: bool = False

    def serves(self, capability: Capability) -> bool | None:
        """Whether any of it runs there; None when there is no device code to judge by."""
        return any(arch.serves(capability) for arch in self.archs) if self.archs else None


def read(path: str | os.PathLike[str]) -> DeviceCode:
    """The architectures of a shared library (64-bit ELF, little endian), or of a bare ``.fatbin``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is neither.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(descriptor).st_size
        return _read(descriptor, size)
    finally:
        os.close(descriptor)


def _read(file: int, size: int) -> DeviceCode:
    # pread, not a mapping: a library that is being replaced would end us with SIGBUS
    head = os.pread(file, 64, 0)
    if head.startswith(_MAGIC):
        regions = [(0, size)]
    elif head.startswith(b"\x7fELF\x02\x01") and len(head) == 64:
        regions = _regions(file, size, head)
    else:
        raise ValueError("no 64-bit ELF file")
    found: set[Arch] = set()
    damaged = False
    for begin, end in regions:
        for arch in _entries(file, begin, end):
            damaged |= arch is None
            found |= {arch} if arch else set()
    return DeviceCode(tuple(sorted(found)), damaged)


def _regions(file: int, size: int, head: bytes) -> list[tuple[int, int]]:
    """Where device code may be: the sections of nvcc, or everything when the section table was stripped."""
    (offset,) = struct.unpack_from("<Q", head, 40)
    width, count, names = struct.unpack_from("<HHH", head, 58)
    if not offset or width != 64 or offset + width * count > size or names >= count:
        return [(0, size)]
    table = os.pread(file, width * count, offset)
    if len(table) < width * count:
        return [(0, size)]
    rows = [struct.unpack_from("<IIQQQQ", table, width * n) for n in range(count)]  # name, type, flags, addr, at, size
    text = os.pread(file, min(rows[names][5], _CHUNK), min(rows[names][4], size))
    return [
        (at, min(at + length, size))
        for name, kind, _, _, at, length in rows
        if kind != 8 and text[name : name + 20].split(b"\0")[0] in _SECTIONS  # 8: NOBITS, in a file of debug symbols
    ]


def _entries(file: int, begin: int, end: int) -> Iterator[Arch | None]:
    """Architectures of every entry in a region; None for a container that is not what it says."""
    looked = 0
    while (begin := _find(file, begin, end)) >= 0 and looked < _MOST:
        version, width, length = struct.unpack("<HHQ", os.pread(file, 16, begin)[4:].ljust(12, b"\0"))
        at, stop = begin + width, begin + width + length
        if version != 1 or width < 16 or stop > end:
            yield None
            begin += 4
            continue
        while at + 48 <= stop and looked < _MOST:
            looked += 1
            entry = os.pread(file, 48, at)
            if len(entry) < 48:
                yield None
                return
            kind, _, header, payload = struct.unpack_from("<HHIQ", entry)
            (number,), (flags,) = struct.unpack_from("<I", entry, 28), struct.unpack_from("<Q", entry, 40)
            if header < 48 or at + header + payload > stop or not 10 <= number <= 9999:
                yield None
                break
            if known := _KINDS.get(kind):
                suffix: Suffix = "a" if flags & _EXACT else "f" if flags & _FAMILY else ""
                yield Arch(number, suffix, known)
            at += header + payload
        begin = max(stop, begin + 16)
    if looked >= _MOST:
        yield None


def _find(file: int, begin: int, end: int) -> int:
    """Offset of the next magic number in a region, usually right at its beginning; -1 when there is none."""
    window = 64
    while begin + 16 <= end:
        chunk = os.pread(file, min(window, end - begin), begin)
        if len(chunk) < 16:
            return -1
        if (at := chunk.find(_MAGIC)) >= 0:
            return begin + at
        begin, window = begin + len(chunk) - 3, _CHUNK
    return -1


def parse_arch(text: str) -> Capability:
    """``sm120``, ``sm_120a``, ``120`` or ``12.0`` as compute capability (12, 0).

    Raises:
        ValueError: it is none of these.
    """
    if found := re.fullmatch(r"(\d{1,2})\.(\d)", text):
        return int(found[1]), int(found[2])
    found = re.fullmatch(r"(?:sm_?|compute_?)?(\d{2,3})[af]?", text.lower())
    if found and int(found[1]) >= 20:
        return divmod(int(found[1]), 10)
    raise ValueError(f"{text!r} is no architecture: write sm120, 120 or 12.0")
