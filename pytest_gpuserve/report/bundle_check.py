"""Is a bundle whole? What ``gpuserve explain --check`` says, and what a reader should know before trusting it."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ..foreign import MOST_JSON
from ..text import foreign_json
from .bundle import INSTEAD, NAME, PARTS, SCHEMA
from .bundle_reader import MOST_PARSED, Bundle

_HASHED: Final = 64 << 20
_SHOWN: Final = 100
"""Lines of one kind."""


@dataclass(frozen=True, slots=True)
class Check:
    """What is wrong with a bundle; foreign names in it are not escaped.

    Attributes:
        complete: the incident was written to its end.
        missing: (part, why it is not there, or what it would have held).
        torn: (file, what is wrong with it).
        left_out: (part, why), known when the bundle was made: no fault of the bundle's.
        odd: (file, why it was not read).
    """

    complete: bool
    missing: tuple[tuple[str, str], ...] = ()
    torn: tuple[tuple[str, str], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    odd: tuple[tuple[str, str], ...] = ()

    @property
    def whole(self) -> bool:
        return self.complete and not (self.missing or self.torn or self.odd)

    def lines(self) -> Iterator[str]:
        """One sentence each, the gravest first."""
        if not self.complete:
            yield "incomplete: whoever wrote it was killed, or ran out of time, before the end"
        told = {"torn": self.torn, "missing": self.missing, "not read": self.odd, "left out": self.left_out}
        for what, entries in told.items():
            for name, why in entries[:_SHOWN]:
                yield f"{what}: {name}: {why}"
            if len(entries) > _SHOWN:
                yield f"{what}: {len(entries) - _SHOWN} more"
        if self.whole:
            yield "whole"


def check(bundle: Bundle) -> Check:
    """Never raises for what a bundle holds."""
    manifest, incident = bundle.json(NAME), bundle.json("incident.json")
    left_out = _mapping(manifest.get("left_out"))
    listed = _mapping(manifest.get("files"))
    complete = manifest.get("complete") is True and incident.get("complete") is True
    torn = [*_torn(bundle, listed), *_drafts(bundle)]
    known = str(manifest.get("schema", SCHEMA))
    if known != SCHEMA:
        torn.append((NAME, f"its schema is {known[:80]}: made by another version; this one reads {SCHEMA}"))
    missing = list(_missing(bundle, listed, left_out))
    missing += _ranks(bundle, incident, left_out, complete)
    return Check(
        complete=complete,
        missing=tuple(missing),
        torn=tuple(torn),
        left_out=tuple((name, str(why)) for name, why in left_out.items()),
        odd=tuple(bundle.files.odd.items()),
    )


def _missing(bundle: Bundle, listed: dict[str, Any], left_out: dict[str, Any]) -> Iterator[tuple[str, str]]:
    there = bundle.files.names
    if NAME not in there:
        yield NAME, "the list of what there should be"
    for name, what in PARTS.items():
        if name not in there and INSTEAD.get(name) not in there and name not in left_out and name not in listed:
            yield name, what
    for name in listed:
        if name not in there:
            yield name, "listed in bundle.json"


def _ranks(
    bundle: Bundle, incident: dict[str, Any], left_out: dict[str, Any], complete: bool
) -> Iterator[tuple[str, str]]:
    """Every process without stacks, and why: there is a line for each rank."""
    names = bundle.stacks()
    found = {name.removeprefix("stacks/").partition(".")[0] for name in names}
    ranks = _mapping(incident.get("ranks"))
    for label, entry in ranks.items():
        safe = re.sub(r"[^A-Za-z0-9._-]+", "_", label.partition(" (pid ")[0])
        if safe not in found and not re.search(r"\d$", safe) and complete:
            continue  # a helper that is no rank
        if safe not in found:
            problem = entry.get("problem") if isinstance(entry, dict) else None
            yield f"stacks of {label}", str(problem or "they were not taken")
    gone = incident.get("missing")
    for label in map(str, gone if isinstance(gone, list) else ()):
        if label not in ranks:
            yield f"stacks of {label}", "it was gone when they were taken"
    if not ranks and not names and "stacks/" not in left_out:
        yield "stacks/", "no stacks of any process were taken"


def _torn(bundle: Bundle, listed: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Files that do not hold what was written, or that cannot be read as what they are."""
    parsed = 0
    for name, size in bundle.files.names.items():
        if name.rpartition("/")[2].startswith("."):
            continue
        try:
            data = bundle.files.read(name, _HASHED)
        except OSError as error:
            yield name, str(error)
            continue
        entry = listed.get(name)
        if isinstance(entry, dict) and size <= _HASHED:
            if size != entry.get("size"):
                yield name, f"{size} bytes, of {entry.get('size')}"
                continue
            if hashlib.sha256(data).hexdigest() != entry.get("sha256"):
                yield name, "changed since it was written"
        parsed += size if name.endswith(".json") else 0
        if parsed > MOST_PARSED:
            continue  # whoever reads it does not get that far either
        if why := _unreadable(name, data) if size <= _HASHED else None:
            yield name, why


def _unreadable(name: str, data: bytes) -> str | None:
    try:
        if name.endswith(".json"):
            if len(data) > MOST_JSON:
                return f"larger than {MOST_JSON >> 20} MiB: not looked at"
            found = foreign_json(data)
            if name in (NAME, "incident.json") and not isinstance(found, dict):
                return "it is JSON, but not what pytest-gpuserve writes there"
        elif name.endswith(".jsonl"):
            for line in io.BytesIO(data):
                if not line.endswith(b"\n"):
                    return "its last line was cut off"
                foreign_json(line[:MOST_JSON])
    except (ValueError, RecursionError) as error:
        return f"no JSON: {type(error).__name__}"
    return None


def _drafts(bundle: Bundle) -> Iterator[tuple[str, str]]:
    for name in bundle.files.names:
        folder, _, last = name.rpartition("/")
        if last.startswith(".") and last.endswith(".new"):
            yield f"{folder}/{last[1:-4]}".lstrip("/"), "being written when its writer was killed"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
