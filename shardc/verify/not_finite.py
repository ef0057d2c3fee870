"""Find the op that makes the first nan or inf on ranks, forward or backward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.fused_regions import without_fused_regions
from shardc.ir.graph import copy_graph, is_call, source_of
from shardc.ir.program import Program
from shardc.ir.stage import Joint, Stage
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine


def op_on_ranks(program: Program, model: Any, batch: Any, seed: int) -> str:
    """Run a step again and return the op that makes the first nan or inf; "" if there is none.

    Forward: the op of the first nan on any rank, or of the inf that led to it. If forward has no nan: the op whose
    backward makes a gradient that is not finite. The op is named with its module and line in the model.
    """
    forward, backward = _Seen(), _Seen()
    program = without_fused_regions(program)
    watched = replace(program, stages=tuple(_watched(s, forward, backward) for s in program.stages), pairs=())

    def work(mesh: LoopbackMesh) -> None:
        engine = Engine(watched, model, None, seed, mesh=mesh, check=False)
        if watched.forward_only:
            engine.evaluate(batch)
        else:
            engine.backward(batch)

    loopback(watched.mesh, work)
    for s in program.stages:
        graph = s.graph if s.joint is None else s.joint.forward
        if nan := next((n for n in graph.nodes if n in forward.nan), None):
            op = _op(_origin(nan, forward.nan | forward.inf), s)
            return f"{op} is the first result that is not finite"
    for s in reversed(program.stages):
        bad = backward.nan | backward.inf
        for graph in s.joint.graphs.values() if s.joint is not None else ():
            if first := next((n for n in graph.nodes if n in bad), None):
                return f"backward of {_op(first, s)} makes the first gradient that is not finite"
    return ""


@dataclass
class _Seen:
    """Lines that have nan or inf in a result on any rank."""

    nan: set[fx.Node] = field(default_factory=set)
    inf: set[fx.Node] = field(default_factory=set)

    def look(self, n: fx.Node, result: Any) -> None:
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                for nodes, test in ((self.nan, torch.isnan), (self.inf, torch.isinf)):
                    if bool(test(x.detach()).any()):
                        nodes.add(n)


def _watched(stage: Stage, forward: _Seen, backward: _Seen) -> Stage:
    if stage.joint is None:
        return replace(stage, graph=_looking(stage.graph, forward))
    first, *others = stage.joint.graphs.values()
    return replace(stage, joint=Joint(_looking(first, forward), *(_looking(g, backward) for g in others)))


def _looking(graph: fx.Graph, seen: _Seen) -> fx.Graph:
    """Return a copy of a graph that passes the result of each line to `seen`."""
    env: dict[fx.Node, fx.Node] = {}
    copy = copy_graph(graph, env)
    for n in graph.nodes:
        if is_call(n):

            def look(result: Any, line: fx.Node = n) -> None:
                seen.look(line, result)

            with copy.inserting_after(env[n]):
                copy.call_function(look, (env[n],))
    return copy


def _origin(node: fx.Node, bad: set[fx.Node]) -> fx.Node:
    """Follow operands that are not finite back from a node to the first one."""
    while operand := next((x for x in node.all_input_nodes if x in bad), None):
        node = operand
    return node


def _op(line: fx.Node, stage: Stage) -> str:
    """Return the op of the stage that a line belongs to, with its line in the model."""
    name = line.meta.get("of", line.name)
    node = next((n for n in stage.graph.nodes if n.name == name), line)
    return f"{node.name} of {source}" if str(source := source_of(node)) else node.name
