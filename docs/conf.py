# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration: `make docs` builds the site into build/docs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from kvlink import __version__

project = "kvlink"
author = "The kvlink authors"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "plain_docstrings", "generated_reference"]
exclude_patterns = ["_ext", "examples"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
smartquotes_action = "qe"  # not "D", which makes a dash of the -- of an option

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "undoc-members": False}

html_theme = "furo"
html_title = f"kvlink {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False
