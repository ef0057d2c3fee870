"""The program before partition, differences between texts, JSON, and one HTML file to look at."""

from __future__ import annotations

import difflib
import html as escape
import re
from dataclasses import asdict, replace
from typing import Any

from shardc import emit
from shardc.placement import show
from shardc.program import Program
from shardc.report.comm import comm_rows, comm_table


def before(program: Program) -> str:
    """The captured graph: the model as one device runs it, with every module's and line's name."""
    return emit.text(replace(program, stages=(), buckets=()))


def diff(old: str, new: str) -> str:
    """Unified difference of two program texts."""
    return "".join(difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), "before", "after", n=2))


def to_json(program: Program) -> dict[str, Any]:
    """What `--json` prints: JSON-able values only; types in the notation of shardc.placement."""
    mesh = program.mesh
    return {
        "model": program.meta.get("model"), "mesh": dict(mesh.axes), "world": mesh.world, "notes": list(program.notes),
        "seconds": program.meta.get("pass_seconds", {}),
        "parameters": [
            {
                "name": p.fqn, "aliases": list(p.aliases), "type": show(p.shape, p.dtype, p.layout), "reduce": list(p.reduce), "bucket": p.bucket,
                "bytes_per_rank": p.value.nbytes(mesh),
            }
            for p in program.params
        ],
        "inputs": [{"path": list(i.path), "type": show(i.shape, i.dtype, i.layout)} for i in program.inputs],
        "collectives": [
            {
                "name": n.name, "type": str(n.meta["value"]), "module": n.meta["source"].module, "line": n.meta["source"].line,
                **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(n.meta["collective"]).items()},
            }
            for s in program.stages for n in s.graph.nodes if "collective" in n.meta
        ],
        "per_step": [asdict(r) for r in comm_rows(program)],
    }  # fmt: skip


_STYLE = """
:root{color-scheme:light dark;--back:#fbfaf7;--ink:#23241f;--soft:#77786f;--line:#e2e0d8;--mark:#b4501e;--tint:#f6e7dc}
@media(prefers-color-scheme:dark){:root{--back:#191a17;--ink:#e4e3db;--soft:#92938a;--line:#33342f;--mark:#f0a070;--tint:#33261d}}
body{background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif;margin:2.5rem auto;max-width:1200px;padding:0 1.5rem}
h1{font-size:1.5rem;font-weight:600}h2{font-size:1.05rem;margin-top:2.2rem}
pre{font:12.5px/1.55 ui-monospace,monospace;overflow-x:auto;border:1px solid var(--line);border-radius:6px;padding:1rem}
.c{color:var(--soft)}.x{background:var(--tint);color:var(--mark);display:inline-block;min-width:100%}.s{font-weight:600}
"""


def html(program: Program) -> str:
    """One file that needs no other: the collectives of a step, and the program with its collectives marked."""
    shown = []
    for line in emit.text(program).splitlines():
        text = escape.escape(line)
        if re.search(r" \| \w+/\w+ ", line):
            text = f'<span class="x">{text}</span>'
        elif line.lstrip().startswith("# "):
            text = f'<span class="s">{text}</span>'
        else:
            code, mark, rest = text.partition("  # ")
            text = f'{code}<span class="c">{mark}{rest}</span>' if mark else text
        shown.append(text)
    title = escape.escape(f"{program.meta.get('model', 'program')} on {program.mesh}")
    notes = "".join(f"<li>{escape.escape(n)}</li>" for n in program.notes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>'
        + (f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
        + f"<h2>Collectives of one training step, on one rank</h2><pre>{escape.escape(comm_table(program))}</pre>"
        + f"<h2>Program</h2><pre>{chr(10).join(shown)}</pre></html>"
    )
