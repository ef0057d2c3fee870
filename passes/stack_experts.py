"""Stack the separate parameters of experts into one, so that ranks can split it by expert.

    before   up = stack([experts_0_w1, experts_1_w1, ...])        f32[128, 64] each
             y  = experts(x, index, weights, up, ...)
    after    y  = experts(x, index, weights, experts_w1, ...)     one f32[8, 128, 64], whose members keep their names

Only experts that `experts:` names are stacked. The state_dict, checkpoints and exported files keep the members
separate, as the model has them (shardc.ir.stored.Stored).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.ir import types as values
from shardc.ir.graph import copy_graph, operands_of
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.passes.annotate.experts import Experts
from shardc.passes.base import Pass
from shardc.rules.experts import UP

aten = torch.ops.aten
_CAST = aten._to_copy.default


@dataclass(frozen=True)
class StackExperts(Pass):
    """Replaces each stack of parameters that nothing else uses by one parameter."""

    def applies(self, program: Program) -> bool:
        return bool(self.spec.experts) and bool(program.graph.find_nodes(op="call_function", target=aten.stack.default))

    def run(self, program: Program) -> Program:
        program = replace(program, graph=copy_graph(program.graph))
        weights = [w for _, node in Experts(self.spec, program).ops() for w in operands_of(node)[UP:]]
        for stack in [n for n in program.graph.nodes if n.target is aten.stack.default]:
            if any(stack in values.behind([w]) for w in weights):
                program = _stacked(program, stack)
        return program


def _stacked(program: Program, stack: fx.Node) -> Program:
    entries: Any = stack.args[0]
    casts = [n for n in entries if n.target is _CAST]
    nodes = [n.args[0] for n in casts] if len(casts) == len(entries) else list(entries)
    by_name = {p.name: p for p in program.params}
    members = [by_name.get(n.name) for n in nodes]
    params = [p for p in members if p is not None]
    alone = all(len(n.users) == 1 for n in (*nodes, *entries)) and len(set(nodes)) == len(nodes)
    uniform = len({(p.dtype, p.requires_grad) for p in params}) == 1 and not any(p.aliases for p in params)
    dim = stack.args[1] if len(stack.args) > 1 else stack.kwargs.get("dim", 0)
    if len(params) != len(nodes) or not alone or not uniform or dim != 0:
        return program
    graph, first = program.graph, nodes[0]
    with graph.inserting_before(first):
        new = graph.placeholder("_".join(c for c in _pattern([p.name for p in params], "_").split("_") if c != "*"))
    new.target = new.name
    stacked = replace(
        params[0],
        name=new.name,
        fqn=_pattern([p.fqn for p in params], "."),
        shape=(len(params), *params[0].shape),
        members=tuple(p.fqn for p in params),
    )
    new.meta = {**first.meta, "value": stacked.value}
    entry = new
    if casts:
        with graph.inserting_before(stack):
            entry = graph.call_function(_CAST, (new,), dict(casts[0].kwargs))
        entry.meta = {**casts[0].meta, "value": stack.meta["value"]}
    stack.replace_all_uses_with(entry)
    for n in (stack, *casts, *nodes):
        graph.erase_node(n)
    gone = {p.name for p in params}
    kept: list[Param] = []
    for p in program.params:
        kept += [stacked] if p.name == params[0].name else [] if p.name in gone else [p]
    return replace(program, params=tuple(kept))


def _pattern(names: Sequence[str], mark: str) -> str:
    """Return what names have in common, with a * for the rest: moe.experts.*.w1.weight"""
    parts = [n.split(mark) for n in names]
    if len({len(p) for p in parts}) > 1:
        return f"{names[0]}{mark}*"
    return mark.join(p[0] if len(set(p)) == 1 else "*" for p in zip(*parts, strict=True))
