"""Files that others add to a bundle, redacted and listed like ours."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .. import foreign
from ..errors import GpuserveError
from ..redaction.redact import Redactor
from ..text import one_line
from .bundle import NAME
from .bundle_reader import Bundle, Directory
from .files import MOST_TEXT, Store, safe_name
from .log_parts import shown

FOLDER: Final = "extra"
MOST_FILES: Final = 200


class Extra:
    """Adds files to the bundle in ``directory``; :meth:`add` is what a hook gets."""

    def __init__(self, directory: Path, redactor: Redactor) -> None:
        self._directory = directory
        self._redactor = redactor
        self._store = Store(directory, redactor, 0o644)
        self._added = 0

    def add(self, name: str, content: str | bytes | Path) -> None:
        """Write ``extra/NAME``; a name that is taken, or no file's name, becomes a similar one.

        Raises:
            GpuserveError: it is no text, cannot be read, or there are too many.
        """
        if self._added >= MOST_FILES:
            raise GpuserveError(f"{self._directory.name} has {MOST_FILES} files added to it already.")
        text = _text(name, _read(name, content) if isinstance(content, Path) else content)
        last, number = safe_name(name), 1
        while f"{FOLDER}/{last}" in self._store.files:
            number += 1
            last = f"{number}-{safe_name(name)}"
        try:
            self._store.write(f"{FOLDER}/{last}", shown(self._redactor, text), clean=True)
        except OSError as error:
            raise GpuserveError(f"{one_line(name)} cannot be added to {self._directory}: {error.strerror}.") from error
        self._added += 1

    def close(self) -> None:
        """List what was added, where the bundle has a list."""
        manifest = Bundle("", Directory(self._directory)).json(NAME)
        files = manifest.get("files")
        if self._added and isinstance(files, dict) and manifest.get("complete") is True:
            added = {name: {"size": size, "sha256": digest} for name, (size, digest) in self._store.files.items()}
            Store(self._directory, None, 0o644).write_json(NAME, {**manifest, "files": {**files, **added}})


def _read(name: str, path: Path) -> bytes:
    try:
        return foreign.beginning(path, MOST_TEXT + 1)
    except OSError as error:
        raise GpuserveError(f"{one_line(name)} cannot be added: {one_line(str(path))}: {error.strerror}.") from error


def _text(name: str, content: str | bytes) -> str:
    if isinstance(content, str):
        return content
    if b"\0" in content[:4096]:
        raise GpuserveError(f"{one_line(name)} cannot be added: it is no text, and so cannot be redacted.")
    return content.decode(errors="replace")
