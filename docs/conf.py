"""Sphinx builds the site from the Markdown files of this folder: `make docs`, result in build/docs."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
project = "shardc"
version = release = runpy.run_path(str(ROOT / "shardc" / "version.py"))["VERSION"]
copyright = "the shardc authors, Apache-2.0"
html_title = f"shardc {version}"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
copybutton_prompt_text = "$ "  # of a console block, commands are copied and what they print is not
myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 4  # the anchors that GitHub gives to headings
nitpicky = True


def _repository() -> str:
    """The address of the repository on the web, of which this is a clone; "" if it is none."""
    command = ["git", "-C", str(ROOT), "config", "remote.origin.url"]
    origin = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    address = re.fullmatch(r"(?:https://|ssh://git@|git@)([\w.-]+\.\w+)[:/](.+?)(?:\.git)?/?", origin)
    return f"https://{address[1]}/{address[2]}/" if address else ""


html_theme_options: dict[str, Any] = {}
if repository := _repository():  # "edit this page"
    html_theme_options = {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"}

#: Pages of the site that are files outside this folder.
OUTSIDE = {"readme": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md", "agents": "AGENTS.md"}


def _outside(app: Any, name: str, source: list[str]) -> None:
    """Read README.md and others at the top as pages of the site; links to and from them lead from page to page."""
    text = source[0]
    if name in OUTSIDE:
        text = (Path(app.srcdir).parent / OUTSIDE[name]).read_text(encoding="utf-8").replace("](docs/", "](")
        text = re.sub(r"\A# shardc$", "# Overview", text, flags=re.MULTILINE)  # the landing page has that title
        text = re.sub(r"\[([^\]]+)\]\([\w/]+\.py\)", r"`\1`", text)  # source files are not on the site
    for page, file in OUTSIDE.items():
        text = re.sub(rf"\]\((?:\.\./)*{re.escape(file)}", f"](/{page}.md", text)
    source[0] = text


def setup(app: Any) -> None:
    app.connect("source-read", _outside)
