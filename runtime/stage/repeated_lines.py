"""Which ops of a backward graph compute again what forward has computed: where they run, its lines do not differ from
others, so what runs says so to the step.

    t = mm(y_grad, w_t)
    repeat(step, True)
    g = gelu(h)            "repeats" in the metadata of the text
    repeat(step, False)
    w_grad = mm(g_t, y_grad)

Who measures a step, or runs it without data, reads it (`StepContext.repeats`).
"""

from __future__ import annotations

from torch import fx

from shardc.runtime.mesh.step_context import StepContext


def repeat(step: StepContext, now: bool) -> None:
    step.repeats = now


def tell_repeated(graph: fx.Graph, step: fx.Node) -> None:
    """Insert these calls around the lines of a text that repeat forward. step: the node of the step's context."""
    said = False
    for n in [n for n in graph.nodes if n.op == "call_function"]:
        repeats = bool(n.meta.get("repeats"))
        if repeats != said:
            with graph.inserting_before(n):
                graph.call_function(repeat, (step, repeats))
            said = repeats
    if said:
        with graph.inserting_before(graph.output_node()):
            graph.call_function(repeat, (step, False))
