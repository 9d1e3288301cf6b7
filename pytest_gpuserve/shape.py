"""JSON that anybody may have written, or torn: its shape is checked before anything of it is used.

A shape is a type or a union of types (``str | None``; ``int`` is no ``bool``), a tuple of the values that are allowed,
``[shape]`` for a list, ``{str: shape}`` for an object with any keys, ``{"key": shape}`` for one with these keys and
others that nobody looks at, or :class:`Maybe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final

from . import foreign
from .text import foreign_json, one_line

DEPTH: Final = 50
"""Levels of lists and objects in each other."""

NUMBER: Final = int | float
SCALAR: Final = str | int | float | bool
OBJECT: Final[Any] = {str: object}

_KINDS: Final = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Maybe:
    """Null, or not there, or of this shape."""

    shape: Any


def read(path: Path, shape: Any) -> Any:
    """The document in a regular file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or of another shape; the message says where.
    """
    return parsed(foreign.whole(path), shape)


def parsed(data: str | bytes, shape: Any) -> Any:
    """A document.

    Raises:
        ValueError: as for :func:`read`.
    """
    try:
        value = foreign_json(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(DEPTH):
        level = [inner for one in level for inner in _inside(one)]
    if level:
        raise ValueError("it is nested too deeply")
    return checked(value, shape)


def checked(value: Any, shape: Any, where: str = "") -> Any:
    """``value``, which has this shape.

    Raises:
        ValueError: it has not; ``where`` in a document, and what is there instead.
    """
    name = one_line(where, 100) or "the document"
    if isinstance(shape, Maybe):
        return None if value is None else checked(value, shape.shape, where)
    if isinstance(shape, tuple):
        if not any(value == one and type(value) is type(one) for one in shape):
            raise ValueError(f"{name} is {one_line(repr(value), 60)}, not {' or '.join(map(repr, shape))}")
    elif isinstance(shape, list):
        _expect(value, list, name)
        for number, entry in enumerate(value):
            checked(entry, shape[0], f"{where}[{number}]")
    elif isinstance(shape, Mapping):
        _expect(value, dict, name)
        for key, inner in shape.items():
            if key is str:
                for own, entry in value.items():
                    checked(entry, inner, f"{where}.{own}".lstrip("."))
            elif key in value or not _may_be_absent(inner):
                if key not in value:
                    raise ValueError(f"{name} has no {key}")
                checked(value[key], inner, f"{where}.{key}".lstrip("."))
    else:
        _expect(value, shape, name)
    return value


def _expect(value: Any, shape: type | UnionType, name: str) -> None:
    kinds = shape.__args__ if isinstance(shape, UnionType) else (shape,)
    if object not in kinds and type(value) not in kinds:
        wanted = " or ".join(_KINDS[kind] for kind in kinds)
        raise ValueError(f"{name} is {_KINDS.get(type(value), 'something else')}, not {wanted}")


def _may_be_absent(shape: Any) -> bool:
    return isinstance(shape, Maybe) or (isinstance(shape, UnionType) and type(None) in shape.__args__)


def _inside(value: Any) -> list[Any]:
    return value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
