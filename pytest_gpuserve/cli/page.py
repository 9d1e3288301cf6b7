"""``gpuserve page DIR``: one self-contained HTML file of an incident, or of a session's artifacts."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..text import one_line


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="an incident's directory, or the artifacts directory of a session"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: DIR/index.html")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from ..report.html import write_page

    print(one_line(str(write_page(arguments.directory, arguments.output))))
    return 0
