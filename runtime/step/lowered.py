"""A lowered stage (shardc.passes.lower) as two functions: neither runs under autograd.

forward(*what the stage takes)   -> loss, news, what other stages take; and what backward wants, kept by name
backward({name: value})          -> gradients of what was received; it takes each value out of the dict, so that
                                    what forward kept is freed at its last use
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.ir.program import Stage
from shardc.runtime.step import op_errors
from shardc.runtime.step.profiler_ranges import with_ranges


class LoweredStage:
    """stage: with `lowered`; forward, backward: its two graphs, for the device."""

    def __init__(self, stage: Stage, forward: fx.Graph, backward: fx.Graph, *, ranges: bool) -> None:
        returned: Any = stage.graph.output_node().args[0]
        self._loss = f"{returned[0].name}_grad" if returned[0] is not None else ""
        self._received = [n for n, v in stage.receives.items() if v.requires_grad]
        self._forward_graph, self._backward_graph = forward, backward
        kept: Any = forward.output_node().args[0]
        self._kept = [n.name for n in kept[3]]
        self._takes = {n.name for n in backward.find_nodes(op="placeholder")}
        self._forward, self._backward = fx.GraphModule(nn.Module(), forward), _taking(backward)
        if ranges:
            self._forward = with_ranges(self._forward, forward)
            self._backward = with_ranges(self._backward, backward)

    @torch.no_grad()
    def forward(self, mesh: Any, *values: Any) -> tuple[Any, dict[str, Any]]:
        """((loss, news, sent), what backward wants). values: what the stage takes."""
        with mesh.step.in_lowered(), op_errors.named(self._forward_graph):
            *returned, kept = self._forward(*values)
        return tuple(returned), dict(zip(self._kept, kept, strict=True))

    @torch.no_grad()
    def backward(
        self, kept: dict[str, Any], values: Mapping[str, Any], grads: Mapping[str, Tensor], loss: Tensor
    ) -> dict[str, Tensor | None]:
        """{received value: its gradient}. kept: of forward, which is used up; values: what the stage takes; grads: of
        what it made for others; loss: the gradient of the loss."""
        begin = {f"{n}_grad": g for n, g in grads.items()} | {self._loss: loss}
        for name in self._takes - kept.keys():
            kept[name] = begin[name] if name in begin else values[name]
        del begin, grads
        step = values["mesh"].step
        with step.in_lowered(), step.recompute(step.microbatch), op_errors.named(self._backward_graph):
            returned = self._backward(kept)
        return dict(zip(self._received, returned, strict=True))


def _taking(graph: fx.Graph) -> fx.GraphModule:
    """A graph as a function of one dict, which takes values out of it."""
    copy = fx.Graph()
    values = copy.placeholder("values")
    env: dict[fx.Node, fx.Node] = {}
    for n in graph.nodes:
        if n.op == "placeholder":
            env[n] = copy.create_node("call_method", "pop", (values, n.name), name=n.name)
        else:
            env[n] = copy.node_copy(n, env.__getitem__)
    return fx.GraphModule(nn.Module(), copy)
