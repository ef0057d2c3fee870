"""Place: on every mesh axis, choose a strategy for every op, and with it the placement of every value.

The graph stays the same; its nodes get `strategies` and `why` (shardc.ir.metadata), parameters and buffers
get their layouts. Partition then inserts the conversions that the choices imply.

one_axis        chooses strategies on one axis, greedily
storing         moves conversions to parameters and buffers; writes strategies and their causes to nodes
refuse          refuses *pins* (annotated activations) and other annotated splits that could not be carried out
transfer_cost   prices conversions and repeated work
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardc.ir.graph import calls, copy_graph, operands_of, producer_of
from shardc.ir.placement import Shard
from shardc.ir.program import Program
from shardc.optional import registered
from shardc.passes import outputs
from shardc.passes.base import Pass
from shardc.passes.place import storing
from shardc.passes.place.one_axis import Axis
from shardc.passes.place.refuse import refuse_pins, refuse_uneven
from shardc.rules.core.choices import Choices, choices_of
from shardc.rules.core.op_call import rounds


@dataclass(frozen=True)
class Place(Pass):
    """Chooses strategies on every axis of size > 1. Nodes get strategies; parameters and buffers get layouts."""

    def run(self, program: Program) -> Program:
        mesh, program = program.mesh, replace(program, graph=copy_graph(program.graph))
        cache: dict[Any, Choices] = {}
        choices = {
            node: _without_partial_sums(choices_of(node, cache)) if rounds(node) else choices_of(node, cache)
            for node in calls(program.graph)
        }
        operands = {
            node: [producer_of(t) for t in operands_of(node)]
            for node in program.graph.nodes
            if node in choices or node.op == "output"
        }
        for node in program.graph.nodes:
            node.meta["strategies"] = {}
        batch_axes, running = outputs.batch_axes(self.spec, mesh), self.options.compatible_with
        token_axes = set(mesh.digits(*self.spec.token_axes))
        # Axes that split inputs come first: they can pad a dim only if no other axis splits it yet; annotations may
        # split it further. Within each group, axes of tokens come last: they may split rows further.
        input_axes = {a for x in program.inputs for a, p in x.layout.items if isinstance(p, Shard)}
        for axis, n in sorted(mesh.axes, key=lambda a: (a[0] not in input_axes, a[0] in token_axes)):
            if n == 1:
                continue
            kept = {p.name: p.layout[axis] for p in running.params} if running is not None else {}
            chosen = Axis(program, axis, n, mesh, choices, operands, axis in batch_axes, kept).choose()
            for improve in registered("passes", "improve_placement") if axis in token_axes else ():
                chosen, notes = improve(chosen, token_axes)
                program = replace(program, notes=(*program.notes, *notes))
            storing.write(chosen)
            layouts = {p.name: p.layout for p in program.stored}
            program = program.with_layouts(
                {node.name: layouts[node.name].replace(axis, p, mesh) for node, p in chosen.stored.items()}
            )
        refuse_pins(program, mesh)
        refuse_uneven(program, mesh, choices, token_axes)
        return program


def _without_partial_sums(choices: Choices) -> Choices:
    """Return the choices without those that take partial sums: rounding is not linear."""
    return replace(choices, rule=replace(choices.rule, linear=""))
