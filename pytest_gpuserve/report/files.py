"""Where an incident is written: one directory with raw text in the private state, one redacted among the artifacts.

Every file is written under a dot-prefixed name, flushed, and renamed when complete, so that whoever kills us half way
leaves whole files. Nothing is ever written through a link: all names are opened relative to a directory that we hold.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import foreign
from ..redaction.redact import Redactor

MARKER = ".gpuserve"
"""File in every directory that we made: only those are ever pruned."""

MOST_TEXT = 16 << 20
"""Characters of one text file; what is longer is cut, and says so."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # O_EXCL follows no link


def safe_name(text: str, limit: int = 80) -> str:
    """``text`` as one path component: only ``A-Za-z0-9._-``, no dot in front, never empty, at most ``limit`` long."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:limit].lstrip(".") or "_"


def place_of(directory: Path, name: str, schema: str, taken: Container[Path] = ()) -> Path:
    """Where a file of ours goes: ``name``, else ``stem-2.suffix`` …, the first that :func:`free_for` it and not taken.

    Raises:
        FileExistsError: there is none.
    """
    stem, _, suffix = name.partition(".")
    for number in range(1, 1000):
        path = directory / (name if number == 1 else f"{stem}-{number}.{suffix}")
        if path not in taken and free_for(path, schema):
            return path
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory / name))


def ours(directory: Path, name: str, schema: str) -> list[Path]:
    """The files that :func:`place_of` has given for ``name``, in their order; none of somebody else's."""
    stem, _, suffix = name.partition(".")
    numbered = re.compile(rf"{re.escape(stem)}(?:-(\d{{1,3}}))?\.{re.escape(suffix)}")
    with suppress(OSError):
        named = filter(None, map(numbered.fullmatch, os.listdir(directory)))
        found = sorted((int(match[1] or 1), directory / match[0]) for match in named)
        return [path for _, path in found if free_for(path, schema)]
    return []


def free_for(path: Path, schema: str) -> bool:
    """Nothing is there, or a file of ours of any version of ``schema``, or an empty one: it may be written.

    Its name is one that others use, too, and the directory may be theirs.
    """
    if not os.path.lexists(path):
        return True
    try:
        with foreign.opened(path, follow=False) as file:
            head = file.read(200)
    except OSError:
        return False
    family = re.escape(schema.rpartition("/")[0].encode())
    return not head or re.match(rb'\s*\{\s*"schema":\s*"' + family + b"/", head) is not None


