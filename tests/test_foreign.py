"""Files that others named: regular ones, up to a limit; nobody is waited for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gpuserve import foreign


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "terminal"])
@pytest.mark.parametrize("read", [foreign.opened, foreign.whole, lambda path: foreign.beginning(path, 9)])
def test_only_regular_files_are_read(
    kind: str, read: Callable[[Path], object], tmp_path: Path, odd_file: Callable[[str], Path]
) -> None:
    path = Path(os.ttyname(os.openpty()[1])) if kind == "terminal" else odd_file(kind)
    link = tmp_path / "link"
    link.symlink_to(path)
    before = os.listdir("/proc/self/fd")
    for name in (path, link):
        with pytest.raises(OSError, match="no regular file") as caught:
            read(name)
        assert (caught.value.strerror or "").endswith("nothing else is read")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_directory_and_a_name_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        foreign.opened(tmp_path)
    with pytest.raises(FileNotFoundError):
        foreign.opened(f"{tmp_path}/a\0b")


def test_what_is_cut_and_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    assert foreign.beginning(tmp_path / "x", 4) == b"0123"
    assert foreign.whole(tmp_path / "x", 10) == b"0123456789"
    with pytest.raises(OSError, match="larger than"):
        foreign.whole(tmp_path / "x", 9)


@pytest.mark.parametrize("name", ["../x", "in/../../x", "link", "in/link/x", "in/pipe", "in\0/x", "/etc/passwd", "in"])
def test_nothing_leads_out_of_a_directory(name: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (tmp_path / "x").write_text("not yours")
    (root / "link").symlink_to(tmp_path / "x")
    (root / "in" / "link").symlink_to(tmp_path)
    os.mkfifo(root / "in" / "pipe")
    (root / "in" / "good").write_text("mine")
    with foreign.opened_below(root, "in/good") as file:
        assert file.read() == b"mine"
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError):
        foreign.opened_below(root, name)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_file_that_grows_as_fast_as_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1000)
    with foreign.opened(path) as file, path.open("ab") as other:
        read, size = foreign.until_now(file), 0
        while data := read(100):
            size += len(data)
            assert size <= 1000
            other.write(b"y" * 200)
            other.flush()
    assert size == 1000


OURS = {
    *("report/files.py", "report/gather.py", "report/incident.py", "cli/pytest_probe.py"),
    *("engines/flags.py", "engines/kernels.py", "diagnose/checkup.py", "report/versions.py"),
    *(
        "plugin/newhooks.py",
        "diagnose/phase_frames.py",
        "diagnose/signatures.py",
        "diagnose/triage_rules.py",
        "report/html/page.py",
    ),
}
"""They read what only we write, what is installed, or what the kernel says."""


OTHERWISE = re.compile(r"\.read_(bytes|text)\(|open\(\"rb\"\)|RDONLY \| os\.O_NOFOLLOW \| os\.O_CLOEXEC\)")


def test_one_reader_for_all() -> None:
    package = Path(foreign.__file__).parent
    rooms = ("cli", "plugin", "report", "diagnose", "isolation", "phases", "engines")
    sources = [path for room in rooms for path in (package / room).rglob("*.py")]
    assert {str(path.relative_to(package)) for path in sources if OTHERWISE.search(path.read_text())} == OURS
