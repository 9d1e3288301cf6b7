"""Reading a bundle that came from anywhere: a directory or a zip, nothing in it trusted.

Nothing is ever unpacked to a disk; everything is read into memory up to a limit. No link is followed, no name leads
out of the bundle, and names are only ever looked up, never opened as paths (directories: relative to an open one).
"""

from __future__ import annotations

import io
import os
import stat
import weakref
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from .. import foreign
from ..errors import GpuserveError
from ..foreign import MOST_JSON
from ..text import foreign_json, one_line
from .bundle import NAME, named_like_one
from .files import MARKER

MOST_FILES: Final = 20_000
MOST_BYTES: Final = 64 << 20
"""Bytes of one file; a larger one is not read."""
MOST_TOTAL: Final = 1 << 30
"""Bytes of all files together, unpacked: what is more is not looked at."""
MOST_PARSED: Final = 64 << 20
"""Bytes of one incident's JSON that are parsed: that of 64 ranks has about a tenth."""
MOST_DEPTH: Final = 6
MOST_LISTED: Final = 8 << 20
"""Bytes of a zip's list of files."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
SIGNS: Final = (NAME, "incident.json", MARKER)
"""Any of these makes a directory a bundle."""


class BundleError(GpuserveError):
    """It is no bundle, or not a safe one."""


class Files(Protocol):
    """A tree of files by name (``stacks/TP0.7.json``)."""

    @property
    def names(self) -> Mapping[str, int]:
        """Every regular file and its size."""

    @property
    def odd(self) -> Mapping[str, str]:
        """What is there and is not read, and why."""

    def read(self, name: str, limit: int = MOST_BYTES) -> bytes:
        """The beginning of a file. Raises OSError where there is none, or it cannot be read."""


class _Listed:
    """What was found so far, and when it is enough."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.odd: dict[str, str] = {}
        self._left = MOST_TOTAL

    def _add(self, name: str, size: int) -> None:
        """A file that is not looked at takes nothing from the others."""
        if size > MOST_BYTES:
            self.odd[name] = f"larger than {MOST_BYTES >> 20} MiB: not read"
        elif size > self._left:
            self.odd[name] = f"more than {MOST_TOTAL >> 30} GiB in all: name one incident"
        else:
            self._left -= size
            self.names[name] = size


class Directory(_Listed):
    """A directory's regular files."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._seen = 0
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._walk(handle, "", 1)
        finally:
            os.close(handle)

    def _walk(self, handle: int, prefix: str, depth: int) -> None:
        with os.scandir(handle) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = prefix + entry.name
                self._seen += 1
                if self._seen > MOST_FILES:
                    self.odd[prefix + "…"] = f"more than {MOST_FILES} files: the rest was not looked at"
                    return
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError as error:
                    self.odd[name] = error.strerror or "cannot be read"
                    continue
                if stat.S_ISREG(found.st_mode):
                    self._add(name, found.st_size)
                elif stat.S_ISDIR(found.st_mode) and depth < MOST_DEPTH:
                    with suppress(OSError):
                        inner = os.open(entry.name, _DIRECTORY, dir_fd=handle)
                        try:
                            self._walk(inner, f"{name}/", depth + 1)
                        finally:
                            os.close(inner)
                else:
                    self.odd[name] = "a link" if stat.S_ISLNK(found.st_mode) else "no plain file"

    def read(self, name: str, limit: int = MOST_BYTES) -> bytes:
        if name not in self.names:
            raise FileNotFoundError(name)
        with foreign.opened_below(self._path, name) as file:
            return file.read(limit)


class _Source(io.BufferedReader):
    """A zip file whose list of files cannot fill the memory: zipfile reads the list at once, as long as it says."""

    most: int | None = MOST_LISTED

    def read(self, size: int | None = -1, /) -> bytes:
        if self.most is not None and size is not None and size > self.most:
            raise zipfile.BadZipFile(f"its list of files is longer than {self.most >> 20} MiB")
        return super().read(size)


class Zip(_Listed):
    """A zip file's plain members whose names stay inside."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            source = _Source(foreign.opened(path).detach())
            weakref.finalize(self, source.close)  # zipfile closes only what it has opened
            self._zip = zipfile.ZipFile(source)
            source.most = None
            entries = self._zip.infolist()
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise BundleError(f"{one_line(str(path))} cannot be read as a zip: {one_line(str(error))}.") from None
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for entry in entries[:MOST_FILES]:
            name = getattr(entry, "orig_filename", entry.filename)  # zipfile cuts names at a NUL
            if entry.is_dir() and unsafe_name(name.rstrip("/")) is None:
                continue
            why = unsafe_name(name) or _unsafe_entry(entry)
            if why is None and name in self._entries:
                why = "there twice"
            if why is not None:
                self.odd[name] = why
            else:
                self._entries[name] = entry
                self._add(name, entry.file_size)
        if len(entries) > MOST_FILES:
            self.odd["…"] = f"more than {MOST_FILES} files: the rest was not looked at"

    def read(self, name: str, limit: int = MOST_BYTES) -> bytes:
        if name not in self.names:
            raise FileNotFoundError(name)
        entry = self._entries[name]
        try:
            with self._zip.open(entry) as file:
                return file.read(limit)
        except OSError:
            raise
        except Exception as error:  # every decompressor has errors of its own
            raise OSError(f"{one_line(name)} cannot be unpacked: {one_line(str(error))}") from None


