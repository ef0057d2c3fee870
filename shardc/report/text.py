"""Write the captured graph as text, and a program as JSON."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from shardc.artifact import emit
from shardc.ir.program import Program
from shardc.ir.type_text import show


def before(program: Program, *, full: bool = False) -> str:
    """Return the captured graph as text: the model on one device, with the names of modules and lines."""
    return emit.text(replace(program, stages=(), buckets=()), full=full)


def to_json(program: Program) -> dict[str, Any]:
    """Return what `--json` prints: JSON-able values; types in the notation of shardc.ir.placement."""
    mesh = program.mesh
    return {
        "model": program.meta.get("model"),
        "mesh": dict(mesh.axes),
        "world": mesh.world,
        "notes": list(program.notes),
        "seconds": program.meta.get("pass_seconds", {}),
        "parameters": [
            {
                "name": p.fqn,
                "aliases": list(p.aliases),
                "type": show(p.shape, p.dtype, p.layout),
                "reduce": list(p.reduce),
                "bucket": p.bucket,
                "bytes_per_rank": p.value.nbytes(mesh),
            }
            for p in program.params
        ],
        "inputs": [{"path": list(i.path), "type": show(i.shape, i.dtype, i.layout)} for i in program.inputs],
        "collectives": [
            {
                "name": n.name,
                "type": str(n.meta["value"]),
                "module": n.meta["source"].module,
                "line": n.meta["source"].line,
                **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(n.meta["collective"]).items()},
            }
            for s in program.stages
            for n in s.graph.nodes
            if "collective" in n.meta
        ],
    }
