"""Show a program as one HTML page, for `shardc inspect --html FILE`; the page needs no network.

data            all that the page shows, as JSON: graphs, spec_lines, messages (collectives, buckets), step (times and
                memory); 80 equal layers are shown once (shardc.ir.repeats)
page.html       the frame of all pages; inspect.html: header, panels, dialogs; page.css: their style; picture.css:
                that of pictures; colours.css: all colours
DRAWING         the scripts that draw, in their order: each panel is one file. They make elements as plain values, and
                need no document: so docs/drawing.py makes pictures as files, and tests draw every panel
plan.js         the page of a plan (shardc.plan.page)
document.js     turns elements into the document's; page.js: tabs, search, keys, the address
dagre.min.js    lays graphs out (docs/explanation/decisions.md, 60): @dagrejs/dagre 3.1.3, MIT (dagre.LICENSE), from npm

Data and scripts are separate in the file: names of a model are JSON, and become text of the page, never HTML. A content
security policy allows the page's own scripts, by their digests, and nothing else.
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

#: Scripts in the order in which they run: those that others use come first.
DRAWING = (
    *("dagre.min.js", "draw.js", "base.js", "spec.js", "tree.js", "graph.js", "timeline.js", "memory.js"),
    "panels.js",
)
SCRIPTS = (*DRAWING, "document.js", "page.js")
#: Scripts of the page of `shardc plan --html`.
PLAN = ("draw.js", "document.js", "plan.js")


def html(program: Program, cost: Cost | None = None, proof: Proof | None = None, *, full: bool = False) -> str:
    """Return the page. Without `cost` it has no times, no memory; without `proof` no verdict.

    cost: `program.cost(device)`. proof: `program.prove()`. full: also show layers that equal a shown one.
    """
    return of_data(data(program, cost, proof, full=full))


def of_data(shown: Mapping[str, Any]) -> str:
    """Return the page that shows this data."""
    facts = shown["facts"]
    title = f"{facts['model']} on {' × '.join(f'{axis}={n}' for axis, n in facts['mesh']) or 'one device'}"
    notice = f"<!-- Graphs are laid out by dagre, which comes with this notice:\n{read('dagre.LICENSE')}-->\n"
    return file("inspect", title, read("inspect.html"), shown, SCRIPTS, notice)


def file(command: str, title: str, body: str, shown: Mapping[str, Any], names: Iterable[str], notice: str = "") -> str:
    """Build one HTML file from a body, data and scripts; its content policy allows nothing else."""
    scripts = [read(name) for name in names]
    # without `<` the JSON cannot end its element, or begin a comment
    encoded = json.dumps(shown, ensure_ascii=True, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src {' '.join(map(_digest, scripts))}"
    )
    parts = {
        "COMMAND": command,
        "POLICY": policy,
        "TITLE": escape(title),
        "STYLE": "".join(map(read, ("colours.css", "picture.css", "page.css"))),
        "BODY": body,
        "DATA": encoded,
        "NOTICE": notice,
        "SCRIPTS": "\n".join(f"<script>{text}</script>" for text in scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], read("page.html"))


def read(name: str) -> str:
    """Read a file of this folder."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
