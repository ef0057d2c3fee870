"""Which op of a step's forward made a nan or an inf first, on any rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.errors import ShardcError
from shardc.ir.graph import source_of, values_of
from shardc.ir.program import Program


class NotFiniteError(ShardcError):
    """A loss is nan or inf, and the engine was made with nonfinite="stop". Nothing of the step was updated."""


@torch.no_grad()
def first_not_finite(program: Program, mesh: Any, values: Sequence[Mapping[str, Any]]) -> str:
    """Run forward again op by op, all ranks together, and name the first op whose result is not finite.

    values: of each microbatch: {placeholder: value}. Returns the op with its module and line; "" where all results of
    forward are finite on every rank. For programs of one stage.
    """
    (stage,) = program.stages
    nodes = list(stage.graph.nodes)
    first = len(nodes)
    for microbatch in values:
        run = _Looking(fx.GraphModule(nn.Module(), stage.graph))
        run.run(*(microbatch[n.target] for n in nodes if n.op == "placeholder"))
        first = min(first, run.first)
    every = [0] * mesh.layout.world
    every[mesh.rank] = first
    first = min(mesh.sum_on_host(every))
    if first == len(nodes):
        return ""
    node = nodes[first]
    return f"{node.name} of {source}" if str(source := source_of(node)) else node.name


class _Looking(fx.Interpreter):
    """nan, inf: the numbers of the first nodes whose results have one. An inf counts where a gradient flows, and where
    no operand has one: masks are made of -inf on purpose.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.nan = self.inf = self._end = len(list(module.graph.nodes))
        self._number = -1

    @property
    def first(self) -> int:
        return self.nan if self.nan < self._end else self.inf

    def run_node(self, n: fx.Node) -> Any:
        self._number += 1
        result = super().run_node(n)
        if n.op == "call_function" and self._number < self.nan:
            results = [x for x in (result if isinstance(result, tuple) else (result,)) if _is_floating(x)]
            if any(bool(x.isnan().any()) for x in results):
                self.nan = self._number
            elif self._number < self.inf and any(v.requires_grad for v in values_of(n)):
                operands = [self.env[a] for a in n.all_input_nodes if _is_floating(self.env.get(a))]
                if any(_has_inf(x) for x in results) and not any(_has_inf(x) for x in operands):
                    self.inf = self._number
        return result


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _has_inf(x: Tensor) -> bool:
    return bool(x.isinf().any())
