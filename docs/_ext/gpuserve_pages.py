"""What this site does to its Markdown before Sphinx reads it, and what it checks in the pages that came out.

* ``<!-- generated: NAME -->`` becomes what ``gpuserve_reference.PAGES[NAME]()`` reads from the code.
* A fence ``python title="test_x.py"`` gets that file name as its caption.
* Links that leave docs/ (to examples/, for whoever reads the pages in the repository) become plain text.
* A page that would load something from the network fails the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gpuserve_reference as reference
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

_PLACE = re.compile(r"<!-- generated: ([a-z-]+) -->")
_TITLED = re.compile(r'^```(\w+) title="([^"]+)"[^\n]*$', re.MULTILINE)
_LINK = re.compile(r"\[([^\]\n]+)\]\((\.\.?/[^)\s#]+)(#[^)\s]*)?\)")
_LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>", re.IGNORECASE
)


def prepare(text: str, page: Path, root: Path) -> str:
    """The Markdown of ``page`` as Sphinx shall read it; ``root`` is docs/."""

    def link(match: re.Match[str]) -> str:
        target = (page.parent / match[2]).resolve()
        return match[0] if target.is_relative_to(root.resolve()) else f"`{match[1].strip('`')}`"

    text = _LINK.sub(link, text)
    text = _TITLED.sub(r"```{code-block} \1\n:caption: \2\n", text)
    return _PLACE.sub(lambda match: reference.PAGES[match[1]](), text)


def _source_read(app: Sphinx, docname: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".md":
        source[0] = prepare(source[0], path, Path(app.srcdir))


def _generated(app: Sphinx, env: BuildEnvironment, *_: object) -> list[str]:
    """Pages that are made from the code are read at every build."""
    return [name for name in env.found_docs if _PLACE.search(Path(env.doc2path(name)).read_text(encoding="utf-8"))]


def _check(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        if found := _LOADED.search(page.read_text(encoding="utf-8")):
            raise ExtensionError(f"{page.relative_to(app.outdir)} loads from the network: {found[0]}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Entry point of the extension."""
    app.connect("source-read", _source_read)
    app.connect("env-get-outdated", _generated)
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
