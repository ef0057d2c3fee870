"""Find what the backward of each call keeps, from the rules by which joint graphs are written.

relu(x)                  its result
linear(x, w)             x, w
layer_norm(x, w, b)      x, w, b, and 2 numbers per row that it makes
transpose(x), add(x, y)  nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from shardc.ir.graph import is_call, operands_of, producer_of, values_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.passes.joint.derivatives import Facts, Rules
from shardc.passes.joint.derivatives.record import Type
from shardc.passes.joint.derivatives.rule import Request
from shardc.passes.joint.derivatives.template import Made
from shardc.rules.core.op_call import Call, call_of
from shardc.runtime import ops


@dataclass(frozen=True)
class Saved:
    """What backward keeps of a call. operands: nodes; results: indices.

    own: bytes that the op makes only for its backward. views: by result the operand whose memory it shares, or None.
    """

    operands: tuple[fx.Node, ...] = ()
    results: tuple[int, ...] = ()
    own: int = 0
    views: tuple[fx.Node | None, ...] = (None,)


class LocalTypes:
    """The types of a program's values on one rank, in one microbatch."""

    def __init__(self, program: Program) -> None:
        self.mesh = program.mesh
        self._inputs = {x.name: x.local_shape(program.mesh, program.microbatches) for x in program.inputs}

    def of(self, node: fx.Node) -> tuple[Value, ...]:
        """Return the types of a node's results."""
        types = tuple(
            Value(v.local_shape(self.mesh), v.dtype, v.requires_grad) for v in values_of(node) if v is not None
        )
        if node.op == "placeholder" and node.name in self._inputs:  # its type is that of the whole step's input
            return (replace(types[0], shape=self._inputs[node.name]),)
        return types

    def call(self, node: fx.Node) -> Call:
        """Return a call with the types of one rank."""
        operands = tuple(self.of(x)[0] for x in operands_of(node))
        return replace(call_of(node), operands=operands, results=self.of(node))


def types_of(program: Program, graph: fx.Graph, rules: Rules) -> tuple[dict[Made, Type | None], dict[fx.Node, Facts]]:
    """Return the type of every value on one rank, and the facts of every call."""
    local = LocalTypes(program)
    trained = {p.name for p in program.params if p.requires_grad}
    types: dict[Made, Type | None] = {}
    facts: dict[fx.Node, Facts] = {}
    for n in graph.nodes:
        if n.op == "placeholder":
            if n.meta.get("value") is not None:
                (v,) = local.of(n)
                grad = n.name in trained or ("collective" in n.meta and v.requires_grad)
                types[n, 0] = Type.contiguous(v.shape, v.dtype, grad)
        elif is_call(n):
            operands = [t for key in rules.template(n).operands if (t := types[key]) is not None]
            facts[n] = rules.facts(n, operands)
            types.update({(n, i): t for i, t in enumerate(facts[n].types)})
    return types, facts


def saved_of(program: Program, graph: fx.Graph, rules: Rules) -> dict[fx.Node, Saved]:
    """Return what backward keeps of every call of a stage, in order."""
    types, facts = types_of(program, graph, rules)
    return {n: _saved(n, types, facts[n], rules) for n in facts}


def _saved(n: fx.Node, types: Mapping[Made, Type | None], facts: Facts, rules: Rules) -> Saved:
    """Return what the backward of one call keeps, by its rule."""
    operands = list(dict.fromkeys(operands_of(n)))
    views = tuple(operands[i] if i >= 0 else None for i in facts.views)
    taken = tuple(t for x in operands if (t := types[producer_of(x)]) is not None)
    tangents = tuple(replace(t, grad=False) if t is not None and t.grad else None for t in facts.types)
    needs = tuple(t.grad for t in taken)
    if not any(needs) or not any(tangents) or n.target in (ops.gather_wait, ops.updated):
        return Saved(views=views)
    rule = rules.rule(n, Request(taken, tangents, (None,) * len(taken), needs))
    by_kind = {kind: [r.index for r in rule.wants if r.kind == kind] for kind in ("x", "y", "t")}
    kept = [rule.forward[i].types for i in by_kind["t"]] if rule.forward is not None else []
    nbytes = rule.own + sum(t.nbytes for t in kept if isinstance(t, Type))
    return Saved(tuple(operands[i] for i in by_kind["x"]), tuple(by_kind["y"]), nbytes, views)
