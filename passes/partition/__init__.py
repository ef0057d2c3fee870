"""Partition: write the program of one rank. Placements become collectives, sizes become local.

`x = linear(h, w)` whose k is split over tp, and an op after it that needs x whole:

    before   x = linear(h, w)                     h: f32[8, 64]         w: f32[256, 64@tp]
             y = gelu(x)
    after    h_cut = shard(h, mesh, "tp", ...)    h_cut: f32[8, 64@tp]
             x = linear(h_cut, w)                 x: f32[8, 256] +tp
             x_sum = all_reduce(x, mesh, ("tp",)) x_sum: f32[8, 256]
             y = gelu(x_sum)

local_program   writes the graph of one rank, op by op
conversion_order  finds the conversions from one layout to another, in order
collectives     builds a conversion's arguments and its collective, with the annotation behind it
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import operands_of, values_of
from shardc.ir.metadata import Collective
from shardc.ir.outputs import Output
from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.passes import outputs
from shardc.passes.annotate import to_spec
from shardc.passes.base import Pass
from shardc.passes.partition.local_program import LocalProgram
from shardc.runtime import ops
from shardc.runtime.ops.factors import multiplies


@dataclass(frozen=True)
class Partition(Pass):
    """Makes the graph of one rank from a placed global graph. (Pipeline cuts it into stages later.)

    With `strict: true`, collectives without an annotation behind them are errors. (Without it, gathers get a note.)
    """

    def run(self, program: Program) -> Program:
        writer = LocalProgram(program, program.mesh, outputs.batch_axes(self.spec, program.mesh))
        graph = writer.run()
        _overlap(graph)
        if self.spec.strict:
            refuse_implicit(graph)
        suggested = dict.fromkeys(to_spec.suggest_split(program, axis) for axis in sorted(writer.gathered))
        fused = (
            f"fused weights can be split by their parts: write {text} before the entries that split them in another way"
            for text in suggested
            if text
        )
        names = tuple(o.name for o in program.outputs)
        return replace(
            program,
            stages=(Stage(graph, outputs=names),),
            outputs=_local_outputs(program, graph),
            notes=(*program.notes, *writer.notes, *fused),
        )


def _overlap(graph: fx.Graph) -> None:
    """Set overlap=True on sums of input gradients, which run while backward computes weights' gradients."""
    for node in graph.nodes:
        if node.target in (ops.sum_grad, ops.all_gather_partial_grad) and node.meta["collective"].backward != "none":
            products = [u for u in node.users if multiplies(u, node)]
            if any(v.requires_grad for u in products for x in operands_of(u) if x is not node for v in values_of(x)):
                node.kwargs = {**node.kwargs, "overlap": True}


def _local_outputs(program: Program, graph: fx.Graph) -> tuple[Output, ...]:
    """Return the outputs with the types and layouts that they have in the graph of a rank."""
    returned: Any = graph.output_node().args[0]
    values = [n.meta["value"] for n in returned[1][len(returned[1]) - len(program.outputs) :]]
    return tuple(
        replace(o, shape=v.shape, dtype=v.dtype, layout=v.layout) for o, v in zip(program.outputs, values, strict=True)
    )


def refuse_implicit(graph: fx.Graph) -> None:
    """Raise ShardcError for every collective without a cause (`strict: true`)."""
    errors = Errors()
    for node in graph.nodes:
        c: Collective | None = node.meta.get("collective")
        if c is not None and c.implicit:
            kinds = ((c.kind, "forward"), (c.backward, "backward"))
            runs = " and ".join(f"{k} in {d}" for k, d in kinds if k != "none")
            errors.add(
                f"{runs} over {', '.join(c.axes)} of {node.meta['value']} is implied by no annotation (strict: true)",
                where=str(node.meta["source"]),
                fix="annotate the value or the weights around it, or set `strict: false`",
            )
    errors.raise_any()
