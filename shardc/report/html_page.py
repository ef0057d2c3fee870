"""A program as one HTML file, to read in a browser or to send to someone. No scripts, no
other files; light and dark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from shardc.ir import units
from shardc.ir.program import Program
from shardc.report.comm import comm_rows
from shardc.report.timeline import SECONDS, svg, timeline

_STYLE = """
:root{color-scheme:light dark;--back:#fbfaf7;--ink:#23241f;--soft:#6d6e65;--line:#e2e0d8;--mark:#a3430f;--tint:#f6e7dc}
@media(prefers-color-scheme:dark){:root{--back:#191a17;--ink:#e4e3db;--soft:#98998f;--line:#33342f;--mark:#f0a070;--tint:#33261d}}
body{background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif;margin:2.5rem auto;max-width:1200px;padding:0 1.5rem}
h1{font-size:1.5rem;font-weight:600}h2,summary{font-size:1.05rem;font-weight:600;margin:2.2rem 0 .6rem}summary{cursor:pointer}
pre{border:1px solid var(--line);border-radius:6px;padding:1rem}
pre,td,th.n{font:12.5px/1.55 ui-monospace,monospace}pre,.wide{overflow-x:auto}
table{border-collapse:collapse}th,td{border-bottom:1px solid var(--line);padding:.25rem 1.2rem .25rem 0;text-align:left;white-space:nowrap}
th{color:var(--soft);font-size:13px;font-weight:500}.n{text-align:right}
.c{color:var(--soft)}.x{background:var(--tint);color:var(--mark);display:inline-block;min-width:100%}.s{font-weight:600}
"""
_COLLECTIVE = re.compile(r" \| \w+/\w+ ")


def html(program: Program, *, full: bool = False) -> str:
    """The facts, the collectives of a step, how everything is stored, and the program with its collectives marked."""
    title = escape(f"{program.meta.get('model', 'program')} on {program.mesh}")
    notes = "".join(f"<li>{escape(n)}</li>" for n in program.notes)
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><h1>{title}</h1>',
            f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
            "<h2>Collectives of one training step, on one rank</h2>",
            _comms(program),
            _schedule(program),
            f"<details><summary>{units.plural(len(program.params), 'parameter')}</summary>{_params(program)}</details>",
            "<h2>Program</h2><pre>",
            "\n".join(map(_line, program.text(full=full).splitlines())),
            "</pre></body></html>\n",
        ]
    )


def _comms(program: Program) -> str:
    rows = [(r.axes, r.direction, r.kind, str(r.count), units.size(r.bytes), r.cause) for r in comm_rows(program)]
    return (
        _table(("axis", "direction", "collective", "a step", "bytes a rank", "cause"), rows, (3, 4))
        if rows
        else "<p>None.</p>"
    )


def _schedule(program: Program) -> str:
    return (
        f'<h2>Schedule</h2><div class="wide">{svg(timeline(program), SECONDS)}</div>'
        if program.schedule is not None
        else ""
    )


def _params(program: Program) -> str:
    rows = []
    for p in program.params:
        bucket = str(p.bucket) if p.bucket >= 0 else ""
        rows.append(
            (
                " = ".join((p.fqn, *p.aliases)),
                str(p.value),
                units.size(p.value.nbytes(program.mesh)),
                "+".join(p.reduce),
                bucket,
            )
        )
    return _table(("name", "type", "bytes a rank", "gradient summed over", "bucket"), rows, (2, 4))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    """numbers: the columns that are aligned to the right."""

    def row(cells: Sequence[str], tag: str) -> str:
        mark = [' class="n"' if i in numbers else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for c, m in zip(cells, mark, strict=True)) + "</tr>"

    body = "".join(row(r, "td") for r in rows)
    return f'<div class="wide"><table><thead>{row(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def _line(line: str) -> str:
    """A line of the program: collectives marked, sources bold, types pale."""
    if _COLLECTIVE.search(line):
        return f'<span class="x">{escape(line)}</span>'
    if line.lstrip().startswith("# "):
        return f'<span class="s">{escape(line)}</span>'
    code, mark, rest = line.partition("  # ")
    return f'{escape(code)}<span class="c">{escape(mark + rest)}</span>' if mark else escape(line)
