"""Which op makes a number that is nan or inf first, on ranks or on one device: forward, and backward."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.ir.graph import source_of
from shardc.ir.program import Program
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.runnable import on_device


def op_on_ranks(program: Program, model: Any, batch: Any, seed: int) -> str:
    """Run a step once more, and name the op whose result is the first nan on any rank, or the inf that it is made of;
    where there is none in forward, the op whose backward makes a gradient that is not finite. "" where none is.

    The op with its module and line in the model.
    """
    eager = replace(program, stages=tuple(replace(s, lowered=None) for s in program.stages), pairs=())
    starts = list(accumulate((len(s.graph.nodes) for s in eager.stages), initial=0))

    def work(mesh: LoopbackMesh) -> tuple[set[int], ...]:
        engine = Engine(eager, model, None, seed, mesh=mesh, check=False)
        looking = {s: _Looking(on_device(eager.stages[s].graph, mesh.device)) for s in engine.interpreter.stages}
        with engine.interpreter.replaced({s: x.run for s, x in looking.items()}):
            if eager.forward_only:
                engine.evaluate(batch)
            else:
                engine.backward(batch)
        each = [(starts[s], x.nan, x.inf, x.gradients) for s, x in looking.items()]
        return tuple({start + i for start, *found in each for i in found[k]} for k in range(3))

    ranks = loopback(eager.mesh, work)
    nodes = [n for s in eager.stages for n in s.graph.nodes]
    nan, inf, gradients = ({nodes[i] for each in ranks for i in each[k]} for k in range(3))
    if nan:
        return (
            f"{_shown(_origin(next(n for n in nodes if n in nan), nan | inf))} is the first result that is not finite"
        )
    return _of_backward([n for n in nodes if n in gradients])


def _origin(node: fx.Node, bad: set[fx.Node]) -> fx.Node:
    """The first of the values that are not finite by which a value came to be so."""
    while operand := next((x for x in node.all_input_nodes if x in bad), None):
        node = operand
    return node


def _of_backward(bad: list[fx.Node]) -> str:
    """The op that makes a gradient which is not finite of one that is: a user of the last value that has such a one."""
    if not bad:
        return ""
    maker = next((u for u in bad[-1].users if u.op == "call_function"), bad[-1])
    return f"backward of {_shown(maker)} makes the first gradient that is not finite"


def _shown(node: fx.Node) -> str:
    return f"{node.name} of {source}" if str(source := source_of(node)) else node.name


class _Looking(fx.Interpreter):
    """nan, inf, gradients: the numbers of nodes with a result that has nan, or inf, or whose gradient has one."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(nn.Module(), garbage_collect_values=True, graph=graph)
        self.nan: set[int] = set()
        self.inf: set[int] = set()
        self.gradients: set[int] = set()
        self._numbers = {n: i for i, n in enumerate(graph.nodes)}

    def run_node(self, n: fx.Node) -> Any:
        result, number = super().run_node(n), self._numbers[n]

        def look(gradient: Tensor) -> None:
            if not bool(gradient.isfinite().all()):
                self.gradients.add(number)

        for x in result if isinstance(result, tuple) else (result,):
            if n.op != "call_function" or not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
                continue
            for found, test in ((self.nan, torch.isnan), (self.inf, torch.isinf)):
                if bool(test(x).any()):
                    found.add(number)
            if x.requires_grad:
                x.register_hook(look)  # type: ignore[no-untyped-call]
        return result
