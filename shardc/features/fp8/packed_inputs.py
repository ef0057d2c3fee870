"""PackedInputs: keep the inputs of 8-bit products for backward as 8 bits.

    before   x_fp8 = fp8_round(x, x_amax, 'e4m3', (1, 1, 0))
             q = fp8_linear(x_fp8, wq, wq_amax, 'fp8-rowwise')
             k = fp8_linear(x_fp8, wk, wk_amax, 'fp8-rowwise')
    after    x_8 = fp8_pack(x, 'e4m3', (1, 1, 0), x_amax)        a byte for each number and for each scale
             q = fp8_linear(x, wq, wq_amax, 'fp8-rowwise', False, x_8)
             k = fp8_linear(x, wk, wk_amax, 'fp8-rowwise', False, x_8)

So the bytes are made once for all products of an input, and the kernels multiply these bytes. Only gradients flow
through x itself. A value that was rounded and then gathered (in 8 bits) is packed as it is:

             x_8 = fp8_pack(x_fp8_whole, 'e4m3', (1, 1, 0))
             q = fp8_linear(x_fp8_whole, wq, wq_amax, 'fp8-rowwise', False, x_8)

This pass runs after placement: the order of the bytes is local to a rank, and a part of a granule has its own scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.features.fp8 import section
from shardc.features.fp8.products import fp8_linear
from shardc.features.fp8.recipe import RECIPES, along
from shardc.features.fp8.rounding import fp8_pack, fp8_round, message_bytes
from shardc.ir.graph import calls, copy_graph, source_of, value_of
from shardc.ir.metadata import Value
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.passes.base import Pass


@dataclass(frozen=True)
class PackedInputs(Pass):
    """Packs each input of 8-bit products once."""

    def applies(self, program: Program) -> bool:
        return section.of(self.spec) is not None

    def run(self, program: Program) -> Program:
        stages = []
        for stage in program.stages:
            graph = copy_graph(stage.graph)
            packed: dict[Any, fx.Node] = {}
            for n in list(calls(graph)):
                if n.target is fp8_linear:
                    _pack(n, packed, program)
            for x in [n for n in calls(graph) if n.target is fp8_round and not n.users]:
                graph.erase_node(x)
            graph.lint()
            stages.append(replace(stage, graph=graph))
        return replace(program, stages=tuple(stages))


def _pack(n: fx.Node, packed: dict[Any, fx.Node], program: Program) -> None:
    """Pass a product the packed bytes of its input. packed: bytes made so far, by input and granule."""
    x, weight, amax, recipe, *rest = n.args
    assert isinstance(x, fx.Node)
    v = value_of(x)
    granule = along(RECIPES[str(recipe)].x, len(v.shape))
    if (x, granule) not in packed:
        with n.graph.inserting_before(n):
            args: tuple[Any, ...] = (x, "e4m3", granule)
            if _here_alone(x):
                args = (x.args[0], "e4m3", granule, x.args[1])
            node = n.graph.create_node("call_function", fp8_pack, args, {}, name=f"{x.name}_8")
        nbytes = message_bytes(v.local_shape(program.mesh), granule)
        value = Value((nbytes,), torch.uint8, False, Layout())
        node.meta |= {"value": value, "source": source_of(n)}
        packed[x, granule] = node
    through = packed[x, granule].args[0]
    n.args = (through, weight, amax, recipe, bool(rest and rest[0]), packed[x, granule])


def _here_alone(x: fx.Node) -> bool:
    """Return whether x is the result of a rounding that only products read."""
    return x.target is fp8_round and all(
        u.target is fp8_pack or (u.target is fp8_linear and u.args[0] is x and x not in u.args[1:]) for u in x.users
    )
