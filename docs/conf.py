# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration: `make docs` builds the site into build/docs.

KVLINK_DOCS_REPOSITORY is the repository's address at GitHub, GitLab or Bitbucket: each page then has a link that edits
it. KVLINK_DOCS_ADDRESS is that of the site itself, with a slash at its end: pages then name it, and 404.html works
below every path. KVLINK_DOCS_VERSIONS lists the sites of all releases as "NAME=ADDRESS NAME=ADDRESS", and
KVLINK_DOCS_SUPPORT is where users ask, an address of the web or of mail; without it that is the repository's issues.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from kvlink import __version__

project = "kvlink"
author = "The kvlink authors"
project_copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "plain_docstrings",
    "generated_reference",
    "native_reference",
]
exclude_patterns = ["_ext", "_templates", "examples"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
smartquotes_action = "qe"  # not "D", which makes a dash of the -- of an option

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_type_aliases = {name: name for name in ("BlockIds", "GroupIds", "NumTokens", "TokenRanges")}
autodoc_default_options = {"members": True, "undoc-members": False}

html_theme = "furo"
html_title = f"kvlink {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
html_baseurl = os.environ.get("KVLINK_DOCS_ADDRESS", "")
if repository := os.environ.get("KVLINK_DOCS_REPOSITORY"):
    html_theme_options |= {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
    html_theme_options["top_of_page_buttons"] = ["view", "edit"]
templates_path = ["_templates"]
html_context = {
    "docs_versions": [pair.split("=", 1) for pair in os.environ.get("KVLINK_DOCS_VERSIONS", "").split()],
    "docs_support": [
        ("Ask or report", address)
        for address in (os.environ.get("KVLINK_DOCS_SUPPORT") or (repository and f"{repository}/issues"),)
        if address
    ],
}
html_last_updated_fmt = "%Y-%m-%d"
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"


def place_404(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Lets the links of 404.html begin at the site's address: a server shows it at any path."""
    if pagename == "404" and html_baseurl:
        context["metatags"] = f'<base href="{html_baseurl}">' + context.get("metatags", "")


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("html-page-context", place_404)
