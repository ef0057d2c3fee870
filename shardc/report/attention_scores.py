"""Show which part of attention's scores each rank computes: rows are queries, columns are keys.

model.layers.*.self_attn: 8 heads of 4096 queries and 4096 keys, causal, ring over cp=4, 12.0 MiB a rank
  0 . . . . . . .        rank 0 has the first eighth and the last: as many pairs as any other
  1 1 . . . . . .
  ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Square:
    """One kind of attention, as a square of queries and keys.

    heads: query heads of a rank, and of all; rows, keys: of the whole sequence; band: the keys that a row sees; masked:
    a mask hides more; over: axes that split rows, with their sizes; method: how rows meet the keys of other ranks;
    sent: bytes of a rank in forward; held: the rows of each rank of `over`; modules: the keys are the modules that use
    it; pairs: for each rank, the pairs of a row and a key that it sees, of one head.
    """

    heads: tuple[int, int]
    rows: int
    keys: int
    band: Band
    masked: bool
    over: tuple[tuple[str, int], ...]
    method: str
    sent: int
    held: tuple[tuple[Span, ...], ...] = field(repr=False)
    modules: dict[str, None] = field(default_factory=dict, compare=False)

    @property
    def pairs(self) -> tuple[int, ...]:
        whole = [Span(0, 0, self.keys)]
        return tuple(sum(b.pairs for b in blocks(rows, whole, self.band)) for rows in self.held)

    @property
    def uneven(self) -> float:
        """The largest number of pairs of a rank, divided by the mean."""
        return max(self.pairs) * len(self.pairs) / (sum(self.pairs) or 1)

    def owner(self, row: int) -> int:
        return next(r for r, spans in enumerate(self.held) if any(s.start <= row < s.end for s in spans))

    def cells(self) -> list[list[int | None]]:
        """Return, by rows and columns of cells, the rank that computes a part of the cell, or None."""
        n, m = min(CELLS, self.rows), min(CELLS, self.keys)
        drawn: list[list[int | None]] = []
        for i in range(n):
            top, bottom = i * self.rows // n, (i + 1) * self.rows // n
            sees = self.band.keys(top, bottom, Span(0, 0, self.keys))
            columns = ((j * self.keys // m, (j + 1) * self.keys // m) for j in range(m))
            owner = self.owner((top + bottom) // 2)
            drawn.append([owner if max(a, sees[0]) < min(b, sees[1]) else None for a, b in columns])
        return drawn


def squares(program: Program) -> list[Square]:
    """Return each kind of attention that is one op, of torch or shardc, in the order of the program."""
    known: dict[Square, Square] = {}
    for node in (n for stage in program.stages for n in calls(stage.graph) if n.target in OPS):
        square = _square(node, program.mesh)
        known.setdefault(square, square).modules.setdefault(of_every_layer(source_of(node).module) or ".")
    return list(known)


def _square(node: fx.Node, mesh: Mesh) -> Square:
    call = call_of(node)
    q, k = call.operands[:2]
    dim, out = len(q.shape) - 2, values_of(node)[0]
    heads = out.shape[-3] if len(out.shape) > 2 else 1
    local_heads = out.layout.local_shape(out.shape, mesh)[-3] if len(out.shape) > 2 else 1
    over = tuple((a, mesh.size(a)) for a, _ in q.layout.shards(dim) if mesh.size(a) > 1)
    window = dict(call.kwargs).get("window")
    ring: Collective | None = node.meta.get("collective")
    return Square(
        heads=(local_heads, heads),
        rows=q.shape[-2],
        keys=k.shape[-2],
        band=CAUSAL if call.arg("is_causal") else Band(*window) if window else ALL,
        masked=len(call.operands) > 3,
        over=over,
        method="ring" if ring else "keys of all ranks" if over else "heads split" if local_heads < heads else "whole",
        sent=ring.bytes if ring else 0,
        held=tuple(_rows(q.layout, q.shape[dim], dim, mesh, rank) for rank in range(math.prod(n for _, n in over))),
    )


def _rows(layout: Layout, length: int, dim: int, mesh: Mesh, rank: int) -> tuple[Span, ...]:
    """Return the rows of a rank. Ranks count through the axes that split rows, the last one fastest."""
    digits = []
    for axis, shard in reversed(layout.shards(dim)):
        n = mesh.size(axis)
        digits.append((shard, n, rank % n))
        rank //= n
    return tuple(Span(start, local, n) for local, start, n in runs(length, digits))


# --- shown


def _about(s: Square) -> str:
    heads = f"{s.heads[0]} of {s.heads[1]} heads" if s.heads[0] < s.heads[1] else f"{s.heads[1]} heads"
    low, high = s.band
    band = {ALL: "all keys", CAUSAL: "causal"}.get(s.band, f"keys from {low} to {high}, counted from the query")
    mask = ", and a mask" if s.masked else ""
    over = " x ".join(f"{a}={n}" for a, n in s.over)
    sent = f", {size(s.sent)} a rank" if s.sent else ""
    how = s.method + (f" over {over}" if over else "")
    return f"{heads} of {s.rows} queries and {s.keys} keys, {band}{mask}: {how}{sent}"


def _work(s: Square) -> str:
    pairs = s.pairs
    if len(pairs) == 1:
        return f"{count(pairs[0])} pairs of a query and a key, for each head"
    even = "as many on every rank" if s.uneven < 1.005 else f"the most of a rank is {s.uneven:.2f} times the mean"
    return f"{count(sum(pairs) / len(pairs))} pairs of a query and a key a rank, for each head: {even}"


def text(program: Program) -> str:
    """Draw each square in characters: the rank that computes a cell, or a dot if none does."""
    parts = []
    for s in squares(program):
        rows = [" ".join("." if r is None else _NAMES[r % len(_NAMES)] for r in line) for line in s.cells()]
        parts.append("\n".join([", ".join(s.modules), f"  {_about(s)}", f"  {_work(s)}", *(f"    {r}" for r in rows)]))
    return "\n\n".join(parts) or "no attention that is one op: what a model writes out is products and a softmax"


def to_json(program: Program) -> list[dict[str, Any]]:
    """Return the facts of `text` for each square, JSON-able. cells: by rows and columns, a rank or None."""
    return [
        {
            "modules": list(s.modules),
            "heads": s.heads[1],
            "heads_a_rank": s.heads[0],
            "queries": s.rows,
            "keys": s.keys,
            "band": list(s.band),
            "mask": s.masked,
            "over": dict(s.over),
            "method": s.method,
            "bytes": s.sent,
            "pairs": list(s.pairs),
            "about": _about(s),
            "work": _work(s),
            "cells": s.cells(),
        }
        for s in squares(program)
    ]
