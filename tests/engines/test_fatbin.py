"""Architectures of shared libraries: real ones of nvcc, and made ones that nvcc would not write."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gpuserve.engines.fatbin import Arch, DeviceCode, parse_arch, read

KERNELS = Path(__file__).parent.parent / "data" / "kernels"
ZSTD, LZ4, EXACT, FAMILY = 0x8000, 0x2000, 0x100000, 0x200000


def entry(number: int, flags: int = 0, kind: int = 2, payload: bytes = b"\0" * 24) -> bytes:
    head = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(payload), 0, 0, 8, 1, number, 0, 0, 0x11 | flags, 0, 0)
    return head + payload


def container(*entries: bytes, version: int = 1, longer: int = 0) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, version, 16, len(body) + longer) + body


def elf(*sections: tuple[str, bytes], kind: int = 1, table: bool = True) -> bytes:
    """A 64-bit ELF file with these sections, and a section of their names."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in sections) + b".shstrtab\0"
    body, rows = bytearray(64), [struct.pack("<IIQQQQIIQQ", *[0] * 10)]
    for name, data in (*sections, (".shstrtab", names)):
        where = names.index(b"\0" + name.encode() + b"\0") + 1
        own = 3 if name == ".shstrtab" else kind
        rows.append(struct.pack("<IIQQQQIIQQ", where, own, 0, 0, len(body), len(data), 0, 0, 8, 0))
        body += data
    at = len(body) if table else 0
    count = len(rows) if table else 0
    ident, last = b"\x7fELF\x02\x01\x01", max(count - 1, 0)
    body[:64] = struct.pack("<16sHHIQQQIHHHHHH", ident, 3, 62, 1, 0, 0, at, 0, 64, 56, 0, 64, count, last)
    return bytes(body) + b"".join(rows)


def archs(data: bytes, path: Path) -> str:
    path.write_bytes(data)
    found = read(path)
    return " ".join(map(str, found.archs)) + (" damaged" if found.damaged else "")


@pytest.mark.parametrize(
    ("name", "carries"),
    [
        ("plain", "sm_80 sm_90 sm_120"),
        ("hopper", "sm_80 sm_86 sm_90a"),
        ("exact", "sm_90a sm_100a sm_120a"),
        ("family", "sm_100f sm_120f"),
        ("ptx", "sm_80 compute_90"),
        ("ptx_exact", "sm_90 compute_100a"),
        ("host", ""),
    ],
)
def test_what_nvcc_wrote(name: str, carries: str) -> None:
    found = read(KERNELS / f"{name}.so")
    assert " ".join(map(str, found.archs)) == carries
    assert not found.damaged


@pytest.mark.parametrize(
    ("arch", "runs_on", "not_on"),
    [
        ("sm_80", "8.0 8.6 8.9", "7.5 9.0 12.0"),
        ("sm_86", "8.6 8.9", "8.0 9.0"),
        ("sm_90", "9.0", "8.9 10.0 12.0"),
        ("sm_90a", "9.0", "8.9 10.0 12.0"),
        ("sm_100", "10.0 10.3", "9.0 11.0 12.0"),
        ("sm_100a", "10.0", "10.3 12.0"),
        ("sm_100f", "10.0 10.3", "10.1 11.0 12.0"),
        ("sm_101f", "10.1", "10.0 10.3"),
        ("sm_103f", "10.3", "10.0"),
        ("sm_120", "12.0 12.1", "10.0 9.0"),
        ("sm_120a", "12.0", "12.1 10.0"),
        ("sm_120f", "12.0 12.1", "10.0"),
        ("sm_121a", "12.1", "12.0"),
        ("compute_80", "8.0 8.6 9.0 10.0 12.0 12.1", "7.5"),
        ("compute_90", "9.0 10.0 12.1", "8.9"),
        ("compute_90a", "9.0", "10.0 12.0"),
        ("compute_100a", "10.0", "10.3 12.0"),
        ("compute_100f", "10.0 10.3", "12.0"),
    ],
)
def test_which_gpus_run_it(arch: str, runs_on: str, not_on: str) -> None:
    parsed = Arch.parse(arch)
    assert str(parsed) == arch
    assert [text for text in runs_on.split() if not parsed.serves(parse_arch(text))] == []
    assert [text for text in not_on.split() if parsed.serves(parse_arch(text))] == []


