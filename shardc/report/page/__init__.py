"""`shardc inspect --html FILE`: a program as one page that needs nothing else, not even a network.

data            all that the page shows, as JSON: graphs, spec_lines, messages (collectives, buckets), step (when and
                how much), equal_layers (80 equal layers are shown once)
page.html       the frame: header, panels, dialogs; page.css: its style; picture.css: colours, and what pictures need
DRAWING         the scripts that draw, in their order: each panel is one file. They make elements as plain values, and
                need no document: so that docs/drawing.py makes pictures as files, and tests draw every panel
plan.js         the page of a plan, in the frame plan.html
document.js     turns elements into the document's; page.js: tabs, search, keys, the address
dagre.min.js    lays graphs out (docs/explanation/decisions.md, 68): @dagrejs/dagre 3.1.3, MIT (dagre.LICENSE), from npm

Data and scripts are apart in the file: names of a model are JSON, and become text of the page, never HTML. A content
security policy allows the page's own scripts, by their digests, and nothing from anywhere else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from shardc.cost import Cost
from shardc.ir.program import Program
from shardc.report.page.data import data
from shardc.verify.static import Proof

#: In the order in which they are run: what others use comes first.
DRAWING = (
    "dagre.min.js",
    "draw.js",
    "base.js",
    "spec.js",
    "tree.js",
    "graph.js",
    "timeline.js",
    "memory.js",
    "panels.js",
)
SCRIPTS = (*DRAWING, "document.js", "page.js")
#: Of the page of `shardc plan --html` (shardc.plan.page).
PLAN = ("draw.js", "document.js", "plan.js")


def html(program: Program, cost: Cost | None = None, proof: Proof | None = None, *, full: bool = False) -> str:
    """The page. cost: `program.cost(device)`; without it the page has no times and no memory. proof: `program.prove()`;
    without it the page has no verdict. full: also layers that are equal to one that is shown.
    """
    return of_data(data(program, cost, proof, full=full))


def of_data(shown: Mapping[str, Any]) -> str:
    """The page that shows this data."""
    facts = shown["facts"]
    title = f"{facts['model']} on {' × '.join(f'{axis}={n}' for axis, n in facts['mesh']) or 'one device'}"
    return file("page.html", title, shown, SCRIPTS)


def file(frame: str, title: str, shown: Mapping[str, Any], names: Iterable[str]) -> str:
    """One HTML file: a frame with its data and its scripts, which is all that its content policy allows."""
    scripts = [read(name) for name in names]
    # `<` cannot end the element that the JSON is in, or begin a comment in it
    encoded = json.dumps(shown, ensure_ascii=True, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src {' '.join(map(_digest, scripts))}"
    )
    parts = {
        "POLICY": policy,
        "TITLE": escape(title),
        "STYLE": read("picture.css") + read("page.css"),
        "DATA": encoded,
        "LICENSE": read("dagre.LICENSE"),
        "SCRIPTS": "\n".join(f"<script>{text}</script>" for text in scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], read(frame))


def read(name: str) -> str:
    """A file of this folder."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