class Store:
    """A directory that is written to. With a redactor, everything that is written goes through it.

    ``files``: size and SHA-256 of what was written, by name.
    """

    def __init__(self, path: Path, redactor: Redactor | None, mode: int) -> None:
        self.path = path
        self._redactor = redactor
        self._mode = mode
        self.files: dict[str, tuple[int, str]] = {}

    @property
    def redacts(self) -> bool:
        """Others may read it."""
        return self._redactor is not None

    def write(self, name: str, text: str, *, clean: bool = False) -> None:
        """Write ``name`` (which may have one directory in front), replacing what is there. ``clean``: it is redacted.

        Raises:
            OSError: it cannot be written.
        """
        text = self._redactor.redact(text) if self._redactor and not clean else text
        if len(text) > MOST_TEXT:
            text = f"{text[:MOST_TEXT]}\n<cut here: {len(text)} characters in all>\n"
        self._write(name, text)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON value; redaction sees its strings, not its syntax."""
        value = self._redactor.value(value) if self._redactor else value
        self._write(name, json.dumps(value, indent=1, default=str) + "\n")

    def write_lines(self, name: str, values: Iterable[Any]) -> None:
        """Write JSON values, one a line."""
        clean = map(self._redactor.value, values) if self._redactor else values
        self._write(name, "".join(json.dumps(value, separators=(",", ":"), default=str) + "\n" for value in clean))

    def _write(self, name: str, text: str) -> None:
        *folders, last = name.split("/")
        with self._opened(folders) as directory:
            draft = f".{last}.new"
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=directory)
            data = text.encode(errors="backslashreplace")
            with open(os.open(draft, _NEW_FILE, self._mode, dir_fd=directory), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(draft, last, src_dir_fd=directory, dst_dir_fd=directory)
        self.files[name] = (len(data), hashlib.sha256(data).hexdigest())

    @contextmanager
    def _opened(self, folders: list[str]) -> Iterator[int]:
        handle = os.open(self.path, _DIRECTORY)
        try:
            for folder in folders:
                with suppress(FileExistsError):
                    os.mkdir(folder, self._mode | 0o111 & self._mode >> 2, dir_fd=handle)
                inner = os.open(folder, _DIRECTORY, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle
        finally:
            os.close(handle)


class Stores:
    """The raw directory and, where there is one, the redacted one; both are written alike."""

    def __init__(self, raw: Store, shared: Store | None, problem: str | None, name: Path | None = None) -> None:
        self._name = name
        self.raw = raw
        self.shared = shared
        self.problem = problem
        """Why there is no redacted one although one was asked for."""

    @property
    def path(self) -> Path:
        """The one to tell people."""
        return self._name or (self.shared or self.raw).path

    def publish(self) -> None:
        """Give the redacted directory its name, now that it says what it is; until then it is a draft."""
        if self.shared is None or self._name is None:
            return
        wanted, self._name = self._name, None
        for number in range(1, 1000):
            name = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            try:
                self.shared.path.rename(name)  # over an empty directory, never over one with something in it, or a link
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    self.problem = self.problem or f"{wanted} cannot be made: {error.strerror}"
                    return
            else:
                self.shared.path = name
                return

    def write(self, name: str, text: str, *, clean: bool = False) -> None:
        for store in self.all:
            self._try(store, lambda store=store: store.write(name, text, clean=clean))

    def write_json(self, name: str, value: Any) -> None:
        for store in self.all:
            self._try(store, lambda store=store: store.write_json(name, value))

    def write_lines(self, name: str, values: Sequence[Any]) -> None:
        for store in self.all:
            self._try(store, lambda store=store: store.write_lines(name, values))

    def each(self, write: Callable[[Store], None]) -> None:
        """Where the two differ; a full disk costs one file as always."""
        for store in self.all:
            self._try(store, lambda store=store: write(store))

    @property
    def all(self) -> list[Store]:
        """Both, or the raw one."""
        return [store for store in (self.raw, self.shared) if store]

    def _try(self, store: Store, write: Any) -> None:
        """A full disk must not cost the rest of the evidence."""
        try:
            write()
        except OSError as error:
            self.problem = self.problem or f"{store.path}: {error.strerror}"


def open_stores(server: Path, artifacts: Path | None, name: str, redactor: Redactor) -> Stores:
    """Make the directories of one incident: ``server/incidents/NAME`` (0700) and ``artifacts/NAME``.

    Raises:
        OSError: not even the raw one can be made.
    """
    parent = server / "incidents"
    with suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    raw = Store(_new_directory(parent, name, 0o700), None, 0o600)
    raw.write(MARKER, "gpuserve\n")
    if artifacts is None:
        return Stores(raw, None, None)
    try:
        make_artifacts(artifacts)
        draft = f".{raw.path.name}.{os.getpid()}.new"
        shared = Store(_new_directory(artifacts, draft, 0o755), redactor, 0o644)
        shared.write(MARKER, "gpuserve\n")
    except OSError as error:
        return Stores(raw, None, f"{artifacts} cannot be written: {error.strerror}")
    return Stores(raw, shared, None, artifacts / raw.path.name)


def make_artifacts(path: Path) -> None:
    """The artifacts directory, marked as ours when it is new or empty.

    Raises:
        OSError: it cannot be made.
    """
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    if made or not any(path.iterdir()):
        Store(path, None, 0o644).write(MARKER, "gpuserve\n")


def unusable(path: Path) -> str:
    """Why no incident could be written below ``path``, which need not exist; empty: nothing is known against it.

    Nothing is made to find out."""
    there = next((place for place in (path, *path.parents) if os.path.lexists(place)), path)
    if there.is_symlink() and not there.exists():
        return f"{there} is a link to nothing"
    if not there.is_dir():
        return f"{there} is no directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written by this user"
    return ""


def incident_name(spec_id: str, reason: str, now: float | None = None) -> str:
    """``20261129T184503-sglang-tp8-eagle3-test_timeout``."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.localtime(now))
    return f"{stamp}-{safe_name(spec_id, 120)}-{safe_name(reason, 40)}"


def _new_directory(parent: Path, name: str, mode: int) -> Path:
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(mode=mode)
        except FileExistsError:
            number += 1
        else:
            return path


def put_line(path: Path, entry: dict[str, Any]) -> None:
    """Append ``entry`` to a JSON-lines file, or replace the last line when that is an earlier form of it (same
    ``incident``), in one step: a reader sees the old file or the new one.

    Raises:
        OSError: it cannot be written.
    """
    lines: list[str] = []
    with suppress(FileNotFoundError):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if lines:
        with suppress(ValueError, AttributeError):
            if json.loads(lines[-1]).get("incident") == entry["incident"]:
                lines.pop()
    lines.append(json.dumps(entry))
    Store(path.parent, None, 0o600).write(path.name, "\n".join(lines) + "\n")