def test_one_piece_that_runs_is_enough_and_none_at_all_proves_nothing() -> None:
    assert read(KERNELS / "hopper.so").serves((8, 9)) is True
    assert read(KERNELS / "hopper.so").serves((12, 0)) is False
    assert read(KERNELS / "ptx.so").serves((12, 0)) is True
    assert read(KERNELS / "ptx_exact.so").serves((12, 0)) is False
    assert read(KERNELS / "host.so").serves((12, 0)) is None


def test_sections_and_containers(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    first = container(entry(80), entry(90, EXACT | ZSTD, payload=b"x" * 5000), entry(90, LZ4, kind=1))
    second = container(entry(120, FAMILY))
    device = first + b"\0" * 40 + second + b"\0" * 4096 + container(entry(103))
    assert archs(elf((".text", b"code"), (".nv_fatbin", device)), file) == "sm_80 compute_90 sm_90a sm_103 sm_120f"
    assert archs(elf(("__nv_relfatbin", second)), file) == "sm_120f"
    assert archs(elf((".nv_fatbin", first), ("__nv_relfatbin", second)), file).endswith("sm_120f")
    assert archs(second, file) == "sm_120f", "a bare .fatbin"
    assert archs(elf((".rodata", second), (".nv_fatbin_more", second)), file) == "", "not where nvcc puts code"
    assert archs(elf((".nv_fatbin", second), kind=8), file) == "", "a file of debug symbols has no contents"
    assert archs(elf((".nv_fatbin", second), table=False), file) == "sm_120f", "stripped of its section table"
    assert archs(elf((".nv_fatbin", container(entry(80, kind=8), entry(86)))), file) == "sm_86", "LTO-IR is no code yet"


def test_what_is_damaged_says_so(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    good = container(entry(80))
    assert archs(elf((".nv_fatbin", container(entry(90), longer=1 << 40) + good)), file) == "sm_80 damaged"
    assert archs(elf((".nv_fatbin", container(entry(90), version=7) + good)), file) == "sm_80 damaged"
    assert archs(elf((".nv_fatbin", container(entry(90), b"\xff" * 64) + good)), file) == "sm_80 sm_90 damaged"
    huge = bytearray(entry(100))
    huge[8:16] = struct.pack("<Q", 1 << 62)
    assert archs(elf((".nv_fatbin", container(entry(90), bytes(huge)) + good)), file) == "sm_80 sm_90 damaged"
    whole = elf((".nv_fatbin", container(entry(90, payload=b"y" * 9000))))
    assert archs(whole[: len(whole) - 8000], file) in ("sm_90 damaged", " damaged", "damaged", "")


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + b"\0" * 100])
def test_what_is_no_library(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match="no 64-bit ELF"):
        read(tmp_path / "file")
    with pytest.raises(OSError):
        read(tmp_path)
    with pytest.raises(OSError):
        read(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        read(tmp_path / "pipe")


WHOLE = elf((".text", b"x" * 50), (".nv_fatbin", container(entry(80), entry(120, EXACT)) + container(entry(90))))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=12), st.booleans())
def test_any_damage_is_survived(tmp_path: Path, changes: list[tuple[int, int]], cut: bool) -> None:
    data = bytearray(WHOLE)
    for at, value in changes:
        data[at] = value
    file = tmp_path / "lib.so"
    file.write_bytes(data[: changes[0][0]] if cut else data)
    with suppress(ValueError):  # the only error that it may raise
        assert isinstance(read(file), DeviceCode)


@pytest.mark.parametrize("text", ["sm120", "sm_120", "sm_120a", "120", "12.0", "SM120", "compute_120"])
def test_names_of_an_architecture(text: str) -> None:
    assert parse_arch(text) == (12, 0)


@pytest.mark.parametrize("text", ["", "blackwell", "12", "sm_12.0", "1.2.0", "sm_120x"])
def test_names_of_none(text: str) -> None:
    with pytest.raises(ValueError, match="write sm120"):
        parse_arch(text)
