"""Find the parameters that a step trains: those that gradients of the loss reach, on any rank."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.ir.types import requires_grad
from shardc.runtime.ops.zero import gather_start, gather_wait, updated


def trained_params(program: Program) -> frozenset[str]:
    """Return the names of parameters that gradients reach in any stage, also on other ranks."""
    params, trained = {p.name for p in program.params}, set[str]()
    for stage in program.stages:
        reached = {n for n in backward_roots(program, stage) if requires_grad(n)}
        for n in reversed(stage.graph.nodes):
            if n in reached:
                reached.update(x for x in _gradients_of(n) if requires_grad(x))
        trained |= {n.name for n in reached if n.name in params}
    return frozenset(trained)


def backward_roots(program: Program, stage: Stage) -> list[fx.Node]:
    """Return the values at which backward may begin: sent ones that get gradients, and the loss."""
    crossing = {name for e in program.edges for name, _ in e.differentiable()}
    returned: Any = stage.graph.output_node().args[0]
    loss, _, *sent = returned
    return [n for n in (sent[0] if sent else ()) if n.name in crossing] + ([loss] if loss is not None else [])


def _gradients_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that get a node's gradient: its operands, or one parameter of a gathered bucket."""
    if node.target is operator.getitem:
        result, k = node.args
        assert isinstance(result, fx.Node)
        start = result.args[0] if result.target is gather_wait else result
        if isinstance(start, fx.Node) and start.target in (gather_start, updated):
            return [start.args[0][k]]  # type: ignore[index, list-item]
    return node.all_input_nodes
