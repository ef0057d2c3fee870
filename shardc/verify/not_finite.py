"""Find the op that makes the first nan or inf on ranks, forward or backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from shardc.ir.fused_regions import without_fused_regions
from shardc.ir.graph import calls, copy_graph, source_of
from shardc.ir.program import Program
from shardc.ir.stage import Joint, Stage
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine


def op_on_ranks(program: Program, model: Any, batch: Any, seed: int) -> str:
    """Run a step again and return the op that makes the first nan or inf; "" if there is none.

    Forward: the op of the first nan on any rank, or of the inf that led to it. If forward has no nan: the op whose
    backward makes a gradient that is not finite. The op is named with its module and line in the model.
    """
    program = without_fused_regions(program)
    graphs = {s.name: list(s.joint.graphs.values()) if s.joint is not None else [s.graph] for s in program.stages}
    bad: dict[fx.Node, bool] = {}  # lines that have nan (True) or only inf on a rank

    def looking(graph: fx.Graph) -> fx.Graph:
        """Return a copy of a graph that looks at the results of each line."""
        env: dict[fx.Node, fx.Node] = {}
        copy = copy_graph(graph, env)
        for n in calls(graph):

            def look(result: Any, line: fx.Node = n) -> None:
                for x in result if isinstance(result, tuple) else (result,):
                    if isinstance(x, Tensor) and not bool((y := x.detach()).isfinite().all()):
                        bad.setdefault(line, False)
                        if bool(y.isnan().any()):
                            bad[line] = True

            with copy.inserting_after(env[n]):
                copy.call_function(look, (env[n],))
        return copy

    def watched(s: Stage) -> Stage:
        copies = map(looking, graphs[s.name])
        return replace(s, graph=next(copies)) if s.joint is None else replace(s, joint=Joint(*copies))

    looked_at = replace(program, stages=tuple(map(watched, program.stages)), pairs=())

    def work(mesh: LoopbackMesh) -> None:
        engine = Engine(looked_at, model, None, seed, mesh=mesh, check=False)
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
            if line := next((n for n in graph.nodes if n in bad), None):
                return f"backward of {_op(line, s)} makes the first gradient that is not finite"
    return ""


def _op(line: fx.Node, stage: Stage) -> str:
    """Return the op of the stage that a line belongs to, with its line in the model."""
    name = line.meta.get("of", line.name)
    node = next((n for n in stage.graph.nodes if n.name == name), line)
    return f"{node.name} of {source}" if str(source := source_of(node)) else node.name
