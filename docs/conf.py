"""Sphinx builds the site from the Markdown files of this folder: `make docs`, result in build/docs."""

from __future__ import annotations

import re
from typing import Any

project = "shardc"
copyright = "the shardc authors, Apache-2.0"
html_title = "shardc"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["pictures"]
myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 4  # the anchors that GitHub gives to headings
nitpicky = True


def _readme_links(app: Any, name: str, source: list[str]) -> None:
    """CONTRIBUTING.md and README.md are outside this folder: links to them go to a page of the site."""
    source[0] = re.sub(r"\]\(\.\./CONTRIBUTING\.md", "](contributing.md", source[0])
    source[0] = re.sub(r"\]\(\.\./README\.md", "](index.md", source[0])


def setup(app: Any) -> None:
    app.connect("source-read", _readme_links)
