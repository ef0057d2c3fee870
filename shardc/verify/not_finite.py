"""Which op makes a number that is nan or inf first, on ranks or on one device: forward, and backward."""

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
    """Run a step once more, and name the op whose result is the first nan on any rank, or the inf that it is made of;
    where there is none in forward, the op whose backward makes a gradient that is not finite. "" where none is.

    The op with its module and line in the model.
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
    """Lines, of all ranks, with a result that has nan, or inf."""

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
    """A copy of a graph that looks at the result of each line."""
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
    """The first of the values that are not finite by which a value came to be so."""
    while operand := next((x for x in node.all_input_nodes if x in bad), None):
        node = operand
    return node


def _op(line: fx.Node, stage: Stage) -> str:
    """The op of the stage that a line belongs to, with its line in the model."""
    name = line.meta.get("of", line.name)
    node = next((n for n in stage.graph.nodes if n.name == name), line)
    return f"{node.name} of {source}" if str(source := source_of(node)) else node.name