class Below:
    """The files of another tree that lie below a folder."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder
        self.names = {name.removeprefix(folder): size for name, size in files.names.items() if name.startswith(folder)}
        self.odd = {name.removeprefix(folder): why for name, why in files.odd.items() if name.startswith(folder)}

    def read(self, name: str, limit: int = MOST_BYTES) -> bytes:
        return self._files.read(self._folder + name, limit)


class Bundle:
    """One bundle. ``name``: its directory's; ``files``: everything in it; ``instead``: JSON that stands for files."""

    def __init__(self, name: str, files: Files, instead: Mapping[str, dict[str, Any]] | None = None) -> None:
        self.name = name
        self.files = files
        self._instead = instead or {}

    def text(self, name: str, limit: int = MOST_BYTES) -> str | None:
        """A file as text; None where it is not there or cannot be read."""
        try:
            return self.files.read(name, limit).decode(errors="replace")
        except OSError:
            return None

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object; empty where there is none, or something else."""
        if name in self._instead:
            return self._instead[name]
        try:
            found = foreign_json(self.text(name, MOST_JSON) or "")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def stacks(self) -> list[str]:
        """Names of the files with the stacks of one process each."""
        return [
            n for n in sorted(self.files.names) if n.startswith("stacks/") and n.endswith(".json") and "/." not in n
        ]


def open_bundles(path: Path) -> list[Bundle]:
    """The bundle at ``path``, or all that lie below it (an artifacts directory, a CI artifact).

    Raises:
        BundleError: there is none.
    """
    if path.is_dir():
        try:
            files: Files = Directory(path)
        except OSError as error:
            raise BundleError(f"{one_line(str(path))} cannot be read: {error.strerror}.") from None
    else:
        files = Zip(path)
    own = path.name.removesuffix(".zip") or path.resolve().name
    folders = sorted({name.rpartition("/")[0] for name in files.names if name.rpartition("/")[2] in SIGNS})
    whole = {folder for folder in folders if _is_bundle(files, folder)}
    if "" in whole or (folders == [""] and named_like_one(own)):
        return [Bundle(own, files)]
    inner = [f for f in folders if f and (f in whole or not any(o != f and o.startswith(f"{f}/") for o in folders))]
    if not inner:
        raise BundleError(
            f"{one_line(str(path))} holds no incident: there is no incident.json in it, and no {NAME} of "
            f"pytest-gpuserve's. Give the directory of one incident, the directory of all, or a zip of either."
        )
    return [Bundle(folder.rpartition("/")[2], Below(files, f"{folder}/")) for folder in inner]


def _is_bundle(files: Files, folder: str) -> bool:
    """Others have a ``bundle.json`` as well; ours begins with its schema, which is there in a torn one, too."""
    prefix = f"{folder}/" if folder else ""
    if f"{prefix}incident.json" in files.names:
        return True
    with suppress(OSError):
        return b'"schema": "gpuserve.' in files.read(prefix + NAME, 256)
    return False


def unsafe_name(name: str) -> str | None:
    """Why a name in a zip is not taken; None when it is an ordinary relative one."""
    if "\0" in name:
        return "a NUL in its name"
    if name.startswith(("/", "\\")) or (len(name) > 1 and name[1] == ":"):
        return "an absolute path"
    if "\\" in name:
        return "a backslash in its name"
    parts = name.split("/")
    if ".." in parts:
        return "a path that leads out"
    if "" in parts or "." in parts:
        return "a path with empty parts"
    if len(name) > 1024 or len(parts) > MOST_DEPTH + 2:
        return "a path that is too long"
    return None


def _unsafe_entry(entry: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return "a link"
    if kind not in (0, stat.S_IFREG):
        return "no plain file"
    if entry.flag_bits & 0x1:
        return "encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others need as much memory as they say
        return "packed in another way than by deflate"
    return None
