"""Move the loss's sums over ranks to the end of the step, where the loss is linear in them.

    before   s_sum = all_reduce(s, ("dp",))        once a microbatch: every rank waits for the others
             loss  = s_sum / n_sum
    after    loss  = s / n_sum                     +dp: this rank's summand, which the engine sums after the step

Gradients are the same: the gradient of a sum with respect to a summand is 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from shardc.ir.conversions import CONVERSIONS
from shardc.ir.graph import operands_of, source_of, values_of
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout
from shardc.ir.types import requires_grad
from shardc.runtime import ops

#: The functions of all conversions.
CONVERTERS = {getattr(ops, row.op) for row in CONVERSIONS}


def _mark_partial(node: fx.Node, axes: tuple[str, ...]) -> None:
    """Set a node's type: ranks of these axes have a summand of it."""
    value: Value = node.meta["value"]
    items = tuple((a, p) for a, p in value.layout.items if a not in axes)
    node.meta["value"] = replace(value, layout=Layout((*items, *((a, PARTIAL) for a in axes))))


def sum_after_step(graph: fx.Graph, summands: set[fx.Node], mesh_node: fx.Node, mesh: Mesh) -> None:
    """Move the loss's sums over ranks to the step's end, if it is linear in sums over the same axes."""
    output = graph.output_node()
    returned: Any = output.args[0]
    loss, new_values = returned
    if loss is None:
        return
    linear, sums, other_summands = _linear_in_sums(loss, summands)
    summed_over: set[Any] = {n.args[2] for n in sums}
    if len(summed_over) != 1:
        return
    parts = mesh.digits(*summed_over.pop())

    def is_unsplit(x: fx.Node) -> bool:
        return all(v.layout[a] in (REPLICATE, PARTIAL_GRAD) for v in values_of(x) for a in parts)

    def converts(x: fx.Node) -> bool:
        over: Any = x.args[2] if x.target in CONVERTERS else ()
        axes = (over,) if isinstance(over, str) else over
        return any(part in parts for a in axes for part in mesh.digits(a))

    inside = {*linear, output}
    if any(n in new_values or not inside.issuperset(n.users) for n in (*linear, *sums)):
        return
    if any(map(converts, linear)) or not all(map(is_unsplit, (*linear, *other_summands))):
        return
    if not all(is_unsplit(x) and not requires_grad(x) for n in linear for x in operands_of(n) if x not in summands):
        return
    for n in sums:
        n.replace_all_uses_with(n.args[0])  # type: ignore[arg-type]
        graph.erase_node(n)
    for x in other_summands:
        once = x  # the first rank of each axis adds it
        for a in parts:
            op = ops.to_partial if x.meta["value"].layout[a] == REPLICATE else ops.partial_grad_to_partial
            value = once.meta["value"]
            with graph.inserting_after(once):
                once = graph.create_node("call_function", op, (once, mesh_node, a), {}, name=f"{x.name}_once")
            once.meta = {"value": value, "source": source_of(x)}
            _mark_partial(once, (a,))
        for n in (n for n in linear if x in n.all_input_nodes):
            n.replace_input_with(x, once)
    for n in linear:
        _mark_partial(n, parts)


def _linear_in_sums(loss: fx.Node, all_summands: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Return what makes up the loss, backwards: (ops linear in summands, sums over ranks, other summands)."""
    linear: dict[fx.Node, None] = {}
    sums: dict[fx.Node, None] = {}
    others: dict[fx.Node, None] = {}
    todo = [loss]
    while todo:
        n = todo.pop()
        summands = [x for x in operands_of(n) if x in all_summands]
        if n.target is ops.all_reduce:
            sums[n] = None
        elif summands and n not in linear:
            linear[n] = None
            todo += summands
        elif not summands:
            others[n] = None
    return list(linear), list(sums), list(others)
