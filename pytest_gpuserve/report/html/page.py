"""Templates to one self-contained file: no request leaves it, and only our own style and script are obeyed.

Every value that a template prints is foreign text: :func:`..text.escape` makes control and bidi characters visible,
then Jinja2's autoescape takes care of markup. Style and script are the only texts that pass unescaped; the page's
policy names them by hash, so that nothing else runs even if something got through.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from ... import __version__
from ...text import escape

if TYPE_CHECKING:
    from jinja2 import Environment

GENERATOR: Final = '<meta name="generator" content="pytest-gpuserve">'
"""In the first lines of every page of ours: only such a file is ever replaced."""


def render(template: str, **values: Any) -> str:
    """The page as ASCII text, so that it reads the same whatever a server or a disk takes its encoding for."""
    return _environment().get_template(template).render(**values).encode("ascii", "xmlcharrefreplace").decode("ascii")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def visible(value: Any) -> Any:
        return value if isinstance(value, Markup) else escape(str(value))

    environment = Environment(
        loader=PackageLoader("pytest_gpuserve.report.html"),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = _source("style.css"), _source("page.js")
    environment.globals.update(
        style=Markup(style),
        script=Markup(script),
        policy="; ".join(
            (
                "default-src 'none'",
                f"style-src '{_hash(style)}'",
                f"script-src '{_hash(script)}'",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
        generator=Markup(GENERATOR),
        gpuserve=__version__,
    )
    return environment


def _source(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="ascii")


def _hash(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"
