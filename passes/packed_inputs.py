"""PackedInputs: what products of 8 bits take is kept for backward as 8 bits.

    before   q = fp8_linear(x_fp8, wq, wq_amax, 'fp8-rowwise')
             k = fp8_linear(x_fp8, wk, wk_amax, 'fp8-rowwise')
    after    x_8 = fp8_pack(x_fp8, 'e4m3', (1, 1, 0))            a byte for each number and for each scale
             q = fp8_linear(x_fp8, wq, wq_amax, 'fp8-rowwise', False, x_8)
             k = fp8_linear(x_fp8, wk, wk_amax, 'fp8-rowwise', False, x_8)

So the bytes are made once for all products of an input, and are those that the kernels multiply; x_fp8 itself is only
what gradients flow through, and is freed behind the last of them. It stands behind placement: how the bytes lie is a
rank's own affair, and a part of a granule has a scale of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import calls, copy_graph, source_of, value_of
from shardc.ir.placement import Layout
from shardc.ir.program import Program, Value
from shardc.passes.base import Pass
from shardc.runtime import ops
from shardc.runtime.ops.fp8 import message_bytes
from shardc.runtime.ops.fp8_recipe import RECIPES, along


@dataclass(frozen=True)
class PackedInputs(Pass):
    """Packs the inputs of products of 8 bits, once each."""

    def applies(self, program: Program) -> bool:
        return self.spec.precision.products is not None

    def run(self, program: Program) -> Program:
        stages = []
        for stage in program.stages:
            graph = copy_graph(stage.graph)
            packed: dict[Any, fx.Node] = {}
            for n in list(calls(graph)):
                if n.target is ops.fp8_linear:
                    _pack(n, packed, program)
            graph.lint()
            stages.append(replace(stage, graph=graph))
        return replace(program, stages=tuple(stages))


def _pack(n: fx.Node, packed: dict[Any, fx.Node], program: Program) -> None:
    """Give a product its input's bytes. packed: those that there are, by input and granule."""
    x, weight, amax, recipe, *rest = n.args
    assert isinstance(x, fx.Node)
    v = value_of(x)
    granule = along(RECIPES[str(recipe)].x, len(v.shape))
    if (x, granule) not in packed:
        with n.graph.inserting_before(n):
            args = (x, "e4m3", granule)
            made = n.graph.create_node("call_function", ops.fp8_pack, args, {}, name=f"{x.name}_8")
        nbytes = message_bytes(v.local_shape(program.mesh), granule)
        value = Value((nbytes,), torch.uint8, False, Layout())
        made.meta |= {"value": value, "source": source_of(n)}
        packed[x, granule] = made
    n.args = (x, weight, amax, recipe, bool(rest and rest[0]), packed[x, granule])
