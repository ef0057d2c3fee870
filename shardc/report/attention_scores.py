"""Show which part of attention's scores each rank computes: rows are queries, columns are keys.

model.layers.*.self_attn: 8 heads of 4096 queries and 4096 keys, causal, ring over cp=4, 12.0 MiB a rank
  0 . . . . . . .        rank 0 has the first eighth and the last: as many pairs as any other
  1 1 . . . . . .
  ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardc.ir.graph import calls, source_of, values_of
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective
from shardc.ir.placement import Layout, runs
from shardc.ir.program import Program
from shardc.ir.units import count, size
from shardc.layer_names import of_every_layer
from shardc.rules.attention import OPS
from shardc.rules.core.op_call import call_of
from shardc.runtime.ops.attention.spans import ALL, CAUSAL, Band, Span, blocks

#: Number of cells on a side of the drawn square.
CELLS = 32
_NAMES = "0123456789abcdefghijklmnopqrstuvwxyz"


def to_json(program: Program) -> list[dict[str, Any]]:
    """Return each kind of attention that is one op, of torch or shardc, as a square of queries and keys.

    They are JSON-able, in the order of the program. modules: those that use it; heads: of queries; queries, keys: of
    the whole sequence; band: the keys that a row sees; mask: whether a mask hides more; over: axes that split rows,
    with their sizes; method: how rows meet the keys of other ranks; bytes: of a rank in forward; pairs: for each rank
    of `over`, the pairs of a row and a key that it sees, of one head; about, work: in words; cells: by rows and
    columns, the rank that computes a part of the cell, or None.
    """
    squares: dict[str, dict[str, Any]] = {}
    for node in (n for stage in program.stages for n in calls(stage.graph) if n.target in OPS):
        (facts, held), module = _facts(node, program.mesh), of_every_layer(source_of(node).module) or "."
        if (key := repr((facts, held))) not in squares:
            squares[key] = {"modules": [], **facts, **_drawn(facts, held)}
        squares[key]["modules"] += [module] if module not in squares[key]["modules"] else []
    return list(squares.values())


def _facts(node: fx.Node, mesh: Mesh) -> tuple[dict[str, Any], list[tuple[Span, ...]]]:
    """Return the facts of an op of attention, and the rows of each rank of `over`."""
    call = call_of(node)
    (q, k), out = call.operands[:2], values_of(node)[0]
    dim = len(q.shape) - 2
    heads = out.shape[-3] if len(out.shape) > 2 else 1
    local = out.layout.local_shape(out.shape, mesh)[-3] if len(out.shape) > 2 else 1
    over = {a: mesh.size(a) for a, _ in q.layout.shards(dim) if mesh.size(a) > 1}
    window = dict(call.kwargs).get("window")
    band = CAUSAL if call.arg("is_causal") else Band(*window) if window else ALL
    ring: Collective | None = node.meta.get("collective")
    held = [_rows(q.layout, q.shape[dim], dim, mesh, rank) for rank in range(math.prod(over.values()))]
    facts = {
        "heads": heads,
        "heads_a_rank": local,
        "queries": q.shape[-2],
        "keys": k.shape[-2],
        "band": list(band),
        "mask": len(call.operands) > 3,
        "over": over,
        "method": "ring" if ring else "keys of all ranks" if over else "heads split" if local < heads else "whole",
        "bytes": ring.bytes if ring else 0,
    }
    return facts, held


def _rows(layout: Layout, length: int, dim: int, mesh: Mesh, rank: int) -> tuple[Span, ...]:
    """Return the rows of a rank. Ranks count through the axes that split rows, the last one fastest."""
    digits = []
    for axis, shard in reversed(layout.shards(dim)):
        n = mesh.size(axis)
        digits.append((shard, n, rank % n))
        rank //= n
    return tuple(Span(start, local, n) for local, start, n in runs(length, digits))


def _drawn(s: Mapping[str, Any], held: Sequence[tuple[Span, ...]]) -> dict[str, Any]:
    rows, keys, band = s["queries"], s["keys"], Band(*s["band"])
    n, m = min(CELLS, rows), min(CELLS, keys)
    cells: list[list[int | None]] = []
    for i in range(n):
        top, bottom = i * rows // n, (i + 1) * rows // n
        first, end = band.keys(top, bottom, Span(0, 0, keys))
        middle = (top + bottom) // 2
        owner = next(r for r, spans in enumerate(held) if any(s.start <= middle < s.end for s in spans))
        columns = ((j * keys // m, (j + 1) * keys // m) for j in range(m))
        cells.append([owner if max(a, first) < min(b, end) else None for a, b in columns])
    pairs = [sum(b.pairs for b in blocks(spans, [Span(0, 0, keys)], band)) for spans in held]
    return {"pairs": pairs, "about": _about(s), "work": _work(pairs), "cells": cells}


def _about(s: Mapping[str, Any]) -> str:
    heads = f"{s['heads_a_rank']} of {s['heads']} heads" if s["heads_a_rank"] < s["heads"] else f"{s['heads']} heads"
    low, high = band = Band(*s["band"])
    kind = {ALL: "all keys", CAUSAL: "causal"}.get(band, f"keys from {low} to {high}, counted from the query")
    mask = ", and a mask" if s["mask"] else ""
    over = " x ".join(f"{a}={n}" for a, n in s["over"].items())
    sent = f", {size(s['bytes'])} a rank" if s["bytes"] else ""
    how = s["method"] + (f" over {over}" if over else "")
    return f"{heads} of {s['queries']} queries and {s['keys']} keys, {kind}{mask}: {how}{sent}"


def _work(pairs: Sequence[int]) -> str:
    if len(pairs) == 1:
        return f"{count(pairs[0])} pairs of a query and a key, for each head"
    mean = sum(pairs) / len(pairs)
    uneven = max(pairs) / (mean or 1)
    even = "as many on every rank" if uneven < 1.005 else f"the most of a rank is {uneven:.2f} times the mean"
    return f"{count(mean)} pairs of a query and a key a rank, for each head: {even}"


def text(program: Program) -> str:
    """Draw each square in characters: the rank that computes a cell, or a dot if none does."""
    parts = []
    for s in to_json(program):
        rows = [" ".join("." if r is None else _NAMES[r % len(_NAMES)] for r in line) for line in s["cells"]]
        head = [", ".join(s["modules"]), f"  {s['about']}", f"  {s['work']}"]
        parts.append("\n".join([*head, *(f"    {r}" for r in rows)]))
    return "\n\n".join(parts) or "no attention that is one op: what a model writes out is products and a softmax"
