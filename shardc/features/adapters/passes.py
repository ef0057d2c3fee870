"""Adapt: add the spec's adapters beside weights, and freeze weights that are not trained.

    before   q = linear(x, q_weight)              f32[8, 16, 64] grad       x: the embedding of ids
    after    q = linear(x, q_weight)              f32[8, 16, 64]            frozen: no gradient, of x neither
             a = linear(x, q_lora_A_weight)       f32[8, 16, 4] grad
             b = linear(a, q_lora_B_weight)       f32[8, 16, 64] grad
             q_1 = add(q, mul(b, 8.0))            f32[8, 16, 64] grad

The pass computes again which values have a gradient, so that backward computes, sends and keeps nothing for a frozen
weight alone. It runs after annotate: plans and structures are those of the model without adapters, and an adapter is
split like its weight.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.errors import Errors
from shardc.features.adapters import section
from shardc.features.adapters.low_rank import LowRank
from shardc.features.adapters.program import adapters
from shardc.ir.graph import calls, copy_graph, is_call, map_value, operands_of, placeholders, values_of
from shardc.ir.patterns import enclosing, match
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.ir.types import carries_gradient, requires_grad
from shardc.optional import registered
from shardc.passes import Entry
from shardc.passes.base import Pass
from shardc.spec.model_names import Names

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Adapt(Pass):
    """Adds adapters, freezes parameters, and types every value by whether a gradient reaches it."""

    def applies(self, program: Program) -> bool:
        sections = section.of(self.spec)
        return bool(sections.adapters or sections.freeze)

    def run(self, program: Program) -> Program:
        program = replace(program, graph=copy_graph(program.graph))
        flags = {n: [v.requires_grad for v in values_of(n)] for n in calls(program.graph)}
        before = {n: (x, any(map(requires_grad, operands_of(n)))) for n, x in flags.items()}
        errors = Errors()
        sections = section.of(self.spec)
        freeze = sections.freeze or (("*",) if sections.adapters else ())
        known = Names.of_weights({n: p.shape for p in program.params for n in p.names})
        wrong = known.check_weights(sections.patterns(), self.spec.where, errors)
        names = {p.name for p in program.params}
        if sections.adapters:
            program = LowRank(self.spec, program, errors, wrong).run()
        errors.raise_any()

        def put(p: Param) -> Param:
            now = _frozen(freeze, p.names) if p.name in names else False
            return replace(p, requires_grad=False, frozen=True) if now else p

        program = replace(program, params=tuple(map(put, program.params)))
        beside = {n: a.base for a in adapters(program) for n in (a.a, a.b)}
        for added in registered("program", "added", program.features):
            program = added(program, beside)
        if not any(p.requires_grad for p in program.params):
            note = f"{self.spec.where(('freeze',))}: no trainable parameter remains, so steps will be refused"
            program = replace(program, notes=(*program.notes, note) if not program.forward_only else program.notes)
        _type_gradients(program, before)
        return _stored_narrow(program)


def _frozen(patterns: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether the `freeze` patterns freeze a parameter with these names. The last match decides."""
    for pattern in reversed(patterns):
        if any(match(pattern.removeprefix("!"), n) for name in names for n in (name, *enclosing(name))):
            return not pattern.startswith("!")
    return False


#: Each with the pass that it follows.
PASSES = (("annotate", Entry("adapt", Adapt, "plans are of models without adapters; these are split like weights")),)


def _type_gradients(program: Program, before: Mapping[fx.Node, tuple[list[bool], bool]]) -> None:
    """Remove the gradients of values that no trained parameter reaches.

    before: of a call, which of its results had a gradient, and whether an operand had one. A call that cut the gradient
    of an operand still does. If no operand had one, the op decides.
    """
    nodes = placeholders(program.graph)
    for p in program.params:
        nodes[p.name].meta["value"] = replace(nodes[p.name].meta["value"], requires_grad=p.requires_grad)
    for node in program.graph.nodes:
        if node.target is operator.getitem:  # a part of its operand's current type
            node.meta["value"] = node.args[0].meta["value"][node.args[1]]
        if not is_call(node):
            continue
        results, had = before.get(node, ([], False))
        reached = any(map(requires_grad, operands_of(node)))
        own = itertools.repeat(carries_gradient(node.target, node.args, node.kwargs))
        flags = (reached and x for x in results) if had else own

        def put(v: Any, flags: Any = flags) -> Any:
            floating = v.dtype.is_floating_point or v.dtype.is_complex
            return replace(v, requires_grad=next(flags) and floating)

        node.meta["value"] = map_value(put, node.meta["value"])


def _stored_narrow(program: Program) -> Program:
    """Store frozen parameters that are only used in 16 bits in 16 bits: no update needs a wider copy.

    before   w_bf16 = _to_copy(w, dtype=bfloat16)       w: f32, frozen
    after    w                                          w: bf16
    """
    nodes = placeholders(program.graph)
    params: list[Param] = []
    for p in program.params:
        users = list(nodes[p.name].users)
        dtypes: set[Any] = {u.kwargs.get("dtype") if u.target is _CAST else None for u in users}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        if not p.frozen or dtype is None or dtype.itemsize >= p.dtype.itemsize:
            params.append(p)
            continue
        nodes[p.name].meta["value"] = replace(nodes[p.name].meta["value"], dtype=dtype)
        for u in users:
            u.replace_all_uses_with(nodes[p.name])
            program.graph.erase_node(u)
        params.append(replace(p, dtype=dtype))
    return replace(program, params=tuple(params))
