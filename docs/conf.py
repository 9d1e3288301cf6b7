"""Sphinx configuration: ``sphinx-build -W docs docs/_build``. Needs no network, nor do the pages."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from pytest_gpuserve import __version__

project = "pytest-gpuserve"
author = "pytest-gpuserve maintainers"
copyright = "pytest-gpuserve maintainers, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "gpuserve_pages"]
exclude_patterns = ["_build", "_ext"]
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_type_aliases = {"Phase": "Phase", "Source": "Source"}
napoleon_attr_annotations = False
python_use_unqualified_type_names = True
nitpicky = False

smartquotes = False  # options and code words are pasted

html_theme = "furo"
html_title = f"pytest-gpuserve {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
