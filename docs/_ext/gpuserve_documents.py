"""documents.toml, and whether a document is as it says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

DOCUMENTS: Mapping[str, Any] = _toml.loads((Path(__file__).parents[1] / "documents.toml").read_text(encoding="utf-8"))
"""By the name under which a reader meets it: ``schema``, ``text``, ``keys`` (``"type|type: meaning"``)."""

SCHEMAS: Mapping[str, Any] = {document["schema"]: document["keys"] for document in DOCUMENTS.values()}

_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def differences(document: Mapping[str, Any]) -> list[str]:
    """What of a document is not as its schema is described.

    Raises:
        KeyError: its schema is not described.
    """
    schema = document["schema"]
    keys = SCHEMAS[schema]
    found = [f"{schema}: {key} is missing" for key in keys if key not in document]
    for key, value in document.items():
        if key not in keys:
            found.append(f"{schema}: {key} is not described")
            continue
        allowed, kind = keys[key].partition(":")[0].split("|"), _TYPES[type(value)]
        if kind not in allowed and not (kind == "integer" and "number" in allowed):
            found.append(f"{schema}: {key} is a {kind}, not {' or '.join(allowed)}")
    return found
