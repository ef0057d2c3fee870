"""Sphinx builds the site from the Markdown files of this folder: `make docs`, result in build/docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

project = "shardc"
copyright = "the shardc authors, Apache-2.0"
html_title = "shardc"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 4  # the anchors that GitHub gives to headings
nitpicky = True


#: Pages of the site that are files outside this folder.
OUTSIDE = {"readme": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md", "agents": "AGENTS.md"}


def _outside(app: Any, name: str, source: list[str]) -> None:
    """Read README.md and others at the top as pages of the site; links to and from them lead from page to page."""
    text = source[0]
    if name in OUTSIDE:
        text = (Path(app.srcdir).parent / OUTSIDE[name]).read_text(encoding="utf-8").replace("](docs/", "](")
        text = re.sub(r"\[([^\]]+)\]\([\w/]+\.py\)", r"`\1`", text)  # source files are not on the site
    for page, file in OUTSIDE.items():
        text = re.sub(rf"\]\((?:\.\./)*{re.escape(file)}", f"](/{page}.md", text)
    source[0] = text


def setup(app: Any) -> None:
    app.connect("source-read", _outside)
