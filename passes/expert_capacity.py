"""Drop the choices of an expert that are above its capacity (`experts: [{capacity: 1.25}]`).

    before   y    = experts(x, index, weights, up, down, ...)       index: i64[t, k], the experts that tokens chose
    after    kept = experts_keep(index, 8, 40)                      of each expert the first 40 choices of the batch
             y    = experts(x, kept, weights, up, down, ...)

With `per: microbatch` the limit applies to each microbatch separately. A microbatch has the same rows of every rank's
part of the batch, so index is seen as [ranks, microbatches, ..., k], with microbatches outermost while it counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import copy_graph, operands_of
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.passes.annotate.experts import Experts
from shardc.passes.base import Pass
from shardc.rules.experts import INDEX, UP
from shardc.runtime import ops
from shardc.spec import Expert

_RESHAPE, _PERMUTE = torch.ops.aten.reshape.default, torch.ops.aten.permute.default


@dataclass(frozen=True)
class ExpertCapacity(Pass):
    """Drops choices above an expert's capacity. Raises ShardcError for one that microbatches cannot keep."""

    def applies(self, program: Program) -> bool:
        return any(entry.capacity is not None for entry in self.spec.experts)

    def run(self, program: Program) -> Program:
        program = replace(program, graph=copy_graph(program.graph))
        chosen = Experts(self.spec, program)
        for i, node in list(chosen.ops()):
            entry = self.spec.experts[i]
            if entry.capacity is None:
                continue
            index: Any = node.args[INDEX]
            e = operands_of(node)[UP].meta["value"].shape[0]
            with program.graph.inserting_before(node):
                kept = self._kept(program.graph, index, e, i, node.meta["source"])
            node.args = (*node.args[:INDEX], kept, *node.args[INDEX + 1 :])
        return program

    def _kept(self, graph: fx.Graph, index: fx.Node, experts: int, i: int, source: Source) -> fx.Node:
        """Write and return the choices that the experts take, i64[t, k]."""
        entry, typed = self.spec.experts[i], index.meta["value"]
        (t, k), chunks = typed.shape, self.spec.batch.microbatches
        ranks = self.spec.data_ranks
        where = self.spec.where(("experts", i, "capacity"))

        def emit(target: Any, shape: tuple[int, ...], *args: Any, **meta: Any) -> fx.Node:
            new = graph.create_node("call_function", target, args, {})
            new.meta = {"value": replace(typed, shape=shape), "source": source, **meta}
            return new

        def keep(x: fx.Node, tokens: int) -> fx.Node:
            limit = capacity(entry, tokens, k, experts)
            return emit(
                ops.experts_keep,
                x.meta["value"].shape,
                x,
                experts,
                limit,
                spec_line=f"{where} capacity {entry.capacity}",
            )

        if chunks == 1:
            return keep(index, t)
        if entry.per == "batch":
            raise ShardcError(
                f"capacity {entry.capacity} is a share of the global batch, of which microbatches see a part each: the"
                " rows that an expert keeps depend on rows that other ranks have in other microbatches",
                where=where,
                fix=(
                    "write per: microbatch (each microbatch drops tokens separately, as in other frameworks), "
                    "microbatches: 1, or capacity: none"
                ),
            )
        if t % (ranks * chunks):
            fault = (
                f"per: microbatch needs equal parts: {t} tokens are not {ranks * chunks} ({ranks} ranks of {chunks}"
                " microbatches)"
            )
            raise ShardcError(fault, where=where, fix=f"make the batch a multiple of {ranks * chunks} rows")
        part = t // (ranks * chunks)
        by_rank = emit(_RESHAPE, (ranks, chunks, part, k), index, [ranks, chunks, part, k])
        by_chunk = emit(_PERMUTE, (chunks, ranks, part, k), by_rank, [1, 0, 2, 3])
        kept = keep(emit(_RESHAPE, (chunks, ranks * part, k), by_chunk, [chunks, ranks * part, k]), ranks * part)
        back = emit(
            _PERMUTE,
            (ranks, chunks, part, k),
            emit(_RESHAPE, (chunks, ranks, part, k), kept, [chunks, ranks, part, k]),
            [1, 0, 2, 3],
        )
        return emit(_RESHAPE, (t, k), back, [t, k])


def capacity(entry: Expert, tokens: int, choices: int, experts: int) -> int:
    """Return how many choices an expert takes: its even share times the factor, rounded up."""
    assert entry.capacity is not None
    return max(1, math.ceil(entry.capacity * tokens * choices / experts))
