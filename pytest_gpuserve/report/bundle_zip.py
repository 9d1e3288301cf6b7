"""One zip of a bundle, made when somebody wants to attach it."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from .. import foreign
from .bundle import BESIDE
from .bundle_reader import Bundle, BundleError
from .files import MARKER, ours

MOST: Final = 256 << 20
"""Bytes that go into one zip; what comes after is named in the answer."""

_TIME: Final = (1980, 1, 1, 0, 0, 0)


def write_zip(bundle: Bundle, out: Path, beside: Path | None = None) -> list[str]:
    """Write ``out``, whole or not at all. ``beside``: the directory of the session's own files, which go along.

    Returns:
        names of what was left out because it is too big, cannot be read, or is no file of a bundle.

    Raises:
        BundleError: ``out`` cannot be written.
    """
    left = list(bundle.files.odd)
    draft = out.with_name(f".{out.name}.{os.getpid()}.new")
    size = 0
    try:
        with draft.open("xb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in _members(bundle, beside, left):
                size += len(data)
                if size > MOST:
                    left.append(name)
                    size -= len(data)
                    continue
                entry = zipfile.ZipInfo(name, _TIME)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = (stat.S_IFREG | 0o644) << 16
                archive.writestr(entry, data)
        draft.replace(out)
    except OSError as error:
        raise BundleError(f"{out} cannot be written: {error.strerror}. Choose another file with --zip.") from error
    finally:
        with suppress(OSError):
            draft.unlink()
    return left


def _members(bundle: Bundle, beside: Path | None, left: list[str]) -> Iterator[tuple[str, bytes]]:
    for name, size in sorted(bundle.files.names.items()):
        last = name.rpartition("/")[2]
        if last.startswith(".") and name != MARKER:
            continue
        try:
            data = bundle.files.read(name)
        except OSError:
            left.append(name)
            continue
        if len(data) < size:
            left.append(name)
        else:
            yield f"{bundle.name}/{name}", data
    if beside is None:
        return
    for path in (path for name, schema in BESIDE.items() for path in ours(beside, name, schema)):
        with suppress(OSError), foreign.opened_below(beside, path.name) as file:
            yield path.name, file.read(MOST)
