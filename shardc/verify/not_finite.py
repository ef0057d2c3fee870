"""Find the op that makes the first nan or inf on ranks, forward or backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from shardc.ir.fused_regions import without_fused_regions
from shardc.ir.program import Program
from shardc.ir.stage import Joint, Stage
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.stage.not_finite import named, watched
from shardc.runtime.step.engine import Engine


def op_on_ranks(program: Program, model: Any, batch: Any, seed: int) -> str:
    """Run a step again and return the op that makes the first nan or inf; "" if there is none.

    Forward: the op of the first nan on any rank, or of the inf that led to it. If forward has no nan: the op whose
    backward makes a gradient that is not finite. The op is named with its module and line in the model.
    """
    program = without_fused_regions(program)
    graphs = {s.name: list(s.joint.graphs.values()) if s.joint is not None else [s.graph] for s in program.stages}
    bad: dict[fx.Node, bool] = {}

    def looked_at(s: Stage) -> Stage:
        copies = [watched(graph, bad) for graph in graphs[s.name]]
        return replace(s, graph=copies[0]) if s.joint is None else replace(s, joint=Joint(*copies))

    copy = replace(program, stages=tuple(map(looked_at, program.stages)), pairs=())

    def work(mesh: LoopbackMesh) -> None:
        engine = Engine(copy, model, None, seed, mesh=mesh, check=False)
        if program.forward_only:
            engine.evaluate(batch)
        else:
            engine.backward(batch)

    loopback(program.mesh, work)
    for s in program.stages:
        if line := next((n for n in graphs[s.name][0].nodes if bad.get(n)), None):
            while operand := next((x for x in line.all_input_nodes if x in bad), None):
                line = operand
            return f"{_op(line, s)} is the first result that is not finite"
    for s in reversed(program.stages):
        for graph in graphs[s.name][1:]:
            if line := next((n for n in graph.nodes if n.op == "call_function" and n in bad), None):
                return f"backward of {_op(line, s)} makes the first gradient that is not finite"
    return ""


def _op(line: fx.Node, stage: Stage) -> str:
    """Return the op of the stage that a line belongs to, with its line in the model."""
    name = line.meta.get("of", line.name)
    return named(next((n for n in stage.graph.nodes if n.name == name), line))
