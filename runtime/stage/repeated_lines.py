"""Mark the ops of a backward graph that recompute values of forward, at run time.

    t = mm(y_grad, w_t)
    repeat(step, True)
    g = gelu(h)            "repeats" in the metadata of the text
    repeat(step, False)
    w_grad = mm(g_t, y_grad)

Code that measures a step, or runs it without data, reads the mark (`StepContext.repeats`).
"""

from __future__ import annotations

from torch import fx

from shardc.runtime.mesh.step_context import StepContext


def repeat(step: StepContext, now: bool) -> None:
    """Set whether the following lines recompute forward."""
    step.repeats = now


def insert_repeat_marks(graph: fx.Graph, step: fx.Node) -> None:
    """Insert these calls around the lines that recompute forward. step: the node of the step's context."""
    repeating = False
    for n in [n for n in graph.nodes if n.op == "call_function"]:
        repeats = bool(n.meta.get("repeats"))
        if repeats != repeating:
            with graph.inserting_before(n):
                graph.call_function(repeat, (step, repeats))
            repeating = repeats
    if repeating:
        with graph.inserting_before(graph.output_node()):
            graph.call_function(repeat, (step, False))
